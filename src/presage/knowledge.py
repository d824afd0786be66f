"""What a network knows about cases it has never seen: by game, by step ahead, and how far to trust its numbers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from presage.agent import Agent
from presage.batches import Batch, assemble, heldout_rows
from presage.collect import are_there, shard_files
from presage.errors import UsageError
from presage.games import find
from presage.model import Model
from presage.progress import Bar
from presage.store import HELDOUT, Budget, Store, shard_lengths
from presage.tasks import Task

CASES = 2_000  # a game, or a game and an iteration
AT_ONCE = 250
BINS = 10  # of probabilities, evenly wide
OUTCOMES = ("died", "scored")


class Foretold(NamedTuple):
    """What was said of some cases and what then happened."""

    p: Tensor  # float64 [n, H, 2]: P(died), P(scored) after each step
    happened: Tensor  # bool [n, H, 2]
    mask: Tensor  # bool [n, H]: False where nobody knows


@torch.inference_mode()
def foretell(model: Model, store: Store, rows: np.ndarray[Any, Any], horizon: int) -> Foretold:
    model.eval()
    parts = []
    for some in np.array_split(rows, math.ceil(len(rows) / AT_ONCE)):
        batch = assemble(store, torch.from_numpy(some).to(store.home), horizon)
        batch = Batch(*(tensor.to(store.device) for tensor in batch))
        logits = model(batch.frames, batch.controls)
        parts.append((logits.sigmoid(), torch.stack([batch.died, batch.scored], -1), batch.mask))
    p, happened, mask = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return Foretold(p.double(), happened, mask)


def heldout(model: Model, store: Store, horizon: int) -> dict[str, dict[str, Any]]:
    """For each game: cross-entropy beside the best constant's, precision, recall, F1."""
    rows = {task.name: heldout_rows(store, index, CASES) for index, task in enumerate(store.tasks)}
    return {name: scores(foretell(model, store, of_game, horizon)) for name, of_game in rows.items()}


def scores(foretold: Foretold) -> dict[str, Any]:
    p, happened, mask = foretold
    return {
        "cases": len(p),
        "cross_entropy": cross_entropy(*foretold),
        "baseline_cross_entropy": cross_entropy(constant(foretold), happened, mask),
        **{name: detection(p[..., i], happened[..., i], mask) for i, name in enumerate(OUTCOMES)},
    }


def constant(foretold: Foretold) -> Tensor:
    """The strongest constant [n, H, 2]: for each step ahead and outcome the rate in this very set."""
    weight = foretold.mask[..., None].double()
    rate = (foretold.happened * weight).sum(0) / weight.sum(0).clamp(min=1)  # [H, 2]
    return rate.expand_as(foretold.p)


def cross_entropy(p: Tensor, happened: Tensor, mask: Tensor) -> float:
    """The mean over cases, steps and, if there are several, outcomes."""
    sure = p.clamp(1e-12, 1 - 1e-12)
    each = -torch.where(happened, sure.log(), (1 - sure).log())
    weight = mask.double().view(*mask.shape, *[1] * (p.dim() - mask.dim())).expand_as(p)
    return float((each * weight).sum() / weight.sum().clamp(min=1))


def detection(p: Tensor, happened: Tensor, mask: Tensor) -> dict[str, float]:
    """Of 'this will happen' said where P > 1/2: how often right, and how much of what happened was foreseen."""
    said, happened = (p > 0.5) & mask, happened & mask
    right = float((said & happened).sum())
    precision = right / max(float(said.sum()), 1.0)
    recall = right / max(float(happened.sum()), 1.0)
    f1 = 2 * precision * recall / max(precision + recall, 1e-12)
    return {"precision": precision, "recall": recall, "f1": f1, "positives": float(happened.sum())}


def by_step(foretold: Foretold) -> dict[str, list[dict[str, float]]]:
    """For each outcome and step ahead."""
    p, happened, mask = foretold
    known = constant(foretold)
    return {
        name: [
            {
                "cross_entropy": cross_entropy(p[:, step, i], happened[:, step, i], mask[:, step]),
                "baseline_cross_entropy": cross_entropy(known[:, step, i], happened[:, step, i], mask[:, step]),
                **detection(p[:, step, i], happened[:, step, i], mask[:, step]),
            }
            for step in range(p.shape[1])
        ]
        for i, name in enumerate(OUTCOMES)
    }


def calibration(foretold: Foretold) -> dict[str, list[dict[str, float]]]:
    """For each outcome, of all that was said with about the same probability: how much of it happened."""
    p, happened, mask = foretold
    curves: dict[str, list[dict[str, float]]] = {}
    for i, name in enumerate(OUTCOMES):
        said, came = p[..., i][mask], happened[..., i][mask].double()
        bins = (said * BINS).long().clamp(max=BINS - 1)
        count, total, right = (
            torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, part)
            for part in (torch.ones_like(said), said, came)
        )
        curves[name] = [
            {"cases": float(n), "said": float(t / n), "happened": float(r / n)}
            for n, t, r in zip(count, total, right, strict=True)
            if n > 0
        ]
    return curves


def examine(agent: Agent, run: Path, games: Sequence[str | Task] | None = None) -> dict[str, Any]:
    """How well an agent foresees the held-out cases of every iteration that lies in a run's folder; in detail, those of
    random play and those of planned play."""
    tasks = find(list(agent.config.games) if games is None else games)
    iterations = range(1, agent.config.iterations + 1)
    played = [i for i in iterations if are_there(shard_files(run, i, HELDOUT, tasks))]
    if not played:
        raise UsageError(f"there are no held-out cases in {run}: its data were not kept.")
    by_iteration: dict[int, dict[str, Foretold]] = {}
    with Bar("held-out cases", len(played), "iterations") as bar:
        for iteration in played:
            by_iteration[iteration] = _of_iteration(agent, run, iteration, tasks)
            bar.advance()
    of_play = {"random": [i for i in played if i == 1], "planned": [i for i in played if i > 1]}
    found = {
        "iteration": agent.iteration,
        "played": {i: {name: scores(foretold) for name, foretold in f.items()} for i, f in by_iteration.items()},
        **{
            name: {task.name: _detail([by_iteration[i][task.name] for i in some]) for task in tasks}
            for name, some in of_play.items()
            if some
        },
    }
    return dict(_rounded(found))


def _of_iteration(agent: Agent, run: Path, iteration: int, tasks: Sequence[Task]) -> dict[str, Foretold]:
    data = agent.config.data
    rows = shard_lengths(agent.config, iteration)[HELDOUT] * data.envs * len(tasks)
    store = Store(tasks, Budget(rows, "memory", {}), agent.device)
    for index, file in enumerate(shard_files(run, iteration, HELDOUT, tasks)):
        store.add(file, iteration, index, heldout=True)
    return {
        task.name: foretell(agent.model, store, heldout_rows(store, index, CASES), data.horizon)
        for index, task in enumerate(tasks)
    }


def _rounded(value: Any) -> Any:
    """Thousands of figures, each as exact as it means something."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


def _detail(parts: Sequence[Foretold]) -> dict[str, Any]:
    together = Foretold(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    return {**scores(together), "steps": by_step(together), "calibration": calibration(together)}
