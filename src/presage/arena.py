"""Many games in parallel, of several kinds, behind one send and recv: no-op starts (S13), serving (S14), the game loop.

Rows are ordered by task: row r plays tasks[r // envs].
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np

from presage.games import AtariTask
from presage.pools import Array, AtariPool, GymPool, Pool, Step
from presage.tasks import Task

Chooser = Callable[[Array, Array], Array]  # (frames uint8 [N, 84, 84], fresh bool [N]) -> actions int64 [N]

MAX_FRAMES = 108_000  # an episode's cap, in emulator frames: 30 minutes of play


class Arena:
    """`envs` games of each task. After a reset, everything follows from its seed and the actions."""

    def __init__(
        self,
        tasks: Sequence[Task],
        envs: int,
        noop_max: int = 30,
        sticky: float = 0.0,
        threads: int = 0,
        max_frames: int = MAX_FRAMES,
        coloured: bool = False,
        doubles: bool = False,
    ):
        self.tasks, self.envs, self.noop_max = tuple(tasks), envs, noop_max
        self.rows = len(tasks) * envs
        self.task_of = np.repeat(np.arange(len(tasks)), envs)  # [N]
        # The pools of all tasks play at once: together they have a thread for each core.
        self.threads = threads or max(1, (os.cpu_count() or 1) // len(tasks))
        self.options = (sticky, self.threads, max_frames, coloured, doubles)
        self.noop = np.array([task.noop for task in tasks])[self.task_of]
        self.serve = np.array([-1 if task.serve is None else task.serve for task in tasks])[self.task_of]
        self.under_way = False  # a step was sent and not yet received
        self.prepared: tuple[Sequence[int], Future[Array]] | None = None
        self.workers = ThreadPoolExecutor()

    @cached_property
    def pools(self) -> list[Pool]:
        """Opened when first played: a run that is only looked at starts no emulators."""
        return [
            AtariPool(task, self.envs, *self.options)
            if isinstance(task, AtariTask)
            else GymPool(task, self.envs, self.options[2])
            for task in self.tasks
        ]

    def prepare(self, seed: Sequence[int]) -> None:
        """Begin in the background what reset(seed) will wait for: loading ROMs anew takes seconds.

        Other environments than Atari games may not like to be used from several threads; they are left alone.
        """
        if all(isinstance(task, AtariTask) for task in self.tasks):
            if self.prepared is not None:
                self.prepared[1].result()  # nobody took it: one at a time
            self.prepared = (seed, self.workers.submit(self._reset, seed))

    def reset(self, seed: Sequence[int]) -> Array:
        """Start every game, as if nothing had been played before; its first frames [N, 84, 84]."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return self._reset(seed)
        frames = prepared[1].result()
        return frames if prepared[0] == seed else self._reset(seed)

    def _reset(self, seed: Sequence[int]) -> Array:
        if self.under_way:
            self.recv()
        self.randoms = [np.random.default_rng([*seed, row]) for row in range(self.rows)]
        seeds = np.array([random.integers(2**31 - 1) for random in self.randoms], np.int32).reshape(-1, self.envs)
        self.noops_left = np.zeros(self.rows, np.int64)
        self.serve_due = np.zeros(self.rows, bool)
        self._start(np.ones(self.rows, bool))
        starts = [
            self.workers.submit(pool.reset, some) if isinstance(pool, AtariPool) else pool.reset(some)
            for pool, some in zip(self.pools, seeds, strict=True)
        ]
        return np.concatenate([start.result() if isinstance(start, Future) else start for start in starts])

    def overruled(self, actions: Array) -> Array:
        """What would really be played: doing nothing at first (S13), serving when due (S14)."""
        return np.where(self.noops_left > 0, self.noop, np.where(self.serve_due, self.serve, actions))

    @property
    def free(self) -> Array:
        """bool [N]: the next action is not overruled."""
        return np.asarray((self.noops_left == 0) & ~self.serve_due)

    def try_out(self, row: int, sequences: Array) -> Array:
        """What would come of each of these action sequences int [n, H]: died, scored and ended after each step, bool
        [n, H, 3], all False after an end. Nothing is played; Atari games must have `doubles`."""
        return self.pools[row // self.envs].try_out(row % self.envs, sequences)

    def send(self, actions: Array) -> Array:
        """Play one step; the actions really played."""
        played, idle = self.overruled(actions), self.noops_left > 0
        self.noops_left -= idle
        self.serve_due &= idle
        for pool, part in zip(self.pools, np.split(played, len(self.pools)), strict=True):
            pool.send(np.ascontiguousarray(part))
        self.under_way = True
        return played

    def recv(self) -> Step:
        step = Step(*map(np.concatenate, zip(*(pool.recv() for pool in self.pools), strict=True)))
        self.under_way = False
        self.serve_due |= step.died & (self.serve >= 0)
        self._start(step.ended)
        return step

    def picture(self, row: int = 0) -> Array:
        """What a person sees of a game now, uint8 [H, W, 3]; Atari games must be `coloured`."""
        return np.asarray(self.pools[row // self.envs].pictures()[row % self.envs])

    def lives(self, row: int = 0) -> int | None:
        """How many are left, where the emulator counts them."""
        pool = self.pools[row // self.envs]
        if not isinstance(pool, AtariPool) or pool.task.death != "lives":
            return None
        return int(pool.lives[row % self.envs])

    def close(self) -> None:
        self.workers.shutdown()
        for pool in self.__dict__.pop("pools", ()):
            pool.close()

    def _start(self, fresh: Array) -> None:
        for row in np.flatnonzero(fresh):
            self.noops_left[row] = self.randoms[row].integers(self.noop_max + 1)
        self.serve_due |= fresh & (self.serve >= 0)


class Turn(NamedTuple):
    """One step of every game, [N] each: what was seen, what was played, what came of it."""

    frames: Array  # uint8 [N, 84, 84]: the newest frame before the action
    actions: Array  # int64, as really played
    rewards: Array
    died: Array
    scored: Array
    ended: Array


def play(arena: Arena, choose: Chooser, seed: Sequence[int]) -> Iterator[Turn]:
    """The game loop, for ever: collecting, evaluating and watching all fold over it.

    When a turn is handed out the next step is already under way, so that whatever is done with the turn costs no time.
    """
    frames = arena.reset(seed)
    actions = arena.send(choose(frames, np.ones(arena.rows, bool)))
    while True:
        seen, (frames, *outcome) = frames, arena.recv()
        turn = Turn(seen, actions, *outcome)
        actions = arena.send(choose(frames, turn.ended))
        yield turn
