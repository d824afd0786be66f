"""Runs made visible: tables (CSV), figures (SVG and PNG) and one page that needs nothing beside it."""

import base64
import csv
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from presage import checkpoint, drawing, figures
from presage.agent import read_config
from presage.drawing import scene
from presage.errors import UsageError
from presage.figures import Rows
from presage.games import known_games
from presage.highlights import TITLES, highlights
from presage.replay import Film
from presage.run import Run, read_lines


def write(folders: Sequence[Path], out: Path, looks: bool = True) -> Path:
    """The page's path. looks: play a little with each run's newest network, to show what it thinks."""
    figures.plotting()
    runs = [Run(folder, read_config(folder)[0]) for folder in folders]
    for run in runs:
        if not run.metrics("heldout"):
            raise UsageError(f"there is nothing to report of {run.path} yet: none of its iterations is finished.")
    if len({run.path.name for run in runs}) < len(runs):
        raise UsageError("two of these runs have the same name: rename a folder, so that a report can tell them apart.")
    out.mkdir(parents=True, exist_ok=True)
    made = (learning, heldout, scores, speed, knowledge, steps, calibration)
    tables = {table.__name__: table(runs) for table in made}
    for name, rows in tables.items():
        if rows:
            write_csv(out / f"{name}.csv", rows)
    drawn = [figures.curves(runs, out / "curves"), figures.scores(tables["scores"], out / "scores")]
    for run in runs:
        name = "" if len(runs) == 1 else f"-{run.path.name}"
        for draw, table in (
            (figures.forgetting, knowledge),
            (figures.calibration, calibration),
            (figures.steps, steps),
        ):
            drawn.append(draw(table([run]), out / f"{draw.__name__}{name}"))
    (out / "summary.md").write_text("\n".join(summary(run, tables) for run in runs))
    page = out / "index.html"
    seen = "".join(look(run, out) for run in runs if looks and checkpoint.finished(run.path))
    page.write_text(render(runs, tables, [picture for picture in drawn if picture], seen))
    return page


def look(run: Run, out: Path) -> str:
    """A few moments of play with what the agent thought, as pictures and short films."""
    shown = []
    for one in highlights(run.agent(), known_games(run.config.games)):
        path = out / f"{run.path.name}-{one.kind}.mp4"
        film = Film(path)
        for moment in one.clip:
            film.add(moment)
        film.close()
        shown.append(
            f"<figure><figcaption>{TITLES[one.kind]}.</figcaption>{scene(one.moment)}"
            f'<video controls loop muted src="data:video/mp4;base64,{in_base64(path)}"></video></figure>'
        )
    return f"<h2>What {html.escape(run.path.name)} thinks</h2>{''.join(shown)}" if shown else ""


def in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def learning(runs: Sequence[Run]) -> Rows:
    keep = ("iteration", "update", "loss", "lr", "updates_per_s", "wait_fraction")
    return [{"run": run.path.name, **{key: line[key] for key in keep}} for run in runs for line in run.metrics("train")]


def heldout(runs: Sequence[Run]) -> Rows:
    rows = []
    for run in runs:
        for line in run.metrics("heldout"):
            for game, values in line["games"].items():
                rows.append({"run": run.path.name, "iteration": line["iteration"], "game": game} | flat(values))
    return rows


def scores(runs: Sequence[Run]) -> Rows:
    rows = []
    for run in runs:
        for line in run.evaluations():
            for game, values in line["games"].items():
                row = {"run": run.path.name, "game": game, "policy": line["policy"], "iteration": line["iteration"]}
                row |= {"own_plans": line.get("own_plans", True)}  # else made to compare, no result of the run
                row |= {name: line[name] for name in ("k", "seed", "max_frames")} | {"mean": values["mean"]}
                row |= {"ci95_low": values["ci95"][0], "ci95_high": values["ci95"][1], "episodes": values["episodes"]}
                rows.append(row | {name: values[name] for name in ("random", "human", "human_normalized")})
    return rows


def knowledge(runs: Sequence[Run]) -> Rows:
    """Every network on the held-out cases of every iteration's play."""
    rows = []
    for run in runs:
        for line in known(run):
            for played, games in line["played"].items():
                for game, values in games.items():
                    row = {"run": run.path.name, "iteration": line["iteration"], "played": int(played), "game": game}
                    rows.append(row | flat(values))
    return rows


def steps(runs: Sequence[Run]) -> Rows:
    """The newest network that was examined, by step ahead."""
    return [
        row | {"step": step} | values
        for row, detail in details(runs)
        for step, values in enumerate(detail["steps"][row["outcome"]], 1)
    ]


def calibration(runs: Sequence[Run]) -> Rows:
    """The newest network that was examined, by what it said."""
    return [row | values for row, detail in details(runs) for values in detail["calibration"][row["outcome"]]]


def known(run: Run) -> list[dict[str, Any]]:
    """What `presage evaluate --heldout` found: of each iteration's network and game the last."""
    networks: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.path / "knowledge.jsonl"):
        network = networks.setdefault(line["iteration"], {"iteration": line["iteration"], "played": {}})
        for played, games in line["played"].items():
            network["played"].setdefault(played, {}).update(games)
        for play in ("random", "planned"):
            network.setdefault(play, {}).update(line.get(play, {}))
    return [networks[iteration] for iteration in sorted(networks)]


