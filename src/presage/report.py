"""Runs made visible: tables (CSV), figures (SVG and PNG) and one page that needs nothing beside it."""

import base64
import csv
import html
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from presage.agent import read_config
from presage.errors import UsageError
from presage.run import Run

COLOURS = ("#2f6f9f", "#c8553d", "#588157", "#8d6a9f", "#b08900", "#4a4e69")
GREY = "#8a8a8a"
Rows = list[dict[str, Any]]


def write(folders: Sequence[Path], out: Path) -> Path:
    """The page's path."""
    plotting()
    runs = [Run(folder, read_config(folder)[0]) for folder in folders]
    for run in runs:
        if not run.metrics("heldout"):
            raise UsageError(f"there is nothing to report of {run.path} yet: none of its iterations is finished.")
    if len({run.path.name for run in runs}) < len(runs):
        raise UsageError("two of these runs have the same name: rename a folder, so that a report can tell them apart.")
    out.mkdir(parents=True, exist_ok=True)
    tables = {"learning": learning(runs), "heldout": heldout(runs), "scores": scores(runs), "speed": speed(runs)}
    for name, rows in tables.items():
        write_csv(out / f"{name}.csv", rows)
    pictures = [draw_curves(runs, out / "curves"), draw_scores(tables["scores"], out / "scores")]
    (out / "summary.md").write_text("\n".join(summary(run, tables) for run in runs))
    page = out / "index.html"
    page.write_text(render(runs, tables, [picture for picture in pictures if picture]))
    return page


def learning(runs: Sequence[Run]) -> Rows:
    keep = ("iteration", "update", "loss", "lr", "updates_per_s", "wait_fraction")
    return [{"run": run.path.name, **{key: line[key] for key in keep}} for run in runs for line in run.metrics("train")]


def heldout(runs: Sequence[Run]) -> Rows:
    rows = []
    for run in runs:
        for line in run.metrics("heldout"):
            for game, values in line["games"].items():
                row = {"run": run.path.name, "iteration": line["iteration"], "game": game, "cases": values["cases"]}
                row |= {name: values[name] for name in ("cross_entropy", "baseline_cross_entropy")}
                row |= {f"{what}_{name}": values[what][name] for what in ("died", "scored") for name in values[what]}
                rows.append(row)
    return rows


def scores(runs: Sequence[Run]) -> Rows:
    rows = []
    for run in runs:
        for line in run.evaluations():
            for game, values in line["games"].items():
                row = {"run": run.path.name, "game": game, "policy": line["policy"], "iteration": line["iteration"]}
                row |= {name: line[name] for name in ("k", "seed", "max_frames")} | {"mean": values["mean"]}
                row |= {"ci95_low": values["ci95"][0], "ci95_high": values["ci95"][1], "episodes": values["episodes"]}
                rows.append(row | {name: values[name] for name in ("random", "human", "human_normalized")})
    return rows


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
    latest = {(row["game"], row["policy"]): row for row in rows}
    known = {row["game"]: row for row in tables["heldout"] if row["run"] == run.path.name}  # the last iteration's
    lines = [
        "| game | random play | planned play | human | held-out loss | the best constant's |",
        "|---|---|---|---|---|---|",
    ]
    for game in run.config.games:
        played = " | ".join(interval(latest.get((game, policy))) for policy in ("random", "planned"))
        human = next((cell(row["human"]) for row in rows if row["game"] == game), "")
        losses = f"{known[game]['cross_entropy']:.4f} | {known[game]['baseline_cross_entropy']:.4f}"
        lines.append(f"| {game} | {played} | {human} | {losses} |")
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
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"])
        writer.writeheader()
        writer.writerows(rows)


def plotting() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("reports need matplotlib: pip install 'presage[report]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "svg.hashsalt": "presage"}
    )
    return pyplot


def save(figure: Any, stem: Path) -> Path:
    figure.savefig(stem.with_suffix(".png"), dpi=150, bbox_inches="tight")
    figure.savefig(stem.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    plotting().close(figure)
    return stem.with_suffix(".svg")


def draw_curves(runs: Sequence[Run], stem: Path) -> Path:
    """Left the training loss; right, for each game, the held-out loss as a share of the best constant's."""
    figure, (left, right) = plotting().subplots(1, 2, figsize=(10, 3.6))
    styles = ("-", "--", ":", "-.")
    for run, style in zip(runs, cycle(styles)):
        lines = run.metrics("train")
        x = [line["iteration"] - 1 + line["update"] / run.config.train.updates for line in lines]
        left.plot(x, [line["loss"] for line in lines], color=GREY, ls=style, lw=1.6, label=run.path.name)
        known = run.metrics("heldout")
        for game, colour in zip(run.config.games, cycle(COLOURS)):
            values = [line["games"][game] for line in known]
            share = [value["cross_entropy"] / value["baseline_cross_entropy"] for value in values]
            label = game if len(runs) == 1 else f"{run.path.name}: {game}"
            right.plot([line["iteration"] for line in known], share, color=colour, ls=style, marker="o", label=label)
    left.set(xlabel="iterations", ylabel="training loss", ylim=(0, None))
    right.axhline(1, color=GREY, lw=1)
    right.annotate(
        "the best constant", (0.99, 1), (0, -4), ("axes fraction", "data"), "offset points", ha="right", va="top"
    )
    right.set(xlabel="iterations", ylabel="held-out loss / the constant's", ylim=(0, 1.1))
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(frameon=False)
    figure.tight_layout()
    return save(figure, stem)


def draw_scores(rows: Rows, stem: Path) -> Path | None:
    """For each game every evaluation with its 95 % interval, random play in grey, the human score where it is near."""
    names = list(dict.fromkeys(row["game"] for row in rows))
    if not names:
        return None
    figure, axes = plotting().subplots(1, len(names), figsize=(3.4 * len(names), 3.2), squeeze=False)
    for axis, game in zip(axes[0], names, strict=True):
        mine = [row for row in rows if row["game"] == game]
        for i, row in enumerate(mine):
            colour = GREY if row["policy"] == "random" else COLOURS[0]
            spread = [[row["mean"] - row["ci95_low"]], [row["ci95_high"] - row["mean"]]]
            axis.errorbar([i], [row["mean"]], spread, fmt="o", color=colour, capsize=4)
        labels = ["random" if row["policy"] == "random" else f"it. {row['iteration']}, k {row['k']}" for row in mine]
        axis.set_xticks(range(len(mine)), labels, rotation=30, ha="right")
        axis.set(title=game, xlim=(-0.6, len(mine) - 0.4))
    axes[0][0].set_ylabel("score, mean and 95 % interval")
    figure.tight_layout()
    return save(figure, stem)


def render(runs: Sequence[Run], tables: dict[str, Rows], pictures: Sequence[Path]) -> str:
    images = "".join(
        f'<img alt="{p.stem}" src="data:image/svg+xml;base64,{base64.b64encode(p.read_bytes()).decode()}">'
        for p in pictures
    )
    sections = {"scores": "Scores", "heldout": "What it knows about cases it has never seen", "speed": "Speed"}
    body = "".join(f"<h2>{title}</h2>{table_html(tables[name])}" for name, title in sections.items() if tables[name])
    settings = "".join(
        f"<details><summary>{html.escape(str(run.path))}</summary><pre>"
        f"{html.escape((run.path / 'config.json').read_text())}</pre></details>"
        for run in runs
    )
    return PAGE.format(
        names=html.escape(", ".join(run.path.name for run in runs)), images=images, body=body, settings=settings
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
</style>
<h1>presage: {names}</h1>
{images}
{body}
<h2>Settings</h2>
{settings}
</html>
"""
