"""Whether a network is right about plans that it does not choose.

Planned play holds only the sequences that were chosen, so held-out cases of it cannot tell. Here planned play is
stopped now and then to play a whole sequence out blindly: a random one, as the planner considers them, or the chosen
one.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from presage.agent import Agent
from presage.arena import Arena, Array
from presage.batches import controls_table
from presage.collect import whole_seed
from presage.errors import UsageError
from presage.events import targets
from presage.games import find
from presage.knowledge import Foretold, calibration, scores
from presage.progress import Bar
from presage.tasks import Task

ARENA, CHOOSER, RANDOM = 9, 10, 11  # which generator a seed is for
GAMES = 16  # at a time
BETWEEN = 40  # steps of planned play between two sequences
KINDS = ("random", "chosen")


def probe(agent: Agent, games: Sequence[str | Task] | None = None, number: int = 256, seed: int = 0) -> dict[str, Any]:
    """Of each game and kind: what was said of about `number` sequences, and what came of them."""
    if number < 1 or seed < 0:
        raise UsageError("there must be at least 1 sequence, and the seed not negative.")
    tasks = find(list(agent.specs) if games is None else games)
    found = {task.name: _game(agent, task, number, seed) for task in tasks}
    how = {"iteration": agent.iteration, "k": agent.k, "seed": seed, "monotone": agent.config.plan.monotone}
    return how | {"games": found}


def _game(agent: Agent, task: Task, number: int, seed: int) -> dict[str, Any]:
    with closing(Arena([task], GAMES)) as arena:
        played = Probes(agent, task, arena, seed).play(-(-number // GAMES) * len(KINDS))
    return {kind: {**scores(one), "calibration": calibration(one)} for kind, one in played.items()}


class Probes:
    """All games go round in cycles of planned play and one sequence, each at its own time."""

    def __init__(self, agent: Agent, task: Task, arena: Arena, seed: int):
        self.agent, self.arena, self.seed = agent, arena, seed
        self.title = f"probe {task.name}"
        self.horizon, self.actions = agent.config.data.horizon, len(task.controls)
        spec = agent.spec(task)
        self.table = controls_table([spec])[0].to(agent.device)  # [A, 3]
        self.planner = agent.planner([spec] * GAMES, whole_seed(seed, CHOOSER))
        self.random = np.random.default_rng(whole_seed(seed, RANDOM))
        self.cycle = BETWEEN + self.horizon
        self.sequences = np.zeros((GAMES, self.horizon), np.int64)
        self.events = np.zeros((GAMES, self.horizon, 3), bool)  # died, scored, ended
        self.said = np.zeros((GAMES, self.horizon, 2))
        self.over = np.ones(GAMES, bool)  # its sequence was cut short by the episode's end
        self.results: dict[str, list[tuple[Array, Array]]] = {kind: [] for kind in KINDS}

    def play(self, cycles: int) -> dict[str, Foretold]:
        frames, fresh = self.arena.reset((self.seed, ARENA)), np.ones(GAMES, bool)
        late = self.random.integers(0, self.cycle, GAMES)  # when each game's first cycle begins
        steps = (cycles + 1) * self.cycle
        with Bar(self.title, steps, "steps") as bar:
            for turn in range(steps):
                round_, phase = np.divmod(turn - late, self.cycle)
                starts = torch.from_numpy(fresh).to(self.agent.device)
                stacks = self.planner.see(torch.from_numpy(frames).to(starts.device), starts, self.planner.rows)
                best = self.planner.plan(stacks, starts, self.planner.rows).best.cpu().numpy()
                within = (round_ >= 0) & (round_ < cycles) & (phase >= BETWEEN)
                self._begin(np.flatnonzero(within & (phase == BETWEEN)), round_, best, stacks)
                probing = within & ~self.over
                step = np.where(probing, phase - BETWEEN, 0)
                blind = self.sequences[np.arange(GAMES), step]
                wanted = np.where(probing, blind, best[:, 0])
                forced = self.arena.send(wanted) != wanted  # at an episode's start; after a death it changes nothing
                self.over |= probing & forced & ~self.events[..., 0].any(1)
                probing &= ~self.over
                frames, _, died, scored, fresh = self.arena.recv()
                self.events[probing, step[probing]] = np.stack([died, scored, fresh], -1)[probing]
                self._end(np.flatnonzero(probing & ((step == self.horizon - 1) | fresh)), round_)
                bar.advance()
        return {kind: self._foretold(some) for kind, some in self.results.items()}

    def _begin(self, rows: Array, round_: Array, best: Array, stacks: torch.Tensor) -> None:
        if not len(rows):
            return
        chosen = (round_[rows] % len(KINDS) == KINDS.index("chosen"))[:, None]
        anything = self.random.integers(0, self.actions, (len(rows), self.horizon))
        self.sequences[rows] = np.where(chosen, best[rows], anything)
        self.events[rows], self.over[rows] = False, False
        controls = self.table[torch.from_numpy(self.sequences[rows]).to(stacks.device)][:, None]  # [n, 1, H, 3]
        h = self.agent.model.perceive(stacks[torch.from_numpy(rows).to(stacks.device)])
        outlook = self.agent.model.imagine_steps(h, controls, self.agent.config.plan.monotone)
        self.said[rows] = torch.stack(outlook, -1)[:, 0].cpu().numpy()

    def _end(self, rows: Array, round_: Array) -> None:
        for row in rows:
            self.results[KINDS[round_[row] % len(KINDS)]].append((self.said[row].copy(), self.events[row].copy()))
        self.over[rows] = True

    @staticmethod
    def _foretold(some: Sequence[tuple[Array, Array]]) -> Foretold:
        said, events = (torch.from_numpy(np.stack(part)) for part in zip(*some, strict=True))
        died, scored, mask = targets(*events.unbind(-1))
        return Foretold(said, torch.stack([died, scored], -1), mask)
