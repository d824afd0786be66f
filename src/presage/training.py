"""One training phase (S21–S23)."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from presage import fused
from presage.batches import Batch, HardCases, Measured, Sampler, assemble, stream
from presage.config import Config, TrainConfig, at
from presage.errors import RunError
from presage.graphs import Captured
from presage.model import LOW, Model, case_losses, loss
from presage.progress import Bar, Interrupt
from presage.store import Store

SAMPLER = 3  # which generator a seed is for
AT_ONCE = 100  # updates whose rows go to a GPU together
WARM_UP = 100  # updates, where a cosine begins
STATISTICS = 100  # batches that batch norm's statistics are taken from, at most
ROUND = 500  # updates after which it is measured which cases are hard ...
POOL = 100  # ... among those of so many batches; what was measured ...
KEPT = 10  # ... is drawn from for so many rounds: the same few again and again would be learned by heart
MEASURED_AT_ONCE = {"cuda": 1_000, "cpu": 250}


def learning_rate(config: Config, iteration: int, update: int) -> float:
    train, base = config.train, at(config.train.lr, iteration)
    if train.lr_decay == "halve":
        return base if update < train.updates / 2 else base / 2
    done, of = update, train.updates
    if train.lr_decay == "cosine":
        done, of = done + (iteration - 1) * of, config.iterations * of
    warm = min(1.0, (done + 1) / WARM_UP)
    return base * warm * (0.5 + 0.5 * math.cos(math.pi * done / of))


def make_optimizer(model: Model, config: TrainConfig) -> torch.optim.Adam:
    """Adam with L2 weight decay in the gradient, as in 2016 (S22); only the parts that are to be trained."""
    for part in (model.perception, model.prediction):
        part.requires_grad_(config.trainable == "all")
    trained = [p for p in model.parameters() if p.requires_grad]
    on_gpu = trained[0].is_cuda
    rate = torch.zeros((), device=trained[0].device) if on_gpu else 0.0  # a tensor: a captured update reads it anew
    return torch.optim.Adam(trained, lr=rate, weight_decay=config.weight_decay, fused=True, capturable=on_gpu)


def set_rate(optimizer: torch.optim.Adam, rate: float) -> None:
    group = optimizer.param_groups[0]
    if not isinstance(group["lr"], Tensor):
        group["lr"] = rate
    elif group.get("rate") != rate:  # launched only when it changes
        group["lr"].fill_(rate)
        group["rate"] = rate


def update_once(model: Model, optimizer: torch.optim.Adam, batch: Batch, clamp: float, low: bool = False) -> Tensor:
    """Forward, backward, clamp, step; the loss."""
    with torch.autocast(batch.frames.device.type, LOW, enabled=low):
        logits = model(batch.frames, batch.controls)
    value = loss(logits, batch.died, batch.scored, batch.mask)
    optimizer.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], clamp)
    optimizer.step()
    return value.detach()


class Updater:
    """Carries out updates as this machine does it best: all in one graph on a GPU that holds the frames, down to a CPU
    that reads them from disk. The same batches in the same order, whichever it is."""

    def __init__(self, model: Model, optimizer: torch.optim.Adam, store: Store, config: Config):
        self.store, self.size, self.horizon = store, config.train.batch_size, config.data.horizon
        on_gpu, clamp = store.device.type == "cuda", config.train.clamp
        self.fast = config.machine.fused and config.train.trainable == "all" and fused.fits(model, store.device)
        self.low = self.fast or (config.machine.bfloat16 and not on_gpu)
        learner = fused.Learner(model, optimizer, clamp) if self.fast else None

        def learn(*parts: Tensor) -> Tensor:
            batch = Batch(*parts)
            return learner.update(batch) if learner else update_once(model, optimizer, batch, clamp, self.low)

        def gather_and_learn(drawn: Tensor) -> Tensor:
            rows, *moves = drawn
            if learner:
                return learner.update_from(store, rows, self.horizon, moves)
            return learn(*assemble(store, rows, self.horizon, moves))

        self.gathers = on_gpu and store.home == store.device
        self.work: Callable[..., Tensor] = gather_and_learn if self.gathers else learn
        if on_gpu:
            torch.backends.cudnn.benchmark = True  # shapes never change, so the search for fast kernels pays
            self.work = Captured(self.work, learner.adam.settle) if learner else Captured(self.work)

    def inputs(self, sampler: Sampler, updates: range) -> Generator[tuple[Tensor, ...]]:
        """What each update in turn is given."""
        if not self.gathers:
            yield from stream(self.store, sampler, updates, self.size, self.horizon)
            return
        starts = range(0, len(updates), AT_ONCE)
        chunks = (self._to_gpu(sampler, updates[first : first + AT_ONCE]) for first in starts)
        yield from ((drawn,) for drawn in one_by_one(chunks))

    def _to_gpu(self, sampler: Sampler, updates: range) -> Tensor:
        """What is drawn for several updates [n, 1 or 3, B] in one copy."""
        drawn = np.stack([sampler.drawn(update, self.size) for update in updates])
        return torch.from_numpy(drawn).pin_memory().to(self.store.home, non_blocking=True)

    def precision(self) -> torch.autocast:
        """In this the plain network multiplies as updates do."""
        return torch.autocast(self.store.device.type, LOW, enabled=self.low)

    def __call__(self, *given: Tensor) -> Tensor:
        """The loss of one update."""
        return self.work(*given)


def one_by_one(chunks: Iterator[Tensor]) -> Iterator[Tensor]:
    """What all chunks hold. Each is fetched before the last of the one before goes out, so that a GPU whose loss is
    asked for between two chunks does not stand idle until the next one is there."""
    chunk = next(chunks, None)
    while chunk is not None:
        *most, last = chunk
        yield from most
        chunk = next(chunks, None)
        yield last


def train_phase(
    model: Model,
    optimizer: torch.optim.Adam,
    updater: Updater,
    config: Config,
    iteration: int,
    start: int,
    measured: Measured | None,
    save: Callable[[int, Measured | None], None],
    log: Callable[[dict[str, Any]], None],
    interrupt: Interrupt,
) -> None:
    """Updates start … updates - 1 of an iteration; save(n, measured) is called when n are done and it is time.

    measured: where it goes on in the middle, the cases that hard ones are drawn from.
    """
    train, store = config.train, updater.store
    seed = (config.seed, iteration, SAMPLER)
    sampler = Sampler(store, train.weight_growth, train.weight_every, seed, train.hard, train.shift)
    lessons = Lessons(model, updater, sampler, measured)
    updates = range(start, train.updates)
    model.train()
    if train.trainable == "valuation":
        model.perception.eval()  # a frozen Perception keeps its batch statistics
    recent, saved = Recent(store.device), time.monotonic()
    with (
        closing(lessons.give(updates)) as inputs,
        Bar(f"iteration {iteration}: train", train.updates, "updates", start) as bar,
    ):
        for update in updates:
            asked = time.monotonic()
            given = next(inputs)
            waited = time.monotonic() - asked
            set_rate(optimizer, lr := learning_rate(config, iteration, update))
            recent.add(updater(*given), waited)
            done = update + 1
            bar.advance()
            time_enough = time.monotonic() - saved >= config.machine.checkpoint_seconds
            due = done == train.updates or interrupt.wanted or (done % train.checkpoint_every == 0 and time_enough)
            if due or done % train.log_every == 0:
                bar.advance(0, f"loss {recent.loss():.4f}")
                log({"update": done, "lr": lr, **recent.told()})
            if due:  # after the line above, so that a run which goes on from here has it, once
                save(done, lessons.measured)
                saved = time.monotonic()
            interrupt.check()
    if train.trainable == "all":
        sampler.hard = None  # for play, of cases as they come
        take_statistics(model, updater, sampler, range(train.updates, train.updates + min(train.updates, STATISTICS)))


class Lessons:
    """What each update in turn is given. If hard cases are wanted, each round begins with measuring which are."""

    def __init__(self, model: Model, updater: Updater, sampler: Sampler, measured: Measured | None):
        self.model, self.updater, self.sampler = model, updater, sampler
        self.size = POOL * updater.size  # cases measured in a round
        self.measured: Measured | None = None  # in the rounds before, of this iteration
        if measured is not None:
            self._take(measured)

    def give(self, updates: range) -> Generator[tuple[Tensor, ...]]:
        if not self.sampler.share:
            yield from self.updater.inputs(self.sampler, updates)
            return
        while updates:
            if updates.start % ROUND == 0:
                self._measure(updates.start)
            end = min((updates.start // ROUND + 1) * ROUND, updates.stop)
            yield from self.updater.inputs(self.sampler, range(updates.start, end))
            updates = range(end, updates.stop)

    def _measure(self, update: int) -> None:
        rows, tasks = self.sampler.to_measure(update, self.size)
        new = Measured(rows, tasks, measure(self.model, self.updater, rows))
        self._take(new if self.measured is None else self.measured.followed_by(new, KEPT * self.size))

    def _take(self, measured: Measured) -> None:
        self.measured, self.sampler.hard = measured, HardCases(measured)


@torch.no_grad()
def measure(model: Model, updater: Updater, rows: Tensor) -> Tensor:
    """How wrong the network is about each of these cases [n], with the statistics of a batch of them."""
    store, parts = updater.store, []
    with remembering(model, 0.0):  # nothing of it
        for some in torch.split(rows, MEASURED_AT_ONCE[store.device.type]):
            batch = Batch(*(part.to(store.device) for part in assemble(store, some.to(store.home), updater.horizon)))
            with updater.precision():
                logits = model(batch.frames, batch.controls)
            parts.append(case_losses(logits, batch.died, batch.scored, batch.mask))
    return torch.cat(parts).cpu()


@torch.no_grad()
def take_statistics(model: Model, updater: Updater, sampler: Sampler, updates: range) -> None:
    """Batch norm's means and variances for play: of cases as they would be drawn for these updates, with the weights as
    they now are.

    Those kept while training are moving averages, which trail behind the weights. Where a picture hardly varies, as
    Pong's, a channel's mean may have moved by most of its standard deviation since: the network knows and cannot say.
    """
    model.train()
    store = updater.store
    with remembering(model, None) as norms:  # all batches count alike
        for norm in norms:
            norm.reset_running_stats()
        for update in updates:
            frames = store.stacks(torch.from_numpy(sampler.rows(update, updater.size)).to(store.home))
            with updater.precision():  # as it plays
                model.perception(frames.to(store.device))


@contextmanager
def remembering(model: Model, momentum: float | None) -> Iterator[list[nn.BatchNorm2d]]:
    """While training, let a batch count so much in batch norm's running statistics (None: as much as all others); its
    layers."""
    norms = [part for part in model.perception.modules() if isinstance(part, nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = momentum
    try:
        yield norms
    finally:
        for norm, before in zip(norms, usual, strict=True):
            norm.momentum = before


class Recent:
    """Loss and speed since they were last told."""

    def __init__(self, device: torch.device):
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.total, self.count = torch.zeros((), device=self.device), 0
        self.waited, self.began = 0.0, time.monotonic()

    def add(self, loss: Tensor, waited: float) -> None:
        self.total += loss
        self.count += 1
        self.waited += waited

    def loss(self) -> float:
        mean = float(self.total) / self.count
        if not math.isfinite(mean):
            raise RunError(
                f"the loss has become {mean}; the last checkpoint stands, but training would fail again: "
                "start in another folder with a lower --lr."
            )
        return mean

    def told(self) -> dict[str, float]:
        seconds = time.monotonic() - self.began
        speed = {"updates_per_s": self.count / seconds, "wait_fraction": self.waited / seconds}
        values = {"loss": self.loss(), **speed}
        self.clear()
        return values
