"""What the figures of a report look like. Each function draws one, as PNG and SVG, and returns the SVG's path."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from presage.errors import UsageError
from presage.run import Run
from presage.tables import Rows, group, longest

COLOURS = ("#2f6f9f", "#c8553d", "#588157", "#8d6a9f", "#b08900", "#4a4e69")
GREY = "#8a8a8a"
STYLES = ("-", "--", ":", "-.")


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


def curves(runs: Sequence[Run], stem: Path) -> Path:
    """Left the training loss; right, for each game, the held-out loss as a share of the best constant's."""
    figure, (left, right) = plotting().subplots(1, 2, figsize=(10, 3.6))
    for run, style in zip(runs, cycle(STYLES)):
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
        at_iterations(axis)
        axis.legend(frameon=False)
    figure.tight_layout()
    return save(figure, stem)


def at_iterations(axis: Any) -> None:
    """Ticks at whole iterations, even where there is but one."""
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def by_game(rows: Rows, stem: Path, draw: Callable[[Any, Rows], None], label: str, legend: str = "") -> Path | None:
    """One picture beside the other, a game each, and one legend for all; nothing where there are no rows."""
    games = list(dict.fromkeys(row["game"] for row in rows))
    if not games:
        return None
    figure, axes = plotting().subplots(1, len(games), figsize=(3.6 * len(games), 3.3), squeeze=False)
    for axis, game in zip(axes[0], games, strict=True):
        axis.set_title(game)
        draw(axis, [row for row in rows if row["game"] == game])
    axes[0][0].set_ylabel(label)
    lines = {text: line for axis in axes[0] for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(lines) > 1:
        axes[0][-1].legend(
            lines.values(), lines, title=legend, frameon=False, loc="upper left", bbox_to_anchor=(1.02, 1.02)
        )
    figure.tight_layout()
    return save(figure, stem)


def scores(rows: Rows, stem: Path) -> Path | None:
    """Evaluations with their 95 % intervals: over iterations, beside random and human scores as published, where
    several of a run's were evaluated; else a point for each."""
    planned = group([row for row in rows if row["policy"] == "planned"], "run")
    over_iterations = any(len({row["iteration"] for row in mine}) > 1 for mine in planned.values())
    draw = _scores_over_iterations if over_iterations else _scores_side_by_side
    return by_game(rows, stem, draw, "score, mean and 95 % interval")


def _scores_over_iterations(axis: Any, rows: Rows) -> None:
    for name, style in (("human", "--"), ("random", ":")):
        if rows[0][name] is not None:
            axis.axhline(rows[0][name], color=GREY, ls=style, lw=1)
            axis.annotate(name, (0.01, rows[0][name]), (0, 2), ("axes fraction", "data"), "offset points", color=GREY)
    planned = [row for row in rows if row["policy"] == "planned" and row["own"]]
    for name, colour, some in named_lines(planned):
        latest = {row["iteration"]: row for row in longest(some)}
        mine = [latest[iteration] for iteration in sorted(latest)]
        x, y = [row["iteration"] for row in mine], [row["mean"] for row in mine]
        axis.plot(x, y, "o-", color=colour, ms=3.5, label=name)
        low, high = ([row[end] for row in mine] for end in ("ci95_low", "ci95_high"))
        axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        axis.vlines(x, low, high, color=colour, lw=1)  # a band has no width where there is one network only
    axis.set_xlabel("iterations")
    at_iterations(axis)


def named_lines(rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    """A name, a colour and the rows of each run. Beside networks of several games, those of one are all named alike, so
    that a game's picture shows what the company of others does (S25)."""
    several = any(row["tasks"] > 1 for row in rows)
    runs = {run: mine for (run,), mine in group(rows, "run").items()}
    names = {run: "this game alone" if several and mine[0]["tasks"] == 1 else run for run, mine in runs.items()}
    colours = dict(zip(dict.fromkeys(names.values()), cycle(COLOURS)))
    for run, mine in runs.items():
        yield names[run], colours[names[run]], mine


def _scores_side_by_side(axis: Any, rows: Rows) -> None:
    for i, row in enumerate(rows):
        colour = GREY if row["policy"] == "random" else COLOURS[0]
        spread = [[row["mean"] - row["ci95_low"]], [row["ci95_high"] - row["mean"]]]
        axis.errorbar([i], [row["mean"]], spread, fmt="o", color=colour, capsize=4)
    axis.set_xticks(range(len(rows)), telling_labels(rows), rotation=30, ha="right")
    axis.set_xlim(-0.6, len(rows) - 0.4)


def telling_labels(rows: Rows) -> list[str]:
    """Of each evaluation only what tells it from the others."""
    planned = [row for row in rows if row["policy"] == "planned"]
    telling = [name for name in ("run", "iteration", "plans") if len({row[name] for row in planned}) > 1]

    def label(row: dict[str, Any]) -> str:
        if row["policy"] == "random":
            return f"{row['run']}, random" if "run" in telling else "random"
        told = {"run": row["run"], "iteration": f"it. {row['iteration']}", "plans": row["plans"]}
        return ", ".join(told[name] for name in telling) or "planned"

    return [label(row) for row in rows]


def played(rows: Rows, stem: Path) -> Path | None:
    """Scores while playing to learn."""

    def draw(axis: Any, rows: Rows) -> None:
        for name, colour, mine in named_lines(rows):
            ended = [row for row in mine if row["mean"] is not None]
            x, y = [row["iteration"] for row in ended], [row["mean"] for row in ended]
            axis.plot(x, y, "o-", color=colour, ms=3.5, label=name)
        axis.set_xlabel("iterations")
        at_iterations(axis)

    return by_game(rows, stem, draw, "score of episodes that ended")


def forgetting(rows: Rows, stem: Path) -> Path | None:
    """How well deaths of a given iteration's play are foreseen by the networks of all iterations (S26)."""

    def draw(axis: Any, rows: Rows) -> None:
        groups = group([row for row in rows if row["died_positives"]], "played")  # where somebody died
        for number, colour in zip(shown, cycle(COLOURS)):
            mine = sorted(groups.get((number,), []), key=lambda row: row["iteration"])
            values = [row["died_f1"] for row in mine]
            axis.plot([row["iteration"] for row in mine], values, "o-", ms=3.5, color=colour, label=f"{number}")
        axis.set(xlabel="network of iteration", ylim=(0, 1.02))
        at_iterations(axis)

    played = sorted({row["played"] for row in rows})
    shown = played[:: max(1, -(-len(played) // 5))]  # five lines at most
    return by_game(rows, stem, draw, "F1 of deaths", "played in\niteration")


def calibration(rows: Rows, stem: Path) -> Path | None:
    """How often what was said with a probability happened; on the diagonal, as often as said."""

    def draw(axis: Any, rows: Rows) -> None:
        axis.plot([0, 1], [0, 1], color=GREY, lw=1)
        _by_play_and_outcome(axis, rows, "said", lambda row: row["happened"])
        axis.set(xlabel="probability foretold", xlim=(0, 1), ylim=(0, 1), aspect="equal")

    return by_game(rows, stem, draw, "share that happened")


def steps(rows: Rows, stem: Path) -> Path | None:
    """The loss at each step ahead as a share of the best constant's."""

    def draw(axis: Any, rows: Rows) -> None:
        axis.axhline(1, color=GREY, lw=1)
        known = [row for row in rows if row["baseline_cross_entropy"] > 0]  # not where nothing ever happens
        _by_play_and_outcome(axis, known, "step", lambda row: row["cross_entropy"] / row["baseline_cross_entropy"])
        axis.set(xlabel="steps ahead", ylim=(0, 1.1))

    return by_game(rows, stem, draw, "held-out loss / the constant's")


def _by_play_and_outcome(axis: Any, rows: Rows, x: str, y: Callable[[dict[str, Any]], float]) -> None:
    for (outcome, play), mine in group(rows, "outcome", "play").items():
        colour, style = COLOURS[1 if outcome == "died" else 0], "-" if play == "planned" else ":"
        values = [row[x] for row in mine], [y(row) for row in mine]
        axis.plot(*values, style, marker="o", ms=3, color=colour, label=f"{outcome},\n{play} play")