def details(runs: Sequence[Run]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for run in runs:
        for line in known(run)[-1:]:
            for play in ("random", "planned"):
                for game, detail in line.get(play, {}).items():
                    for outcome in ("died", "scored"):
                        row = {"run": run.path.name, "iteration": line["iteration"], "play": play, "game": game}
                        yield row | {"outcome": outcome}, detail


def flat(values: dict[str, Any]) -> dict[str, Any]:
    row = {name: values[name] for name in ("cases", "cross_entropy", "baseline_cross_entropy")}
    return row | {f"{what}_{name}": values[what][name] for what in ("died", "scored") for name in values[what]}


def speed(runs: Sequence[Run]) -> Rows:
    rows = []
    for run in runs:
        played = run.metrics("collect")
        laps = {line["iteration"]: line["seconds"] for line in run.metrics("iteration")}
        for iteration in sorted({line["iteration"] for line in played}):
            mine = [line for line in played if line["iteration"] == iteration]
            steps, seconds = sum(x["steps"] for x in mine), sum(x["seconds"] for x in mine)
            trained = [x for x in run.metrics("train") if x["iteration"] == iteration]
            rows.append(
                {
                    "run": run.path.name,
                    "iteration": iteration,
                    "steps": steps,
                    "steps_per_s": steps / seconds,
                    "bytes_per_step": sum(x["bytes"] for x in mine) / steps,
                    "updates_per_s": sum(x["updates_per_s"] for x in trained) / len(trained) if trained else None,
                    **{f"{stage}_s": laps.get(iteration, {}).get(stage) for stage in ("collect", "train", "heldout")},
                }
            )
    return rows


def summary(run: Run, tables: dict[str, Rows]) -> str:
    """A run's result as a Markdown table, with what it was made with."""
    starts, laps = run.metrics("start"), run.metrics("iteration")
    minutes = sum(sum(lap["seconds"].values()) for lap in laps) / 60
    rows = [row for row in tables["scores"] if row["run"] == run.path.name]
    own = sorted((row for row in rows if row["own_plans"]), key=lambda row: row["iteration"])
    latest = {(row["game"], row["policy"]): row for row in own}
    losses = {row["game"]: row for row in tables["heldout"] if row["run"] == run.path.name}  # the last iteration's
    lines = [
        "| game | random play | planned play | human | held-out loss | the best constant's |",
        "|---|---|---|---|---|---|",
    ]
    for game in run.config.games:
        played = " | ".join(interval(latest.get((game, policy))) for policy in ("random", "planned"))
        human = next((cell(row["human"]) for row in rows if row["game"] == game), "")
        known = f"{losses[game]['cross_entropy']:.4f} | {losses[game]['baseline_cross_entropy']:.4f}"
        lines.append(f"| {game} | {played} | {human} | {known} |")
    shown = [latest[game, policy] for game, policy in latest if game in run.config.games]
    cap = f"{max((row['max_frames'] for row in shown), default=0):,} frames"
    episodes = " or ".join(sorted({str(row["episodes"]) for row in shown})) or "no"
    over = "over " if len(starts) > 1 else ""  # an interrupted process took its times with it
    made = f"`presage train --preset {run.config.preset}`, seed {run.config.seed}, {over}{minutes:.1f} minutes"
    start = starts[-1]
    machine = f"{start['device']}, torch {start['torch']}, commit {start['commit'] or 'unknown'}"
    return "\n".join(
        [*lines, "", f"{made} ({machine}); {episodes} episodes a game of at most {cap}, mean and 95 % interval.", ""]
    )


def interval(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['mean']:.2f} ({row['ci95_low']:.2f} … {row['ci95_high']:.2f})"


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def render(runs: Sequence[Run], tables: dict[str, Rows], pictures: Sequence[Path], seen: str) -> str:
    images = "".join(f'<img alt="{p.stem}" src="data:image/svg+xml;base64,{in_base64(p)}">' for p in pictures)
    sections = {"scores": "Scores", "heldout": "What it knows about cases it has never seen", "speed": "Speed"}
    body = "".join(f"<h2>{title}</h2>{table_html(tables[name])}" for name, title in sections.items() if tables[name])
    settings = "".join(
        f"<details><summary>{html.escape(str(run.path))}</summary><pre>"
        f"{html.escape((run.path / 'config.json').read_text())}</pre></details>"
        for run in runs
    )
    return PAGE.format(
        names=html.escape(", ".join(run.path.name for run in runs)),
        light=drawing.style(drawing.LIGHT),
        dark=drawing.style(drawing.DARK),
        images=images,
        seen=seen,
        body=body,
        settings=settings,
    )


def table_html(rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "" if value is None else str(value)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>presage: {names}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-weight: 600; }} h2 {{ margin-top: 2.5rem; font-weight: 600; font-size: 1.15rem; }}
img {{ width: 100%; background: #fff; border-radius: 6px; margin: .6rem 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }}
th, td {{ text-align: right; padding: .25rem .7rem; border-bottom: 1px solid #8884; white-space: nowrap; }}
th {{ font-weight: 600; }} td:first-child, th:first-child {{ text-align: left; }}
pre {{ overflow-x: auto; font-size: .8rem; }}
figure {{ margin: 1.5rem 0; }} figcaption {{ margin-bottom: .5rem; }}
figure > svg, video {{ display: block; width: 100%; height: auto; border-radius: 6px; margin-bottom: .6rem; }}
{light}
@media (prefers-color-scheme: dark) {{ {dark} }}
</style>
<h1>presage: {names}</h1>
{images}
{seen}
{body}
<h2>Settings</h2>
{settings}
</html>
"""
