"""A moment as SVG: the page, the films and the report show the same pictures.

Colours are classes, so that a page's style sheet can follow the reader's; `style` makes one.
"""

import base64
import io
import math
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np

from presage.errors import UsageError
from presage.live import REMEMBERED, Moment
from presage.pools import Array
from presage.tasks import Control

LEAST = 1e-4  # probabilities are drawn between this and its complement, by their log-odds
TICKS = ((0.001, "0.1 %"), (0.01, "1 %"), (0.1, "10 %"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"))
SCENE = (960, 540)  # a film's pixels
GAME = (16, 56, 448, 336)  # left, top, width and height of the screen in it
NAMES = {"died": "P(died)", "scored": "P(scored)"}

LIGHT = {
    "paper": "#fbfaf8", "ink": "#22262b", "faint": "#8b8f96", "line": "#dfe1e4",
    "died": "#c8443a", "scored": "#2468a8", "safe": "#6f9fc4", "ruled": "#c9c3bd", "pad": "#eceae6",
}  # fmt: skip
DARK = {
    "paper": "#14161a", "ink": "#e8e6e3", "faint": "#8d939c", "line": "#343941",
    "died": "#f0695d", "scored": "#6db3f2", "safe": "#4f7ea6", "ruled": "#4a4744", "pad": "#2a2e35",
}  # fmt: skip


def style(colours: dict[str, str]) -> str:
    """A style sheet for everything below."""
    c = colours
    return "\n".join(
        [
            f"svg text {{ fill: {c['ink']}; font-family: system-ui, 'DejaVu Sans', sans-serif; font-size: 12px; }}",
            f"svg text.faint {{ fill: {c['faint']}; font-size: 10px; }}",
            "svg text.title { font-size: 20px; font-weight: bold; }",
            "svg text.strong { font-weight: bold; }",
            f".paper {{ fill: {c['paper']}; }} .pad {{ fill: {c['pad']}; }}",
            f".lit {{ fill: {c['scored']}; }} .arrow {{ fill: {c['ink']}; }}",
            f".line {{ stroke: {c['line']}; fill: none; }}",
            f".ruled {{ stroke: {c['ruled']}; fill: none; stroke-width: 0.7; }}",
            f".safe {{ stroke: {c['safe']}; fill: none; stroke-width: 0.8; }}",
            f".limit {{ stroke: {c['ink']}; fill: none; stroke-dasharray: 5 4; }}",
            *(f".{name} {{ stroke: {c[name]}; fill: none; stroke-width: 2.5; }}" for name in NAMES),
            *(f".{name}-mark, svg text.{name}-mark {{ fill: {c[name]}; }}" for name in NAMES),
            *(f".{name}-band {{ fill: {c[name]}; opacity: 0.13; }}" for name in NAMES),
        ]
    )


def svg(width: float, height: float, *parts: str, x: float = 0, y: float = 0, label: str = "") -> str:
    name = f'role="img" aria-label="{escape(label)}"' if label else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {place} {name}>{"".join(parts)}</svg>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: Iterable[tuple[float, float]]) -> str:
    """A path's data."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def path(kind: str, *lines: str) -> str:
    return f'<path class="{kind}" d="{"".join(lines)}"/>'


def game(moment: Moment, x: float = 0, y: float = 0) -> str:
    """The screen in its own colours, 4:3 as a television's, whatever its pixels are."""
    _, _, width, height = GAME
    image = (
        f'<image width="{width:g}" height="{height:g}" preserveAspectRatio="none" style="image-rendering: pixelated" '
        f'href="data:image/png;base64,{png(moment.picture)}"/>'
    )
    return svg(width, height, image, x=x, y=y, label=f"{moment.game}, score {moment.score:g}")


def png(picture: Array) -> str:
    """base64"""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("pictures need Pillow: pip install 'presage[viewer]' or 'presage[video]'.") from None
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def outlook(moment: Moment, outcome: str, width: float = 464, height: float = 158, x: float = 0, y: float = 0) -> str:
    """What may come: every candidate's probability after each step, and in bold that of what is about to be played."""
    plan = moment.plan
    candidates, chosen = (
        (plan.candidates_p_died, moment.p_died) if outcome == "died" else (plan.candidates_p_scored, moment.p_scored)
    )
    left, right, top, bottom = 44.0, width - 8, 26.0, height - 20
    steps = np.linspace(left, right, candidates.shape[1])

    def level(p: Any) -> Any:
        """Where a probability lies: by its log-odds, so that one sees 1 in 1,000 as well as 1 in 2."""
        p = np.clip(p, LEAST, 1 - LEAST)
        span = math.log((1 - LEAST) / LEAST)
        return bottom - (np.log(p / (1 - p)) + span) / (2 * span) * (bottom - top)

    def lines(some: Array) -> list[str]:
        return [line(zip(steps, level(row), strict=True)) for row in some]

    parts = [path("line", *(f"M{left} {level(p):.1f}H{right}" for p, _ in TICKS))]
    parts += [text(left - 6, level(p) + 3.5, name, "faint", "end") for p, name in TICKS]
    parts += [path("ruled", *lines(candidates[~plan.safe])), path("safe", *lines(candidates[plan.safe]))]
    if outcome == "died" and plan.threshold > 0:
        height_of_bound = level(plan.threshold)
        parts.append(path("limit", f"M{left} {height_of_bound:.1f}H{right}"))
        parts.append(text(right, height_of_bound - 4, "the bound", "faint", "end"))
    parts.append(path(outcome, *lines(chosen[None])))
    said = f"{NAMES[outcome]} in {len(steps)} steps: {percent(chosen[-1])}"
    others = f"{len(candidates)} plans, grey: ruled out"
    parts += [text(left, 16, said, f"strong {outcome}-mark"), text(right, 16, others, "faint", "end")]
    parts += [text(steps[i], height - 6, str(i + 1), "faint", "middle") for i in range(4, len(steps), 5)]
    return svg(width, height, *parts, x=x, y=y, label=said)


def percent(p: float) -> str:
    return f"{100 * p:.0f} %" if p >= 0.095 else f"{100 * p:.2g} %" if p >= 0.0001 else "under 0.01 %"


def controls(moment: Moment, width: float = 448, height: float = 118, x: float = 0, y: float = 0) -> str:
    """The stick and the button as they are pressed now; the planned sequence after it, a cell a step."""
    shoot, across, up = moment.controls[moment.action]
    cx, cy, reach = 56.0, 60.0, 20.0
    moved = "lit" if across or up else "arrow"
    stick = [
        f'<circle class="pad" cx="{cx}" cy="{cy}" r="40"/>',
        f'<circle class="{moved}" cx="{cx + reach * across}" cy="{cy - reach * up}" r="15"/>',
        f'<circle class="{"lit" if shoot else "pad"}" cx="128" cy="{cy}" r="17"/>',
        text(128, cy + 34, "fire", "faint", "middle"),
    ]
    left, cell = 170.0, (width - 170 - 8) / 13
    cells = []
    for i, action in enumerate(moment.sequence[:26]):
        row, column = divmod(i, 13)
        cells.append(key(moment.controls[int(action)], left + column * cell, 34 + row * 40, cell))
    what = "what you hold down" if moment.person else "what it plans to press"
    return svg(width, height, *stick, text(left, 20, what, "faint"), *cells, x=x, y=y)


def key(control: Control, x: float, y: float, size: float) -> str:
    """One step of a sequence: an arrow, or a dot for doing nothing; a bar below it for shooting."""
    shoot, across, up = control
    cx, cy, r = x + size / 2, y + 13, size * 0.33
    if across or up:
        turn = math.degrees(math.atan2(-up, across))
        d = f"M{r:.1f} 0L{-r * 0.7:.1f} {r * 0.75:.1f}V{-r * 0.75:.1f}Z"
        mark = f'<path class="arrow" d="{d}" transform="translate({cx:.1f} {cy:.1f}) rotate({turn:.0f})"/>'
    else:
        mark = f'<circle class="pad" cx="{cx:.1f}" cy="{cy:.1f}" r="3"/>'
    bar = f'<rect class="lit" x="{cx - r:.1f}" y="{cy + 11:.1f}" width="{2 * r:.1f}" height="3"/>' if shoot else ""
    return mark + bar


def history(moment: Moment, width: float = 464, height: float = 118, x: float = 0, y: float = 0) -> str:
    """What was foretold and what then happened. The steps in which an event could have been foreseen are shaded:
    where the line is low there, it came as a surprise."""
    left, right, top, bottom = 44.0, width - 8, 26.0, height - 8
    horizon = len(moment.sequence)
    past = moment.past
    columns = right - (len(past) - 1 - np.arange(len(past))) * (right - left) / (REMEMBERED - 1)
    step = (right - left) / (REMEMBERED - 1)
    parts = [path("line", *(f"M{left} {bottom - p * (bottom - top):.1f}H{right}" for p in (0, 0.5, 1)))]
    parts += [
        text(left - 6, bottom - p * (bottom - top) + 3.5, f"{100 * p:.0f} %", "faint", "end") for p in (0, 0.5, 1)
    ]
    for outcome in NAMES:
        at = [columns[i] for i, one in enumerate(past) if getattr(one, outcome)]
        for place in at:
            start = max(place - (horizon - 1) * step, left)
            parts.append(
                f'<rect class="{outcome}-band" x="{start:.1f}" y="{top}" width="{place - start:.1f}" '
                f'height="{bottom - top}"/><circle class="{outcome}-mark" cx="{place:.1f}" cy="{top}" r="4"/>'
            )
    if past:
        for outcome in NAMES:
            values = [getattr(one, f"p_{outcome}") for one in past]
            heights = [bottom - p * (bottom - top) for p in values]
            parts.append(path(outcome, line(zip(columns, heights, strict=True))))
    parts.append(text(left, 14, "foretold (lines) and what then happened (dots)", "faint"))
    return svg(width, height, *parts, x=x, y=y, label="what was foretold and what happened")


def facts(moment: Moment) -> list[str]:
    lives = [] if moment.lives is None else [f"lives {moment.lives}"]
    who = "you play" if moment.person else "the agent plays"
    seen = "" if moment.known else ", which never saw this game"
    return [f"score {moment.score:g}", *lives, f"step {moment.step}", f"network {moment.iteration}{seen}", who]


def scene(moment: Moment, screen: bool = True) -> str:
    """Everything in one picture, for films; or all but the screen."""
    width, height = SCENE
    left, top, *_ = GAME
    parts = [
        f'<rect class="paper" width="{width}" height="{height}"/>',
        text(16, 36, moment.game.replace("_", " "), "title"),
        text(width - 16, 36, " · ".join(facts(moment)), "", "end"),
        game(moment, left, top) if screen else "",
        outlook(moment, "died", x=480, y=56),
        outlook(moment, "scored", x=480, y=222),
        text(524, 398, moment.plan.reason, "faint"),
        controls(moment, x=16, y=408),
        history(moment, x=480, y=408),
    ]
    return svg(width, height, *parts)


def rasterise(picture: str, colours: dict[str, str]) -> Array:
    """uint8 [H, W, 3]"""
    try:
        import imageio.v3 as imageio
        import matplotlib
        import resvg_py
    except ImportError:
        raise UsageError("films need more packages: pip install 'presage[video]'.") from None
    fonts = [f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans{kind}.ttf" for kind in ("", "-Bold")]
    sheet = style(colours).replace("system-ui, ", "")  # the same letters on every machine
    data = resvg_py.svg_to_bytes(svg_string=picture, style_sheet=sheet, font_files=fonts, skip_system_fonts=True)
    return np.asarray(imageio.imread(bytes(data))[..., :3])
