"""Runs made visible: tables (CSV), figures (SVG and PNG) and one page that needs nothing beside it."""

import base64
import csv
import html
from collections.abc import Sequence
from pathlib import Path

from presage import checkpoint, drawing, figures, summaries, tables
from presage.agent import read_config
from presage.drawing import scene
from presage.errors import UsageError
from presage.games import known_games
from presage.highlights import TITLES, highlights
from presage.replay import Film
from presage.run import Run
from presage.summaries import cell
from presage.tables import Rows


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
    made = {make.__name__: make(runs) for make in tables.ALL}
    for name, rows in made.items():
        if rows:
            write_csv(out / f"{name}.csv", rows)
    drawn = [figures.curves(runs, out / "curves"), figures.scores(made["scores"], out / "scores")]
    drawn.append(figures.played(made["played"], out / "played"))
    for run in runs:
        name = "" if len(runs) == 1 else f"-{run.path.name}"
        for draw, table in (
            (figures.forgetting, tables.knowledge),
            (figures.calibration, tables.calibration),
            (figures.steps, tables.steps),
        ):
            drawn.append(draw(table([run]), out / f"{draw.__name__}{name}"))
    (out / "summary.md").write_text("\n".join(summaries.summary(run, made) for run in runs))
    (out / "comparison.md").write_text(summaries.comparison(runs, made))
    if several_and_alone := summaries.company(made["scores"]):
        (out / "company.md").write_text(several_and_alone)
    page = out / "index.html"
    seen = "".join(look(run, out) for run in runs if looks and checkpoint.finished(run.path))
    page.write_text(render(runs, made, [picture for picture in drawn if picture], seen))
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


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def render(runs: Sequence[Run], made: dict[str, Rows], pictures: Sequence[Path], seen: str) -> str:
    images = "".join(f'<img alt="{p.stem}" src="data:image/svg+xml;base64,{in_base64(p)}">' for p in pictures)
    sections = {"scores": "Scores", "heldout": "What it knows about cases it has never seen", "speed": "Speed"}
    body = "".join(f"<h2>{title}</h2>{table_html(made[name])}" for name, title in sections.items() if made[name])
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
