"""What documents show of runs, in Markdown: one run's result, several runs side by side."""

from collections.abc import Sequence
from typing import Any

from presage.config import differences, preset
from presage.run import Run
from presage.tables import Rows, group, longest, planning


def summary(run: Run, tables: dict[str, Rows]) -> str:
    """The result of a run's newest network that was evaluated, as a Markdown table; and what it was made with."""
    rows = [row for row in tables["scores"] if row["run"] == run.path.name]
    own = longest([row for row in rows if row["own"]])
    newest = max((row["iteration"] for row in own if row["policy"] == "planned"), default=0)
    shown = [row for row in own if row["policy"] == "random" or row["iteration"] == newest]
    latest = {(row["game"], row["policy"]): row for row in shown}
    losses = {row["game"]: row for row in tables["heldout"] if row["run"] == run.path.name}  # the last iteration's
    lines = []
    for game in run.config.games:
        played = [interval(latest.get((game, policy))) for policy in ("random", "planned")]
        human = next((cell(row["human"]) for row in rows if row["game"] == game), "")
        known = [f"{losses[game][name]:.4f}" for name in ("cross_entropy", "baseline_cross_entropy")]
        lines.append([game, *played, human, *known])
    titles = ["game", "random play", "planned play", "human", "held-out loss", "the best constant's"]
    counted = [row for row in latest.values() if row["game"] in run.config.games]
    return f"{markdown(titles, lines)}\n{made(run)}; {protocol(counted)}.\n"


def comparison(runs: Sequence[Run], tables: dict[str, Rows]) -> str:
    """All runs side by side, in Markdown: what they scored, what they know, how they were made."""
    games = list(dict.fromkeys(row["game"] for row in tables["heldout"]))
    last = {(row["run"], row["game"]): row for row in tables["heldout"]}
    known = [[run.path.name, *(foreseen(last.get((run.path.name, game))) for game in games)] for run in runs]
    return "\n".join(
        [
            compared_scores(told(tables["scores"]), games),
            markdown(["run", *games], known),
            "The last network's loss on held-out cases of all iterations, each run's own (F1 of deaths, of points).\n",
            *([compared_asleep(tables["asleep"])] if tables["asleep"] else []),
            *([compared_probes(tables["probes"])] if tables["probes"] else []),
            *([compared_choices(tables["choices"])] if tables["choices"] else []),
            *(f"- {run.path.name}: {made(run)}" for run in runs),
            "",
        ]
    )


def company(rows: Rows) -> str:
    """What a game's networks scored by their own plans, learned with others or alone (S25), in Markdown: those of
    iterations that there are of both."""
    own = longest([row for row in rows if row["policy"] == "planned" and row["own"]])
    beside = [some for _, some in sorted(group(own, "game", "iteration").items())]
    both = [some for some in beside if len({row["tasks"] == 1 for row in some}) == 2]
    shown = [row for some in both for row in sorted(some, key=lambda row: -row["tasks"])]
    lines = []
    for row in shown:
        learned = "alone" if row["tasks"] == 1 else f"{row['tasks']} games"
        network = f"iteration {row['iteration']}"
        lines.append([row["game"], network, learned, row["run"], interval(row), cell(row["human"])])
    titles = ["game", "network", "learned", "run", "score", "human"]
    return f"{markdown(titles, lines)}\n{protocol(shown).capitalize()}.\n" if shown else ""


def compared_scores(rows: Rows, games: Sequence[str]) -> str:
    lines = []
    for (run, policy, iteration, how), some in group(rows, "run", "policy", "iteration", "plans").items():
        mine = {row["game"]: row for row in some}
        who = "random play" if policy == "random" else f"iteration {iteration}"
        lines.append([run, who, how, *(interval(mine.get(game)) for game in games)])
    return f"{markdown(['run', 'network', 'plans', *games], lines)}\n{protocol(rows).capitalize()}.\n"


