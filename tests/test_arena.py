"""Many games in parallel do exactly what one plain emulator does."""

import dataclasses
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from ale_py import ALEInterface, roms
from gymnasium import Env, spaces

from presage.arena import MAX_FRAMES, Arena, play
from presage.collect import random_chooser
from presage.errors import RunError, UsageError
from presage.events import Outlook
from presage.games import atari_task, find
from presage.planner import Planner
from presage.pools import SKIP
from presage.tasks import Task
from presage.toy import TOY


class PlainEmulator:
    """One game, as simply as it can be written: the reference that the Arena is compared with."""

    def __init__(self, name: str):
        self.task = atari_task(name)
        self.ale = ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.setInt("random_seed", 0)
        self.ale.loadROM(Path(str(roms.get_rom_path(name))))
        self.actions = self.ale.getMinimalActionSet()
        self.restart()

    def restart(self) -> None:
        self.ale.reset_game()
        self.lives = self.ale.lives()
        self.screens = [self.ale.getScreenGrayscale()] * 2

    def step(self, action: int):
        reward = 0
        for _ in range(SKIP):
            reward += self.ale.act(self.actions[action])
            self.screens = [self.screens[1], self.ale.getScreenGrayscale()]
            if self.ale.game_over():
                break
        over, lives = self.ale.game_over(), self.ale.lives()
        died = {"lives": lives < self.lives or over, "negative_reward": reward < 0, "game_over": over}[self.task.death]
        self.lives = lives
        return reward, died, over


def shrink(screen: np.ndarray) -> np.ndarray:
    """210×160 -> 84×84 by exact area averages, in floating point."""
    down, across = (overlap(size, 84) for size in screen.shape)
    return down @ screen.astype(float) @ across.T


def overlap(size: int, target: int) -> np.ndarray:
    edges = np.arange(target + 1) * size / target
    cells = np.arange(size)
    part = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.clip(part, 0, None) * target / size


@pytest.mark.parametrize(
    ("name", "steps"), [("pong", 1100), ("breakout", 600), ("demon_attack", 600), ("freeway", 200)]
)
def test_parity_with_the_plain_emulator_frame_by_frame(name, steps):
    """Rewards, deaths, ends and every pixel, across restarts; ale-py rounds its averages, hence 1 grey level."""
    arena = Arena([atari_task(name)], 3)
    plain = PlainEmulator(name)
    row, restarts, deaths, worst = 1, 0, 0, 0.0
    for _, turn in zip(range(steps), play(arena, random_chooser(arena.tasks, 3, 0), (5,))):
        expected = shrink(np.maximum(*plain.screens))
        worst = max(worst, float(np.abs(turn.frames[row] - expected).max()))
        reward, died, over = plain.step(int(turn.actions[row]))
        assert (turn.rewards[row], turn.died[row], turn.ended[row]) == (reward, died, over)
        assert turn.scored[row] == (reward > 0)
        deaths += died
        if over:
            restarts += 1
            plain.restart()
    arena.close()
    assert worst <= 1.0
    assert deaths > 0 or name == "freeway"
    assert restarts > 0 or name in ("freeway", "demon_attack")


def test_no_op_starts_are_uniform_and_recorded():
    """n in 0 … 30 at each episode's start (S13), then the chooser's actions."""
    arena = Arena([TOY], 400)
    turns = play(arena, lambda frames, fresh: np.ones(400, np.int64), (1,))
    played = np.stack([next(turns).actions for _ in range(31)], 1)  # [400, 31]: none of the toy's episodes is shorter
    n = played.argmax(1)
    n[played.sum(1) == 0] = 31
    assert n.max() == 30
    assert n.min() == 0
    counts = np.bincount(n, minlength=31)
    chi2 = ((counts - 400 / 31) ** 2 / (400 / 31)).sum()
    assert chi2 < 59.7  # the 99.9 % point for 30 degrees of freedom
    for row, start in zip(played, n, strict=True):
        assert (row[start:] == 1).all()


