"""A game of a few pixels that only looking ahead can win; it uses the same door as anyone's own environment.

A wall with a gap falls one row a step. The player, at the bottom, moves one column a step, so it has to set out for the
gap long before the wall arrives. Passing scores a point, being hit costs one of three lives.
"""

from typing import Any, cast

import gymnasium as gym
import numpy as np

from presage.tasks import Frame, StepResult, Task

SIDE = 12  # the field is 12×12 pixels: 7×7 screen pixels each
GAP = 3
LIVES = 3
MAX_STEPS = 300


class GapGame(gym.Env[Frame, int]):
    """Actions: 0 stay, 1 left, 2 right."""

    observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space: gym.spaces.Discrete = gym.spaces.Discrete(3)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.column, self.lives, self.steps = SIDE // 2, LIVES, 0
        self._new_wall()
        return self._picture(), {"lives": self.lives}

    def step(self, action: int) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.column = int(np.clip(self.column + (0, -1, 1)[action], 0, SIDE - 1))
        self.row += 1
        passed = hit = False
        if self.row == SIDE - 1:
            passed = self.gap <= self.column < self.gap + GAP
            hit = not passed
            self.lives -= hit
            self._new_wall()
        info = {"lives": self.lives, "lost_life": hit}
        return self._picture(), float(passed), self.lives == 0, self.steps >= MAX_STEPS, info

    def _new_wall(self) -> None:
        self.row, self.gap = 0, int(self.np_random.integers(0, SIDE - GAP + 1))

    def _picture(self) -> Frame:
        picture = np.zeros((SIDE, SIDE), np.uint8)
        picture[self.row] = 130
        picture[self.row, self.gap : self.gap + GAP] = 0
        picture[SIDE - 1, self.column] = 255
        return cast(Frame, picture)


def lost_life(step: StepResult) -> bool:
    return bool(step.info["lost_life"])


TOY = Task(name="toy", make=GapGame, controls=((0, 0, 0), (0, -1, 0), (0, 1, 0)), died=lost_life)
