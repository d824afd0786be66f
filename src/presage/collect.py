"""Playing to learn: an arena and a chooser leave one shard a task.

A shard is a function of (weights, tasks, seed, iteration, shard number) and of nothing else: its games start anew, with
generators of their own. So whatever was interrupted can be played again, by any process.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from presage.agent import Agent, load
from presage.arena import Arena, Chooser, Turn, play
from presage.config import Config
from presage.files import write_bytes
from presage.pools import Array
from presage.progress import Bar, Interrupt
from presage.store import (
    HELDOUT,
    RUN,
    Episodes,
    ShardWriter,
    Store,
    checksum_path,
    read_shard,
    shard_lengths,
    shard_path,
)
from presage.tasks import Spec, Task

ARENA, CHOOSER, STRAYS = 1, 2, 8  # which generator a seed is for


@contextmanager
def open_arenas(config: Config, tasks: Sequence[Task]) -> Iterator[list[Arena]]:
    """One for each group of games."""
    data = config.data
    envs, threads = data.envs // data.groups, config.machine.threads
    arenas = [Arena(tasks, envs, data.noop_max, data.sticky, threads) for _ in range(data.groups)]
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.close()


def whole_seed(*parts: int) -> int:
    """One number that depends on all of these."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def random_chooser(tasks: Sequence[Task], envs: int, seed: int, hold: float = 1.0) -> Chooser:
    """Random actions, each of which lasts `hold` steps on average."""
    counts = np.repeat([len(task.controls) for task in tasks], envs)
    random, held = np.random.default_rng(seed), np.zeros(len(counts), np.int64)

    def choose(frames: Array, fresh: Array) -> Array:  # noqa: ARG001
        changes = fresh | (random.random(len(held)) * hold < 1) if hold > 1 else True
        held[:] = np.where(changes, random.integers(counts), held)
        return held.copy()

    return choose


def straying(
    choose: Chooser, tasks: Sequence[Task], envs: int, share: float, length: int, seed: int, hold: float = 1.0
) -> Chooser:
    """As `choose`, but in this share of the steps a game plays out a random sequence, as long as plans are.

    Else the network would never see what comes of most plans that it is asked about: those it does not choose, from
    states that it comes to.
    """
    at_random = random_chooser(tasks, envs, whole_seed(seed, STRAYS), hold)
    random, left = np.random.default_rng(seed), np.zeros(len(tasks) * envs, np.int64)
    chance = share / (length * (1 - share) + share)  # of beginning one, so that they are `share` of all steps

    def choose_or_stray(frames: Array, fresh: Array) -> Array:
        chosen = choose(frames, fresh)
        left[fresh] = 0
        left[(left == 0) & (random.random(len(left)) < chance)] = length
        strays = left > 0
        left[strays] -= 1
        return np.where(strays, at_random(frames, fresh), chosen)

    return choose_or_stray


def prepare(config: Config, arenas: Sequence[Arena], iteration: int, shard: int) -> None:
    """Let the emulators of a shard that will be played next start in the background."""
    for group, arena in enumerate(arenas):
        arena.prepare((config.seed, iteration, shard, ARENA, group))


