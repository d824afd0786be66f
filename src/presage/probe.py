"""Whether a network is right about plans that it does not choose, and whether it chooses well where that matters.

Planned play holds only the sequences that were chosen, so held-out cases of it cannot tell. Here play is stopped now
and then, and plans are tried out from that very moment: random ones, as the planner considers them, and the chosen one.
A network's own play leads to moments of its own; those of random play are the same for all networks.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from presage.agent import Agent
from presage.arena import Arena
from presage.collect import random_chooser, whole_seed
from presage.errors import UsageError
from presage.events import targets
from presage.games import find
from presage.knowledge import Foretold, calibration, scores
from presage.pools import Array
from presage.progress import Bar
from presage.tasks import Task

ARENA, CHOOSER, LATE, RANDOM = 9, 10, 11, 12  # which generator a seed is for
GAMES = 8  # at a time: fewer see further into a game
BETWEEN = 40  # steps between two moments of a game
TRIED = 24  # random plans a moment, at most
KINDS = ("random", "chosen")


class Moment(NamedTuple):
    """What was said of some plans from one moment, and what came of them; the first is the chosen one."""

    said: Array  # [n, H, 2]: P(died), P(scored) after each step
    events: Array  # bool [n, H, 3]: died, scored, ended


def probe(
    agent: Agent, games: Sequence[str | Task] | None = None, number: int = 256, seed: int = 0, random: bool = False
) -> dict[str, Any]:
    """Of each game: what was said of plans at `number` moments, what came of them, and how well it chose.

    random: moments of random play instead of its own.
    """
    if number < 1 or seed < 0 or agent.k < 3:
        raise UsageError("there must be at least 1 moment, 3 plans at each, and the seed not negative.")
    tasks = find(list(agent.specs) if games is None else games)
    found = {task.name: _game(agent, task, number, seed, random) for task in tasks}
    return {**agent.settings(tasks), "policy": "random" if random else "planned", "seed": seed, "games": found}


def _game(agent: Agent, task: Task, number: int, seed: int, random: bool) -> dict[str, Any]:
    found: list[Moment] = []
    with closing(Arena([task], GAMES, doubles=True)) as arena, Bar(f"probe {task.name}", number, "moments") as bar:
        for moment in islice(moments(agent, task, arena, seed, random), number):
            found.append(moment)
            bar.advance()
    parts = {"random": foretold(found, slice(1, None)), "chosen": foretold(found, slice(1))}
    told = {kind: {**scores(part), "calibration": calibration(part)} for kind, part in parts.items()}
    return told | {"choices": choices(found)}


def moments(agent: Agent, task: Task, arena: Arena, seed: int, random: bool) -> Iterator[Moment]:
    """Play for ever, of which each game is looked at now and then, all at different times."""
    spec, device = agent.spec(task), agent.device
    planner = agent.planner([spec] * GAMES, whole_seed(seed, CHOOSER))
    late = np.random.default_rng(whole_seed(seed, LATE)).integers(0, BETWEEN, GAMES)
    at_random = random_chooser([task], GAMES, whole_seed(seed, RANDOM))
    frames, fresh = arena.reset((seed, ARENA)), np.ones(GAMES, bool)
    for turn in count():
        starts = torch.from_numpy(fresh).to(device)
        stacks = planner.see(torch.from_numpy(frames).to(device), starts, planner.rows)
        plan = planner.plan(stacks, starts, planner.rows)
        for row in np.flatnonzero(arena.free & ((turn + late) % BETWEEN == 0)):
            chosen = int(plan.choice.chosen[row])
            others = [i for i in range(1, planner.k) if i != chosen]  # random; the first of all was carried on
            tried = plan.actions[row, [chosen, *others[:TRIED]]]  # [n, H]
            h = agent.model.perceive(stacks[row : row + 1])
            controls = planner.tables[row][tried][None]  # [1, n, H, 3]
            said = torch.stack(agent.model.imagine_steps(h, controls, agent.config.plan.monotone), -1)[0]
            yield Moment(said.cpu().numpy(), arena.try_out(int(row), tried.cpu().numpy()))
        arena.send(at_random(frames, fresh) if random else plan.best[:, 0].cpu().numpy())
        frames, _, _, _, fresh = arena.recv()


def choices(found: Sequence[Moment]) -> dict[str, float | None]:
    """Of the moments at which it matters what one plays: how many random plans die there, how many chosen ones, and how
    often, of a random plan that dies and one that does not, it thinks the first the more dangerous (one half: no idea).

    Such a moment is one at which some of every second random plan die and some do not; how many die is told by the
    others, which had no part in that.
    """
    rows = []
    for said, events in found:
        all_died, _, ended = (np.asarray(event.any(1)) for event in np.moveaxis(events, -1, 0))  # [n] each
        if (ended & ~all_died).any():
            continue  # nobody can say what the rest of that plan had brought
        danger, died = said[1:, -1, 0], all_died[1:]
        if died[::2].any() and not died[::2].all():
            more = danger[died][:, None] - danger[~died]
            apart = ((more > 0) + 0.5 * (more == 0)).mean()
            rows.append((apart, died[1::2].mean(), all_died[0]))
    shares = np.mean(rows, 0).tolist() if rows else [None] * 3
    return {"moments": len(rows)} | dict(zip(("told_apart", "random_died", "chosen_died"), shares, strict=True))


def foretold(found: Sequence[Moment], which: slice) -> Foretold:
    """Some of the plans of all moments, whatever moment they are of."""
    said, events = (
        torch.from_numpy(np.concatenate([part[which] for part in parts])) for parts in zip(*found, strict=True)
    )
    died, scored, mask = targets(*events.unbind(-1))
    return Foretold(said.double(), torch.stack([died, scored], -1), mask)
