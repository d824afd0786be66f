"""Candidates, choice, and the batched planner against a plain loop over sequences (S17–S20)."""

import numpy as np
import pytest
import torch

from presage.config import ModelConfig
from presage.events import Outlook
from presage.model import Model
from presage.planner import Planner, choose

SAME = torch.tensor


def pick(died, scored, threshold):
    choice = choose(Outlook(SAME([died]), SAME([scored])), SAME([threshold]))
    return int(choice.chosen[0]), choice.safe[0].tolist()


@pytest.mark.parametrize(
    ("died", "scored", "threshold", "expected"),
    [
        ([0.1, 0.3, 0.05], [0.2, 0.9, 0.1], 0.2, 0),  # some safe: the best score among them, not the best of all
        ([0.3, 0.4, 0.25], [0.2, 0.9, 0.1], 0.2, 2),  # none safe: the least likely to die
        ([0.2, 0.4, 0.5], [0.2, 0.9, 0.1], 0.2, 0),  # equal to the threshold is not under it; still the safest
        ([0.1, 0.1, 0.1], [0.5, 0.5, 0.5], 0.2, 0),  # ties in score: the first, the plan carried on
        ([0.1, 0.1, 0.1], [0.4, 0.5, 0.5], 0.2, 1),
        ([0.3, 0.1, 0.1], [0.9, 0.1, 0.8], 0.0, 1),  # threshold 0: the safest, score or not; ties to the first
        ([0.0, 0.0, 0.1], [0.1, 0.9, 1.0], 0.0, 0),  # even P(died) = 0 is not under 0
        ([0.1, 0.2, 0.3], [0.0, 0.0, 0.0], 0.25, 0),  # nobody scores: the first safe one
        ([0.9, 0.8, 0.7], [0.1, 0.2, 0.3], 1.0, 2),  # threshold 1: score alone
    ],
)
def test_every_branch_of_the_choice(died, scored, threshold, expected):
    index, safe = pick(died, scored, threshold)
    assert index == expected
    assert safe == [d < threshold for d in died]


def test_each_row_has_its_own_threshold():
    outlook = Outlook(SAME([[0.1, 0.3]] * 3), SAME([[0.1, 0.9]] * 3))
    assert choose(outlook, SAME([0.0, 0.2, 0.5])).chosen.tolist() == [0, 0, 1]


def make(imagine, counts=(3, 5), k=7, horizon=6, thresholds=(0.3, 0.0), perceive=lambda frames: frames, seed=0):
    tables = torch.zeros(len(counts), max(counts), 3)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(3 * count).view(count, 3).float() + 100 * row
    generator = torch.Generator().manual_seed(seed)
    return Planner(perceive, imagine, tables, SAME(counts), SAME(thresholds), k, horizon, generator)


def test_held_controls_last_as_long_as_told_and_are_uniform_still():
    planner = make(None, counts=(3, 18), k=4000, horizon=25)
    planner.hold = 4.0
    actions = planner.candidates(SAME([0, 1]), SAME([True, True]))
    for row, count in enumerate((3, 18)):
        counts = torch.bincount(actions[row].flatten(), minlength=count).double() / actions[row].numel()
        assert (counts * count).min() > 0.85
        assert (counts * count).max() < 1.15
        changes = (actions[row, :, 1:] != actions[row, :, :-1]).double().mean()
        assert abs(float(changes) - (1 - 1 / count) / 4) < 0.01  # a new one is the same again once in `count`
    moved_on = planner.candidates(SAME([0, 1]), SAME([False, False]))[:, 0]
    assert torch.equal(moved_on[:, :-1], planner.carried[:, 1:])


def test_candidates_are_uniform_over_each_rows_own_actions():
    planner = make(None, counts=(3, 18), k=4000, horizon=5)
    actions = planner.candidates(SAME([0, 1]), SAME([True, True]))
    for row, count in enumerate((3, 18)):
        seen = torch.bincount(actions[row].flatten(), minlength=count).double()
        assert len(seen) == count
        chi2 = ((seen - 20_000 / count) ** 2 / (20_000 / count)).sum()
        assert chi2 < (13.8 if count == 3 else 40.8)  # 99.9 % points for 2 and 17 degrees of freedom
    assert len({tuple(s) for s in actions[1].tolist()}) > 3900


