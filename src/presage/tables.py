"""What runs have measured, as rows."""

from collections.abc import Iterator, Sequence
from typing import Any

from presage.agent import read_config
from presage.arena import MAX_FRAMES
from presage.config import at
from presage.evaluation import bootstrap
from presage.games import find
from presage.probe import KINDS
from presage.run import Run, read_lines
from presage.store import HELDOUT
from presage.tasks import human_normalized

Rows = list[dict[str, Any]]


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


def asleep(runs: Sequence[Run]) -> Rows:
    """Units of each part that have lost all their weights; older runs did not count them."""
    counted = [(run.path.name, line) for run in runs for line in run.metrics("heldout") if "asleep" in line]
    return [
        {"run": name, "iteration": line["iteration"], "part": part, "asleep": some, "units": units}
        for name, line in counted
        for part, (some, units) in line["asleep"].items()
    ]


def scores(runs: Sequence[Run]) -> Rows:
    """A row for each network, game and way of playing; episodes of several seeds count as one evaluation."""
    rows = []
    for run in runs:
        pools: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
        for line in run.evaluations():
            for game, values in line["games"].items():
                way = (game, line["policy"], line["iteration"], *plans(run, line, game), line["max_frames"])
                pools.setdefault(way, {})[line["seed"]] = values  # the same once more takes the former's place
        for way, seeds in pools.items():
            names = ("game", "policy", "iteration", "plans", "own", "max_frames")
            row = {"run": run.path.name, "tasks": len(run.config.games)} | dict(zip(names, way, strict=True))
            rows.append(row | {"seeds": " ".join(map(str, seeds))} | pooled(seeds))
    return rows


def pooled(seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Several evaluations, by their seeds, as one."""
    first, every = next(iter(seeds)), [score for values in seeds.values() for score in values["scores"]]
    mean, (low, high) = sum(every) / len(every), bootstrap(every, first)
    row = {"mean": mean, "ci95_low": low, "ci95_high": high, "episodes": len(every)}
    random, human = (seeds[first][name] for name in ("random", "human"))
    return row | {"random": random, "human": human, "human_normalized": human_normalized(mean, random, human)}


def plans(run: Run, line: dict[str, Any], game: str) -> tuple[str, bool]:
    """How an evaluation planned, and whether the run's next iteration would: else it was made to compare."""
    cut = f"at most {line['max_frames']:,} frames" * (line["max_frames"] != MAX_FRAMES)
    if line["policy"] == "random":
        sticky = f"sticky {line['sticky']}" * (line["sticky"] > 0)
        return ", ".join(filter(None, (sticky, cut))), line["sticky"] == run.config.data.sticky
    plan, plays = run.config.plan, line["iteration"] + 1
    specs = {spec.name: spec.thresholds for spec in read_config(run.path)[1]}
    bound = at(specs[game] if game in specs else find([game])[0].thresholds, plays)
    own = {
        "k": int(at(plan.k, plays)),
        "threshold": plan.thresholds.get(game, bound),
        "carry": plan.carry,
        "monotone": plan.monotone,
        "hold": run.config.data.hold,
        "sticky": run.config.data.sticky,
    }
    used = own | {name: line[name] for name in own if name in line}
    used["threshold"] = line.get("thresholds", {}).get(game, own["threshold"])
    told = [planning(used), f"threshold {used['threshold']}" * (used["threshold"] != own["threshold"])]
    told += [f"sticky {used['sticky']}" * (used["sticky"] > 0), cut]
    return ", ".join(filter(None, told)), used == own


def planning(used: dict[str, Any]) -> str:
    """Of how plans are made what is not the paper's."""
    told = [f"k {used['k']}", "monotone" * used["monotone"], "nothing carried over" * (not used["carry"])]
    return ", ".join(filter(None, [*told, f"hold {used['hold']:g}" * (used["hold"] > 1)]))


def played(runs: Sequence[Run]) -> Rows:
    """What was scored while playing to learn: means of the episodes that ended within their shard, so long ones are
    missing; but of very many."""
    rows = []
    for run in runs:
        shards = [line for line in run.metrics("collect") if line["shard"] != HELDOUT]
        for iteration in sorted({line["iteration"] for line in shards}):
            for game in run.config.games:
                mine = [line["games"][game] for line in shards if line["iteration"] == iteration]
                ended = [shard for shard in mine if shard["episodes"]]
                episodes = sum(shard["episodes"] for shard in ended)
                total = sum(shard["episodes"] * shard["mean_score"] for shard in ended)
                row = {"run": run.path.name, "tasks": len(run.config.games), "iteration": iteration, "game": game}
                rows.append(row | {"episodes": episodes, "mean": total / episodes if episodes else None})
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


def probes(runs: Sequence[Run]) -> Rows:
    """What `presage evaluate --probe` found: plans tried out at moments of planned or random play."""
    return [
        row | {"sequences": kind} | flat(found[kind]) | overall(found[kind]["calibration"]["died"])
        for row, found in probed(runs)
        for kind in KINDS
    ]


def choices(runs: Sequence[Run]) -> Rows:
    """How well plans were chosen at those of these moments at which it mattered."""
    return [row | found["choices"] for row, found in probed(runs) if "choices" in found]  # which older probes lack


def probed(runs: Sequence[Run]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each network, way to plan and game the last."""
    last: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    for run in runs:
        for line in read_lines(run.path / "probes.jsonl"):
            how = {name: line[name] for name in ("iteration", "k", "monotone")}
            older = {"carry": True, "hold": 1.0, "policy": "planned"}  # what older probes do not say
            how |= {name: line.get(name, usual) for name, usual in older.items()}
            for game, found in line["games"].items():
                row = {"run": run.path.name} | how | {"threshold": line.get("thresholds", {}).get(game), "game": game}
                last[tuple(row.values())] = row, found
    yield from last.values()


def overall(bins: Rows) -> dict[str, float]:
    """What was said of dying and what happened, over all steps."""
    cases = sum(one["cases"] for one in bins)
    return {f"died_{name}": sum(one["cases"] * one[name] for one in bins) / cases for name in ("said", "happened")}


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


ALL = (learning, heldout, asleep, played, scores, speed, knowledge, probes, choices, steps, calibration)


def longest(rows: Rows) -> Rows:
    """Of one run's evaluations those whose episodes were cut the latest: others do not compare."""
    latest = max((row["max_frames"] for row in rows), default=0)
    return [row for row in rows if row["max_frames"] == latest]


def group(rows: Rows, *names: str) -> dict[tuple[Any, ...], Rows]:
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