def collect_shard(
    run: Path,
    config: Config,
    arenas: Sequence[Arena],
    agent: Agent | None,
    iteration: int,
    shard: int,
    interrupt: Interrupt,
    store: Store | None = None,
    start: int = 0,
) -> dict[str, Any]:
    """Play one shard, at random where there is no agent yet; what it took and scored.

    store: frames are also left where it would unpack them, if the shard's rows begin at `start`.
    """
    tasks, lengths = arenas[0].tasks, shard_lengths(config, iteration)
    steps, envs = lengths[shard], config.data.envs
    described = {"iteration": iteration, "shard": shard, "seed": config.seed, "planned": agent is not None}
    writers = [
        ShardWriter(
            shard_path(run, iteration, shard, task.name),
            task,
            described,
            None if store is None else store.room(start + i * envs * steps, envs, steps),
        )
        for i, task in enumerate(tasks)
    ]
    began = playing = time.monotonic()
    name = "held out" if shard == HELDOUT else f"{shard} of {len(lengths) - 1}"
    rows = envs * len(tasks)
    with (
        Recorder(writers, envs // len(arenas)) as recorder,
        Bar(f"iteration {iteration}: play, shard {name}", steps * rows, "steps") as bar,
    ):
        for number, turns in zip(range(steps), plays(config, arenas, agent, iteration, shard), strict=False):
            playing = time.monotonic() if number == 0 else playing  # emulators have started
            recorder.add(turns)
            bar.advance(rows)
            interrupt.check()
        episodes = dict(zip([task.name for task in tasks], recorder.close(), strict=True))
    return {
        "shard": shard,
        "steps": steps * rows,
        "seconds": time.monotonic() - began,
        "steps_per_s": (steps - 1) * rows / (time.monotonic() - playing),
        "bytes": sum(writer.path.stat().st_size for writer in writers),
        "games": {name: {"episodes": e.number, "mean_score": e.mean} for name, e in episodes.items()},
    }


def plays(
    config: Config, arenas: Sequence[Arena], agent: Agent | None, iteration: int, shard: int
) -> Iterator[tuple[Turn, ...]]:
    """A turn of every group at a time. Each group's next step is under way while the others are planned for."""
    place, tasks = (config.seed, iteration, shard), arenas[0].tasks
    if any(arena.prepared is None for arena in arenas):
        prepare(config, arenas, iteration, shard)  # all groups at once
    groups, data = [], config.data
    for group, arena in enumerate(arenas):
        seed = whole_seed(*place, CHOOSER, group)
        if agent is None:
            choose = random_chooser(tasks, arena.envs, seed, data.hold)
        else:
            choose = agent.chooser([Spec.of(task) for task in tasks for _ in range(arena.envs)], seed, group)
            if data.stray:
                strays = whole_seed(*place, STRAYS, group)
                choose = straying(choose, tasks, arena.envs, data.stray, data.horizon, strays, data.hold)
        groups.append(play(arena, choose, (*place, ARENA, group)))
    return zip(*groups, strict=True)


class Recorder:
    """Gives runs of turns to the writers of all tasks, each in a thread of its own: zlib lets go of the interpreter, so
    that packing hides behind the emulator. None of them takes more of PyTorch's threads: the emulator wants the cores.
    """

    BEHIND = 12  # runs that a writer may be behind, at most

    def __init__(self, writers: Sequence[ShardWriter], envs: int):
        self.writers, self.envs = writers, envs
        self.threads = [ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in writers]
        on_gpu = any(writer.room is not None and writer.room.is_cuda for writer in writers)
        # A stream of its own: neither planning nor training stands in line with these copies.
        self.stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.recent: list[Sequence[Turn]] = []
        self.pending: deque[list[Future[None]]] = deque()

    def __enter__(self) -> "Recorder":
        return self

    def add(self, turns: Sequence[Turn]) -> None:
        """One turn of every group. Handed on by the run: threads that are woken for less get in the player's way."""
        self.recent.append(turns)
        if len(self.recent) == RUN:
            self._hand_on()

    def _hand_on(self) -> None:
        some, self.recent = self.recent, []
        self.pending.append([thread.submit(self._add, some, i) for i, thread in enumerate(self.threads)])
        if len(self.pending) > self.BEHIND:
            for future in self.pending.popleft():
                future.result()

    def _add(self, some: Sequence[Sequence[Turn]], task: int) -> None:
        with torch.cuda.stream(self.stream):
            self.writers[task].add(of_task(some, task, self.envs))

    def close(self) -> list[Episodes]:
        if self.recent:
            self._hand_on()
        for futures in self.pending:
            for future in futures:
                future.result()
        if self.stream is not None:
            self.stream.synchronize()
        return [f.result() for f in [t.submit(w.close) for t, w in zip(self.threads, self.writers, strict=True)]]

    def __exit__(self, *_: object) -> None:
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)


def of_task(some: Sequence[Sequence[Turn]], task: int, envs: int) -> Turn:
    """One task's rows, `envs` of each group, of several turns of all groups: [E, n, …] each."""
    mine = slice(task * envs, (task + 1) * envs)
    groups = list(zip(*some, strict=True))

    def all_of(field: int) -> Array:
        # PyTorch lets go of the interpreter while it copies, NumPy does not: the player would wait for it.
        parts = [torch.stack([torch.from_numpy(turn[field][mine]) for turn in turns], 1) for turns in groups]
        return torch.cat(parts).numpy()

    return Turn(*(all_of(field) for field in range(len(Turn._fields))))


