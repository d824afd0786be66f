"""Several copies of one task: an Atari game's emulators, or a Gymnasium environment's copies.

With the arena, the only place that knows emulators: frames, lives, ends, automatic restarts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from ale_py import ALEInterface
from ale_py.vector_env import AtariVectorEnv

from presage.errors import RunError, UsageError
from presage.games import AtariTask, load_rom
from presage.tasks import FRAME, StepResult, Task

Array = np.ndarray[Any, np.dtype[Any]]

SKIP = 4  # emulator frames a step
SCREEN = (210, 160)  # the emulator's own pixels


class Step(NamedTuple):
    """What came back, [N] each. Where an episode ended, frames already shows the first frame of the next one."""

    frames: Array  # uint8 [N, 84, 84]
    rewards: Array  # float32
    died: Array  # bool
    scored: Array  # bool
    ended: Array  # bool


class Pool(Protocol):
    """Several copies of one task."""

    def reset(self, seeds: Array) -> Array: ...
    def send(self, actions: Array) -> None: ...
    def recv(self) -> Step: ...
    def pictures(self) -> Array: ...
    def try_out(self, env: int, sequences: Array) -> Array: ...
    def close(self) -> None: ...


def deaths(task: AtariTask, rewards: Any, lives_fell: Any, terminated: Any) -> Any:
    """Who died in a step (S11), for one game or for arrays."""
    if task.death == "lives":
        return terminated | lives_fell
    return rewards < 0 if task.death == "negative_reward" else terminated


class Double:
    """One more emulator, which plays what a game of a pool plays and so is always at the same moment. There sequences
    can be tried out and taken back, which the vector environment cannot do."""

    def __init__(self, task: AtariTask):
        self.task, self.ale = task, ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)

    def reset(self) -> None:
        load_rom(self.ale, self.task.name)
        self.ale.reset_game()
        self.actions = self.ale.getMinimalActionSet()

    def step(self, action: int) -> tuple[float, bool, bool]:
        """Its reward, whether one died, whether the game is over."""
        before, reward = self.ale.lives(), 0.0
        for _ in range(SKIP):
            reward += self.ale.act(self.actions[action])
            if self.ale.game_over():
                break
        over = self.ale.game_over()
        return reward, bool(deaths(self.task, reward, self.ale.lives() < before, over)), over

    def follow(self, action: int, reward: float, lives: int, ended: bool) -> None:
        """Play what was played."""
        if self.step(action)[0] != reward or (not ended and self.ale.lives() != lives):
            raise RunError(f"a second emulator of {self.task.name} does not play the same: plans cannot be tried out.")
        if ended:
            self.ale.reset_game()

    def try_out(self, sequences: Array) -> Array:
        events, here = np.zeros((*sequences.shape, 3), bool), self.ale.cloneState()
        for sequence, into in zip(sequences.tolist(), events, strict=True):
            for step, action in enumerate(sequence):
                reward, died, over = self.step(action)
                into[step] = died, reward > 0, over
                if over:
                    break
            self.ale.restoreState(here)
        return events


@contextmanager
def polite() -> Iterator[None]:
    """Threads that begin in here let whoever wakes them finish first, where the operating system knows of such: a
    player who sends actions to many emulators would lose its core to the first of them."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with suppress(OSError):  # where it is not allowed, all else works
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread; new ones take it over
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class AtariPool:
    """ale-py's vector environment: frame skip 4, maximum of the last two frames, grey 84×84, unclipped rewards.

    coloured: twins play the same beside them, for people to look at. doubles: others, to try sequences out.
    """

    def __init__(
        self,
        task: AtariTask,
        envs: int,
        sticky: float,
        threads: int,
        max_frames: int,
        coloured: bool,
        doubles: bool,
    ):
        self.task = task
        # A seed makes the emulator load its ROM anew: slow, but the only reset that forgets everything (after a plain
        # one many games, Demon Attack and Tennis among them, begin differently). A new emulator needs it for sticky
        # actions only.
        self.seed_now = sticky > 0
        emulators = partial(
            AtariVectorEnv,
            task.name,
            envs,
            num_threads=threads,
            max_num_frames_per_episode=max_frames,
            repeat_action_probability=sticky,
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,  # no frame is lost and no step is a mere restart
            stack_num=1,  # frames are stacked where they are used, so that each is kept once
            frameskip=SKIP,
            noop_max=0,  # the Arena does nothing by itself, in steps that are recorded
            reward_clipping=False,
            use_fire_reset=False,
        )
        with polite():
            self.envs = emulators(img_height=FRAME, img_width=FRAME)
            self.twins = emulators(img_height=SCREEN[0], img_width=SCREEN[1], grayscale=False) if coloured else None
        self.doubles = [Double(task) for _ in range(envs)] if doubles else []

    def reset(self, seeds: Array) -> Array:
        frames, info = self.envs.reset(seed=seeds if self.seed_now else None)
        if self.twins is not None:
            self.screens = self.twins.reset(seed=seeds if self.seed_now else None)[0]
        for double in self.doubles:
            double.reset()
        self.seed_now = True
        self.lives: Array = info["lives"].copy()
        return np.asarray(frames[:, 0])

    def send(self, actions: Array) -> None:
        self.sent = actions
        self.envs.send(actions)
        if self.twins is not None:
            self.twins.send(actions)

    def recv(self) -> Step:
        if self.twins is not None:
            self.screens = self.twins.recv()[0]
        frames, rewards, terminated, truncated, info = self.envs.recv()
        ended = terminated | truncated
        lives_fell = ~ended & (info["lives"] < self.lives)  # after an end, lives are the next episode's
        died = deaths(self.task, rewards, lives_fell, terminated)
        self.lives = info["lives"].copy()
        what_came = (self.sent.tolist(), rewards.tolist(), self.lives.tolist(), ended.tolist())
        for double, *played in zip(self.doubles, *what_came, strict=False):
            double.follow(*played)
        return Step(frames[:, 0], rewards.astype(np.float32), died, rewards > 0, ended)

    def pictures(self) -> Array:
        """uint8 [envs, 210, 160, 3], of coloured pools; pixels are wider than high: the screen is 4:3."""
        return np.asarray(self.screens[:, 0])

    def try_out(self, env: int, sequences: Array) -> Array:
        return self.doubles[env].try_out(sequences)

    def close(self) -> None:
        self.envs.close()
        if self.twins is not None:
            self.twins.close()


