"""Moments worth looking at, found by playing: a death avoided, a death not foreseen, a point planned."""

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np

from presage.agent import Agent
from presage.config import Planning
from presage.live import Live, Moment
from presage.progress import Bar
from presage.tasks import Task

STEPS = 400  # played of each game
K = 50  # sequences imagined a step, at most: this is for looking
BEFORE, AFTER = 8, 30  # steps that a clip shows around its moment
TITLES = {
    "avoided": "A death it avoided: most of what it considered would have been one",
    "unforeseen": "A death it did not foresee",
    "planned": "A point it planned: little else that it considered would have scored",
}


class Glance(NamedTuple):
    """A step in four numbers and two facts."""

    p_died: float  # within the horizon, of what was played
    p_scored: float
    usual_died: float  # the same of the middle one of all candidates
    usual_scored: float
    died: bool  # in this step
    scored: bool

    @staticmethod
    def of(moment: Moment, died: bool, scored: bool) -> "Glance":
        plan = moment.plan
        return Glance(
            float(moment.p_died[-1]),
            float(moment.p_scored[-1]),
            float(np.median(plan.candidates_p_died[:, -1])),
            float(np.median(plan.candidates_p_scored[:, -1])),
            died,
            scored,
        )


class Highlight(NamedTuple):
    kind: str  # of TITLES
    worth: float  # how clear a case it is
    moment: Moment
    clip: list[Moment]


def pick(glances: Sequence[Glance], horizon: int) -> dict[str, tuple[float, int]]:
    """Of each kind the clearest case, (worth, step), if there is one that is as its title says."""
    died, scored = (np.array([getattr(one, name) for one in glances], bool) for name in ("died", "scored"))
    found: dict[str, tuple[float, int]] = {}

    def offer(kind: str, fits: bool, worth: float, step: int) -> None:
        if fits and worth > found.get(kind, (0.0, 0))[0]:
            found[kind] = (worth, step)

    for step, one in enumerate(glances[: max(0, len(glances) - horizon)]):
        ahead = slice(step, step + horizon)
        if not died[ahead].any():
            offer("avoided", one.p_died < 0.5 < one.usual_died, one.usual_died - one.p_died, step)
            planned = one.usual_scored < 0.5 < one.p_scored and bool(scored[ahead].any())
            offer("planned", planned, one.p_scored - one.usual_scored, step)
    for step in np.flatnonzero(died).tolist():
        first = max(0, step - horizon // 2)  # when there was still time
        if step > first and not died[first:step].any():
            most = max(one.p_died for one in glances[first:step])
            offer("unforeseen", most < 0.5, 1 - most, (first + step) // 2)
    return found


def play(agent: Agent, game: str | Task, seed: int = 0) -> list[Highlight]:
    """What one stretch of a game has to show."""
    moments, glances = [], []
    few = Planning(k=min(agent.k, K))
    with closing(Live(agent, game, seed, few)) as live, Bar(f"look at {live.task.name}", STEPS, "steps") as bar:
        for _ in range(STEPS):
            moment = live.look()
            turn = live.play(moment)
            moments.append(moment)
            glances.append(Glance.of(moment, bool(turn.died[0]), bool(turn.scored[0])))
            bar.advance()
    horizon = agent.config.data.horizon
    return [
        Highlight(kind, worth, moments[step], moments[max(0, step - BEFORE) : step + AFTER])
        for kind, (worth, step) in pick(glances, horizon).items()
    ]


def highlights(agent: Agent, games: Sequence[str | Task]) -> list[Highlight]:
    """One of each kind, of different games where there is a choice."""
    offers = sorted((one for game in games for one in play(agent, game)), key=lambda one: -one.worth)
    chosen: dict[str, Highlight] = {}
    for fresh_games_only in (True, False):
        for one in offers:
            taken = {other.moment.game for other in chosen.values()}
            if one.kind not in chosen and not (fresh_games_only and one.moment.game in taken):
                chosen[one.kind] = one
    return [chosen[kind] for kind in TITLES if kind in chosen]
