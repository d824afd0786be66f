"""The command line: help that helps, one JSON object, one sentence for each mistake."""

import json
import shutil
from pathlib import Path

import pytest

import presage
from conftest import cli
from presage.bench import stages
from presage.config import Planning
from presage.errors import UsageError
from presage.figures import named_lines, telling_labels
from presage.knowledge import examine
from presage.probe import probe
from presage.report import write
from presage.run import Run, add_line
from presage.summaries import company
from presage.tables import longest, scores

REPOSITORY = Path(__file__).parents[1]


def test_help_lists_the_commands_and_each_has_its_own():
    done = cli("--help")
    assert done.returncode == 0
    for command in ("games", "train", "evaluate", "play", "watch", "report", "bench", "doctor"):
        assert f"presage {command}" in done.stdout
    train = cli("train", "--preset", "paper", "--help").stdout
    assert "--batch-size" in train
    assert "default: 48000" in train
    assert "Parameter updates an iteration" in train
    assert "default: 10" in cli("train", "--preset", "debug", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("trian", "--run", "x"), "there is no command 'trian'; did you mean train"),
        (("train", "--preset", "papper", "--run", "x"), "no preset 'papper'; did you mean paper"),
        (("train", "--preset", "debug", "--run", "x", "--games", "pongg"), "no game 'pongg'; did you mean pong"),
        (("train", "--preset", "debug", "--run", "x", "--updates", "-3"), "updates must be at least 1, not -3"),
        (("train", "--preset", "debug", "--run", "x", "--updates", "many"), "--updates"),
        (("train", "--preset", "debug", "--run", "x", "--batchsize", "3"), "--batch-size"),
        (
            ("train", "--preset", "debug", "--run", "x", "--thresholds", "pong", "0.1", "--games", "toy"),
            "does not play",
        ),
        (("train", "--preset", "debug", "--run", "x", "--device", "warp"), "no device 'warp'"),
        (("train", "--preset", "debug", "--run", "x", "--init-from", "nowhere"), "there is no run in nowhere"),
        (("train", "--preset", "debug"), "--run"),
        (("train", "--preset", "debug", "--run", "x", "--shards-from", "nowhere"), "there is no run in nowhere"),
        (("evaluate", "nowhere"), "there is no run in nowhere"),
        (("evaluate", "nowhere", "--heldout", "--k", "9"), "--heldout does not play"),
        (("evaluate", "nowhere", "--heldout", "--probe", "9"), "--heldout does not play"),
        (("evaluate", "nowhere", "--probe", "9", "--sticky", "0.1"), "--probe looks at play without sticky actions"),
        (("evaluate", "nowhere", "--episodes", "none"), "--episodes"),
        (("play", "nowhere"), "there is no run in nowhere"),
        (("bench", "--seconds", "0"), "seconds must be more than 0"),
        (("train", "--preset", "debug", "--run", "x", "--device", "cuda:9"), "there is no cuda:9 here"),
        (("report", "nowhere", "--out", "y"), "there is no run in nowhere"),
    ],
)
def test_mistakes_are_one_sentence_with_status_2_and_nothing_is_written(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_evaluate_json_is_one_object_and_is_also_written_down(tiny_run):
    before = len(tiny_run.evaluations())
    how = {"k": 5, "threshold": 0.5, "carry": False, "monotone": True, "hold": 2.0}
    told = [word for name, value in how.items() for word in (f"--{name}", value)]
    command = ("evaluate", tiny_run.path, "--games", "toy", "--episodes", 3, *told, "--iteration", 1, "--json")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["iteration"] == 1
    assert {name: result[name] for name in how if name in result} | {"threshold": result["thresholds"]["toy"]} == how
    toy = result["games"]["toy"]
    assert set(toy) >= {"mean", "ci95", "episodes", "steps", "random", "human", "human_normalized"}
    assert toy["episodes"] == len(toy["scores"]) == 3
    assert toy["ci95"][0] <= toy["mean"] <= toy["ci95"][1]
    assert tiny_run.evaluations()[before:] == [result]
    again = cli(*command)
    assert json.loads(again.stdout)["games"] == result["games"]  # the same seed, the same episodes
    assert set(result["made"]) == {"presage", "commit", "torch", "device"}


def test_evaluate_prints_a_table(tiny_run):
    done = cli("evaluate", tiny_run.path, "--games", "breakout", "--episodes", 2, "--random")
    assert done.returncode == 0, done.stderr
    assert "random play" in done.stdout
    assert "31.80" in done.stdout


def test_play_tells_a_score_and_films_it(tiny_run, tmp_path):
    import imageio.v3 as imageio

    game = ("play", tiny_run.path, "--game", "toy", "--seed", 1)
    done = cli(*game, "--video", tmp_path / "toy.mp4", "--plain")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    film = list(imageio.imiter(tmp_path / "toy.mp4"))
    assert len(film) == result["steps"]
    assert film[0].shape == (336, 448, 3)
    assert (film[0] != film[-1]).any()
    part = cli(*game, "--video", tmp_path / "part.mp4", "--start", 1, "--seconds", 0.4)
    assert json.loads(part.stdout) == result  # whatever is filmed, the game is the same
    film = list(imageio.imiter(tmp_path / "part.mp4"))
    assert len(film) == 6  # at 15 a second
    assert film[0].shape == (540, 960, 3)
    wrong = cli("play", tiny_run.path, "--game", "toy", "--video", tmp_path / "toy.avi")
    assert wrong.returncode == 2
    assert "ends in .mp4" in wrong.stderr


FIGURES = ("curves", "scores", "played", "forgetting", "calibration", "steps")


def evaluated(run: Run, folder: Path) -> Path:
    """A copy of a run, with evaluations of both its networks; the last one with plans that are not its own."""
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("evaluations.jsonl"))
    for iteration in (1, 2):
        agent = run.agent(iteration)
        for some in (agent, agent.playing(Planning(threshold=0.5))):
            add_line(folder / "evaluations.jsonl", presage.evaluate(some, games=["toy"], episodes=2))
        for games in (None, ["toy"]):  # the second adds nothing, and hides nothing
            add_line(folder / "knowledge.jsonl", examine(agent, folder, games))
    add_line(folder / "probes.jsonl", probe(run.agent(), ["toy"], number=16))
    return folder


