"""Cases to learn from: drawn by iteration weight (S16), made into tensors, prepared while the last update runs."""

import queue
import threading
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from presage.events import Targets, targets
from presage.pools import Array
from presage.store import DIED, LAST, SCORED, Store
from presage.tasks import FRAME, Spec

MEASURED, MOVED = 12, 13  # which generator a seed is for


class Batch(NamedTuple):
    frames: Tensor  # uint8 [B, 4, 84, 84]
    controls: Tensor  # float32 [B, H, 3]
    died: Tensor  # bool [B, H]
    scored: Tensor  # bool [B, H]
    mask: Tensor  # bool [B, H]


def controls_table(specs: Sequence[Spec]) -> Tensor:
    """float32 [specs, most actions, 3], padded with zeros."""
    table = torch.zeros(len(specs), max(len(spec.controls) for spec in specs), 3)
    for i, spec in enumerate(specs):
        table[i, : len(spec.controls)] = torch.tensor(spec.controls)
    return table


def iteration_weight(iteration: int, growth: float, every: int) -> float:
    """1, 1, 1, 3, 3, 3, 9, …"""
    return float(growth ** ((iteration - 1) // every))


class Measured(NamedTuple):
    """Cases drawn evenly, the newest last, and how wrong the network was about each when it was measured; [n] each."""

    rows: Tensor  # int64
    tasks: Tensor  # int64
    losses: Tensor  # float32

    def followed_by(self, newer: "Measured", most: int) -> "Measured":
        return Measured(*(torch.cat(both)[-most:] for both in zip(self, newer, strict=True)))


class HardCases:
    """Draws among measured cases of a task, the likelier the wronger the network was."""

    def __init__(self, measured: Measured):
        rows, tasks, losses = (part.numpy() for part in measured)
        order = np.argsort(tasks, kind="stable")
        self.rows, self.tasks = rows[order], tasks[order]
        self.up_to = np.concatenate([[0.0], np.cumsum(losses[order], dtype=np.float64)])

    def instead_of(self, rows: Array, tasks: Array, random: np.random.Generator) -> Array:
        """Other rows of these tasks; the same where no case of the task was measured."""
        first, last = (self.up_to[np.searchsorted(self.tasks, tasks, side)] for side in ("left", "right"))
        place = np.searchsorted(self.up_to, first + random.random(len(tasks)) * (last - first), "right") - 1
        return np.where(last > first, self.rows[np.minimum(place, len(self.rows) - 1)], rows)


class Sampler:
    """Draws an iteration by its weight, a task evenly, then one of their cases evenly.

    `share`: of cases that are drawn among hard ones instead, once some were measured. `shift`: see TrainConfig.
    """

    def __init__(
        self, store: Store, growth: float, every: int, seed: Sequence[int], share: float = 0.0, shift: int = 0
    ):
        self.seed, self.share, self.shift = list(seed), share, shift
        self.hard: HardCases | None = None
        spans = sorted((s for s in store.spans if not s.heldout), key=lambda span: (span.iteration, span.task))
        cells = sorted({(span.iteration, span.task) for span in spans})
        weights = np.array([iteration_weight(iteration, growth, every) for iteration, _ in cells])
        self.chances = weights / weights.sum()
        self.task_of = np.array([task for _, task in cells])
        self.sizes = np.array([sum(s.stop - s.start for s in spans if (s.iteration, s.task) == cell) for cell in cells])
        # Cases are numbered through all spans, cell by cell; the spans' cumulated sizes turn such a number into a row.
        self.firsts = np.cumsum(self.sizes) - self.sizes  # of each cell
        self.ends = np.cumsum([s.stop - s.start for s in spans])
        self.shifts = np.array([s.stop for s in spans]) - self.ends  # from a number to its row

    def rows(self, update: int, size: int) -> Array:
        """The same rows for the same update, whatever came before: so a resumed run needs no generator's state."""
        random = np.random.default_rng([*self.seed, update])
        cells = random.choice(len(self.chances), size, p=self.chances)
        rows = self._evenly(cells, random)
        if self.hard is not None:
            some = slice(round(self.share * size))
            rows[some] = self.hard.instead_of(rows[some], self.task_of[cells[some]], random)
        return rows

    def drawn(self, update: int, size: int) -> Array:
        """The rows of an update, and by how many pixels each case is moved down and to the right: int64 [3, size], or
        [1, size] where nothing is moved."""
        rows = self.rows(update, size)[None]
        if not self.shift:
            return rows
        random = np.random.default_rng([*self.seed, update, MOVED])
        return np.concatenate([rows, random.integers(-self.shift, self.shift + 1, (2, size))])

    def to_measure(self, update: int, size: int) -> tuple[Tensor, Tensor]:
        """Rows to measure before this update, and their tasks."""
        random = np.random.default_rng([*self.seed, update, MEASURED])
        cells = random.choice(len(self.chances), size, p=self.chances)
        return torch.from_numpy(self._evenly(cells, random)), torch.from_numpy(self.task_of[cells])

    def _evenly(self, cells: Array, random: np.random.Generator) -> Array:
        numbers = self.firsts[cells] + random.integers(self.sizes[cells])
        return np.asarray(numbers + self.shifts[np.searchsorted(self.ends, numbers, side="right")])


def assemble(store: Store, rows: Tensor, horizon: int, moves: Sequence[Tensor] = ()) -> Batch:
    """The batch of these rows, where the store is at home; moves: as in `moved`."""
    controls, wanted = aims(store, rows, horizon)
    frames = store.stacks(rows)
    return Batch(moved(frames, *moves) if moves else frames, controls, *wanted)


class Stacks(NamedTuple):
    """Stacks of frames that are not put together: an update's kernel reads them from where they lie."""

    frames: Tensor  # uint8 [N, 84, 84]
    newest: Tensor  # int64 [B]: the newest frame of each stack
    ages: Tensor  # uint8 [N]: older frames of its episode before a frame; where too few, the oldest is repeated
    down: Tensor | None = None  # int64 [B]: as in `moved`
    right: Tensor | None = None


def moved(frames: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Each stack [B, 4, 84, 84] moved by so many pixels [B]; what is at its edge is repeated."""
    here = torch.arange(FRAME, device=frames.device)
    y, x = ((here - by[:, None]).clamp(0, FRAME - 1) for by in (down, right))  # [B, 84]: where each pixel comes from
    cases = torch.arange(len(frames), device=frames.device)[:, None, None]
    return frames.transpose(1, 3)[cases, x[:, :, None], y[:, None, :]].transpose(1, 3).contiguous()


def aims(store: Store, rows: Tensor, horizon: int) -> tuple[Tensor, Targets]:
    """What follows each of these rows: the controls [B, H, 3] and what is to be foretold of them."""
    controls, events = store.window(rows, horizon)
    return controls, targets(*((events & bit) > 0 for bit in (DIED, SCORED, LAST)))


def heldout_rows(store: Store, task: int, most: int) -> Array:
    """At most `most` held-out cases of a task, evenly spread over everything held out so far."""
    parts = [np.arange(span.start, span.stop) for span in store.spans if span.heldout and span.task == task]
    rows = np.concatenate(parts)
    return np.asarray(rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)])


def stream(store: Store, sampler: Sampler, updates: range, size: int, horizon: int) -> Generator[Batch]:
    """Batches for these updates in order, prepared by a thread a few ahead."""
    ready: queue.Queue[Batch | BaseException] = queue.Queue(4)
    stop = threading.Event()

    def hand_over(item: Batch | BaseException) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def prepare() -> None:
        torch.set_num_threads(1)  # in this thread and later ones: a second team would fight with the one that trains
        try:
            for update in updates:
                if stop.is_set():
                    return
                rows, *moves = torch.from_numpy(sampler.drawn(update, size)).to(store.home)
                batch = assemble(store, rows, horizon, moves)
                # Pinned memory, so that its copy to a GPU takes nobody's time.
                hand_over(Batch(*(t.pin_memory() for t in batch)) if store.device.type == "cuda" else batch)
        except BaseException as error:  # handed to the thread that trains, where it is raised
            hand_over(error)

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    try:
        for _ in updates:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
