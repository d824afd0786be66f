"""Figures about what a network foresees, by hand and of a real run."""

import json
import math
import shutil
from itertools import product

import gymnasium as gym
import numpy as np
import pytest
import torch

import presage
from conftest import cli
from presage.config import Planning
from presage.errors import UsageError
from presage.events import Outlook
from presage.knowledge import Foretold, by_step, calibration, examine, scores
from presage.probe import KINDS, Moment, choices, probe
from presage.tasks import Task


def test_heldout_figures_by_hand():
    """Two cases, two steps; the second step of the second case is masked."""
    p = torch.tensor([[[0.9, 0.2], [0.8, 0.1]], [[0.6, 0.7], [0.5, 0.5]]], dtype=torch.float64)
    happened = torch.tensor([[[True, False], [True, False]], [[False, True], [True, True]]])
    mask = torch.tensor([[True, True], [True, False]])
    got = scores(Foretold(p, happened, mask))
    said = [0.9, 0.8, 0.8, 0.9, 1 - 0.6, 0.7]  # what it gave to what then happened
    assert got["cross_entropy"] == pytest.approx(-sum(map(math.log, said)) / 6)
    # Step 1: died and scored once in two cases each; step 2: one case, where the rate is certain.
    assert got["baseline_cross_entropy"] == pytest.approx(-4 * math.log(0.5) / 6, abs=1e-9)
    assert got["died"] == {"precision": 2 / 3, "recall": 1.0, "f1": pytest.approx(0.8), "positives": 2.0}
    assert got["scored"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "positives": 1.0}
    never = scores(Foretold(torch.full_like(p, 0.1), happened, mask))
    assert never["died"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "positives": 2.0}


