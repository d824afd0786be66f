"""A task: any Gymnasium environment with discrete actions, and what dying and scoring mean in it (S3, S10, S19)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F

from presage.config import Schedule, at, check_schedule
from presage.errors import UsageError

FRAME = 84  # pixels on each side of an observation
STACK = 4  # observations the network sees at once

Control = tuple[int, int, int]  # shoot in {0, 1}, horizontal in {-1, 0, 1}, vertical in {-1, 0, 1}
Frame = np.ndarray[Any, np.dtype[np.uint8]]  # [84, 84]


class StepResult(NamedTuple):
    """What one step of an environment returned: all that the death and score rules may look at."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


Rule = Callable[[StepResult], bool]


def died_at_end(step: StepResult) -> bool:
    """The default death rule: the episode ended, other than by running out of time."""
    return step.terminated


def positive_reward(step: StepResult) -> bool:
    """The default score rule."""
    return step.reward > 0


def grey_84(observation: Any) -> Frame:
    """A picture [H, W] or [H, W, 3] of bytes as 84×84 grey; small pictures keep their sharp pixels."""
    picture = np.asarray(observation)
    if (
        picture.dtype != np.uint8
        or picture.ndim not in (2, 3)
        or (picture.ndim == 3 and picture.shape[2] not in (1, 3))
    ):
        raise UsageError(
            f"an observation must be uint8 [H, W] or [H, W, 3], not {picture.dtype} {list(picture.shape)}; "
            "give the Task a frame=... function that turns it into such a picture."
        )
    if picture.ndim == 3:
        weights = (0.299, 0.587, 0.114) if picture.shape[2] == 3 else (1.0,)
        picture = (picture @ np.array(weights)).round().astype(np.uint8)
    if picture.shape == (FRAME, FRAME):
        return cast(Frame, picture)
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).float()[None, None]  # [1, 1, H, W]
    mode = "nearest" if max(picture.shape) <= FRAME else "area"
    return cast(Frame, F.interpolate(pixels, (FRAME, FRAME), mode=mode)[0, 0].round().to(torch.uint8).numpy())


@dataclass(frozen=True)
class Task:
    """One thing to learn. For an environment of your own, `name`, `make` and `controls` are enough."""

    name: str
    make: Callable[[], gym.Env[Any, Any]]
    """Opens one environment; its observations are pictures, its actions Discrete(len(controls))."""
    controls: tuple[Control, ...]
    """For each action the three numbers the network sees: shoot, horizontal, vertical. All different."""
    died: Rule = died_at_end
    scored: Rule = positive_reward
    frame: Callable[[Any], Frame] = grey_84
    """Turns an observation into a grey 84×84 picture."""
    thresholds: Schedule = ((1, 0.0),)
    """Plans whose P(died) is under this are safe enough to play for points; 0: always the safest plan."""
    noop: int = 0
    """The action that does nothing."""
    serve: int | None = None
    """The action pressed for the player at each start and after each death, where a game waits for it."""
    human: float | None = None
    random: float | None = None
    source: str = ""
    """Where those two reference scores come from."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name):
            raise UsageError(f"a task's name is lower-case letters, digits and _, not {self.name!r}.")
        object.__setattr__(self, "controls", whole_controls(self.name, self.controls))
        object.__setattr__(self, "thresholds", tuple((int(start), float(value)) for start, value in self.thresholds))
        check_schedule(f"{self.name}: thresholds", self.thresholds, least=0)
        if len(set(self.controls)) != len(self.controls):
            raise UsageError(f"{self.name}: two actions have the same control, so no network could tell them apart.")
        for index in (self.noop, self.serve or 0):
            if not 0 <= index < len(self.controls):
                raise UsageError(f"{self.name}: there is no action {index} among {len(self.controls)} controls.")

    def threshold(self, iteration: int) -> float:
        return at(self.thresholds, iteration)

    def normalized(self, score: float) -> float | None:
        return human_normalized(score, self.random, self.human)


def human_normalized(score: float, random: float | None, human: float | None) -> float | None:
    """0 is random play, 1 a human."""
    return None if random is None or human is None else (score - random) / (human - random)


def whole_controls(name: str, controls: Any) -> tuple[Control, ...]:
    """Controls in any table-like form as tuples of plain numbers."""
    try:
        table = tuple((int(shoot), int(across), int(up)) for shoot, across, up in controls)
        exact = all(tuple(row) == kept for row, kept in zip(controls, table, strict=True))
    except (TypeError, ValueError):
        table, exact = (), False
    if not exact or not 2 <= len(table) <= 256:
        raise UsageError(f"{name}: controls must be a table of 2 to 256 actions × 3 whole numbers.")
    if any(shoot not in (0, 1) or across not in (-1, 0, 1) or up not in (-1, 0, 1) for shoot, across, up in table):
        raise UsageError(f"{name}: a control is shoot (0 or 1), horizontal and vertical (-1, 0 or 1).")
    return table


class Spec(NamedTuple):
    """What planning needs of a task; it is kept with every network, so that no environment is needed to plan."""

    name: str
    controls: tuple[Control, ...]
    thresholds: Schedule

    @staticmethod
    def of(task: Task) -> "Spec":
        return Spec(task.name, task.controls, task.thresholds)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Spec":
        thresholds = tuple((int(start), float(value)) for start, value in data["thresholds"])
        check_schedule("thresholds", thresholds, least=0)
        return Spec(str(data["name"]), whole_controls(str(data["name"]), data["controls"]), thresholds)
