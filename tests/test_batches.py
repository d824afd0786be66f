"""Which cases are drawn (S16), and that they come in order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from presage.batches import Batch, HardCases, Measured, Sampler, heldout_rows, iteration_weight, moved, stream
from presage.store import Span


def store_of(*spans: Span) -> SimpleNamespace:
    cpu = torch.device("cpu")
    return SimpleNamespace(spans=list(spans), home=cpu, device=cpu)


SPANS = (
    Span(1, 0, 0, 10, heldout=True),
    Span(1, 0, 10, 50, heldout=False),
    Span(1, 1, 50, 60, heldout=False),
    Span(1, 0, 60, 80, heldout=False),  # a second shard of the same iteration and task
    Span(4, 0, 80, 90, heldout=False),
    Span(4, 1, 90, 110, heldout=False),
    Span(4, 1, 110, 115, heldout=True),
)


NUMBERS = SimpleNamespace(drawn=lambda update, size: np.array([[update]]))  # a sampler that draws the update's number


def test_weights_grow_threefold_every_three_iterations():
    assert [iteration_weight(i, 3, 3) for i in range(1, 11)] == [1, 1, 1, 3, 3, 3, 9, 9, 9, 27]


def test_cases_are_drawn_from_the_exact_distribution():
    """An iteration by weight (1 : 3), a task evenly, a case evenly; chi-square over all 115 rows."""
    sampler = Sampler(store_of(*SPANS), 3, 3, (7,))
    draws = np.concatenate([sampler.rows(update, 1000) for update in range(200)])
    counts = np.bincount(draws, minlength=115)
    chance = np.zeros(115)
    chance[10:50] = chance[60:80] = 1 / 4 / 2 / 60
    chance[50:60] = 1 / 4 / 2 / 10
    chance[80:90] = 3 / 4 / 2 / 10
    chance[90:110] = 3 / 4 / 2 / 20
    assert chance.sum() == pytest.approx(1)
    assert counts[chance == 0].sum() == 0  # nothing held out is ever trained on
    live = chance > 0
    expected = chance[live] * len(draws)
    chi2 = ((counts[live] - expected) ** 2 / expected).sum()
    assert chi2 < 149.4  # the 99.9 % point for 99 degrees of freedom


def test_an_updates_rows_depend_on_nothing_before_it():
    a, b = (Sampler(store_of(*SPANS), 3, 3, (7,)) for _ in range(2))
    for update in range(5):
        a.rows(update, 10)
    assert (a.rows(5, 10) == b.rows(5, 10)).all()
    assert (a.rows(5, 10) != a.rows(6, 10)).any()
    assert (Sampler(store_of(*SPANS), 3, 3, (8,)).rows(5, 10) != b.rows(5, 10)).any()


def test_cases_are_moved_evenly_in_both_directions_and_their_rows_stay():
    still, moving = (Sampler(store_of(*SPANS), 3, 3, (7,), shift=shift) for shift in (0, 2))
    rows, down, right = np.concatenate([moving.drawn(update, 1000) for update in range(20)], 1)
    assert (rows == np.concatenate([still.drawn(update, 1000)[0] for update in range(20)])).all()
    assert len(still.drawn(0, 10)) == 1
    counts = np.histogram2d(down, right, bins=5)[0]
    assert counts.sum() == 20_000
    assert down.min() == right.min() == -2
    assert down.max() == right.max() == 2
    assert np.abs(counts - 800).max() < 5 * 800**0.5


def test_a_moved_picture_repeats_its_edge():
    frames = torch.arange(2 * 4 * 84 * 84).view(2, 4, 84, 84)
    down_left, up = moved(frames, torch.tensor([3, -100]), torch.tensor([-2, 0]))
    assert torch.equal(down_left[:, 3:, :-2], frames[0, :, :-3, 2:])
    assert (down_left[:, :3] == down_left[:, 3:4]).all()
    assert (down_left[..., -2:] == down_left[..., -3:-2]).all()
    assert (up == frames[1, :, -1:]).all()


def test_hard_cases_are_drawn_by_their_losses_and_each_task_as_often_as_before():
    """Half of 1,000 rows; of task 0 two cases are known, with losses 1 : 3, of task 1 three, one without any loss."""
    sampler = Sampler(store_of(*SPANS), 3, 3, (7,), share=0.5)
    evenly = np.stack([sampler.rows(update, 1000) for update in range(100)])
    tasks, losses = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([2.0, 1.0, 0.0, 3.0, 2.0])
    sampler.hard = HardCases(Measured(torch.tensor([50, 10, 90, 60, 109]), tasks, losses))
    rows = np.stack([sampler.rows(update, 1000) for update in range(100)])
    assert (rows[:, 500:] == evenly[:, 500:]).all()
    counts = np.bincount(rows[:, :500].flatten(), minlength=115) / rows[:, :500].size
    wanted = np.zeros(115)
    wanted[[10, 60, 50, 90, 109]] = np.array([1 / 4, 3 / 4, 1 / 2, 0, 1 / 2]) / 2
    assert counts[wanted == 0].sum() == 0
    assert np.abs(counts - wanted).max() < 0.01  # five standard deviations


def test_tasks_of_which_no_case_was_measured_are_drawn_evenly():
    sampler = Sampler(store_of(*SPANS), 3, 3, (7,), share=0.5)
    evenly = sampler.rows(0, 1000)
    sampler.hard = HardCases(Measured(torch.tensor([10]), torch.tensor([0]), torch.tensor([1.0])))
    rows = sampler.rows(0, 1000)
    of_task_1 = ((evenly >= 50) & (evenly < 60)) | (evenly >= 90)
    assert (rows == np.where(of_task_1 | (np.arange(1000) >= 500), evenly, 10)).all()


def test_what_is_measured_is_what_would_be_drawn_all_tasks_mixed():
    """Mixed, for batch norm's statistics of a part of them must be those of a batch."""
    sampler = Sampler(store_of(*SPANS), 3, 3, (7,))
    rows, tasks = sampler.to_measure(500, 20_000)
    of_task_1 = ((rows >= 50) & (rows < 60)) | (rows >= 90)
    assert torch.equal(of_task_1, tasks == 1)
    assert all(0.3 < part.float().mean() < 0.7 for part in tasks.split(250))
    counts = np.bincount(rows.numpy(), minlength=115)
    assert counts[0:10].sum() == counts[110:].sum() == 0  # nothing held out
    assert counts[80:110].sum() / 20_000 == pytest.approx(3 / 4, abs=0.02)
    assert not torch.equal(rows, sampler.to_measure(1000, 20_000)[0])