def test_figures_of_each_step_by_hand():
    """Three cases, two steps; nobody knows the second step of the last case."""
    p = torch.tensor([[0.9, 0.8], [0.2, 0.6], [0.3, 0.99]], dtype=torch.float64)
    happened = torch.tensor([[True, True], [False, False], [False, True]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    never = torch.zeros_like(happened)
    steps = by_step(Foretold(torch.stack([p, p], -1), torch.stack([happened, never], -1), mask))["died"]
    first, second = steps
    assert first["cross_entropy"] == pytest.approx(-(math.log(0.9) + math.log(0.8) + math.log(0.7)) / 3)
    assert first["baseline_cross_entropy"] == pytest.approx(-(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3)
    assert (first["precision"], first["recall"], first["positives"]) == (1, 1, 1)
    assert second["cross_entropy"] == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert (second["precision"], second["recall"], second["positives"]) == (0.5, 1, 1)


def test_calibration_by_hand():
    p = torch.tensor([[0.11], [0.19], [0.95], [1.0], [0.5]], dtype=torch.float64)
    happened = torch.tensor([[False], [True], [True], [True], [True]])
    mask = torch.tensor([[True], [True], [True], [True], [False]])
    curve = calibration(Foretold(torch.stack([p, p], -1), torch.stack([happened, ~happened], -1), mask))
    assert curve["died"] == [
        {"cases": 2, "said": pytest.approx(0.15), "happened": 0.5},
        {"cases": 2, "said": pytest.approx(0.975), "happened": 1},  # a certainty is in the last bin
    ]
    assert [part["happened"] for part in curve["scored"]] == [0.5, 0]


def test_a_runs_held_out_cases(tiny_run, tmp_path):
    """Of both iterations, each as the run itself measured; the first is random play, the second planned."""
    run = shutil.copytree(tiny_run.path, tmp_path / "run")
    done = cli("evaluate", run, "--heldout", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((run / "knowledge.jsonl").read_text())
    assert list(result["played"]) == ["1", "2"]
    first = examine(tiny_run.agent(1), run)
    measured = tiny_run.metrics("heldout")[0]["games"]  # of iteration 1's network on all it had: iteration 1's cases
    for game in ("toy", "breakout"):
        for figure in ("cross_entropy", "baseline_cross_entropy"):
            assert first["played"][1][game][figure] == pytest.approx(measured[game][figure], abs=1e-6)
        assert result["random"][game]["cross_entropy"] == result["played"]["1"][game]["cross_entropy"]
        for outcome in ("died", "scored"):
            assert len(result["planned"][game]["steps"][outcome]) == 25
            said = sum(part["cases"] for part in result["planned"][game]["calibration"][outcome])
            assert 0.5 * 25 * 64 < said <= 25 * 64  # all steps of 64 cases, but for those past an end
    table = cli("evaluate", run, "--heldout", "--iteration", 1, "--games", "toy")
    assert "random play" in table.stdout
    assert "breakout" not in table.stdout
    assert len((run / "knowledge.jsonl").read_text().splitlines()) == 2


def test_without_its_data_a_run_has_nothing_held_out(tiny_run, tmp_path):
    run = shutil.copytree(tiny_run.path, tmp_path / "run", ignore=shutil.ignore_patterns("data"))
    with pytest.raises(UsageError, match="no held-out cases"):
        examine(presage.load(run), run)


def test_probes_tell_what_comes_of_plans(tiny_run):
    agent = tiny_run.agent().playing(Planning(k=9))
    result = probe(agent, ["toy", "breakout"], number=20, seed=2)
    assert probe(agent, ["toy", "breakout"], number=20, seed=2) == result
    for game in ("toy", "breakout"):
        found = result["games"][game]
        assert found["chosen"]["cases"] == 20
        assert 20 * 7 <= found["random"]["cases"] <= 20 * 8  # the chosen one may be random, too
        assert found["random"]["died"]["positives"] > 0
        assert sum(one["cases"] for one in found["chosen"]["calibration"]["died"]) <= 20 * 25
        assert found["random"] != found["chosen"]
    with pytest.raises(UsageError, match="3 plans"):
        probe(agent.playing(Planning(k=2)), ["toy"])


def test_moments_of_random_play_are_the_same_for_all_networks(tiny_run, monkeypatch):
    seen = []
    for iteration, random in ((1, True), (2, True), (1, False)):
        agent = tiny_run.agent(iteration).playing(Planning(k=5))
        perceive = agent.model.perceive
        stacks = []
        monkeypatch.setattr(
            agent.model, "perceive", lambda frames, stacks=stacks, f=perceive: stacks.append(frames) or f(frames)
        )
        assert probe(agent, ["breakout"], number=12, random=random)["policy"] == ("random" if random else "planned")
        seen.append(torch.cat([frames for frames in stacks if len(frames) == 1]))  # those of single moments
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_choices_by_hand():
    """Five plans at each moment, the first of which was chosen. The second and fourth tell whether it matters, the
    third and fifth how many random ones die."""

    def moment(danger, died):
        said, events = np.zeros((5, 2, 2)), np.zeros((5, 2, 3), bool)
        said[:, -1, 0], events[:, 0, 0] = danger, died
        return Moment(said, events)

    yes, no = True, False
    found = [
        moment([0.1, 0.9, 0.9, 0.9, 0.9], [no, no, no, no, no]),  # nobody dies
        moment([0.1, 0.9, 0.9, 0.9, 0.1], [no, no, yes, no, no]),  # somebody, but not of those that tell
        moment([0.1, 0.9, 0.2, 0.3, 0.1], [no, yes, yes, no, no]),  # three of four pairs told apart
        moment([0.0, 0.5, 0.5, 0.1, 0.1], [yes, yes, no, no, no]),  # two of three, and one tie
    ]
    over = moment([0.1, 0.9, 0.2, 0.3, 0.1], [no, yes, yes, no, no])
    over.events[0, 1, 2] = True  # the chosen one's episode ends: nobody knows what else it had brought
    assert choices([*found, over]) == {
        "moments": 2,
        "told_apart": pytest.approx((3 / 4 + 2.5 / 3) / 2),
        "random_died": pytest.approx((1 / 2 + 0) / 2),
        "chosen_died": 0.5,
    }
    assert choices(found[:2]) == {"moments": 0, "told_apart": None, "random_died": None, "chosen_died": None}


CONTROLS = tuple(product((0, 1), (-1, 0, 1), (-1, 0, 1)))
DEADLY = (0, -1, 0)


class Trap(gym.Env):
    """One control of eighteen kills, those to the right score, whatever happened before."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(len(CONTROLS))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros((84, 84), np.uint8), {}

    def step(self, action):
        self.steps += 1
        control = CONTROLS[action]
        picture = np.zeros((84, 84), np.uint8)
        return picture, float(control[1] == 1), self.steps == 150, False, {"trap": control == DEADLY}


def test_who_knows_what_each_control_does_is_found_to_be_right(tiny_run, monkeypatch):
    """What was said is compared with what came of the very plan of which it was said."""
    task = Task("trap", Trap, CONTROLS, died=lambda step: bool(step.info["trap"]))
    agent = tiny_run.agent().playing(Planning(k=20))

    def oracle(h, controls, monotone):
        died = (controls == torch.tensor(DEADLY)).all(-1).cumsum(-1) > 0
        scored = ((controls[..., 1] == 1).cumsum(-1) > 0) & ~died
        return Outlook(died.float(), scored.float())

    monkeypatch.setattr(agent.model, "imagine_steps", oracle)
    result = probe(agent, [task], number=64)["games"]["trap"]
    for kind in KINDS:
        assert result[kind]["cross_entropy"] < 1e-9
        assert result[kind]["cases"] >= 64
    assert result["random"]["died"]["f1"] == result["random"]["scored"]["f1"] == 1
    assert result["choices"]["moments"] > 20
    assert result["choices"]["told_apart"] == 1
    assert 0.2 < result["choices"]["random_died"] < 0.8
    monkeypatch.setattr(agent.model, "imagine_steps", lambda *given: Outlook(*(1 - p for p in oracle(*given))))
    wrong = probe(agent, [task], number=16)["games"]["trap"]
    assert wrong["random"]["cross_entropy"] > 5
    assert wrong["choices"]["told_apart"] == 0
