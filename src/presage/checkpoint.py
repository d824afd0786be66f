"""Everything needed to go on: the network, the optimiser, how far training is. Safetensors and JSON, never pickle."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from presage import __version__
from presage.batches import Measured
from presage.errors import RunError, UsageError
from presage.files import checksum, encode_tensors, flush_folder, read_json, read_tensors, write_bytes, write_json
from presage.model import Model

FORMAT = 1  # of checkpoints, exports and config.json; raised when an older presage could not read them
FINISHED = re.compile(r"iter-(\d+)")
UNFINISHED = re.compile(r"partial-(\d+)-(\d+)")


@dataclass(frozen=True, order=True)
class Position:
    """How far a run is: updates done of an iteration's training."""

    iteration: int
    update: int
    finished: bool

    def is_past(self, iteration: int) -> bool:
        """That iteration's training is done."""
        return iteration < self.iteration or (iteration == self.iteration and self.finished)

    @property
    def folder(self) -> str:
        return f"iter-{self.iteration:02d}" if self.finished else f"partial-{self.iteration:02d}-{self.update:07d}"


def save(
    run: Path,
    position: Position,
    model: Model,
    optimizer: torch.optim.Adam,
    measured: Measured | None = None,
) -> None:
    """A new folder appears at once and whole; older unfinished ones then go. A network that is lost is not saved.

    measured: the cases that are drawn from until others are measured, in the middle of an iteration.
    """
    if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        raise RunError("the network's weights are no longer numbers; the last checkpoint stands: use a lower --lr.")
    folder, building = run / "checkpoints" / position.folder, run / "checkpoints" / ".saving"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        files = {
            "model.safetensors": encode_tensors(model.state_dict()),
            "optimizer.safetensors": encode_tensors(_flatten(optimizer)),
        }
        if measured is not None:
            files["measured.safetensors"] = encode_tensors(measured._asdict())
        for name, data in files.items():
            write_bytes(building / name, data)
        state = {"format": FORMAT, "version": __version__, "iteration": position.iteration, "update": position.update}
        write_json(building / "state.json", {**state, "sha256": {name: checksum(d) for name, d in files.items()}})
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(building, folder)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise RunError(f"cannot save {folder}: {error.strerror}; the checkpoint before it is intact.") from error
    except RunError:
        shutil.rmtree(building, ignore_errors=True)
        raise
    flush_folder(folder.parent)
    for other, path in _all(run):
        if not other.finished and other != position:
            shutil.rmtree(path, ignore_errors=True)


def newest(run: Path) -> Position | None:
    return max((position for position, _ in _all(run)), default=None)


def finished(run: Path) -> list[int]:
    """Iterations whose training is done."""
    return sorted(position.iteration for position, _ in _all(run) if position.finished)


def load_model(folder: Path, model: Model) -> None:
    """The network's weights, from a checkpoint or an export."""
    state = read_json(folder / ("state.json" if (folder / "state.json").exists() else "agent.json"))
    check_format(state.get("format"), folder)
    tensors = read_tensors(folder / "model.safetensors", _recorded(state, folder, "model.safetensors"))
    expected = model.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys()) or [n for n in expected if expected[n].shape != tensors[n].shape]
    if wrong:
        raise RunError(f"{folder} holds another network than its configuration says: {wrong[0]} differs.")
    model.load_state_dict(tensors)


def load(run: Path, position: Position, model: Model, optimizer: torch.optim.Adam) -> Measured | None:
    """Restore both; the cases that were measured, if any."""
    folder = run / "checkpoints" / position.folder
    try:
        load_model(folder, model)
        state = read_json(folder / "state.json")
        _restore(
            optimizer, read_tensors(folder / "optimizer.safetensors", _recorded(state, folder, "optimizer.safetensors"))
        )
        name = "measured.safetensors"
        return Measured(**read_tensors(folder / name, state["sha256"][name])) if name in state["sha256"] else None
    except RunError as error:
        raise RunError(f"{error} Delete {folder} to go on from the checkpoint before it.") from None


def check_format(number: object, where: Path) -> None:
    if not isinstance(number, int):
        raise RunError(f"{where} is damaged: it does not say its format.")
    if number > FORMAT:
        raise UsageError(
            f"{where} was written by a newer presage (format {number}, this one reads {FORMAT}): upgrade presage."
        )


def _recorded(state: dict[str, object], folder: Path, name: str) -> str:
    sums = state.get("sha256")
    if not isinstance(sums, dict) or name not in sums:
        raise RunError(f"{folder} is damaged: the checksum of {name} is not recorded.")
    return str(sums[name])


def _all(run: Path) -> Iterator[tuple[Position, Path]]:
    for path in (run / "checkpoints").glob("*"):
        if match := FINISHED.fullmatch(path.name):
            yield Position(int(match[1]), 2**62, True), path  # after every unfinished one of its iteration
        elif match := UNFINISHED.fullmatch(path.name):
            yield Position(int(match[1]), int(match[2]), False), path


def _flatten(optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    return {f"{i}.{name}": t for i, entry in optimizer.state_dict()["state"].items() for name, t in entry.items()}


def _restore(optimizer: torch.optim.Adam, tensors: dict[str, Tensor]) -> None:
    parameters = optimizer.param_groups[0]["params"]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".")
        if tensor.dim():  # moments must lie in memory as their parameter does: the fused Adam trusts that blindly
            tensor = torch.empty_like(parameters[int(index)]).copy_(tensor)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
