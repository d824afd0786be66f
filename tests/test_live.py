"""What a person sees: moments, their pictures, films; without a browser."""

import re
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import presage
from presage import drawing
from presage.arena import Arena
from presage.config import Planning
from presage.errors import UsageError
from presage.games import find
from presage.highlights import Glance, pick
from presage.live import Live, nearest_action
from presage.replay import Film
from presage.session import Networks, Session
from presage.store import Budget, Store, read_shard
from presage.tasks import grey_84


@pytest.fixture(scope="module")
def agent(tiny_run):
    return tiny_run.agent()


def play(live: Live, steps: int) -> list[tuple[int, float]]:
    seen = []
    for _ in range(steps):
        moment = live.look()
        live.play(moment)
        seen.append((moment.action, moment.score))
    return seen


def test_a_coloured_twin_plays_the_same_game():
    """Its picture, made grey and small, is what the network sees."""
    with closing(Arena(find(["breakout"]), 2, coloured=True)) as arena:
        arena.reset((1,))
        for action in (1, 3, 0, 2, 3, 3, 2, 0, 1, 3):
            arena.send(np.array([action, 3 - action]))
            step = arena.recv()
            for row in range(2):
                assert arena.picture(row).shape == (210, 160, 3)
                ours = grey_84(arena.picture(row)).astype(float)
                assert np.abs(ours - step.frames[row]).mean() < 2  # of 255; other weights and rounding of grey
        assert arena.picture(0).std(-1).max() > 30  # it is coloured
        assert arena.lives() == 5


def test_a_game_follows_from_its_seed(agent):
    with closing(Live(agent, "breakout", 1)) as live:
        first = play(live, 30)
        live.start(1)
        assert play(live, 30) == first
        live.start(2)
        assert play(live, 30) != first


def test_looking_changes_nothing_and_other_networks_see_the_same_moment(agent, tiny_run):
    with closing(Live(agent, "breakout")) as live:
        play(live, 5)
        one, two = live.look(), live.look()
        assert np.array_equal(one.plan.candidates, two.plan.candidates)
        assert np.array_equal(one.p_died, two.p_died)
        live.agent = tiny_run.agent(1)
        early = live.look()
        assert early.iteration == 1
        assert np.array_equal(early.picture, one.picture)
        assert early.step == one.step == 5
        assert not np.allclose(early.p_died, one.p_died)
        live.how = Planning(k=9, threshold=1.0)
        bold = live.look()
        assert bold.plan.candidates.shape[0] == 9
        assert bold.plan.safe.all()


def test_what_is_told_of_plans_holds_for_every_network_and_game(tiny_run, tmp_path):
    session = Session(Networks(tiny_run.path, Planning(k=7, threshold=0.3, hold=3.0)), "toy", tmp_path)
    with closing(session):
        session.change_network(1)
        session.change_game("breakout")
        told = session.live.look().plan
        assert session.live.agent.iteration == 1
        assert (len(told.candidates), told.threshold) == (7, pytest.approx(0.3))
        assert (np.diff(told.candidates) == 0).mean() > 0.5  # held: three in four; else one in four
        session.change_plans(threshold=None)  # its own
        assert session.live.look().plan.threshold == 0


def test_an_episode_ends_and_the_next_begins(agent):
    with closing(Live(agent, "toy", 3)) as live:
        deaths = 0
        for _ in range(310):
            turn = live.play(live.look())
            deaths += int(turn.died[0])
            if turn.ended[0]:
                break
        assert turn.ended[0]
        assert deaths == 3 or live.moments == 300
        assert (live.score, live.steps, len(live.past), live.previous) == (0, 0, 0, None)


