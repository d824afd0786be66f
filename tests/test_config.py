"""Presets, schedules, and what is refused."""

import ast
import dataclasses
from pathlib import Path

import pytest

from presage.config import GROUPS, PRESETS, Config, at, check, differences, from_json, preset, to_json, with_fields
from presage.errors import UsageError

SOURCE = Path(__file__).parents[1] / "src" / "presage"


def test_the_paper_preset_has_the_papers_numbers():
    config = preset("paper")
    assert config.games == ("pong", "breakout", "demon_attack")
    assert config.iterations == 19
    steps = config.data.first_steps + 18 * config.data.later_steps
    assert (config.data.first_steps, config.data.later_steps, steps) == (400_000, 200_000, 4_000_000)  # S15
    assert config.data.horizon == 25
    assert config.data.noop_max == 30
    assert [at(config.plan.k, i) for i in (1, 3, 4, 6, 7, 19)] == [25, 25, 100, 100, 200, 200]  # S20
    assert [at(config.train.lr, i) for i in (1, 3, 4, 6, 7, 19)] == [1e-4, 1e-4, 5e-5, 5e-5, 1e-5, 1e-5]  # S22
    train = config.train
    assert (train.updates, train.batch_size, train.weight_decay, train.clamp) == (48_000, 100, 1e-4, 1.0)
    assert (train.lr_decay, train.weight_growth, train.weight_every) == ("halve", 3, 3)
    assert (config.model.state_size, config.model.hidden_size, config.model.prediction) == (100, 500, "rrnn")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_json(name):
    config = PRESETS[name]
    assert check(config) is config
    assert config.preset == name
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batchsize": 3}, "batch_size"),
        ({"updates": -1}, "updates must be at least 1, not -1"),
        ({"seed": -1}, "seed must be a number that is not negative"),
        ({"sticky": 1.5}, "sticky is a chance between 0 and 1, not 1.5"),
        ({"hard": 1.0}, "hard is a share from 0 to less than 1, not 1.0"),
        ({"channels": (8, 0, 8)}, "channels[1] must be at least 1, not 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number that is not negative"),
        ({"updates": "many"}, "updates cannot be 'many'; it is int"),
        ({"updates": True}, "updates cannot be True"),
        ({"prediction": "gru"}, "one of rrnn, lstm, plain"),
        ({"channels": (1, 2)}, "channels cannot be"),
        ({"lr": ((2, 0.1),)}, "the first from iteration 1"),
        ({"lr": ()}, "the first from iteration 1"),
        ({"lr": ((1, float("nan")),)}, "numbers above 0"),
        ({"seed": 2**64}, "seed must be"),
        ({"memory_gib": float("inf")}, "memory_gib must be"),
        ({"shard_steps": 3}, "at least envs"),
        ({"k": ((1, 0),)}, "whole numbers from 1"),
        ({"k": ((1, 2.5),)}, "whole numbers from 1"),
        ({"games": ("pong", "pong")}, "each once"),
        ({"first_steps": 401, "envs": 16}, "multiple of envs"),
        ({"thresholds": {"pong": -0.1}}, "thresholds[pong] must be a number that is not negative"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, says):
    with pytest.raises(UsageError) as refusal:
        with_fields(preset("paper"), **fields)
    assert says in str(refusal.value)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean quickstart"):
        preset("quikstart")


def test_fields_of_any_group_can_be_replaced_by_name():
    config = with_fields(preset("debug"), seed=5, updates=7, k=[[1, 3]], channels=[1, 2, 3], thresholds={"pong": 1})
    assert (config.seed, config.train.updates, config.plan.k, config.model.channels) == (5, 7, ((1, 3.0),), (1, 2, 3))
    assert config.plan.thresholds == {"pong": 1.0}


def test_differences_leave_out_what_belongs_to_the_machine():
    ours = with_fields(preset("debug"), seed=5, updates=7, threads=1, memory_gib=1)
    found = differences(ours, preset("debug"))
    assert found == {"updates": (7, 10), "seed": (5, 0)}


def test_every_setting_is_read_somewhere():
    """A setting that nothing reads is a promise nobody keeps."""
    read = set()
    for file in SOURCE.glob("*.py"):
        if file.name != "config.py":
            read |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    names = {f.name for f in dataclasses.fields(Config)} - {"preset"}
    names |= {f.name for group in GROUPS for f in dataclasses.fields(getattr(Config(), group))}
    assert names - read == set()


def test_every_setting_has_a_help_text():
    tree = ast.parse((SOURCE / "config.py").read_text())
    settings = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.decorator_list]  # the dataclasses
    assert len(settings) == len(GROUPS) + 2  # all groups, what holds them, and Planning
    for group in settings:
        for field, after in zip(group.body, [*group.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and getattr(field.target, "id", "") not in GROUPS:
                assert isinstance(after, ast.Expr), f"{group.name}.{field.target.id}"
