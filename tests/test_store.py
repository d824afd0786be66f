"""Shards: small, whole, refused when damaged; the same rows in memory and from disk."""

import json
import subprocess
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from presage.arena import Arena, Turn, play
from presage.batches import assemble
from presage.collect import collect_shard, of_task, open_arenas, random_chooser, straying
from presage.config import preset, with_fields
from presage.errors import RunError
from presage.games import find
from presage.progress import Interrupt
from presage.store import (
    FRAME_BYTES,
    RUN,
    Budget,
    ShardWriter,
    Store,
    budget,
    finished_episodes,
    read_shard,
    shard_lengths,
    shard_path,
)
from presage.tasks import Task

CPU = torch.device("cpu")
GAMES = ("pong", "breakout", "demon_attack")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A real shard of each of the paper's games, and the turns it was made of."""
    folder, tasks, envs, steps = tmp_path_factory.mktemp("shards"), find(GAMES), 4, 150
    arena = Arena(tasks, envs)
    writers = [ShardWriter(folder / f"{task.name}.safetensors", task, {"iteration": 1}) for task in tasks]
    turns = []
    for _, turn in zip(range(steps), play(arena, random_chooser(tasks, envs, 0), (1,))):
        turns.append(Turn(*(array.copy() for array in turn)))
    arena.close()
    for index, writer in enumerate(writers):
        for first in range(0, steps, RUN):  # the last run is shorter
            writer.add(of_task([(turn,) for turn in turns[first : first + RUN]], index, envs))
        writer.close()
    return folder, tasks, turns


def columns(turns: list[Turn], name: str) -> np.ndarray:
    return np.stack([getattr(turn, name) for turn in turns], 1)  # [rows, T, …]


def test_the_documented_format_is_readable_without_presage(played):
    """docs/data.md: safetensors, zlib and nothing else."""
    folder, _, turns = played
    with safe_open(folder / "breakout.safetensors", "np") as file:
        head = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    description = json.loads(head["shard"])
    assert description["format"] == "presage-shard-2"
    assert description["task"] == "breakout"
    assert description["controls"][1] == [1, 0, 0]
    mine = slice(4, 8)
    for name in ("actions", "rewards", "died", "scored", "ended"):
        assert (tensors[name] == columns(turns, name)[mine]).all(), name
    ends = tensors["run_ends"].tolist()
    blobs = [tensors["frames"][a:b].tobytes() for a, b in zip([0, *ends[:-1]], ends)]
    runs = [np.frombuffer(zlib.decompress(blob), np.uint8).reshape(-1, 84, 84) for blob in blobs]
    assert [len(run) for run in runs] == ([8] * 18 + [6]) * 4
    frames = np.concatenate(runs)
    assert (frames.reshape(4, 150, 84, 84) == columns(turns, "frames")[mine]).all()


def test_shards_are_more_than_ten_times_smaller_than_raw_frames(played):
    folder, _, _ = played
    for name in GAMES:
        ratio = 4 * 150 * FRAME_BYTES / (folder / f"{name}.safetensors").stat().st_size
        assert ratio > 10, (name, ratio)


def test_checksums_are_in_the_form_that_sha256sum_reads(played):
    folder, _, _ = played
    done = subprocess.run(["sha256sum", "-c", "pong.safetensors.sha256"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("damage", ["flip", "truncate", "no checksum", "empty checksum"])
def test_a_damaged_shard_is_named_and_refused(played, tmp_path, damage):
    folder, _, _ = played
    path, sums = tmp_path / "pong.safetensors", tmp_path / "pong.safetensors.sha256"
    data = bytearray((folder / path.name).read_bytes())
    sums.write_bytes((folder / sums.name).read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-100:]
    elif damage == "no checksum":
        sums.unlink()
    else:
        sums.write_text("")
    path.write_bytes(data)
    with pytest.raises(RunError, match="delete") as refusal:
        read_shard(path)
    assert str(path) in str(refusal.value)


def filled(played, place: str) -> Store:
    folder, tasks, _ = played
    store = Store(tasks, Budget(3 * 4 * 150, place, {}), CPU)
    for index, task in enumerate(tasks):
        store.add(folder / f"{task.name}.safetensors", 1, index, heldout=False)
    return store


def test_resident_and_streamed_frames_give_the_same_batches(played):
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 3 * 4 * 150, 200))
    a, b = (assemble(filled(played, place), rows, 25) for place in ("memory", "disk"))
    for name, one, other in zip(a._fields, a, b):
        assert torch.equal(one, other), name