USUAL = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(not USUAL, reason="done on Linux, to threads that are scheduled as usual")
def test_emulators_do_not_take_the_players_core():
    before = set(os.listdir("/proc/self/task"))
    with closing(Arena(find(["pong"]), 3, threads=2)) as arena:
        arena.reset((0,))
        mine = [int(thread) for thread in set(os.listdir("/proc/self/task")) - before]
        assert sum(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in mine) >= 2
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_breakout_serves_at_the_start_and_after_each_death_and_only_then():
    task = atari_task("breakout")
    arena = Arena([task], 4, noop_max=3)
    due, waited, served, deaths = np.ones(4, bool), np.zeros(4), 0, 0
    turns = play(arena, lambda frames, fresh: np.full(4, 2), (2,))  # the chooser itself never shoots
    for _ in range(300):
        turn = next(turns)
        shot = turn.actions == task.serve
        assert not (shot & ~due).any()
        waited = np.where(due & ~shot, waited + 1, 0)
        assert waited.max() <= 3  # no longer than the no-op start
        served, deaths = served + int(shot.sum()), deaths + int(turn.died.sum())
        due = (due & ~shot) | turn.died
    arena.close()
    assert deaths > 20
    assert deaths <= served <= deaths + 4


class Counting(Env):
    """Shows its own step number; ends after three steps."""

    observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, terminate: bool, length: int = 3):
        self.terminate, self.length, self.total = terminate, length, 10

    def picture(self):
        self.total += 1
        return np.full((84, 84), self.total % 256, np.uint8)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.picture(), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.length
        return self.picture(), 1.0, ended and self.terminate, ended and not self.terminate, {}


@pytest.mark.parametrize("terminate", [True, False])
def test_frames_from_before_an_episode_are_never_shown(terminate):
    task = Task("counting", lambda: Counting(terminate), ((0, 0, 0), (1, 0, 0)))
    seen = []

    def perceive(stacks):
        seen.append(stacks[0, :, 0, 0].tolist())
        return stacks[:, 0, 0].float()

    def imagine(h, controls):
        return Outlook(torch.zeros(controls.shape[:2]), torch.zeros(controls.shape[:2]))

    table = torch.tensor([task.controls]).float()
    planner = Planner(perceive, imagine, table, torch.tensor([2]), torch.zeros(1), 3, 5, torch.Generator())
    turns = play(Arena([task], 1, noop_max=0), planner, (0,))
    out = [next(turns) for _ in range(4)]
    # 11 12 13 (14: the end, replaced by the next episode's first frame) 15 …
    assert seen[:4] == [[11, 11, 11, 11], [11, 11, 11, 12], [11, 11, 12, 13], [15, 15, 15, 15]]
    assert len(seen) == 5  # the step after the last turn is already under way
    assert [bool(turn.died[0]) for turn in out] == [False, False, terminate, False]  # running out of time is no death
    assert [bool(turn.ended[0]) for turn in out] == [False, False, True, False]
    assert [int(turn.frames[0, 0, 0]) for turn in out] == [11, 12, 13, 15]


def test_the_cap_on_an_episode_counts_frames_and_is_no_death():
    assert MAX_FRAMES == 108_000
    arena = Arena([atari_task("freeway")], 1, max_frames=400)
    turns = play(arena, lambda frames, fresh: np.zeros(1, np.int64), (0,))
    ends = [next(turns) for _ in range(100)]
    arena.close()
    assert [bool(t.ended[0]) for t in ends] == [False] * 99 + [True]
    assert not ends[-1].died[0]


def test_the_same_seed_plays_the_same_games_and_another_does_not():
    def trace(seed):
        tasks = find(["breakout", "toy"])
        arena = Arena(tasks, 2)
        turns = play(arena, random_chooser(tasks, 2, 9), (seed,))
        out = [next(turns) for _ in range(60)]
        arena.close()
        return np.stack([t.frames for t in out]), np.stack([t.actions for t in out])

    (a, x), (b, y), (c, z) = trace(1), trace(1), trace(2)
    assert (a == b).all()
    assert (x == y).all()
    assert (a != c).any()
    assert (x != z).any()


