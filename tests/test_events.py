"""The 25-step targets, by hand and against a plain loop (S10, S12)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from presage.events import stack_ages, targets


def flags(*rows):
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_hand_computed_examples():
    died = flags("..x...", "......", "x.....", "....x.")
    scored = flags(".x..x.", "..x...", "x.....", "......")
    last = flags("......", "...x..", "......", "....x.")
    got = targets(died, scored, last)
    # Scored at step 2, died at 3: scored goes back to 0 and stays there, died stays 1.
    assert got.died[0].int().tolist() == [0, 0, 1, 1, 1, 1]
    assert got.scored[0].int().tolist() == [0, 1, 0, 0, 0, 0]
    # Scored at step 3; the episode ends (out of time) at 4: nothing is asked after that.
    assert got.scored[1].int().tolist() == [0, 0, 1, 1, 1, 1]
    assert got.mask[1].int().tolist() == [1, 1, 1, 1, 0, 0]
    # A point in the very step of the death does not count.
    assert got.scored[2].int().tolist() == [0] * 6
    # The death that ends the episode is itself asked.
    assert got.died[3].int().tolist() == [0, 0, 0, 0, 1, 1]
    assert got.mask[3].int().tolist() == [1, 1, 1, 1, 1, 0]


events = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=30)


@given(events)
def test_the_same_as_a_plain_loop(steps):
    died, scored, last = (torch.tensor([[step[i] for step in steps]]) for i in range(3))
    got = targets(died, scored, last)
    has_died = has_scored = over = False
    for j, (d, s, e) in enumerate(steps):
        has_died, has_scored = has_died or d, has_scored or s
        assert bool(got.died[0, j]) == has_died
        assert bool(got.scored[0, j]) == (has_scored and not has_died)
        assert bool(got.mask[0, j]) == (not over)
        over = over or e


def test_how_much_of_the_past_belongs_to_the_episode():
    ended = flags("...x.x....")[0]
    assert stack_ages(ended, 3).tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert stack_ages(flags("......")[0], 3).tolist() == [0, 1, 2, 3, 3, 3]
