"""What must survive: processes killed for real at exact points, damaged files, full disks, two at once, Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import presage
from conftest import TINY, cli, weights
from presage import checkpoint
from presage.agent import load
from presage.collect import collect_shard, open_arenas
from presage.config import preset, with_fields
from presage.errors import RunError, UsageError
from presage.games import find
from presage.progress import Interrupt
from presage.run import Run, add_line, check_request, read_lines
from presage.store import shard_path
from presage.tables import scores

ARGUMENTS = ("train", "--preset", "debug", "--games", *TINY["games"], "--seed", TINY["seed"])
# Kills the process, without a chance to tidy up, at the n-th call of a function.
KILL_AT = """
import os, signal, {module}
_real, _calls = {module}.{name}, []
def _deadly(*arguments, **named):
    _calls.append(1)
    if len(_calls) == {n}:
        os.kill(os.getpid(), signal.SIGKILL)
    return _real(*arguments, **named)
{module}.{name} = _deadly
"""


def stages(run: Path) -> list[tuple]:
    """What was logged, without times: each thing exactly once."""
    lines = [line for line in Run(run, None).metrics() if line["stage"] != "start"]
    return [(m["stage"], m["iteration"], m.get("shard"), m.get("update"), m.get("loss")) for m in lines]


@pytest.mark.parametrize(
    ("moment", "module", "name", "n"),
    [
        ("while collecting at random", "presage.arena", "Arena.recv", 40),
        ("while collecting with plans", "presage.arena", "Arena.recv", 230),
        ("while training", "presage.training", "update_once", 7),
        ("while training iteration 2", "presage.training", "update_once", 17),
        ("while writing the very first file", "os", "replace", 1),
        ("between a shard's checksum and the shard", "os", "replace", 4),
        ("between the files of a checkpoint", "os", "replace", 16),
        ("before a checkpoint's folder is renamed", "os", "rename", 2),
    ],
)
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bits(tiny_run, tmp_path, moment, module, name, n):
    run = tmp_path / "run"
    killed = cli(*ARGUMENTS, "--run", run, code=f"exec({KILL_AT.format(module=module, name=name, n=n)!r})")
    assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
    assert weights(run) != weights(tiny_run.path)
    again = cli(*ARGUMENTS, "--run", run)
    assert again.returncode == 0, again.stderr
    assert weights(run) == weights(tiny_run.path)
    assert stages(run) == stages(tiny_run.path)
    data = {p.relative_to(run): p.read_bytes() for p in run.rglob("data/*/shard*")}
    assert data == {p.relative_to(tiny_run.path): p.read_bytes() for p in tiny_run.path.rglob("data/*/shard*")}
    assert not [p for p in run.rglob("*") if p.name.endswith(".part") or p.name.startswith((".saving", "partial"))]


def test_killed_again_and_again_it_still_ends_the_same(tiny_run, tmp_path):
    """A new death every few calls; each attempt gets further because finished shards and checkpoints stay."""
    run = tmp_path / "run"
    attempts = 0
    while True:
        attempts += 1
        code = KILL_AT.format(module="presage.training", name="update_once", n=6)
        done = cli(*ARGUMENTS, "--run", run, code=f"exec({code!r})")
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert attempts < 10
    assert attempts > 3
    assert weights(run) == weights(tiny_run.path)


OVERLAP = (*ARGUMENTS, "--overlap", "--iterations", 4)


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory) -> Run:
    path = tmp_path_factory.mktemp("overlap") / "run"
    return presage.train("debug", path, **TINY, overlap=True, iterations=4)


def test_overlapped_play_is_by_the_newest_network_that_was_finished(overlapped, tiny_run, tmp_path):
    """Iteration 2 by network 1, as without overlap; 3 by network 1 while 2 trains, 4 by network 2 while 3 trains."""
    path, tasks = overlapped.path, find(TINY["games"])
    for iteration, player in ((2, 1), (3, 1), (4, 2)):
        with open_arenas(overlapped.config, tasks) as arenas:
            collect_shard(tmp_path, overlapped.config, arenas, load(path, player), iteration, 1, Interrupt())
        for task in tasks:
            mine, theirs = (shard_path(run, iteration, 1, task.name).read_bytes() for run in (tmp_path, path))
            assert mine == theirs, (iteration, task.name)
    same = {name: data for name, data in weights(path).items() if name in ("iter-01", "iter-02")}
    assert same == weights(tiny_run.path)


@pytest.mark.parametrize(
    ("module", "name", "n"), [("presage.training", "update_once", 27), ("presage.collect", "of_task", 50)]
)
def test_killed_while_playing_and_training_at_once_it_ends_with_the_same_bits(overlapped, tmp_path, module, name, n):
    run = tmp_path / "run"
    code = KILL_AT.format(module=module, name=name, n=n)
    killed = cli(*OVERLAP, "--run", run, code=f"exec({code!r})")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = cli(*OVERLAP, "--run", run)
    assert again.returncode == 0, again.stderr
    assert weights(run) == weights(overlapped.path)
    data = {p.relative_to(run): p.read_bytes() for p in run.rglob("data/*/shard*")}
    assert data == {p.relative_to(overlapped.path): p.read_bytes() for p in overlapped.path.rglob("data/*/shard*")}


def test_ctrl_c_stops_play_and_training_together(overlapped, tmp_path):
    run = tmp_path / "run"
    code = KILL_AT.format(module="presage.training", name="update_once", n=25).replace("SIGKILL", "SIGINT")
    done = cli(*OVERLAP, "--run", run, code=f"exec({code!r})", timeout=120)
    assert done.returncode == 130, done.stderr
    again = cli(*OVERLAP, "--run", run)
    assert again.returncode == 0, again.stderr
    assert weights(run) == weights(overlapped.path)


def test_another_network_can_learn_from_the_same_data(tiny_run, tmp_path):
    """The second run plays only what the first has not: its third iteration."""
    run = presage.train(
        "debug", tmp_path / "run", **TINY, prediction="lstm", iterations=3, shards_from=str(tiny_run.path)
    )
    for shard in tiny_run.path.rglob("data/*/shard*"):
        assert (run.path / shard.relative_to(tiny_run.path)).read_bytes() == shard.read_bytes()
    assert [line["iteration"] for line in run.metrics("collect")] == [3, 3]
    with pytest.raises(UsageError, match="do not fit: it has another later_steps"):
        presage.train("debug", tmp_path / "none", **TINY, shards_from=str(tiny_run.path), later_steps=32)
    with pytest.raises(UsageError, match="it has not played pong"):
        presage.train("debug", tmp_path / "none", games=["toy", "pong"], shards_from=str(tiny_run.path))
    assert not (tmp_path / "none").exists()


def test_a_damaged_shard_is_not_borrowed(tiny_run, tmp_path):
    lender = shutil.copytree(tiny_run.path, tmp_path / "lender")
    shard = shard_path(lender, 1, 0, "toy")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(RunError, match="shard-000-toy"):
        presage.train("debug", tmp_path / "run", **TINY, shards_from=str(lender))
    assert not list((tmp_path / "run").rglob("shard*"))


def test_the_quick_start_also_plays_other_games(tmp_path):
    """Its threshold for Demon Attack is no obstacle."""
    check_request(with_fields(preset("quickstart"), games=["toy"]), find(["toy"]), tmp_path / "run")


def test_a_finished_run_says_so_and_changes_nothing(tiny_run):
    def state():
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tiny_run.path.rglob("*") if p.is_file()}

    before = state()
    done = cli(*ARGUMENTS, "--run", tiny_run.path)
    assert done.returncode == 0
    assert "is finished" in done.stderr
    before.pop(tiny_run.path / ".lock", None)
    after = state()
    after.pop(tiny_run.path / ".lock", None)
    assert after == before


@pytest.fixture
def copy(tiny_run, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_run.path, tmp_path / "copy"))


def test_without_a_preset_a_run_goes_on_with_its_own_settings(copy, tiny_run):
    shutil.rmtree(copy / "checkpoints" / "iter-02")
    done = cli("train", "--run", copy)
    assert done.returncode == 0, done.stderr
    assert weights(copy) == weights(tiny_run.path)


def test_a_command_with_a_flag_can_be_typed_again(tmp_path):
    command = ("train", "--games", "toy", "--iterations", 1, "--run", tmp_path / "run", "--monotone", "--no-carry")
    assert cli(*command[:3], "--preset", "debug", *command[3:]).returncode == 0
    again = cli(*command)  # now monotone and without carry is what the folder says
    assert again.returncode == 0, again.stderr
    assert "is finished" in again.stderr
    other = cli(*command[:-2], "--no-monotone", "--no-carry")
    assert "monotone (False here, True in the run)" in other.stderr


def test_a_config_that_differs_is_refused_and_nothing_is_written(copy):
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    done = cli(*ARGUMENTS, "--run", copy, "--updates", 11, "--lr", 1, 0.1)
    assert done.returncode == 2
    assert "updates (11 here, 10 in the run)" in done.stderr
    assert "Traceback" not in done.stderr
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before
    machine = cli(*ARGUMENTS, "--run", copy, "--threads", 1)
    assert machine.returncode == 0, machine.stderr  # what belongs to the machine may differ


def test_a_flipped_byte_in_a_shard_is_named_and_replayed_once_deleted(copy, tiny_run):
    shutil.rmtree(copy / "checkpoints" / "iter-02")
    shard = copy / "data" / "iter-01" / "shard-001-breakout.safetensors"
    data = bytearray(shard.read_bytes())
    data[-50] ^= 4
    shard.write_bytes(data)
    done = cli(*ARGUMENTS, "--run", copy)
    assert done.returncode == 1
    assert str(shard) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (copy / "checkpoints" / "iter-02").exists()
    shard.unlink()
    assert cli(*ARGUMENTS, "--run", copy).returncode == 0
    assert weights(copy) == weights(tiny_run.path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used_once_deleted(copy, tiny_run, name):
    shutil.rmtree(copy / "checkpoints" / "iter-02")
    folder = copy / "checkpoints" / "iter-01"
    file = folder / name
    file.write_bytes(file.read_bytes()[:-20])
    done = cli(*ARGUMENTS, "--run", copy)
    assert done.returncode == 1
    assert str(file) in done.stderr
    assert f"Delete {folder}" in done.stderr
    shutil.rmtree(folder)
    assert cli(*ARGUMENTS, "--run", copy).returncode == 0
    assert weights(copy) == weights(tiny_run.path)


def test_a_checkpoint_of_a_newer_version_is_refused(copy):
    shutil.rmtree(copy / "checkpoints" / "iter-02")
    state = copy / "checkpoints" / "iter-01" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": checkpoint.FORMAT + 1}))
    done = cli(*ARGUMENTS, "--run", copy)
    assert done.returncode == 2
    assert "newer presage" in done.stderr


def test_a_shard_of_another_run_is_refused(copy):
    shutil.rmtree(copy / "checkpoints" / "iter-02")
    for end in ("", ".sha256"):
        source = copy / "data" / "iter-01" / f"shard-001-toy.safetensors{end}"
        (copy / "data" / "iter-02" / source.name).write_bytes(source.read_bytes())
    done = cli(*ARGUMENTS, "--run", copy)
    assert done.returncode == 1
    assert "another run's or version's: its iteration is 1" in done.stderr


def test_two_processes_on_one_run_folder(tmp_path):
    run = tmp_path / "run"
    words = [sys.executable, "-m", "presage", *map(str, ARGUMENTS), "--run", str(run), "--updates", "100000"]
    first = subprocess.Popen(words, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: list(run.glob("checkpoints/partial*")), first)
        second = cli(*words[3:])
        assert second.returncode == 1
        assert "another process is working on" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def wait_for(condition, process, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize("during", ["train", "collect"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, during, number):
    run = tmp_path / "run"
    longer = ("--updates", 100_000) if during == "train" else ("--first-steps", 100_000, "--shard-steps", 50_000)
    words = [sys.executable, "-m", "presage", *map(str, (*ARGUMENTS, "--run", run, *longer))]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    sign = "checkpoints/partial*" if during == "train" else "data/iter-01/shard-000-breakout.safetensors"
    wait_for(lambda: list(run.glob(sign)), process)
    time.sleep(0.5)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "saved; the same command goes on from here" in error
    assert "Traceback" not in error
    if during == "train":
        (partial,) = run.glob("checkpoints/partial*")
        update = json.loads((partial / "state.json").read_text())["update"]
        assert update > 0
        assert all(m["update"] <= update for m in Run(run, None).metrics("train"))
    else:
        assert not list(run.glob("data/iter-01/shard-001*"))  # the unfinished shard will be played again


def test_ctrl_c_stops_the_runs_own_evaluation(tmp_path):
    run = tmp_path / "run"
    words = [*map(str, (*ARGUMENTS, "--run", run, "--evaluate-episodes", 100_000))]
    process = subprocess.Popen([sys.executable, "-m", "presage", *words], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (run / "metrics.jsonl").exists() and Run(run, None).metrics("heldout"), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "saved; the same command goes on from here" in error
    assert [p.name for p in run.glob("checkpoints/*")] == ["partial-01-0000010"]  # all is learned


def test_interrupted_at_an_odd_update_it_ends_with_the_same_bits(tiny_run, tmp_path):
    """Ctrl-C saves at an update that no timetable names."""
    run = tmp_path / "run"
    code = KILL_AT.format(module="presage.training", name="update_once", n=3).replace("SIGKILL", "SIGINT")
    stopped = cli(*ARGUMENTS, "--run", run, code=f"exec({code!r})")
    assert stopped.returncode == 130, stopped.stderr
    assert [p.name for p in run.glob("checkpoints/*")] == ["partial-01-0000003"]
    assert cli(*ARGUMENTS, "--run", run).returncode == 0
    assert weights(run) == weights(tiny_run.path)
    assert stages(run)[0] == stages(tiny_run.path)[0]


def test_interrupted_between_two_measurements_of_losses_it_ends_with_the_same_bits(tiny_run, tmp_path):
    """Which cases are hard was found with weights that are gone by then: a checkpoint keeps it."""
    arguments = (*ARGUMENTS, "--hard", "0.5")
    code = KILL_AT.format(module="presage.training", name="update_once", n=3).replace("SIGKILL", "SIGINT")
    assert cli(*arguments, "--run", tmp_path / "whole").returncode == 0
    assert cli(*arguments, "--run", tmp_path / "run", code=f"exec({code!r})").returncode == 130
    assert (tmp_path / "run/checkpoints/partial-01-0000003/measured.safetensors").exists()
    assert cli(*arguments, "--run", tmp_path / "run").returncode == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole") != weights(tiny_run.path)
    assert not list(tmp_path.rglob("iter-*/measured.safetensors"))


FULL_AT = """
import builtins, errno, io, pathlib
_open = pathlib.Path.open
class Full(io.FileIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")
def _choosy(self, mode="r", *rest, **named):
    return Full(self, mode) if {name!r} in str(self) and mode == "wb" else _open(self, mode, *rest, **named)
pathlib.Path.open = _choosy
"""


@pytest.mark.parametrize("name", ["shard-001-breakout", "optimizer", "config.json"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(tiny_run, tmp_path, name):
    run = tmp_path / "run"
    done = cli(*ARGUMENTS, "--run", run, code=f"exec({FULL_AT.format(name=name)!r})")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [p for p in run.rglob("*") if p.suffix == ".part" or p.name == ".saving"]
    again = cli(*ARGUMENTS, "--run", run)
    assert again.returncode == 0, again.stderr
    assert weights(run) == weights(tiny_run.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk(tiny_run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a file system")
    try:
        done = cli(*ARGUMENTS, "--run", disk / "run")
        assert done.returncode == 1
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert cli(*ARGUMENTS, "--run", disk / "run").returncode == 0
        assert weights(disk / "run") == weights(tiny_run.path)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    done = cli(*ARGUMENTS, "--run", tmp_path / "run", "--lr", 1, 1e30)
    assert done.returncode == 1
    assert "the loss has become nan" in done.stderr or "no longer numbers" in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_have_what_the_design_promises(tiny_run):
    heldout = tiny_run.metrics("heldout")
    assert [line["iteration"] for line in heldout] == [1, 2]
    for game in TINY["games"]:
        values = heldout[-1]["games"][game]
        assert values["cross_entropy"] > 0
        assert set(values["died"]) >= {"precision", "recall", "f1"}
        assert set(values["scored"]) >= {"precision", "recall", "f1"}
    assert heldout[-1]["asleep"] == {name: list(count) for name, count in tiny_run.agent().model.asleep().items()}
    assert all(line["seconds"] > 0 and line["steps_per_s"] > 0 for line in tiny_run.metrics("collect"))
    assert all(line["updates_per_s"] > 0 for line in tiny_run.metrics("train"))
    config = json.loads((tiny_run.path / "config.json").read_text())
    assert config["version"] == presage.__version__
    assert config["seed"] == TINY["seed"]


def test_a_half_written_line_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "train"}\n{"stage": "tra')
    assert read_lines(path) == [{"stage": "train"}]
    add_line(path, {"stage": "heldout"})
    assert read_lines(path) == [{"stage": "train"}, {"stage": "heldout"}]


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = cli(*ARGUMENTS, "--run", tmp_path)
    assert done.returncode == 2
    assert "is not a run and not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_evaluation_in_the_run_is_written_down(tmp_path):
    """It is played as the run was, sticky actions and all; the report counts it as the run's own."""
    settings = {"games": ["breakout"], "iterations": 1, "evaluate_episodes": 2, "sticky": 0.25}
    run = presage.train(preset="debug", run=tmp_path / "run", **settings)
    (line,) = run.evaluations()
    assert line["games"]["breakout"]["episodes"] == 2
    assert line["sticky"] == 0.25
    add_line(run.path / "evaluations.jsonl", presage.evaluate(run.agent(), episodes=1, random=True))
    add_line(run.path / "evaluations.jsonl", presage.evaluate(run.agent(), episodes=1, random=True, sticky=0.0))
    found = [(row["policy"], row["plans"], row["own"]) for row in scores([run])]
    assert found == [("planned", "k 4, sticky 0.25", True), ("random", "sticky 0.25", True), ("random", "", False)]


def test_a_run_larger_than_its_memory_streams_and_gives_the_same_network(tiny_run, tmp_path):
    run = presage.train(preset="debug", run=tmp_path / "run", **TINY, memory_gib=1e-6)
    assert weights(run.path) == weights(tiny_run.path)