def test_a_batch_is_what_was_played(played):
    """Stacks, controls and targets of every row against the turns themselves, by plain loops."""
    _, tasks, turns = played
    store = filled(played, "memory")
    frames, actions, died, scored, ended = (columns(turns, n) for n in ("frames", "actions", "died", "scored", "ended"))
    random = np.random.default_rng(1)
    rows = np.concatenate([random.integers(0, 1800, 150), [0, 1, 2, 149, 150, 1799]])
    batch = assemble(store, torch.from_numpy(rows), 25)
    for i, row in enumerate(rows):
        env, t = divmod(int(row), 150)
        start = max([s + 1 for s in np.flatnonzero(ended[env, :t])], default=0)
        stack = np.stack([frames[env, max(t - back, start)] for back in (3, 2, 1, 0)])
        assert (batch.frames[i].numpy() == stack).all()
        dead = point = over = False
        for j in range(25):
            if over or t + j >= 150:
                assert not batch.mask[i, j]
                continue
            assert batch.mask[i, j]
            assert tuple(batch.controls[i, j].int().tolist()) == tasks[env // 4].controls[actions[env, t + j]]
            dead, point = dead or bool(died[env, t + j]), point or bool(scored[env, t + j])
            assert bool(batch.died[i, j]) == dead
            assert bool(batch.scored[i, j]) == (point and not dead)
            over = bool(ended[env, t + j])


def test_the_controls_of_many_games_do_not_run_into_each_other(tmp_path):
    """Fifteen tasks of 18 actions: more controls than a byte tells apart."""
    everything = tuple(product((0, 1), (-1, 0, 1), (-1, 0, 1)))
    tasks = [Task(f"task{i}", lambda: None, everything[i:] + everything[:i]) for i in range(15)]
    store = Store(tasks, Budget(64, "memory", {}), CPU)
    turn = Turn(np.zeros((2, 1, 84, 84), np.uint8), np.array([[17], [3]]), *np.zeros((4, 2, 1), bool))
    writer = ShardWriter(tmp_path / "last.safetensors", tasks[14], {"iteration": 1})
    writer.add(turn)
    writer.close()
    store.add(tmp_path / "last.safetensors", 1, 14, heldout=False)
    controls, _ = store.window(torch.arange(2), 1)
    assert [tuple(c) for c in controls[:, 0].int().tolist()] == [tasks[14].controls[17], tasks[14].controls[3]]


def test_shard_lengths_share_the_steps_evenly():
    config = with_fields(preset("debug"), first_steps=100, shard_steps=30, envs=2, heldout_steps=8)
    assert shard_lengths(config, 1) == [4, 12, 13, 12, 13]
    assert sum(shard_lengths(preset("paper"), 1)[1:]) * 40 == 400_000
    assert sum(shard_lengths(preset("paper"), 2)[1:]) * 40 == 200_000


def test_a_paper_run_on_24_gib_is_planned_under_12_gib():
    machine = 24 * 2**30
    space = budget(preset("paper"), 3, machine)
    assert space.rows == 19 * 3 * 8_000 + 12_000_000
    assert space.place == "disk"  # 82 GiB would not fit, so it streams
    assert "streamed from disk" in str(space)
    small = budget(preset("quickstart"), 3, machine)
    assert small.place == "memory"
    assert max(space.allowed["memory"], small.allowed["memory"]) < 10 * 2**30


@pytest.mark.parametrize(
    ("gpu", "memory", "settings", "place"),
    [
        (139, 128, {}, "gpu"),  # a large card holds a whole paper run
        (24, 256, {}, "memory"),
        (24, 64, {}, "disk"),
        (8, 64, {}, "disk"),
        (139, 256, {"gpu_memory_gib": 20.0}, "memory"),  # as told
        (139, 256, {"gpu_memory_gib": 20.0, "memory_gib": 10.0}, "disk"),
        (0, 256, {}, "memory"),  # no card at all
    ],
)
def test_frames_lie_on_the_gpu_in_memory_or_on_disk_by_what_there_is(gpu, memory, settings, place):
    space = budget(with_fields(preset("paper"), **settings), 3, memory * 2**30, gpu * 2**30)
    assert space.place == place
    assert ("GiB of gpu" in str(space)) == (gpu > 0)


def test_streaming_takes_memory_for_the_rows_only(played):
    """Some four bytes a row, whatever the frames: 12 million rows are 48 MiB."""
    store = filled(played, "disk")
    held = [store.codes, store.events, store.ages, *(shard.bounds for shard in store.frames.shards)]
    assert sum(t.numel() * t.element_size() for t in held) < 4.1 * store.size


def test_finished_episodes_leave_out_the_one_cut_short():
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    ended = torch.tensor([[False, True, False, False], [True, False, False, True]])
    assert finished_episodes(rewards, ended) == (3, (3 + 1 + 3) / 3)
    assert finished_episodes(rewards, torch.zeros(2, 4, dtype=torch.bool)) == (0, None)


def test_a_shard_is_a_function_of_its_place_alone(tmp_path):
    config, tasks = with_fields(preset("debug"), games=["toy", "breakout"], seed=5), find(["toy", "breakout"])
    contents: list[dict[Path, bytes]] = []
    for name, shards in (("once", [1]), ("again", [2, 1]), ("other", [2])):
        with open_arenas(config, tasks) as arenas:
            for shard in shards:
                collect_shard(tmp_path / name, config, arenas, None, 1, shard, Interrupt())
        contents.append({p.name: p.read_bytes() for p in (tmp_path / name).rglob("shard-*")})
    once, again, other = contents
    assert once == {name: data for name, data in again.items() if "shard-001" in name}
    same_task = "shard-001-breakout.safetensors", "shard-002-breakout.safetensors"
    assert once[same_task[0]] != other[same_task[1]]
    assert shard_path(tmp_path / "once", 1, 1, "toy").name in once


def test_frames_left_in_the_stores_room_are_those_of_the_shard(tmp_path):
    """What was played straight into memory, in two groups, 13 steps, and what is unpacked from its files: the same."""
    sizes = {"envs": 4, "groups": 2, "first_steps": 52, "shard_steps": 52}
    config, tasks = with_fields(preset("debug"), games=["breakout", "toy"], **sizes), find(["breakout", "toy"])
    space = Budget(64 * 2 * 2, "memory", {})
    played, unpacked = (Store(tasks, space, CPU) for _ in range(2))
    with open_arenas(config, tasks) as arenas:
        collect_shard(tmp_path, config, arenas, None, 1, 1, Interrupt(), played)
    for index, task in enumerate(tasks):
        file = shard_path(tmp_path, 1, 1, task.name)
        played.add(file, 1, index, heldout=False, unpacked=True)
        unpacked.add(file, 1, index, heldout=False)
    assert played.size == unpacked.size == 104
    assert torch.equal(played.frames.frames[:104], unpacked.frames.frames[:104])
    assert unpacked.frames.frames[:104].float().std() > 0


@pytest.mark.parametrize("hold", [1.0, 4.0])
def test_random_play_holds_its_controls_as_long_as_told(hold):
    tasks, fresh = find(["toy", "breakout"]), np.zeros(200, bool)
    choose = random_chooser(tasks, 100, 7, hold)
    played = np.stack([choose(np.empty(0), fresh) for _ in range(1000)], 1)  # [200, 1000]
    for rows, count in ((played[:100], 3), (played[100:], 4)):
        assert np.allclose(np.bincount(rows.ravel()) / rows.size, 1 / count, atol=0.01)
        changes = (rows[:, 1:] != rows[:, :-1]).mean()
        assert abs(changes - (1 - 1 / count) / hold) < 0.01
    strays = straying(lambda frames, fresh: np.full(200, -1), tasks, 100, share=0.5, length=10, seed=4, hold=hold)
    played = np.stack([strays(np.empty(0), fresh) for _ in range(1000)], 1)
    inside = (played[:100, 1:] >= 0) & (played[:100, :-1] >= 0)
    assert abs((played[:100, 1:] != played[:100, :-1])[inside].mean() - 2 / 3 / hold) < 0.01


def test_strays_are_whole_random_sequences_in_a_share_of_all_steps():
    tasks = find(["toy", "breakout"])
    choose = straying(lambda frames, fresh: np.full(200, -1), tasks, 100, share=0.3, length=10, seed=4)
    played = np.stack([choose(np.empty(0), np.zeros(200, bool)) for _ in range(1000)], 1)  # [200, 1000]
    strays = played >= 0
    assert 0.27 < strays.mean() < 0.33
    for row in strays:
        ends = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        lengths = (ends[1::2] - ends[::2])[:-1]  # the last may be cut off
        assert (lengths % 10 == 0).all()  # one may follow another at once
    assert set(played[:100][strays[:100]]) == {0, 1, 2}
    assert set(played[100:][strays[100:]]) == {0, 1, 2, 3}
    assert (choose(np.empty(0), np.ones(200, bool)) >= 0).mean() < 0.15  # a new episode begins as planned
