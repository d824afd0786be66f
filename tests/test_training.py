"""Schedules and gradients by hand; and that it learns, and learns the same twice."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import presage
from conftest import weights
from presage.batches import Batch, Measured
from presage.config import ModelConfig, TrainConfig, preset, with_fields
from presage.model import Model, loss
from presage.training import (
    Lessons,
    learning_rate,
    make_optimizer,
    measure,
    one_by_one,
    take_statistics,
    update_once,
)


def some_batch(size=6, horizon=5) -> Batch:
    torch.manual_seed(0)
    flags = torch.rand(3, size, horizon) < 0.3
    frames = torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8)
    return Batch(frames, torch.randint(-1, 2, (size, horizon, 3)).float(), flags[0], flags[1], ~flags[2])


def small_model() -> Model:
    torch.manual_seed(1)
    return Model(ModelConfig(channels=(4, 4, 4), state_size=16, hidden_size=16))


def test_the_papers_learning_rate_is_halved_for_the_second_half_of_each_iteration():
    paper = preset("paper")
    assert [learning_rate(paper, 1, u) for u in (0, 23_999, 24_000, 47_999)] == [1e-4, 1e-4, 5e-5, 5e-5]
    assert [learning_rate(paper, i, 30_000) for i in (3, 4, 7)] == [5e-5, 2.5e-5, 5e-6]


def test_the_cosine_warms_up_and_goes_down_to_nothing_over_the_whole_run():
    config = with_fields(preset("paper"), iterations=2, updates=500, lr=((1, 1e-3),), lr_decay="cosine")
    rates = [learning_rate(config, iteration, u) for iteration in (1, 2) for u in range(500)]
    assert rates[0] < 2e-5
    assert max(rates) == pytest.approx(1e-3, rel=0.05)
    assert rates[500] == pytest.approx(5e-4, rel=0.01)
    assert rates[-1] < 1e-6


def test_annealing_does_that_in_each_iteration():
    config = with_fields(preset("paper"), iterations=2, updates=500, lr=((1, 1e-3), (2, 1e-4)), lr_decay="anneal")
    for iteration, highest in ((1, 1e-3), (2, 1e-4)):
        rates = [learning_rate(config, iteration, u) for u in range(500)]
        assert rates[0] < 0.02 * highest
        assert max(rates) == pytest.approx(highest, rel=0.1)
        assert rates[250] == pytest.approx(highest / 2)
        assert rates[-1] < 1e-4 * highest


def test_gradients_are_clamped_element_wise_before_adam():
    """Two updates against Adam with L2 weight decay written out (S22)."""
    model, batch, clamp, decay, lr = small_model(), some_batch(), 0.01, 0.1, 0.01
    optimizer = make_optimizer(model, TrainConfig(weight_decay=decay))
    optimizer.param_groups[0]["lr"] = lr
    weight = model.valuation.out.weight
    w, m, v = weight.detach().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    clamped = 0
    for step in (1, 2):
        update_once(model, optimizer, batch, clamp)
        gradient = weight.grad
        clamped += int((gradient.abs() == torch.tensor(clamp)).sum())
        assert gradient.abs().max() <= clamp
        g = gradient + decay * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), w, rtol=1e-4, atol=1e-6)
    assert clamped > 0


def test_batch_norms_statistics_for_play_are_of_the_weights_as_they_are():
    """Pictures that hardly vary and weights that just moved: moving averages are far off, those taken anew are not."""
    model, pictures = small_model(), torch.full((400, 4, 84, 84), 87, dtype=torch.uint8)
    pictures[torch.arange(400), :, torch.arange(400) % 84, torch.arange(400) % 81] = 200  # a ball
    store = SimpleNamespace(stacks=pictures.__getitem__, home=torch.device("cpu"), device=torch.device("cpu"))
    updater = SimpleNamespace(store=store, size=40, precision=nullcontext)
    sampler = SimpleNamespace(rows=lambda update, size: np.arange(update * size, (update + 1) * size) % 400)
    optimizer = make_optimizer(model, TrainConfig())
    optimizer.param_groups[0]["lr"] = 1e-2
    batch = some_batch(40)._replace(frames=pictures[:40])
    for _ in range(20):
        update_once(model, optimizer, batch, 1.0)
    seen = model.perception.stages[0](pictures / 255).transpose(0, 1).flatten(1)  # [C, ...]: by the first layer
    norm = model.perception.stages[1]
    assert ((norm.running_mean - seen.mean(1)).abs() / seen.std(1)).max() > 0.5  # else this shows nothing
    for _ in range(2):  # the second time from what the first left: the same
        take_statistics(model, updater, sampler, range(100, 110))
        torch.testing.assert_close(norm.running_mean, seen.mean(1), rtol=1e-3, atol=1e-4)  # sums of float32
        torch.testing.assert_close(norm.running_var, seen.var(1), rtol=0.05, atol=1e-6)  # within batches
        assert norm.momentum == 0.1


def test_measuring_tells_each_cases_loss_and_leaves_the_network_as_it_was(monkeypatch):
    model, batch = small_model().train(), some_batch(6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr("presage.training.assemble", lambda store, rows, horizon: Batch(*(t[rows] for t in batch)))
    store = SimpleNamespace(home=torch.device("cpu"), device=torch.device("cpu"))
    found = measure(model, SimpleNamespace(store=store, horizon=5, precision=nullcontext), torch.arange(6))
    logits = model(batch.frames, batch.controls)
    alone = [loss(*(part[i : i + 1] for part in (logits, *batch[2:]))) for i in range(6)]
    torch.testing.assert_close(found, torch.stack(alone).detach())
    model.load_state_dict(before)
    measure(model, SimpleNamespace(store=store, horizon=5, precision=nullcontext), torch.arange(6))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) or "num_batches" in name, name
    assert all(n.momentum == 0.1 for n in model.modules() if isinstance(n, torch.nn.BatchNorm2d))


@pytest.mark.parametrize(("start", "measured_before"), [(0, [0, 500, 1000]), (3, [500, 1000]), (500, [500, 1000])])
def test_each_round_begins_with_measuring_wherever_training_goes_on(monkeypatch, start, measured_before):
    asked, given = [], []

    def to_measure(update, size):
        asked.append((update, size))
        return torch.full((size,), update), torch.zeros(size, dtype=torch.int64)

    def inputs(sampler, updates):
        for update in updates:
            given.append(set(sampler.hard.rows.tolist()))
            yield update

    sampler = SimpleNamespace(share=0.5, to_measure=to_measure)
    updater = SimpleNamespace(size=4, inputs=inputs)
    monkeypatch.setattr("presage.training.measure", lambda model, updater, rows: torch.ones(len(rows)))
    saved = Measured(torch.tensor([-1]), torch.tensor([0]), torch.tensor([1.0])) if start else None
    assert list(Lessons(None, updater, sampler, saved).give(range(start, 1200))) == list(range(start, 1200))
    assert asked == [(update, 400) for update in measured_before]
    assert given[0] == {0: {0}, 3: {-1}, 500: {-1, 500}}[start]
    assert given[-1] == {*measured_before, *([-1] if start else [])}  # all that was measured so far


def test_rows_are_fetched_a_chunk_ahead_and_handed_out_in_order():
    fetched = []

    def fetch():
        for first in (0, 2, 4):
            fetched.append(first)
            yield torch.arange(first, min(first + 2, 5))

    seen = [(int(row), len(fetched)) for row in one_by_one(fetch())]
    assert seen == [(0, 1), (1, 2), (2, 2), (3, 3), (4, 3)]  # the second chunk before row 1, the third before row 3
    assert list(one_by_one(iter([]))) == []


def test_valuation_alone_can_be_trained_with_the_rest_frozen(tiny_run, tmp_path):
    """Not a bit of Perception (its batch statistics included) or Prediction moves; Valuation does (S7)."""
    donor = tiny_run.agent().model.state_dict()
    run = presage.train(
        preset="debug", run=tmp_path / "new", games=["toy"], iterations=1, init_from=str(tiny_run.path),
        trainable="valuation",
    )  # fmt: skip
    trained = run.agent().model.state_dict()
    changed = {name for name in donor if not torch.equal(donor[name], trained[name])}
    assert changed == {name for name in donor if name.startswith("valuation.")}


def test_it_learns_the_toy_that_only_looking_ahead_can_win(tmp_path):
    """From random play alone: foresees deaths far better than any constant, and plays many times better than random."""
    run = presage.train(
        preset="debug", run=tmp_path / "toy", games=["toy"], iterations=1, noop_max=0,
        first_steps=8_000, shard_steps=8_000, heldout_steps=800, envs=8,
        channels=(8, 8, 16), state_size=32, hidden_size=64,
        updates=1_500, batch_size=64, lr=((1, 3e-3),), lr_decay="cosine", checkpoint_every=10_000, k=((1, 32),),
    )  # fmt: skip
    known = run.metrics("heldout")[-1]["games"]["toy"]
    assert known["cross_entropy"] < 0.6 * known["baseline_cross_entropy"]
    assert known["died"]["f1"] > 0.85
    agent = run.agent()
    planned, random = (presage.evaluate(agent, episodes=10, random=r)["games"]["toy"] for r in (False, True))
    assert planned["ci95"][0] > random["ci95"][1], (planned, random)


def test_training_twice_gives_the_same_bits(tiny_run, tmp_path):
    again = presage.train(preset="debug", run=tmp_path / "again", games=["toy", "breakout"], seed=3)
    assert weights(again.path) == weights(tiny_run.path)
    other = presage.train(preset="debug", run=tmp_path / "other", games=["toy", "breakout"], seed=4)
    assert weights(other.path) != weights(tiny_run.path)


@pytest.mark.parametrize("kind", ["lstm", "plain"])
def test_the_other_predictions_train_too(kind):
    model, batch = Model(ModelConfig("lstm" if kind == "lstm" else "plain", (4, 4, 4), 16, 16)), some_batch()
    optimizer = make_optimizer(model, TrainConfig())
    optimizer.param_groups[0]["lr"] = 1e-2
    losses = [float(update_once(model, optimizer, batch, 1.0)) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_updates_in_bfloat16_learn_what_those_in_float32_do():
    """Forty updates on one batch, from the same weights. bfloat16 has eight bits: a loss moves by some per cent."""
    losses = []
    for low in (False, True):
        model, batch = small_model().train(), some_batch()
        optimizer = make_optimizer(model, TrainConfig())
        optimizer.param_groups[0]["lr"] = 1e-2
        losses.append([float(update_once(model, optimizer, batch, 1.0, low)) for _ in range(40)])
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    plain, low = np.array(losses)
    assert (plain != low).any()
    assert plain[-1] < 0.2 * plain[0]
    np.testing.assert_allclose(low[:5], plain[:5], rtol=0.05)
    assert low[-1] < 0.2 * low[0]