def test_older_measurements_are_kept_for_a_while():
    old, new = (Measured(*(torch.arange(a, b) for _ in range(3))) for a, b in ((0, 4), (4, 6)))
    both = old.followed_by(new, 5)
    assert all(part.tolist() == [1, 2, 3, 4, 5] for part in both)


def test_heldout_rows_are_spread_evenly_over_what_is_held_out():
    assert heldout_rows(store_of(*SPANS), 0, 4).tolist() == [0, 3, 6, 9]
    assert heldout_rows(store_of(*SPANS), 1, 100).tolist() == [110, 111, 112, 113, 114]


def test_batches_come_in_order_and_an_error_comes_out_where_it_is_used(monkeypatch):
    def assemble(store, rows, horizon, moves):
        if rows[0] == 6:
            raise OSError("the disk went away")
        return Batch(*[rows] * 5)

    monkeypatch.setattr("presage.batches.assemble", assemble)
    batches = stream(store_of(), NUMBERS, range(3, 9), 1, 1)
    assert [int(next(batches).frames) for _ in range(3)] == [3, 4, 5]
    with pytest.raises(OSError, match="the disk went away"):
        next(batches)


def test_a_stream_that_is_not_read_to_its_end_lets_go_of_its_thread(monkeypatch):
    import threading

    monkeypatch.setattr("presage.batches.assemble", lambda store, rows, horizon, moves: Batch(*[rows] * 5))
    before = threading.active_count()
    batches = stream(store_of(), NUMBERS, range(1000), 1, 1)
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before