def test_sticky_actions_reach_the_emulator():
    """With chance 1 the first action is repeated for ever: a paddle told to move stands still."""
    arena = Arena([atari_task("pong")], 1, noop_max=0, sticky=1.0)
    turns = play(arena, lambda frames, fresh: np.full(1, 3), (0,))
    paddles = [next(turns).frames[0, :, 70:78].astype(int) for _ in range(30)]
    arena.close()
    assert all((paddle == paddles[10]).all() for paddle in paddles[10:])


@pytest.mark.parametrize("name", ["tennis", "beam_rider", "breakout"])
def test_a_reset_forgets_everything_that_was_played(name):
    """In Tennis and Beam Rider the emulator's own reset does not."""
    arena = Arena([atari_task(name)], 2)

    def trace(seed, steps):
        turns = play(arena, random_chooser(arena.tasks, 2, seed), (seed,))
        return np.stack([next(turns).frames for _ in range(steps)])

    first = trace(1, 80)
    trace(2, 150)
    assert (trace(1, 80) == first).all()
    arena.close()


def test_a_start_in_the_background_is_the_same_start():
    """Prepared, prepared for another seed, not prepared: the same games."""
    arena = Arena([atari_task("breakout"), atari_task("demon_attack")], 2)

    def trace(prepared):
        if prepared is not None:
            arena.prepare(prepared)
        turns = play(arena, random_chooser(arena.tasks, 2, 1), (1,))
        return np.stack([next(turns).frames for _ in range(40)])

    plain = trace(None)
    assert (trace((1,)) == plain).all()
    assert (trace((2,)) == plain).all()
    arena.close()


def test_an_environment_that_never_ends_is_cut_at_the_same_cap():
    task = Task("endless", lambda: Counting(True, length=10**9), ((0, 0, 0), (1, 0, 0)))
    turns = play(Arena([task], 1, noop_max=0, max_frames=40), lambda frames, fresh: np.zeros(1, int), (0,))
    out = [next(turns) for _ in range(20)]
    assert [i for i, turn in enumerate(out) if turn.ended[0]] == [9, 19]
    assert not any(turn.died[0] for turn in out)


@pytest.mark.parametrize("task", [*map(atari_task, ("pong", "breakout", "demon_attack", "freeway")), TOY])
def test_what_is_tried_out_is_what_then_happens(task):
    """At many moments of a long random play: a sequence tried out, beside others, and then played."""
    random, compared = np.random.default_rng(0), np.zeros(3, int)
    with closing(Arena([task], 2, noop_max=3, doubles=True)) as arena:
        arena.reset((5,))
        for turn in range(60):
            while not arena.free[1]:
                arena.send(np.zeros(2, int))
                arena.recv()
            sequences = random.integers(len(task.controls), size=(3, 25))
            if task.name == "freeway":
                sequences[random.random((3, 25)) < 0.9] = 1  # up: else the chicken never arrives
            foretold = arena.try_out(1, sequences)
            for step, action in enumerate(sequences[turn % 3]):
                arena.send(np.array([0, action]))
                _, _, died, scored, ended = arena.recv()
                came = np.array([died[1], scored[1], ended[1]])
                compared += came
                np.testing.assert_array_equal(came, foretold[turn % 3, step])
                if ended[1] or not arena.free[1]:  # from here on something else is played
                    break
    assert compared[1 if task.name == "freeway" else 0] > 0  # points there: only the end of the game is a death


def test_a_double_that_plays_otherwise_is_noticed():
    with closing(Arena([atari_task("pong")], 1, noop_max=0, doubles=True)) as arena:
        arena.reset((0,))
        arena.pools[0].doubles[0].step(1)  # one step ahead

        def play_on():
            for _ in range(300):
                arena.send(np.zeros(1, int))
                arena.recv()

        with pytest.raises(RunError, match="does not play the same"):
            play_on()


def test_an_environment_that_cannot_be_copied_cannot_be_tried_out():
    class Bound(type(TOY.make())):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle")

    with closing(Arena([dataclasses.replace(TOY, make=Bound)], 1, noop_max=0)) as arena:
        arena.reset((0,))
        with pytest.raises(UsageError, match="cannot be copied"):
            arena.try_out(0, np.zeros((1, 25), int))
