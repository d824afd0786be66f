"""Many games in parallel, of several kinds, behind one send and recv (S2, S13, S14).

The only place that knows emulators: lives, ends, automatic restarts, no-op starts, serving. Rows are ordered by task:
row r plays tasks[r // envs].
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv

from presage.errors import UsageError
from presage.games import AtariTask
from presage.tasks import FRAME, StepResult, Task

Array = np.ndarray[Any, np.dtype[Any]]
Chooser = Callable[[Array, Array], Array]  # (frames uint8 [N, 84, 84], fresh bool [N]) -> actions int64 [N]

MAX_FRAMES = 108_000  # an episode's cap, in emulator frames: 30 minutes of play
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
    def close(self) -> None: ...


class AtariPool:
    """ale-py's vector environment: frame skip 4, maximum of the last two frames, grey 84×84, unclipped rewards.

    coloured: twins play the same beside them, for people to look at.
    """

    def __init__(self, task: AtariTask, envs: int, sticky: float, threads: int, max_frames: int, coloured: bool):
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
        self.envs = emulators(img_height=FRAME, img_width=FRAME)
        self.twins = emulators(img_height=SCREEN[0], img_width=SCREEN[1], grayscale=False) if coloured else None

    def reset(self, seeds: Array) -> Array:
        frames, info = self.envs.reset(seed=seeds if self.seed_now else None)
        if self.twins is not None:
            self.screens = self.twins.reset(seed=seeds if self.seed_now else None)[0]
        self.seed_now = True
        self.lives: Array = info["lives"].copy()
        return np.asarray(frames[:, 0])

    def send(self, actions: Array) -> None:
        self.envs.send(actions)
        if self.twins is not None:
            self.twins.send(actions)

    def recv(self) -> Step:
        if self.twins is not None:
            self.screens = self.twins.recv()[0]
        frames, rewards, terminated, truncated, info = self.envs.recv()
        ended = terminated | truncated
        if self.task.death == "lives":
            died = terminated | (~ended & (info["lives"] < self.lives))  # after an end, lives are the next episode's
        elif self.task.death == "negative_reward":
            died = rewards < 0
        else:
            died = terminated
        self.lives = info["lives"].copy()
        return Step(frames[:, 0], rewards.astype(np.float32), died, rewards > 0, ended)

    def pictures(self) -> Array:
        """uint8 [envs, 210, 160, 3], of coloured pools; pixels are wider than high: the screen is 4:3."""
        return np.asarray(self.screens[:, 0])

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

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _step(self, row: int, action: int) -> tuple[Array, ...]:
        env = self.envs[row]
        observation, reward, terminated, truncated, info = env.step(int(action))
        self.ages[row] += 1
        result = StepResult(float(reward), bool(terminated), bool(truncated) or self.ages[row] >= self.max_steps, info)
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


class Arena:
    """`envs` games of each task. After a reset, everything follows from its seed and the actions."""

    def __init__(
        self,
        tasks: Sequence[Task],
        envs: int,
        noop_max: int = 30,
        sticky: float = 0.0,
        threads: int = 0,
        max_frames: int = MAX_FRAMES,
        coloured: bool = False,
    ):
        self.tasks, self.envs, self.noop_max = tuple(tasks), envs, noop_max
        self.rows = len(tasks) * envs
        self.task_of = np.repeat(np.arange(len(tasks)), envs)  # [N]
        # The pools of all tasks play at once: together they have a thread for each core.
        each = threads or max(1, (os.cpu_count() or 1) // len(tasks))
        self.options = (sticky, each, max_frames, coloured)
        self.noop = np.array([task.noop for task in tasks])[self.task_of]
        self.serve = np.array([-1 if task.serve is None else task.serve for task in tasks])[self.task_of]
        self.under_way = False  # a step was sent and not yet received
        self.prepared: tuple[Sequence[int], Future[Array]] | None = None
        self.workers = ThreadPoolExecutor()

    @cached_property
    def pools(self) -> list[Pool]:
        """Opened when first played: a run that is only looked at starts no emulators."""
        return [
            AtariPool(task, self.envs, *self.options)
            if isinstance(task, AtariTask)
            else GymPool(task, self.envs, self.options[2])
            for task in self.tasks
        ]

    def prepare(self, seed: Sequence[int]) -> None:
        """Begin in the background what reset(seed) will wait for: loading ROMs anew takes seconds.

        Other environments than Atari games may not like to be used from several threads; they are left alone.
        """
        if all(isinstance(task, AtariTask) for task in self.tasks):
            if self.prepared is not None:
                self.prepared[1].result()  # nobody took it: one at a time
            self.prepared = (seed, self.workers.submit(self._reset, seed))

    def reset(self, seed: Sequence[int]) -> Array:
        """Start every game, as if nothing had been played before; its first frames [N, 84, 84]."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return self._reset(seed)
        frames = prepared[1].result()
        return frames if prepared[0] == seed else self._reset(seed)

    def _reset(self, seed: Sequence[int]) -> Array:
        if self.under_way:
            self.recv()
        self.randoms = [np.random.default_rng([*seed, row]) for row in range(self.rows)]
        seeds = np.array([random.integers(2**31 - 1) for random in self.randoms], np.int32).reshape(-1, self.envs)
        self.noops_left = np.zeros(self.rows, np.int64)
        self.serve_due = np.zeros(self.rows, bool)
        self._start(np.ones(self.rows, bool))
        starts = [
            self.workers.submit(pool.reset, some) if isinstance(pool, AtariPool) else pool.reset(some)
            for pool, some in zip(self.pools, seeds, strict=True)
        ]
        return np.concatenate([start.result() if isinstance(start, Future) else start for start in starts])

    def overruled(self, actions: Array) -> Array:
        """What would really be played: doing nothing at first (S13), serving when due (S14)."""
        return np.where(self.noops_left > 0, self.noop, np.where(self.serve_due, self.serve, actions))

    def send(self, actions: Array) -> Array:
        """Play one step; the actions really played."""
        played, idle = self.overruled(actions), self.noops_left > 0
        self.noops_left -= idle
        self.serve_due &= idle
        for pool, part in zip(self.pools, np.split(played, len(self.pools)), strict=True):
            pool.send(np.ascontiguousarray(part))
        self.under_way = True
        return played

    def recv(self) -> Step:
        step = Step(*map(np.concatenate, zip(*(pool.recv() for pool in self.pools), strict=True)))
        self.under_way = False
        self.serve_due |= step.died & (self.serve >= 0)
        self._start(step.ended)
        return step

    def picture(self, row: int = 0) -> Array:
        """What a person sees of a game now, uint8 [H, W, 3]; Atari games must be `coloured`."""
        return np.asarray(self.pools[row // self.envs].pictures()[row % self.envs])

    def lives(self, row: int = 0) -> int | None:
        """How many are left, where the emulator counts them."""
        pool = self.pools[row // self.envs]
        if not isinstance(pool, AtariPool) or pool.task.death != "lives":
            return None
        return int(pool.lives[row % self.envs])

    def close(self) -> None:
        self.workers.shutdown()
        for pool in self.__dict__.pop("pools", ()):
            pool.close()

    def _start(self, fresh: Array) -> None:
        for row in np.flatnonzero(fresh):
            self.noops_left[row] = self.randoms[row].integers(self.noop_max + 1)
        self.serve_due |= fresh & (self.serve >= 0)


def rehearse(task: Task) -> None:
    """Open a task's environment and play one step: what is wrong with it shows before a run begins."""
    pool = GymPool(task, 1, MAX_FRAMES)
    try:
        pool.reset(np.zeros(1, np.int32))
        pool.send(np.array([task.noop]))
        pool.recv()
    finally:
        pool.close()


class Turn(NamedTuple):
    """One step of every game, [N] each: what was seen, what was played, what came of it."""

    frames: Array  # uint8 [N, 84, 84]: the newest frame before the action
    actions: Array  # int64, as really played
    rewards: Array
    died: Array
    scored: Array
    ended: Array


def play(arena: Arena, choose: Chooser, seed: Sequence[int]) -> Iterator[Turn]:
    """The game loop, for ever: collecting, evaluating and watching all fold over it.

    When a turn is handed out the next step is already under way, so that whatever is done with the turn costs no time.
    """
    frames = arena.reset(seed)
    actions = arena.send(choose(frames, np.ones(arena.rows, bool)))
    while True:
        seen, (frames, *outcome) = frames, arena.recv()
        turn = Turn(seen, actions, *outcome)
        actions = arena.send(choose(frames, turn.ended))
        yield turn
