"""The score that counts: full episodes from no-op starts, never only those that ended in time, with an interval."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from presage.agent import Agent
from presage.arena import MAX_FRAMES, Arena, Chooser, play
from presage.collect import random_chooser, whole_seed
from presage.config import Planning
from presage.errors import UsageError
from presage.games import find
from presage.pools import Array
from presage.progress import Bar
from presage.tasks import Spec, Task

ARENA, CHOOSER = 4, 5  # which generator a seed is for
PARALLEL = {"cuda": 64, "cpu": 8}  # episodes of a game at a time: emulators whose episodes are done play on in vain
RESAMPLES = 10_000


def evaluate(
    agent: Agent,
    games: Sequence[str | Task] | None = None,
    episodes: int = 30,
    k: int | None = None,
    seed: int = 0,
    random: bool = False,
    sticky: float | None = None,
    max_frames: int = MAX_FRAMES,
    each_turn: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Scores of full episodes in each game; random=True plays uniformly random actions in the same way instead.

    sticky: what the agent was trained with, unless told. each_turn is called all the time: it may raise, to stop.
    """
    sticky = agent.config.data.sticky if sticky is None else sticky
    if episodes < 1 or seed < 0 or max_frames < 1:
        raise UsageError("episodes and max_frames must be at least 1, and the seed not negative.")
    if not 0 <= sticky <= 1:
        raise UsageError(f"sticky is a chance between 0 and 1, not {sticky}.")
    tasks = find(list(agent.specs) if games is None else games)
    agent, began = agent.playing(Planning(k)), time.monotonic()
    results = {}
    for task in tasks:
        agent.captured.clear()  # no other game can use what was captured for the one before
        rows = min(episodes, PARALLEL[agent.device.type])
        quota = np.full(rows, episodes // rows) + (np.arange(rows) < episodes % rows)  # episodes each row still owes
        chosen = whole_seed(seed, CHOOSER)
        choose = random_chooser([task], rows, chosen) if random else _planned(agent, task, quota, chosen)
        title = f"{'random play' if random else 'evaluate'}: {task.name}"
        with closing(Arena([task], rows, sticky=sticky, max_frames=max_frames)) as arena:
            scores, steps = fold_episodes(arena, choose, (seed, ARENA), quota, title, each_turn)
        results[task.name] = _summary(task, scores, steps, seed)
    return {
        **agent.settings(tasks),
        "policy": "random" if random else "planned",
        "seed": seed,
        "sticky": sticky,
        "bfloat16": agent.fast or agent.low,
        "max_frames": max_frames,
        "seconds": time.monotonic() - began,
        "games": results,
    }


def _planned(agent: Agent, task: Task, quota: Array, seed: int) -> Chooser:
    specs = [Spec.of(task)] * len(quota)
    if agent.fast:
        return agent.chooser(specs, seed)  # one launch for all games costs less than several for some
    planner = agent.planner(specs, seed)

    def choose(frames: Array, fresh: Array) -> Array:
        """Plan only for games whose result still counts."""
        owing = np.flatnonzero(quota)
        actions = np.zeros(len(quota), np.int64)
        actions[owing] = planner(frames[owing], fresh[owing], owing)
        return actions

    return choose


def _summary(task: Task, scores: list[float], steps: int, seed: int) -> dict[str, Any]:
    mean = float(np.mean(scores))
    return {
        "mean": mean,
        "ci95": list(bootstrap(scores, seed)),
        "episodes": len(scores),
        "steps": steps,
        "random": task.random,
        "human": task.human,
        "human_normalized": task.normalized(mean),
        "scores": scores,
    }


def fold_episodes(
    arena: Arena, choose: Chooser, seed: Sequence[int], quota: Array, title: str, each_turn: Callable[[], None]
) -> tuple[list[float], int]:
    """Play until every row has finished its quota of episodes; their scores and the steps they took."""
    scores: list[float] = []
    running, steps = np.zeros(arena.rows), 0
    with Bar(title, int(quota.sum()), "episodes") as bar:
        for turn in play(arena, choose, seed):
            each_turn()
            counting = quota > 0
            steps += int(counting.sum())
            running += turn.rewards
            ended = turn.ended & counting
            scores += running[ended].tolist()
            running[turn.ended] = 0
            quota -= ended
            bar.advance(int(ended.sum()), f"mean {np.mean(scores):.2f}" if scores else None)
            if not quota.any():
                return scores, steps
    raise AssertionError("play never ends by itself")


def bootstrap(scores: Sequence[float], seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean, by resampling the episodes."""
    values = np.asarray(scores)
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)