def test_a_person_presses_and_the_network_tells_what_comes_of_it(agent):
    with closing(Live(agent, "breakout")) as live:
        while live.arena.noops_left[0] or live.arena.serve_due[0]:
            assert live.look().action == live.arena.overruled(np.array([3]))[0]  # nobody's choice yet
            live.play(live.look())
        live.held = (0, -1, 0)
        moment = live.look()
        left = live.task.actions.index("LEFT")
        assert moment.person
        assert moment.action == left
        assert (moment.sequence == left).all()
        died, scored = agent.foresee(live.stack, "breakout", [left] * len(moment.sequence))
        assert np.array_equal(moment.p_died, died)
        assert np.array_equal(moment.p_scored, scored)
        before = moment.picture
        for _ in range(8):
            live.play(live.look())
        columns = [np.flatnonzero(picture[190].sum(-1)[8:-8] > 100).mean() for picture in (before, live.look().picture)]
        assert columns[1] < columns[0] - 5  # the paddle has moved
        live.held = None
        assert not live.look().person


@pytest.mark.parametrize(("wanted", "found"), [((1, 1, 0), "RIGHT"), ((0, 0, 1), "NOOP"), ((1, 0, 0), "FIRE")])
def test_keys_that_a_game_does_not_know_become_the_nearest_action(wanted, found):
    (task,) = find(["breakout"])
    names = {"RIGHT": {"RIGHT", "FIRE"}, "NOOP": {"NOOP"}, "FIRE": {"FIRE"}}
    assert task.actions[nearest_action(task.controls, wanted)] in names[found]


def test_foresee_refuses_what_is_no_sequence(agent, frames):
    for actions in ([], [[0]], [99], [-1]):
        with pytest.raises(UsageError, match="one sequence of the task's actions"):
            agent.foresee(frames[0], "breakout", actions)


def test_recorded_play_is_a_shard_like_any_other(agent, tmp_path):
    folder = tmp_path / "mine"
    with closing(Live(agent, "toy", 2)) as live:
        live.record(folder)
        assert live.stop_recording() is None  # nothing was played
        assert not folder.exists()
        live.record(folder)
        live.held = (0, 1, 0)
        stacks = []
        for number in range(20):
            if number in (8, 13):
                live.start(number)  # a run of frames has just been handed on, or not
            stacks.append(live.stack)
            live.play(live.look())
        path = live.stop_recording()
        live.record(folder)
        live.play(live.look())
        other = live.stop_recording()
    assert read_shard(other)["actions"].shape == (1, 1)
    shard = read_shard(path)
    assert shard["actions"].shape == (1, 20)
    assert np.flatnonzero(shard["ended"][0]).tolist() == [7, 12]  # what began anew does not follow from what was
    store = Store(find(["toy"]), Budget(20, "memory", {}), torch.device("cpu"))
    store.add(path, agent.iteration, 0, heldout=False)
    for row in (7, 8, 9, 14, 19):
        assert np.array_equal(store.stacks(torch.tensor([row]))[0].numpy(), stacks[row])


def test_recordings_made_side_by_side_keep_out_of_each_others_way(agent, tmp_path):
    with closing(Live(agent, "toy", 2)) as one, closing(Live(agent, "toy", 3)) as other:
        for live, steps in ((one, 2), (other, 3)):
            live.record(tmp_path)
            for _ in range(steps):
                live.play(live.look())
        with ThreadPoolExecutor() as threads:
            paths = list(threads.map(Live.stop_recording, (one, other)))
        assert sorted(path.name for path in paths) == ["toy-000.safetensors", "toy-001.safetensors"]
        assert [read_shard(path)["actions"].shape[1] for path in paths] == [2, 3]
        paths[0].rename(tmp_path / "toy-007.safetensors")
        one.record(tmp_path)
        one.play(one.look())
        assert one.stop_recording() == paths[0]  # the first free name


def test_every_picture_is_whole_and_shows_what_it_should(agent):
    with closing(Live(agent, "breakout")) as live:
        live.how = Planning(k=7, threshold=0.6)
        play(live, 40)
        moment = live.look()
        live.held = (1, 1, 0)
        mine = live.look()
    for some in (moment, mine):
        for picture in (drawing.game(some), drawing.controls(some), drawing.history(some), drawing.scene(some)):
            ElementTree.fromstring(picture)
    for outcome in ("died", "scored"):
        picture = drawing.outlook(moment, outcome)
        ElementTree.fromstring(picture)
        counts = {kind: len(re.findall("M", d)) for kind, d in re.findall(r'<path class="(\w+)" d="(.*?)"', picture)}
        assert counts["ruled"] == (~moment.plan.safe).sum()
        assert counts["safe"] == moment.plan.safe.sum()
        assert counts[outcome] == 1
        assert ("limit" in counts) == (outcome == "died")
    assert "you play" in drawing.facts(mine)
    assert "the agent plays" in drawing.facts(moment)


