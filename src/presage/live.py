"""One game, step by step, and what the agent thinks of it: what the page, the films and the report show."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from presage.agent import Agent, AgentPlan
from presage.arena import Arena, Turn
from presage.collect import of_task, whole_seed
from presage.config import AS_THE_RUN, Planning
from presage.errors import UsageError
from presage.games import find
from presage.pools import Array
from presage.store import RUN, ShardWriter
from presage.tasks import STACK, Control, Task

ARENA, CHOOSER = 6, 7  # which generator a seed is for
REMEMBERED = 200  # steps that a history shows
NAMING = threading.Lock()  # two recordings that end at once must not take the same name


class Past(NamedTuple):
    """A step that was played: what was foretold when it began, and what it brought."""

    p_died: float  # within the horizon
    p_scored: float
    died: bool
    scored: bool


@dataclass(frozen=True)
class Moment:
    """All there is to see before a step is played."""

    game: str
    known: bool  # the network was trained on this game
    iteration: int  # of the network
    picture: Array  # uint8 [H, W, 3]
    controls: tuple[Control, ...]  # of the game's actions
    plan: AgentPlan
    person: bool  # a person plays, not the agent
    action: int  # what is pressed now
    sequence: Array  # int [H]: what is meant to follow: the agent's plan, or the person's control held down
    p_died: Array  # [H]: what would come of that, after each step
    p_scored: Array  # [H]
    score: float
    lives: int | None
    step: int
    past: tuple[Past, ...]  # of this episode, at most REMEMBERED


class Tape:
    """Steps being recorded, as a shard (docs/data.md)."""

    def __init__(self, folder: Path, task: Task, iteration: int, seed: int):
        self.writer = ShardWriter(folder / task.name, task, {"iteration": iteration, "seed": seed})
        self.recent: list[Turn] = []

    def add(self, turn: Turn) -> None:
        self.recent.append(turn._replace(frames=turn.frames.copy()))
        if len(self.recent) == RUN:
            self._hand_on()

    def cut(self) -> None:
        """What comes next does not follow from what was."""
        if self.recent:
            self.recent[-1] = self.recent[-1]._replace(ended=np.ones(1, bool))
        elif self.writer.steps:
            self.writer.columns["ended"][-1] = True

    def close(self) -> Path | None:
        """The file, if anything was recorded: the first name that is free."""
        if self.recent:
            self._hand_on()
        writer = self.writer
        if not writer.steps:
            return None
        with NAMING:
            numbered = ((n, writer.path.with_name(f"{writer.task.name}-{n:03d}.safetensors")) for n in count())
            writer.metadata["shard"], writer.path = next((n, path) for n, path in numbered if not path.exists())
            writer.close()
        return writer.path

    def _hand_on(self) -> None:
        some, self.recent = self.recent, []
        self.writer.add(of_task([[turn] for turn in some], 0, 1))


class Live:
    """A game that waits for whoever looks at it. Everything follows from the seed and from what is pressed."""

    def __init__(self, agent: Agent, game: str | Task, seed: int = 0, how: Planning = AS_THE_RUN):
        self.agent, self.how = agent, how
        self.held: Control | None = None  # what a person presses; None: the agent plays
        self.tape: Tape | None = None
        (self.task,) = find([game])
        self.arena = Arena([self.task], 1, threads=1, coloured=True)
        self.start(seed)

    def start(self, seed: int) -> None:
        """A new episode."""
        if seed < 0:
            raise UsageError(f"the seed must not be negative, not {seed}.")
        if self.tape is not None:
            self.tape.cut()
        self.seed, self.moments = seed, 0
        self._begin(self.arena.reset((seed, ARENA)))

    def _begin(self, frames: Array) -> None:
        self.stack = np.repeat(frames, STACK, 0)  # [4, 84, 84]
        self.score, self.steps, self.previous = 0.0, 0, None  # type: float, int, AgentPlan | None
        self.past: deque[Past] = deque(maxlen=REMEMBERED)

    def look(self) -> Moment:
        """What is to be seen now. Asked again it is the same, or as other settings and networks see it."""
        seed = whole_seed(self.seed, CHOOSER, self.moments)
        agent = self.agent.playing(self.how)
        plan = agent.plan(self.stack, self.task, seed=seed, previous=self.previous)
        sequence, p_died, p_scored = plan.sequence, plan.p_died, plan.p_scored
        held = self.held
        if held is not None:
            sequence = np.full_like(sequence, nearest_action(self.task.controls, held))
            p_died, p_scored = agent.foresee(self.stack, self.task, sequence)
        return Moment(
            game=self.task.name,
            known=self.task.name in self.agent.specs,
            iteration=self.agent.iteration,
            picture=self.arena.picture(),
            controls=self.task.controls,
            plan=plan,
            person=held is not None,
            action=int(self.arena.overruled(sequence[:1])[0]),
            sequence=sequence,
            p_died=p_died,
            p_scored=p_scored,
            score=self.score,
            lives=self.arena.lives(),
            step=self.steps,
            past=tuple(self.past),
        )

    def play(self, moment: Moment) -> Turn:
        """Press what this moment, the latest, is about to press."""
        seen = self.stack[-1:]
        played = self.arena.send(moment.sequence[:1])
        frames, *outcome = self.arena.recv()
        turn = Turn(seen, played, *outcome)
        if self.tape is not None:
            self.tape.add(turn)
        self.moments += 1
        if turn.ended[0]:
            self._begin(frames)
            return turn
        self.stack = np.concatenate([self.stack[1:], frames])
        self.score, self.steps = self.score + float(turn.rewards[0]), self.steps + 1
        self.past.append(Past(moment.p_died[-1], moment.p_scored[-1], bool(turn.died[0]), bool(turn.scored[0])))
        # What is carried on is what was meant to follow what was pressed.
        self.previous = replace(moment.plan, sequence=moment.sequence)
        return turn

    def record(self, folder: Path) -> None:
        self.tape = Tape(folder, self.task, self.agent.iteration, self.seed)

    def stop_recording(self) -> Path | None:
        """The file, if there is anything in it."""
        tape, self.tape = self.tape, None
        return None if tape is None else tape.close()

    def close(self) -> None:
        self.arena.close()


def nearest_action(controls: Sequence[Control], wanted: Control) -> int:
    """The game's action that is most like what is pressed."""
    return int(np.abs(np.array(controls) - wanted).sum(1).argmin())
