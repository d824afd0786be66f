"""Games and tasks of one's own."""

import gymnasium as gym
import numpy as np
import pytest

import presage
from presage.arena import Arena, play
from presage.collect import random_chooser
from presage.errors import UsageError
from presage.games import TWO_PLAYERS, WITHOUT_LIVES, atari_games, atari_task, control, find
from presage.tasks import Task, grey_84
from presage.toy import GAP, LIVES, SIDE, TOY, GapGame


def test_every_game_has_distinct_controls_and_something_that_does_nothing():
    assert len(atari_games()) == 104
    assert not set(TWO_PLAYERS) & set(atari_games())
    for name in atari_games():
        task = atari_task(name)
        assert len(set(task.controls)) == len(task.controls) == len(task.actions)
        assert task.controls[task.noop] == (0, 0, 0) or "NOOP" not in task.actions
        assert (task.human is None) == (task.random is None) == (task.source == "")


def test_controls_are_read_off_the_emulators_names():
    assert control("LEFTFIRE") == (1, -1, 0)
    assert control("DOWNRIGHT") == (0, 1, -1)
    assert atari_task("breakout").controls == ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, -1, 0))


def test_the_papers_games_have_the_papers_scores_and_thresholds():
    scores = {name: (atari_task(name).random, atari_task(name).human) for name in ("pong", "breakout", "demon_attack")}
    assert scores == {"pong": (-20.7, 9.3), "breakout": (1.7, 31.8), "demon_attack": (152.1, 3401.0)}
    assert atari_task("pong").threshold(1) == atari_task("breakout").threshold(19) == 0
    thresholds = [atari_task("demon_attack").threshold(i) for i in (1, 3, 4, 6, 7, 15, 16, 19)]
    assert thresholds == [0.2, 0.2, 0.1, 0.1, 0.005, 0.005, 0.001, 0.001]
    assert atari_task("pong").normalized(9.3) == 1
    assert atari_task("breakout").serve == 1
    assert atari_task("adventure").normalized(3) is None


@pytest.mark.parametrize("name", sorted(WITHOUT_LIVES))
def test_games_listed_without_lives_have_none(name):
    arena = Arena([atari_task(name)], 2)
    turns = play(arena, random_chooser(arena.tasks, 2, 0), (0,))
    for _ in range(60):
        next(turns)
        assert arena.pools[0].lives.max() == 0
    arena.close()


def test_games_not_listed_there_do_have_lives():
    """After a little play: Amidar, for one, counts its lives only once it has begun."""
    for name in set(atari_games()) - set(WITHOUT_LIVES):
        arena = Arena([atari_task(name)], 1, noop_max=0)
        turns, seen = play(arena, random_chooser(arena.tasks, 1, 0), (0,)), 0
        for _ in range(40):
            next(turns)
            seen = max(seen, int(arena.pools[0].lives[0]))
            if seen:
                break
        arena.close()
        assert seen > 0, name


@pytest.mark.parametrize("name", sorted(n for n, rule in WITHOUT_LIVES.items() if rule == "negative_reward"))
def test_the_rule_for_games_without_lives_is_a_lost_point(name):
    """Played at random until somebody loses points; Private Eye's fines are too rare to wait for."""
    arena = Arena([atari_task(name)], 4)
    deaths = 0
    for _, turn in zip(
        range(150 if name == "private_eye" else 2000), play(arena, random_chooser(arena.tasks, 4, 0), (0,))
    ):
        assert (turn.died == (turn.rewards < 0)).all()
        deaths += int(turn.died.sum())
        if deaths:
            break
    arena.close()
    assert deaths or name == "private_eye"


def test_unknown_games_are_refused_with_the_nearest_names():
    with pytest.raises(UsageError, match=r"no game 'brekout'; did you mean breakout"):
        find(["brekout"])
    with pytest.raises(UsageError, match="two players"):
        find(["combat"])
    with pytest.raises(UsageError, match="only once"):
        find(["pong", "pong"])


def test_tables_in_any_form_become_plain_tuples():
    task = make_task(controls=np.array(TOY.controls), thresholds=[[1, 0]])
    assert task.controls == TOY.controls
    assert type(task.controls[0][1]) is int
    assert task.thresholds == ((1, 0.0),)


def make_task(**changes):
    return Task(**{"name": "mine", "make": GapGame, "controls": TOY.controls, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "../escape"}, "lower-case letters"),
        ({"controls": ((0, 0, 0),)}, "2 to 256 actions"),
        ({"controls": ((0, 0), (0, 1))}, "3 whole numbers"),
        ({"controls": ((0, 0, 0), (0, 0.5, 0))}, "3 whole numbers"),
        ({"controls": 7}, "3 whole numbers"),
        ({"controls": ((0, 0, 0), (0, 5, 0))}, "horizontal and vertical"),
        ({"thresholds": ()}, "the first from iteration 1"),
        ({"thresholds": ((1, -0.5),)}, "numbers from 0"),
        ({"controls": ((0, 0, 0), (0, 0, 0))}, "same control"),
        ({"noop": 7}, "no action 7"),
        ({"serve": -2}, "no action -2"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(changes, says):
    with pytest.raises(UsageError, match=says):
        make_task(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"controls": ((0, 0, 0), (0, 1, 0))}, r"has Discrete\(3\) but the task has 2"),
        ({"died": lambda step: step.reward}, "the rule died must return True or False, not"),
        ({"scored": lambda step: None}, "the rule scored must return True or False, not None"),
        ({"frame": lambda picture: picture}, r"frame must return uint8 \[84, 84\], not uint8 \[12, 12\]"),
        ({"frame": lambda picture: "no picture"}, "not str"),
    ],
)
def test_a_task_whose_parts_return_the_wrong_thing_is_named_and_nothing_is_written(changes, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        presage.train(preset="debug", run=tmp_path / "run", games=[make_task(**changes)])
    assert not (tmp_path / "run").exists()


def test_pictures_become_grey_84():
    assert (grey_84(np.full((84, 84), 7, np.uint8)) == 7).all()
    small = np.zeros((12, 12), np.uint8)
    small[2, 3] = 200
    large = grey_84(small)
    assert (large[14:21, 21:28] == 200).all()  # each pixel becomes a sharp 7×7 square
    assert (large > 0).sum() == 49
    colour = np.zeros((210, 160, 3), np.uint8)
    colour[..., 1] = 100
    assert (grey_84(colour) == 59).all()
    for wrong in (np.zeros((4, 4)), np.zeros((2, 4, 4, 4), np.uint8), np.zeros((4, 4, 2), np.uint8)):
        with pytest.raises(UsageError, match="an observation must be uint8"):
            grey_84(wrong)


def test_the_toy_is_won_by_walking_to_the_gap_and_lost_by_standing():
    game = gym.wrappers.TimeLimit(GapGame(), 10_000)
    scores = []
    for clever in (True, False):
        game.reset(seed=1)
        score, ended = 0.0, False
        while not ended:
            inner = game.unwrapped
            aim = np.sign(inner.gap + GAP // 2 - inner.column)
            _, reward, terminated, truncated, info = game.step({0: 0, -1: 1, 1: 2}[int(aim)] if clever else 0)
            score, ended = score + reward, terminated or truncated
        scores.append(score)
    assert scores[0] == 300 // (SIDE - 1)  # every wall of a whole episode
    assert scores[1] <= LIVES
    assert info["lives"] == 0
