"""What is written is true: the README's code runs, its files exist, modules import only from those above them."""

import ast
import csv
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from conftest import cli

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "presage"
README = (REPOSITORY / "README.md").read_text()
ORDER = (
    "errors", "config", "tasks", "toy", "games", "pools", "arena", "events", "files", "store", "batches", "model",
    "graphs", "fused_prediction", "fused_layers", "fused_perception", "fused_adam", "fused", "planner",
    "checkpoint", "agent", "progress", "collect", "training", "knowledge", "probe", "evaluation", "run", "live",
    "drawing", "replay", "highlights", "session", "viewer", "tables", "summaries", "figures", "report", "bench", "cli",
)  # fmt: skip


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_order_names_every_module():
    names = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert set(ORDER) == names


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_those_above_it(name):
    above = {*ORDER[: ORDER.index(name)], "presage"}
    for node in ast.walk(ast.parse((SOURCE / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "presage":
            home = node.module.split(".")[-1]
            assert home in above, f"{name} imports {node.module}"
            if home == "presage":  # from presage import module
                assert {alias.name for alias in node.names} <= {*above, "__version__"}


@pytest.mark.parametrize("package", ["matplotlib", "imageio", "PIL", "resvg_py", "nicegui"])
def test_training_needs_no_plotting_video_or_web(package):
    """Such packages are imported only inside the functions that use them."""
    for path in set(SOURCE.glob("*.py")) - {SOURCE / "viewer.py"}:  # which is imported where it is used
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not any(name.split(".")[0] == package for name in names), path


def test_nothing_unsafe_is_used():
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), path
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve"} & set(names), path


def test_the_readme_names_every_module_and_only_what_exists():
    links = set(re.findall(r"\]\(([^)#:]+)\)", README))
    for link in links:
        assert (REPOSITORY / link).exists(), link
    assert {f"src/presage/{name}.py" for name in ORDER} - links == {
        "src/presage/errors.py",
        "src/presage/progress.py",
    }


def reported() -> set[str]:
    """Every line of what `presage report` left in results."""
    reports = [p for name in ("comparison", "company") for p in (REPOSITORY / "results").glob(f"**/{name}.md")]
    return {line for path in reports for line in path.read_text().splitlines()}


@pytest.mark.parametrize(("document", "least"), [("results.md", 80), ("deviations.md", 10)])
def test_the_results_shown_are_the_reports_own(document, least):
    """No figure is typed by hand: each row of a table about runs is one that `presage report` wrote."""
    lines, known = (REPOSITORY / "docs" / document).read_text().splitlines(), reported()
    titles = [i for i, line in enumerate(lines) if re.match(r"\| (run|game) \|", line)]
    rows = [row for i in titles for row in takewhile(lambda line: line.startswith("|"), lines[i:])]
    made = [line for line in lines if re.match(r"- [\w-]+: `presage train", line)]
    assert not [row for row in rows + made if row not in known]
    assert len(rows) >= least


def test_the_quick_starts_result_is_the_reports_own():
    assert (REPOSITORY / "docs" / "quickstart" / "summary.md").read_text().strip() in README


def measured(iteration: int) -> dict[str, list[dict[str, str]]]:
    """What the networks of an iteration scored, by game, as `presage report` has it."""
    rows = []
    for report in ("report", "random-report"):
        with (REPOSITORY / "results" / report / "scores.csv").open() as file:
            rows += [r for r in csv.DictReader(file) if r["policy"] == "planned" and r["iteration"] == str(iteration)]
    return {game: [r for r in rows if r["game"] == game] for game in ("pong", "breakout", "demon_attack")}


def is_mean(shown: str, rows: list[dict[str, str]]) -> bool:
    """Whether one of them has this mean, to as many digits as are shown."""
    digits = len(shown.strip().partition(".")[2])
    return any(abs(float(shown.replace(",", "")) - float(row["mean"])) <= 0.5 * 10**-digits + 1e-9 for row in rows)


def test_the_ladder_shows_what_was_measured():
    lines = [line for line in (REPOSITORY / "docs" / "results.md").read_text().splitlines() if "| **presage" in line]
    for line in lines:
        (run,) = re.findall(r"\[results/([\w-]+)\]", line)
        shown = re.findall(r"\*\*(-?[\d,.]+)\*\*", line)
        for number, (game, rows) in zip(shown, measured(19).items(), strict=True):
            assert is_mean(number, [row for row in rows if row["run"] == run]), (line, game)
    assert len(lines) == 2


def test_what_mattered_after_random_play_is_what_was_measured():
    table = (REPOSITORY / "docs" / "deviations.md").read_text().split("| the paper | -8.62 ")[1].split("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()[1:]]
    for _, *cells in lines:
        for cell, (game, rows) in zip(cells, measured(1).items(), strict=True):
            assert all(is_mean(number, rows) for number in cell.split(", ") if number.strip()), (game, cell)
    assert len(lines) == 14


def test_one_network_beside_three_is_what_was_measured():
    with (REPOSITORY / "results" / "alone" / "scores.csv").open() as file:
        last = [r for r in csv.DictReader(file) if r["iteration"] == "19" and r["own"] == "True"]
    (sentence,) = re.findall(r"those have (.*?) \(one seed each", README, re.DOTALL)
    shown = re.findall(r"\d[\d,.]*\d", sentence)
    assert len(shown) == 6
    for number, (runs, game) in zip(shown, ((r, g) for r in (1, 3) for g in ("pong", "breakout", "demon_attack"))):
        assert is_mean(number, [r for r in last if r["game"] == game and r["tasks"] == str(runs)]), (number, game)


def test_the_readmes_make_targets_exist():
    for target in re.findall(r"^make (\w+)", "\n".join(blocks(README, "console")), re.MULTILINE):
        done = subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    return [
        line.split("#")[0].strip()
        for line in "\n".join(blocks(README, "console")).splitlines()
        if line[:8] == "presage " and line[:13] != "presage watch"  # which serves until it is stopped: test_viewer.py
    ]


@pytest.mark.parametrize("command", commands())
def test_the_readmes_commands_work(command, tiny_run, tmp_path, monkeypatch):
    shutil.copytree(tiny_run.path, tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    done = cli(*command.split()[1:])
    assert done.returncode == 0, done.stderr
    assert command != "presage games" or done.stdout.count("2016") == 54  # as many as Wang et al. have scores of


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_the_readmes_python_works(number, tmp_path):
    code = blocks(README, "python")[number]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_data_formats_example_works(tiny_run):
    (code,) = blocks((REPOSITORY / "docs" / "data.md").read_text(), "python")
    folder = tiny_run.path / "data" / "iter-01"
    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(run.shape, run.std())"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(8, 84, 84)")


def test_the_ci_command_is_the_readmes():
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()