def test_report_writes_tables_figures_and_a_page_that_needs_nothing(tiny_run, tmp_path):
    run = evaluated(tiny_run, tmp_path / "tiny")
    done = cli("report", run, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip()).read_text()
    names = {p.name for p in (tmp_path / "report").iterdir()}
    assert names >= {
        "index.html",
        "summary.md",
        "learning.csv",
        "comparison.md",
        "heldout.csv",
        "asleep.csv",
        "played.csv",
        "scores.csv",
        "knowledge.csv",
        "probes.csv",
        "steps.csv",
        "calibration.csv",
        *(f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")),
    }
    assert page.count("data:image/svg+xml") == len(FIGURES)
    clips = list((tmp_path / "report").glob("tiny-*.mp4"))
    assert page.count("data:video/mp4") == len(clips) > 0  # deaths that so poor a network did not foresee
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "| toy | " in (tmp_path / "report" / "summary.md").read_text()
    rows = (tmp_path / "report" / "heldout.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2  # iterations × games
    assert rows[0].startswith("run,iteration,game,cases,cross_entropy,baseline_cross_entropy,died_precision")
    knowledge = (tmp_path / "report" / "knowledge.csv").read_text().splitlines()
    assert len(knowledge) == 1 + 2 * 2 * 2  # networks × iterations played × games
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert f"{evaluations[2]['games']['toy']['mean']:.2f} (" in (tmp_path / "report" / "summary.md").read_text()
    add_line(run / "evaluations.jsonl", presage.evaluate(tiny_run.agent(1), games=["breakout"], episodes=1))
    write([run], tmp_path / "again", looks=False)
    assert "| breakout |  |  |" in (tmp_path / "again" / "summary.md").read_text()  # not an older network's score


def test_evaluations_with_several_seeds_count_as_one_and_a_repeated_one_once(tiny_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run.path, folder, ignore=shutil.ignore_patterns("evaluations.jsonl"))
    agent = tiny_run.agent()
    parts = [presage.evaluate(agent, games=["toy"], episodes=2, seed=seed) for seed in (0, 3, 0)]
    for part in (*parts, presage.evaluate(agent, games=["toy"], episodes=1, random=True)):
        add_line(folder / "evaluations.jsonl", part)
    planned, random = scores([Run(folder, tiny_run.config)])
    every = [score for part in parts[:2] for score in part["games"]["toy"]["scores"]]
    assert (planned["seeds"], planned["episodes"], planned["mean"]) == ("0 3", 4, sum(every) / 4)
    assert planned["ci95_low"] <= planned["mean"] <= planned["ci95_high"]
    assert planned["own"]
    assert (random["policy"], random["plans"]) == ("random", "")
    add_line(folder / "evaluations.jsonl", presage.evaluate(agent, games=["toy"], episodes=1, max_frames=40))
    rows = scores([Run(folder, tiny_run.config)])
    assert [row["plans"] for row in rows] == ["k 4", "", "k 4, at most 40 frames"]
    assert longest(rows) == rows[:2]  # what was cut earlier does not stand beside the rest


def test_a_report_of_two_runs_tells_them_apart(tiny_run, tmp_path):
    runs = [evaluated(tiny_run, tmp_path / name) for name in ("one", "two")]
    write(runs, tmp_path / "report", looks=False)
    compared = (tmp_path / "report" / "comparison.md").read_text()
    for run in runs:
        for how in ("iteration 1 | k 4", "iteration 1 | k 4, threshold 0.5", "iteration 2 | k 4"):
            assert f"| {run.name} | {how} |" in compared
        assert f"- {run.name}: `presage train --preset " in compared
        parts = Run(run, tiny_run.config).metrics("heldout")[-1]["asleep"].values()
        assert f"| {run.name} | {' | '.join(f'{some} of {units}' for some, units in parts)} |" in compared
        found = json.loads((run / "probes.jsonl").read_text())["games"]["toy"]["random"]
        told = f"{found['cases']} random | {found['cross_entropy']:.3f}"
        assert f"| {run.name} | iteration 2 | k 4 | toy | its own | {told} |" in compared
    names = {p.stem for p in (tmp_path / "report").glob("*.png")}
    assert names == {*FIGURES[:3], *(f"{name}-{run.name}" for name in FIGURES[3:] for run in runs)}
    rows = (tmp_path / "report" / "calibration.csv").read_text().splitlines()[1:]
    assert {row.split(",")[0] for row in rows} == {"one", "two"}
    with pytest.raises(UsageError, match="two of these runs have the same name"):
        write([runs[0], runs[0]], tmp_path / "again")


def test_networks_of_one_game_have_one_name_beside_those_of_several():
    rows = [{"run": run, "tasks": tasks} for run, tasks in (("both", 2), ("one", 1), ("two", 1), ("one", 1))]
    (both, blue, _), (one, red, ones), (two, again, _) = named_lines(rows)
    assert (both, one, two, len(ones)) == ("both", "this game alone", "this game alone", 2)
    assert blue != red == again
    assert [name for name, _, _ in named_lines(rows[1:])] == ["one", "two"]


def test_networks_of_several_games_stand_beside_those_of_one():
    def row(run, tasks, iteration, mean, own=True):
        ways = {"policy": "planned", "own": own, "max_frames": 9, "game": "pong", "episodes": 4, "human": 9.3}
        ends = {"ci95_low": mean - 1, "ci95_high": mean + 1}
        return ways | ends | {"run": run, "tasks": tasks, "iteration": iteration, "mean": mean}

    alone, three = row("alone", 1, 19, 18.0), row("three", 3, 19, 15.0)
    others = [row("three", 3, 1, -16.0), row("alone", 1, 18, 7.0), row("three", 3, 19, 99.0, own=False)]
    lines = company([alone, three, *others]).splitlines()
    assert lines[2:-1] == [
        "| pong | iteration 19 | 3 games | three | 15.00 (14.00 … 16.00) | 9.3 |",
        "| pong | iteration 19 | alone | alone | 18.00 (17.00 … 19.00) | 9.3 |",
        "",
    ]
    assert company([three, *others[:1]]) == ""


def test_labels_say_only_what_tells_evaluations_apart():
    def row(run, policy="planned", iteration=3, plans="k 25"):
        return {"run": run, "policy": policy, "iteration": iteration, "plans": plans}

    assert telling_labels([row("a", "random"), row("a")]) == ["random", "planned"]
    assert telling_labels([row("a", "random"), row("a"), row("b")]) == ["a, random", "a", "b"]
    assert telling_labels([row("a", plans="k 5"), row("a", iteration=1)]) == ["it. 3, k 5", "it. 1, k 25"]


def test_bench_json_has_the_promised_fields():
    done = cli("bench", "--seconds", 0.2, "--games", "breakout", "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    promised = {"device", "emulator_steps_per_s", "collect_steps_per_s", "collect_over_emulator", "update_ms"}
    promised |= {"record_steps_per_s", "record_over_emulator", "data_wait_fraction"}
    assert set(result) >= promised | {"update_eager_ms", "plan_ms", "plan_over_network"}
    assert result["emulator_threads"] == 1
    assert all(value > 0 for name, value in result.items() if isinstance(value, float) and name != "data_wait_fraction")
    rows = stages(result)
    assert [row[0].split()[0].strip(",") for row in rows] == ["emulator", "the", "collect", "plan", "update"]
    assert rows[2][4] == "emulator and planning in turn"  # one group: nothing hides planning
    fast = result | {"groups": 2, "plan_ms": 1e-3, "data_wait_fraction": 0.5}
    assert [row[4] for row in stages(fast)][2::2] == ["the emulator", "waiting for data"]


def test_games_and_doctor_tell_what_is_here():
    listed = cli("games", "breakout", "demon_attack", "pong").stdout  # all of them: test_docs.py
    assert "a point is lost" in listed
    assert "0.005 from iteration 7" in listed
    assert "(1, 0, 0)" in listed
    found = cli("doctor").stdout
    assert "104" in found
    assert "streamed" in found or "kept in memory" in found


def test_version_and_module_entry():
    assert cli("--version").stdout.strip().count(".") == 2