def test_a_history_marks_what_happened(agent):
    with closing(Live(agent, "toy", 3)) as live:
        while not any(one.died for one in live.past):
            live.play(live.look())
        picture = drawing.history(live.look())
    assert picture.count('class="died-mark"') == sum(one.died for one in live.past)
    assert picture.count('class="scored-mark"') == sum(one.scored for one in live.past)


def test_a_game_that_the_network_never_saw_is_said_to_be_one(agent):
    with closing(Live(agent, "pong")) as live:
        assert not live.look().known
        assert "never saw this game" in " ".join(drawing.facts(live.look()))


def glances(length: int = 60, **changes: tuple[int, float]) -> list[Glance]:
    """Nothing happens and nothing is expected; but `name=(step, value)`."""
    found = [Glance(0.0, 0.0, 0.0, 0.0, False, False) for _ in range(length)]
    for name, (step, value) in changes.items():
        found[step] = found[step]._replace(**{name: value})
    return found


def test_clear_cases_are_found():
    assert pick(glances(), 10) == {}
    assert pick(glances(usual_died=(20, 0.9)), 10) == {"avoided": (0.9, 20)}
    assert pick(glances(usual_died=(20, 0.9), died=(25, True)), 10).keys() == {"unforeseen"}  # it was not avoided
    assert pick(glances(usual_died=(55, 0.9)), 10) == {}  # how that ended is not known
    assert pick(glances(p_scored=(20, 0.8), scored=(24, True)), 10) == {"planned": (0.8, 20)}
    assert pick(glances(p_scored=(20, 0.8), scored=(40, True)), 10) == {}  # not that point
    assert pick(glances(p_scored=(20, 0.8), usual_scored=(20, 0.6), scored=(24, True)), 10) == {}  # most would have
    assert pick(glances(usual_died=(20, 0.4)), 10) == {}  # most would have lived
    assert pick(glances(died=(30, True)), 10) == {"unforeseen": (1.0, 27)}
    assert pick(glances(died=(30, True), p_died=(27, 0.55)), 10) == {}  # it was foreseen


def test_percentages_are_short():
    assert [drawing.percent(p) for p in (0.5, 0.0951, 0.031, 0.0004, 1e-6, 1.0)] == [
        "50 %", "10 %", "3.1 %", "0.04 %", "under 0.01 %", "100 %",
    ]  # fmt: skip


@pytest.mark.parametrize("plain", [False, True])
def test_a_film_shows_the_screen_and_what_is_thought(agent, tmp_path: Path, plain):
    from PIL import Image

    with closing(Live(agent, "breakout")) as live:
        film = Film(tmp_path / "some.gif", plain)
        for _ in range(40):
            moment = live.look()
            if moment.step % 13 == 0:  # equal pictures would become one
                film.add(moment)
            live.play(moment)
        film.close()
    with Image.open(tmp_path / "some.gif") as image:
        assert image.n_frames > 1
        assert image.size == ((640, 480) if plain else (640, 360))
        frame = np.asarray(image.convert("RGB")).astype(int)
    screen = frame if plain else frame[40:260, 12:308]
    brick = np.array([200, 72, 72])
    assert (np.abs(screen - brick).sum(-1) < 40).sum() > 100  # Breakout's red bricks
    red = np.abs(frame - [240, 105, 93]).sum(-1) < 90  # P(died)
    assert plain or red[:, 330:].any()


def test_the_example_agents_thoughts_can_be_shown():
    example = presage.load(Path(__file__).parents[1] / "results" / "agent")
    with closing(Live(example, "demon_attack")) as live:
        live.how = Planning(k=50)
        assert len(drawing.scene(live.look())) > 10_000