def shard_files(path: Path, iteration: int, shard: int, tasks: Sequence[Task]) -> list[Path]:
    return [shard_path(path, iteration, shard, task.name) for task in tasks]


def are_there(files: Sequence[Path]) -> bool:
    return all(file.exists() for file in files)


def borrow(theirs: Sequence[Path], files: Sequence[Path]) -> None:
    """Copy a shard that another run has."""
    for mine, lent in zip(files, theirs, strict=True):
        read_shard(lent)  # refuses what is damaged
        mine.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(checksum_path(mine), checksum_path(lent).read_bytes())
        write_bytes(mine, lent.read_bytes())


class Player:
    """Plays iterations when they are asked for or, with `overlap`, while the one before trains.

    With overlap all play is in one thread, which has as many of PyTorch's threads as the one that trains: sums are in
    the same order then, and an environment that minds threads sees one only.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        arenas: Sequence[Arena],
        store: Store,
        log: Callable[[int, dict[str, Any]], None],
        interrupt: Interrupt,
    ):
        self.path, self.config, self.arenas = path, config, arenas
        self.store, self.log, self.interrupt = store, log, interrupt
        self.lender = Path(config.data.shards_from) if config.data.shards_from else None
        on_gpu = store.device.type == "cuda"
        self.stream = torch.cuda.Stream(store.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))
        self.ahead: dict[int, Future[list[bool]]] = {}

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        if self.ahead:  # nobody will take it: stop playing
            self.interrupt.wanted = True
        self.thread.shutdown()

    def shards(self, iteration: int) -> list[bool]:
        """When all of an iteration's shards are there; of each, whether it was played just now, into the store."""
        if not self.config.data.overlap:
            return self._play(iteration)
        if iteration not in self.ahead:
            self.ahead[iteration] = self.thread.submit(self._play, iteration)
        fresh = self.ahead[iteration].result()
        del self.ahead[iteration]
        return fresh

    def look_ahead(self, iteration: int) -> None:
        """This iteration is about to train: play the next one meanwhile, or at least start its emulators."""
        if iteration == self.config.iterations:
            return
        if self.config.data.overlap and iteration > 1:
            self.ahead[iteration + 1] = self.thread.submit(self._play, iteration + 1)
            return
        files = shard_files(self.path, iteration + 1, HELDOUT, self.arenas[0].tasks)
        if not are_there(files) and not self._lent(files):
            prepare(self.config, self.arenas, iteration + 1, HELDOUT)

    def _lent(self, files: Sequence[Path]) -> list[Path]:
        """Where another run has this shard of all tasks; nowhere, if it lacks one or there is no such run."""
        theirs = [self.lender / file.relative_to(self.path) for file in files] if self.lender else []
        return theirs if are_there(theirs) else []

    def _play(self, iteration: int) -> list[bool]:
        tasks, start, fresh = self.arenas[0].tasks, self.store.size, []
        agent: Agent | None = None
        with torch.cuda.stream(self.stream):  # so that it runs beside training; nothing where there is no GPU
            for shard, length in enumerate(shard_lengths(self.config, iteration)):
                files = shard_files(self.path, iteration, shard, tasks)
                if not are_there(files) and (theirs := self._lent(files)):
                    borrow(theirs, files)
                fresh.append(not are_there(files))
                if fresh[-1]:
                    agent = agent or self._agent(iteration)
                    measured = collect_shard(
                        self.path, self.config, self.arenas, agent, iteration, shard, self.interrupt, self.store, start
                    )
                    self.log(iteration, measured)
                start += length * self.config.data.envs * len(tasks)
        if self.stream is not None:
            self.stream.synchronize()
        return fresh

    def _agent(self, iteration: int) -> Agent | None:
        """Who plays: nobody yet, the iteration before's, or with overlap the newest that is finished by then."""
        if iteration == 1:
            return None
        older = self.config.data.overlap and iteration > 2
        number = iteration - 2 if older else iteration - 1
        saved = load(self.path, number, self.config.machine.device)
        # With this process's settings of the machine, which may differ from those that the run was started with.
        agent = Agent(saved.model, [*saved.specs.values()], self.config, number, saved.device)
        agent.plays = iteration
        return agent