def test_the_best_plan_is_carried_on_moved_up_by_one_unless_the_episode_is_new():
    wanted = SAME([[2, 1, 0, 2, 1, 0], [4, 3, 2, 1, 0, 4]])
    planner = make(None)
    planner.carried[:] = wanted
    actions = planner.candidates(SAME([0, 1]), SAME([False, True]))
    assert actions[0, 0, :-1].tolist() == [1, 0, 2, 1, 0]
    assert actions[1, 0, :-1].tolist() != [3, 2, 1, 0, 4]
    lasts = {int(make(None, seed=s).candidates(SAME([0, 1]), SAME([False, False]))[0, 0, -1]) for s in range(30)}
    assert lasts == {0, 1, 2}  # its last control is drawn anew
    planner.carry = False
    assert planner.candidates(SAME([0, 1]), SAME([False, False]))[0, 0, :-1].tolist() != [1, 0, 2, 1, 0]


def test_a_plan_is_remembered_for_its_own_row_only():
    def imagine(state, controls):  # prefers the sequence with the largest first number
        return Outlook(1 / (1 + controls[:, :, 0, 0]), torch.zeros(controls.shape[:2]))

    planner = make(imagine)
    plan = planner.plan(torch.zeros(1, 1), SAME([True]), rows=SAME([1]))
    assert planner.carried[0].tolist() == [0] * 6
    assert planner.carried[1].tolist() == plan.best[0].tolist()
    assert plan.best[0, 0] == plan.actions[0, :, 0].max()


@pytest.mark.parametrize("kind", ["rrnn", "lstm"])
def test_the_same_as_a_plain_loop_over_games_and_sequences(kind):
    """Float32 sums in another order: probabilities within 1e-5, choices as good within that."""
    torch.manual_seed(0)
    model = Model(ModelConfig(prediction=kind, channels=(4, 8, 8), state_size=20, hidden_size=30)).eval()
    frames = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    fresh, rows = torch.ones(5, dtype=torch.bool), torch.arange(5)
    planner = make(model.imagine, (3, 3, 18, 6, 4), 40, 25, (0.0,) * 5, model.perceive)
    middle = planner.plan(torch.from_numpy(frames), fresh, rows).outlook.died.median(1).values
    thresholds = SAME([0.0, 1.0, *middle[2:]])  # no plan safe, all safe, half of them safe
    planner.thresholds = thresholds
    plan = planner.plan(torch.from_numpy(frames), fresh, rows)
    kinds = set()
    for row in range(5):
        outcomes = []
        for sequence in plan.actions[row]:
            controls = torch.stack([planner.tables[row, action] for action in sequence])
            p = model(torch.from_numpy(frames[row : row + 1]), controls[None]).sigmoid()[0, -1].detach()
            outcomes.append((float(p[0]), float(p[1])))
        safe = [i for i, (died, _) in enumerate(outcomes) if died < thresholds[row]]
        np.testing.assert_allclose(plan.outlook.died[row], [o[0] for o in outcomes], atol=1e-5)
        np.testing.assert_allclose(plan.outlook.scored[row], [o[1] for o in outcomes], atol=1e-5)
        values = {i: outcomes[i][1] for i in safe} or {i: -died for i, (died, _) in enumerate(outcomes)}
        assert values[int(plan.choice.chosen[row])] >= max(values.values()) - 1e-5
        kinds.add("none" if not safe else "all" if len(safe) == 40 else "some")
    assert kinds == {"none", "all", "some"}


def test_as_a_chooser_it_plays_the_first_action_of_the_best_plan():
    planner = make(lambda state, controls: Outlook(controls[:, :, 0, 0], torch.zeros(controls.shape[:2])))
    actions = planner(np.zeros((2, 84, 84), np.uint8), np.array([True, True]))
    assert actions.tolist() == planner.carried[:, 0].tolist()
    assert actions.dtype == np.int64
