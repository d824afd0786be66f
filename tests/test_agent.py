"""Loading, asking, handing on."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import presage
from presage.agent import load
from presage.config import Planning
from presage.errors import RunError, UsageError


def test_a_plan_says_what_was_considered_and_why(tiny_run, frames):
    agent = presage.load(tiny_run.path)
    plan = agent.plan(frames[0], task="breakout", k=6, threshold=0.9)
    assert plan.action == plan.sequence[0] == plan.candidates[plan.chosen][0]
    assert tuple(plan.control) == agent.specs["breakout"].controls[plan.action]
    assert plan.candidates.shape == plan.candidates_p_died.shape == plan.candidates_p_scored.shape == (6, 25)
    assert plan.candidates.max() < 4
    assert (plan.p_died == plan.candidates_p_died[plan.chosen]).all()
    assert (plan.p_scored == plan.candidates_p_scored[plan.chosen]).all()
    assert (plan.safe == (plan.candidates_p_died[:, -1] < 0.9)).all()
    assert plan.p_scored[-1] == pytest.approx(plan.candidates_p_scored[plan.safe, -1].max(), abs=1e-6)
    assert plan.reason == "6 of 6 plans have P(died) < 0.9; the likeliest of them to score"
    careful = agent.plan(frames[0], task="breakout", k=6, threshold=0.0)
    assert careful.reason == "no plan has P(died) < 0; the least likely to die"
    assert careful.p_died[-1] == pytest.approx(careful.candidates_p_died[:, -1].min(), abs=1e-6)


def test_a_batch_of_frames_is_planned_at_once(tiny_run, frames):
    agent = tiny_run.agent()
    plan = agent.plan(torch.from_numpy(frames), task="toy")
    assert plan.action.shape == plan.chosen.shape == (3,)
    assert plan.p_died.shape == (3, 25)
    assert plan.control.shape == (3, 3)
    assert len(plan.reason) == 3
    assert agent.act(frames[0], "toy") in (0, 1, 2)


def test_the_same_seed_plans_the_same(tiny_run, frames):
    agent = tiny_run.agent()
    a, b, c = (agent.plan(frames[0], "toy", seed=s).candidates for s in (1, 1, 2))
    assert (a == b).all()
    assert (a != c).any()


def test_a_game_it_never_saw_can_be_planned_too(tiny_run, frames):
    agent = tiny_run.agent()
    assert "pong" not in agent.specs
    assert agent.plan(frames[0], "pong").action in range(6)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((4, 84, 84)),
        np.zeros((84, 84, 4), np.uint8),
        np.zeros((4, 84), np.uint8),
        np.zeros((0, 4, 84, 84), np.uint8),
        np.zeros((1, 1, 4, 84, 84), np.uint8),
        torch.zeros(4, 84, 84),
        "frames",
    ],
)
def test_frames_of_the_wrong_shape_or_type_are_refused(tiny_run, wrong):
    with pytest.raises(UsageError, match=r"frames must be uint8 \[4, 84, 84\] or \[N, 4, 84, 84\], not"):
        tiny_run.agent().plan(wrong, "toy")


def test_other_wrong_questions_are_refused(tiny_run, frames):
    agent = tiny_run.agent()
    with pytest.raises(UsageError, match="k takes whole numbers from 1, not 0"):
        agent.plan(frames[0], "toy", k=0)
    with pytest.raises(UsageError, match="no game 'pongg'"):
        agent.plan(frames[0], "pongg")
    with pytest.raises(UsageError, match="episodes and max_frames must be at least 1"):
        presage.evaluate(agent, episodes=0)
    with pytest.raises(UsageError, match="threshold must not be negative"):
        agent.playing(Planning(threshold=-0.1))


def test_the_agent_that_comes_with_presage_plays():
    """Random play has 1.7 in Breakout."""
    agent = presage.load(Path(__file__).parents[1] / "results" / "agent", device="cpu")
    assert list(agent.specs) == ["pong", "breakout", "demon_attack"]
    assert (
        presage.evaluate(agent, games=["breakout"], episodes=2, k=10, max_frames=2400)["games"]["breakout"]["mean"] > 4
    )


def test_the_same_network_can_play_otherwise(tiny_run):
    agent = tiny_run.agent()
    other = agent.playing(Planning(k=3, threshold=0.4, carry=False, monotone=True))
    result = presage.evaluate(other, games=["toy"], episodes=1)
    how = ("k", "thresholds", "carry", "monotone")
    assert [result[name] for name in how] == [3, {"toy": 0.4}, False, True]
    usual = presage.evaluate(agent, games=["toy"], episodes=1, k=5)
    assert [usual[name] for name in how] == [5, {"toy": 0.0}, True, False]
    assert agent.k == 4


def test_a_monotone_agent_shows_and_plays_by_the_same_numbers(tiny_run, frames):
    agent = tiny_run.agent().playing(Planning(k=20, monotone=True))
    plan = agent.plan(frames[0], "breakout", seed=1, threshold=0.5)
    assert (np.diff(plan.candidates_p_died, axis=-1) >= 0).all()
    assert (plan.safe == (plan.candidates_p_died[:, -1] < 0.5)).all()
    assert np.allclose(agent.foresee(frames[0], "breakout", plan.sequence)[0], plan.p_died, atol=1e-6)


def test_an_export_needs_nothing_of_the_run(tiny_run, frames, tmp_path):
    agent = tiny_run.agent(iteration=1)
    folder = agent.export(tmp_path / "export")
    assert sorted(p.name for p in folder.iterdir()) == ["agent.json", "model.safetensors"]
    again = presage.load(folder)
    assert again.iteration == 1
    assert (again.plan(frames[0], "toy").p_died == agent.plan(frames[0], "toy").p_died).all()
    with pytest.raises(UsageError, match="an export of iteration 1 alone"):
        load(folder, iteration=2)


def test_what_cannot_be_loaded_says_why(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="there is no run in"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no finished iteration 7; it has 1, 2"):
        load(tiny_run.path, iteration=7)
    with pytest.raises(UsageError, match="no device 'gpu'"):
        load(tiny_run.path, device="gpu")
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(tiny_run.path / "config.json", begun)
    with pytest.raises(UsageError, match="no finished iteration yet"):
        load(begun)


def edited(folder, **changes):
    data = json.loads((folder / "agent.json").read_text())
    (folder / "agent.json").write_text(json.dumps(data | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iteration": "one"}, "does not say its iteration"),
        ({"format": "one"}, "does not say its format"),
        ({"sha256": {}}, "checksum of model.safetensors is not recorded"),
        ({"sha256": {"model.safetensors": "00"}}, "its SHA-256 is not the one recorded"),
        ({"tasks": [{"name": "toy"}]}, "agent.json is damaged"),
        ({"config": {"updats": 3}}, "agent.json is damaged: there is no setting 'updats'; did you mean updates"),
        ({"config": None}, "agent.json is damaged"),
    ],
)
def test_a_foreign_or_damaged_export_is_refused(tiny_run, tmp_path, changes, says):
    folder = edited(tiny_run.agent().export(tmp_path / "export"), **changes)
    with pytest.raises(RunError, match=says):
        load(folder)


def test_an_export_of_a_newer_version_is_refused(tiny_run, tmp_path):
    folder = edited(tiny_run.agent().export(tmp_path / "export"), format=2)
    with pytest.raises(UsageError, match="written by a newer presage"):
        load(folder)


def test_plans_are_carried_on_and_drawn_anew(tiny_run, frames):
    """In a loop of one's own: other sequences at each step, and the best of the step before moved on (S17)."""
    agent = tiny_run.agent()
    first = agent.plan(frames[0], "toy")
    second = agent.plan(frames[0], "toy", previous=first)
    assert second.candidates[0, :-1].tolist() == first.sequence[1:].tolist()
    assert (second.candidates[1:] != first.candidates[1:]).any()
    with pytest.raises(UsageError, match="another number of games"):
        agent.plan(frames, "toy", previous=first)