class GymPool:
    """Copies of a Gymnasium environment, one after the other."""

    def __init__(self, task: Task, envs: int, max_frames: int):
        self.task, self.max_steps = task, max_frames // SKIP  # the same time for all: 27,000 steps
        self.envs = [task.make() for _ in range(envs)]
        space = self.envs[0].action_space
        if not isinstance(space, gym.spaces.Discrete) or space.start != 0 or space.n != len(task.controls):
            raise UsageError(
                f"{task.name}: the environment has {space} but the task has {len(task.controls)} "
                "controls; there must be one for each discrete action."
            )

    def reset(self, seeds: Array) -> Array:
        self.ages = [0] * len(self.envs)
        self.frames = np.stack([self._frame(e.reset(seed=int(s))[0]) for e, s in zip(self.envs, seeds, strict=True)])
        return self.frames

    def send(self, actions: Array) -> None:
        self.actions = actions

    def recv(self) -> Step:
        step = Step(*map(np.stack, zip(*map(self._step, range(len(self.envs)), self.actions), strict=True)))
        self.frames = step.frames
        return step

    def pictures(self) -> Array:
        """uint8 [envs, H, W, 3]: what the environments draw for people, or else what the network sees."""
        drawn = [np.asarray(env.render()) if env.render_mode == "rgb_array" else None for env in self.envs]
        grey = np.repeat(self.frames[..., None], 3, -1)
        return np.stack([grey[i] if picture is None else picture for i, picture in enumerate(drawn)])

    def try_out(self, env: int, sequences: Array) -> Array:
        events = np.zeros((*sequences.shape, 3), bool)
        for sequence, into in zip(sequences.tolist(), events, strict=True):
            copy = self._copy(self.envs[env])
            for step, action in enumerate(sequence):
                _, result = self._played(copy, action, self.ages[env] + step + 1)
                ended = result.terminated or result.truncated
                into[step] = self._rule("died", result), self._rule("scored", result), ended
                if ended:
                    break
        return events

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _copy(self, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        try:
            if not isinstance(env.unwrapped, gym.utils.EzPickle):  # whose copies begin anew
                return deepcopy(env)
        except (TypeError, RecursionError):
            pass
        raise UsageError(f"{self.task.name}: its environment cannot be copied to try plans out.")

    def _played(self, env: gym.Env[Any, Any], action: int, age: int) -> tuple[Any, StepResult]:
        observation, reward, terminated, truncated, info = env.step(int(action))
        return observation, StepResult(float(reward), bool(terminated), bool(truncated) or age >= self.max_steps, info)

    def _step(self, row: int, action: int) -> tuple[Array, ...]:
        env = self.envs[row]
        self.ages[row] += 1
        observation, result = self._played(env, action, self.ages[row])
        died, scored = self._rule("died", result), self._rule("scored", result)
        ended = result.terminated or result.truncated
        self.ages[row] = 0 if ended else self.ages[row]
        frame = self._frame(env.reset()[0] if ended else observation)
        return frame, np.float32(result.reward), np.bool_(died), np.bool_(scored), np.bool_(ended)  # type: ignore[return-value]

    def _rule(self, name: str, result: StepResult) -> bool:
        answer = getattr(self.task, name)(result)
        if not isinstance(answer, bool | np.bool_):
            raise UsageError(f"{self.task.name}: the rule {name} must return True or False, not {answer!r}.")
        return bool(answer)

    def _frame(self, observation: Any) -> Array:
        frame = self.task.frame(observation)
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.shape != (FRAME, FRAME):
            got = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise UsageError(f"{self.task.name}: frame must return uint8 [{FRAME}, {FRAME}], not {got}.")
        return frame


def rehearse(task: Task) -> None:
    """Open a task's environment and play one step: what is wrong with it shows before a run begins."""
    pool = GymPool(task, 1, SKIP)
    try:
        pool.reset(np.zeros(1, np.int32))
        pool.send(np.array([task.noop]))
        pool.recv()
    finally:
        pool.close()
