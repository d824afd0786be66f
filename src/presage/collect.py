"""Playing to learn: an arena and a chooser leave one shard a task.

A shard is a function of (weights, tasks, seed, iteration, shard number) and of nothing else: its games start anew, with
generators of their own. So whatever was interrupted can be played again, by any process.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from presage.agent import Agent
from presage.arena import Arena, Array, Chooser, play
from presage.config import Config
from presage.progress import Bar, Interrupt
from presage.store import HELDOUT, ShardWriter, shard_lengths, shard_path
from presage.tasks import Spec, Task

ARENA, CHOOSER = 1, 2  # which generator a seed is for


def open_arena(config: Config, tasks: Sequence[Task]) -> Arena:
    return Arena(tasks, config.data.envs, config.data.noop_max, config.data.sticky, config.machine.threads)


def whole_seed(*parts: int) -> int:
    """One number that depends on all of these."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def random_chooser(tasks: Sequence[Task], envs: int, seed: int) -> Chooser:
    counts = np.repeat([len(task.controls) for task in tasks], envs)
    random = np.random.default_rng(seed)

    def choose(stacks: Array, fresh: Array) -> Array:  # noqa: ARG001
        return random.integers(counts)

    return choose


def collect_shard(
    run: Path,
    config: Config,
    arena: Arena,
    agent: Agent | None,
    iteration: int,
    shard: int,
    interrupt: Interrupt,
) -> dict[str, Any]:
    """Play one shard, at random where there is no agent yet; what it took and scored."""
    place, data, tasks = (config.seed, iteration, shard), config.data, arena.tasks
    lengths = shard_lengths(config, iteration)
    steps = lengths[shard]
    seed = whole_seed(*place, CHOOSER)
    if agent is None:
        choose = random_chooser(tasks, data.envs, seed)
    else:
        choose = agent.planner([Spec.of(task) for task in tasks for _ in range(data.envs)], seed)
    described = {"iteration": iteration, "shard": shard, "seed": config.seed, "planned": agent is not None}
    writers = [
        ShardWriter(
            shard_path(run, iteration, shard, task.name), task, slice(i * data.envs, (i + 1) * data.envs), described
        )
        for i, task in enumerate(tasks)
    ]
    began = playing = time.monotonic()
    name = "held out" if shard == HELDOUT else f"{shard} of {len(lengths) - 1}"
    try:
        with Bar(f"iteration {iteration}: play, shard {name}", steps * arena.rows, "steps") as bar:
            for number, turn in zip(range(steps), play(arena, choose, (*place, ARENA)), strict=False):
                playing = time.monotonic() if number == 0 else playing  # emulators have started
                for writer in writers:
                    writer.add(turn)
                bar.advance(arena.rows)
                interrupt.check()
        episodes = {task.name: writer.close() for task, writer in zip(tasks, writers, strict=True)}
    finally:
        for writer in writers:
            writer.packer.shutdown(cancel_futures=True)
    rate = (steps - 1) * arena.rows / (time.monotonic() - playing)
    return {
        "shard": shard,
        "steps": steps * arena.rows,
        "seconds": time.monotonic() - began,
        "steps_per_s": rate,
        "bytes": sum(writer.path.stat().st_size for writer in writers),
        "games": {name: {"episodes": e.number, "mean_score": e.mean} for name, e in episodes.items()},
    }