def test_weights_of_another_shape_are_refused(tiny_run, tmp_path):
    folder = tiny_run.agent().export(tmp_path / "export")
    config = json.loads((folder / "agent.json").read_text())["config"]
    config["model"]["hidden_size"] = 99
    with pytest.raises(RunError, match=r"another network than its configuration says: prediction\.f1\.weight differs"):
        load(edited(folder, config=config))


def test_a_file_that_is_no_json_is_refused(tiny_run, tmp_path):
    folder = tiny_run.agent().export(tmp_path / "export")
    (folder / "agent.json").write_text("{")
    with pytest.raises(RunError, match="not valid JSON"):
        load(folder)
    (folder / "agent.json").write_text("[]")
    with pytest.raises(RunError, match="does not hold a JSON object"):
        load(folder)


def test_planning_in_bfloat16_says_nearly_the_same(tiny_run, frames):
    agent = tiny_run.agent()
    low = agent.playing(Planning(), bfloat16=True)
    controls = torch.randint(-1, 2, (3, 5, 25, 3)).float()
    stacks = torch.from_numpy(frames)

    def foreseen(one, fast=True):
        perceive, imagine = one.network(fast)
        return imagine(perceive(stacks), controls)

    assert torch.equal(foreseen(low, fast=False).died, foreseen(agent).died)  # what people are shown is exact
    for outlooks in zip(foreseen(agent), foreseen(low), strict=True):
        assert all(p.dtype == torch.float32 for p in outlooks)
        assert (outlooks[0] != outlooks[1]).any()
        torch.testing.assert_close(*outlooks, atol=0.03, rtol=0)  # eight bits, over 25 steps
    assert not agent.low
    assert presage.evaluate(low, ["toy"], episodes=1, seed=1)["bfloat16"]