def compared_asleep(rows: Rows) -> str:
    parts = list(dict.fromkeys(row["part"] for row in rows))
    networks = {(row["run"], row["part"]): row for row in rows}  # the last
    lines = [
        [run, *(f"{row['asleep']} of {row['units']}" if (row := networks.get((run, part))) else "" for part in parts)]
        for run in dict.fromkeys(row["run"] for row in rows)
    ]
    return f"{markdown(['run', *parts], lines)}\nThe last network's units that have lost all their weights.\n"


def compared_probes(rows: Rows) -> str:
    titles = ["run", "network", "plans", "game", "play", "sequences"]
    titles += ["loss", "the best constant's", "P(died) said", "happened", "F1"]
    lines = [
        [*probed_where(row), f"{row['cases']} {row['sequences']}"]
        + [f"{row[name]:.3f}" for name in ("cross_entropy", "baseline_cross_entropy")]
        + [percent(row[name]) for name in ("died_said", "died_happened")]
        + [f"{row['died_f1']:.2f}"]
        for row in rows
    ]
    caption = "Sequences played out from states of the network's own play, or of random play; deaths over all steps."
    return f"{markdown(titles, lines)}\n{caption}\n"


def compared_choices(rows: Rows) -> str:
    titles = ["run", "network", "plans", "game", "play", "moments", "random plans die", "chosen ones die", "told apart"]
    shares = ("random_died", "chosen_died", "told_apart")
    lines = [[*probed_where(row), str(row["moments"]), *(percent(row[name]) for name in shares)] for row in rows]
    caption = (
        "Of these moments those at which some random plans die and some do not. Told apart: of one that dies and one "
        "that does not, the first is thought the more dangerous (by chance 50 %)."
    )
    return f"{markdown(titles, lines)}\n{caption}\n"


def probed_where(row: dict[str, Any]) -> list[str]:
    where = "random play" if row["policy"] == "random" else "its own"
    return [row["run"], f"iteration {row['iteration']}", planning(row), row["game"], where]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def told(rows: Rows) -> Rows:
    """Of each run's own play the networks that are some run's first or last, so that runs can be compared; what was
    tried besides; and random play."""
    own = [row for row in rows if row["policy"] == "planned" and row["own"]]
    numbers = [[row["iteration"] for row in mine] for mine in group(own, "run").values()]
    ends = {end for mine in numbers for end in (min(mine), max(mine))}
    kept = [row for row in rows if row not in own or row["iteration"] in ends]
    order = list(dict.fromkeys(row["run"] for row in rows))
    return sorted(kept, key=lambda row: (order.index(row["run"]), row["policy"] == "planned", row["iteration"]))


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, *lines)).replace(
        "\n", "\n|" + "---|" * len(titles) + "\n", 1
    )


def made(run: Run) -> str:
    """The command that made a run, its time and its machine."""
    starts, laps = run.metrics("start"), run.metrics("iteration")
    minutes = sum(sum(lap["seconds"].values()) for lap in laps) / 60
    over = "over " if len(starts) > 1 else ""  # an interrupted process took its times with it
    usual = differences(run.config, preset(run.config.preset))
    options = "".join(f", {name} {usual[name][0]}" for name in sorted(usual) if name != "seed")
    start = starts[-1]
    low = ", bfloat16" * run.config.machine.bfloat16
    machine = f"{start['device']}{low}, torch {start['torch']}, commit {start['commit'] or 'unknown'}"
    command = f"`presage train --preset {run.config.preset}`, seed {run.config.seed}{options}"
    return f"{command}, {over}{minutes:.1f} minutes ({machine})"


def protocol(rows: Rows) -> str:
    if not rows:
        return "not evaluated"
    cap = f"{max(row['max_frames'] for row in rows):,} frames"
    numbers = sorted({row["episodes"] for row in rows})
    episodes = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
    return f"{episodes} episodes a game of at most {cap}, mean and 95 % interval"


def interval(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['mean']:.2f} ({row['ci95_low']:.2f} … {row['ci95_high']:.2f})"


def foreseen(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['cross_entropy']:.4f} ({row['died_f1']:.2f}, {row['scored_f1']:.2f})"


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "" if value is None else str(value)
