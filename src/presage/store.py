"""Everything ever played: each frame once, in immutable checksummed shards, and the rows that training draws from.

A shard is what `envs` copies of one task played in T steps: one safetensors file, and beside it its SHA-256 in the form
that `sha256sum -c` reads. docs/data.md describes the format. Streamed frames are read from these files when needed;
resident ones are unpacked once. Both give the same batches.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from presage.arena import Array, Turn
from presage.config import Config
from presage.errors import RunError
from presage.events import stack_ages
from presage.files import checksum, encode_tensors, read_tensors, write_bytes
from presage.tasks import FRAME, STACK, Task

FORMAT = "presage-shard-1"
FRAME_BYTES = FRAME * FRAME
ROW_BYTES = 3 + 8  # action, events and age of a step, and where its frame lies
HELDOUT = 0  # the number of each iteration's shard that is never trained on


def shard_path(run: Path, iteration: int, shard: int, task: str) -> Path:
    return run / "data" / f"iter-{iteration:02d}" / f"shard-{shard:03d}-{task}.safetensors"


def shard_lengths(config: Config, iteration: int) -> list[int]:
    """Steps that each environment plays in each of an iteration's shards: the held-out one, then even shares."""
    data = config.data
    steps = data.first_steps if iteration == 1 else data.later_steps
    shards = math.ceil(steps / data.shard_steps)
    cuts = [steps // data.envs * i // shards for i in range(shards + 1)]
    return [data.heldout_steps // data.envs, *(b - a for a, b in pairwise(cuts))]


class Episodes(NamedTuple):
    """What a shard's finished episodes scored."""

    number: int
    mean: float | None


class ShardWriter:
    """Takes the turns of one task's rows as they are played and leaves one shard; keeps only packed frames."""

    def __init__(self, path: Path, task: Task, rows: slice, metadata: dict[str, Any]):
        self.path, self.task, self.rows, self.metadata = path, task, rows, metadata
        self.turns: list[Turn] = []  # without frames
        self.packed: list[Future[list[bytes]]] = []
        self.packer = ThreadPoolExecutor(1)  # zlib lets go of the interpreter, so packing hides behind the emulator

    def add(self, turn: Turn) -> None:
        mine = Turn(*(array[self.rows] for array in turn))
        self.packed.append(self.packer.submit(lambda: [zlib.compress(frame, 1) for frame in mine.frames]))
        self.turns.append(mine._replace(frames=np.empty(0)))

    def close(self) -> Episodes:
        blobs = [blob for env in zip(*(future.result() for future in self.packed), strict=True) for blob in env]
        self.packer.shutdown()

        def column(name: str, dtype: Any) -> Tensor:  # [T][E] -> [E, T]
            return torch.from_numpy(np.stack([getattr(turn, name) for turn in self.turns], 1).astype(dtype))

        tensors = {
            "frames": torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.uint8),  # zlib streams, env by env
            "frame_ends": torch.tensor([len(blob) for blob in blobs]).cumsum(0),  # [E * T]
            "actions": column("actions", np.uint8),
            "rewards": column("rewards", np.float32),
            "died": column("died", np.bool_),
            "scored": column("scored", np.bool_),
            "ended": column("ended", np.bool_),
        }
        described = {"format": FORMAT, "task": self.task.name, "controls": self.task.controls, **self.metadata}
        data = encode_tensors(tensors, {"shard": json.dumps(described)})  # one entry: the order of several varies
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The checksum comes first: a shard that is there always has one.
        write_bytes(checksum_path(self.path), f"{checksum(data)}  {self.path.name}\n".encode())
        write_bytes(self.path, data)
        return finished_episodes(tensors["rewards"], tensors["ended"])


def finished_episodes(rewards: Tensor, ended: Tensor) -> Episodes:
    scores = []
    for reward, end in zip(rewards.numpy(), ended.numpy(), strict=True):
        bounds = np.concatenate([[0], np.flatnonzero(end) + 1])
        scores += [float(reward[a:b].sum()) for a, b in pairwise(bounds)]
    return Episodes(len(scores), float(np.mean(scores)) if scores else None)


def checksum_path(shard: Path) -> Path:
    return shard.with_name(shard.name + ".sha256")


def read_shard(path: Path) -> dict[str, Tensor]:
    """A shard's tensors, once its checksum has been found right."""
    try:
        recorded = checksum_path(path).read_text().split()[0]
    except (OSError, IndexError):
        raise RunError(
            f"{path} has no readable checksum beside it; delete the shard and it will be played again."
        ) from None
    try:
        return read_tensors(path, recorded)
    except RunError as error:
        raise RunError(f"{error} It is not trained on; delete it and it will be played again.") from None


def unpack(frames: Tensor, ends: Tensor) -> Iterator[Array]:
    """The frames uint8 [84, 84] behind the zlib streams."""
    data = memoryview(frames.numpy())  # type: ignore[arg-type]
    start = 0
    for end in ends.tolist():
        yield np.frombuffer(zlib.decompress(data[start:end]), np.uint8).reshape(FRAME, FRAME)
        start = end


class Resident:
    """Frames unpacked in memory, on the host or on the device that trains."""

    def __init__(self, capacity: int, device: torch.device):
        # Memory that is not yet filled costs nothing: the operating system gives it on first use.
        self.frames = torch.empty((capacity, FRAME, FRAME), dtype=torch.uint8, device=device)

    def add(self, start: int, shard: dict[str, Tensor], path: Path) -> None:  # noqa: ARG002
        for row, frame in enumerate(unpack(shard["frames"], shard["frame_ends"]), start):
            self.frames[row] = torch.from_numpy(frame.copy())

    def at(self, rows: Tensor) -> Tensor:
        """uint8 [..., 84, 84]"""
        return self.frames[rows.to(self.frames.device)]


class Streamed:
    """Frames left on disk, read and unpacked when they are asked for."""

    def __init__(self, capacity: int):
        self.starts = torch.empty(capacity, dtype=torch.int64)  # where in its file a row's frame starts
        self.first_rows: list[int] = []
        self.paths: list[Path] = []

    def add(self, start: int, shard: dict[str, Tensor], path: Path) -> None:
        ends = shard["frame_ends"]
        header, data = read_header(path)
        first = data + int(header["frames"]["data_offsets"][0])
        self.starts[start : start + len(ends)] = first + torch.cat([ends.new_zeros(1), ends[:-1]])
        self.first_rows.append(start)
        self.paths.append(path)

    def at(self, rows: Tensor) -> Tensor:
        flat = rows.flatten()
        owners = torch.searchsorted(torch.tensor(self.first_rows), flat, right=True) - 1
        out = np.empty((len(flat), FRAME_BYTES), np.uint8)
        for i, (owner, start) in enumerate(zip(owners.tolist(), self.starts[flat].tolist(), strict=True)):
            with self.paths[owner].open("rb", buffering=0) as file:  # opened each time: shards may be thousands
                file.seek(start)
                packed = file.read(FRAME_BYTES + 1024)  # a zlib stream knows its own end, and none is longer
            out[i] = np.frombuffer(zlib.decompressobj().decompress(packed), np.uint8)
        return torch.from_numpy(out).view(*rows.shape, FRAME, FRAME)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's JSON header, and where its data begin: after 8 bytes of length and the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def check_owner(path: Path, task: Task, iteration: int) -> None:
    """Refuse a shard that somebody put in another one's place."""
    described = json.loads(read_header(path)[0].get("__metadata__", {}).get("shard", "{}"))
    controls = [list(control) for control in task.controls]
    ours = {"format": FORMAT, "task": task.name, "iteration": iteration, "controls": controls}
    for name, value in ours.items():
        if described.get(name) != value:
            raise RunError(f"{path} is another run's: its {name} is {described.get(name)}. Delete it.")


@dataclass(frozen=True)
class Budget:
    """Where a run's frames will lie, decided and said before any memory is spent."""

    rows: int
    limit: int  # bytes
    resident: bool

    def __str__(self) -> str:
        size, limit = self.rows * FRAME_BYTES / 2**30, self.limit / 2**30
        place = "kept in memory" if self.resident else "streamed from disk"
        return f"{self.rows:,} frames, {size:.2f} GiB unpacked, {limit:.1f} GiB allowed: {place}"


def budget(config: Config, tasks: int, machine_bytes: int) -> Budget:
    """Two fifths of the memory that the frames would lie in, unless the configuration says how much."""
    iterations = range(1, config.iterations + 1)
    rows = sum(sum(shard_lengths(config, i)) for i in iterations) * config.data.envs * tasks
    limit = int(config.machine.memory_gib * 2**30) or machine_bytes * 2 // 5
    return Budget(rows, limit, rows * (FRAME_BYTES + ROW_BYTES) <= limit)


def machine_memory(device: torch.device) -> int:
    """Bytes of the memory that the frames would lie in: the GPU's, or what machine and control group give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return size


@dataclass(frozen=True)
class Span:
    """The rows of one shard: a block of cases of one iteration and task."""

    iteration: int
    task: int
    start: int
    stop: int
    heldout: bool


class Store:
    """All rows, one a step played. A case is a row: the stack that ends there and the steps that follow from there."""

    def __init__(self, tasks: Sequence[Task], budget: Budget, device: torch.device):
        self.tasks, self.device = tuple(tasks), device
        self.spans: list[Span] = []
        self.size = 0
        self.actions = torch.zeros(budget.rows, dtype=torch.uint8)
        self.events = torch.zeros(budget.rows, dtype=torch.uint8)  # 1: died, 2: scored, 4: last of episode or recording
        self.ages = torch.zeros(budget.rows, dtype=torch.uint8)  # frames of its episode before it, at most 3
        self.frames = Resident(budget.rows, device) if budget.resident else Streamed(budget.rows)

    def add(self, path: Path, iteration: int, task: int, heldout: bool) -> None:
        shard = read_shard(path)
        check_owner(path, self.tasks[task], iteration)
        envs, length = shard["actions"].shape
        start, stop = self.size, self.size + envs * length
        if stop > len(self.actions):
            raise RunError(f"{path} holds more steps than the run's settings allow: was config.json edited?")
        last = shard["ended"].clone()
        last[:, -1] = True
        self.actions[start:stop] = shard["actions"].flatten()
        self.events[start:stop] = (shard["died"] | (shard["scored"].byte() << 1) | (last.byte() << 2)).flatten()
        self.ages[start:stop] = torch.cat([stack_ages(ended, STACK - 1) for ended in shard["ended"]])
        self.frames.add(start, shard, path)
        self.spans.append(Span(iteration, task, start, stop, heldout))
        self.size = stop

    def stacks(self, rows: Tensor) -> Tensor:
        """uint8 [B, 4, 84, 84]: where an episode is younger than the stack, its first frame is repeated."""
        back = torch.arange(STACK - 1, -1, -1)  # [3, 2, 1, 0]
        return self.frames.at(rows[:, None] - torch.minimum(back, self.ages[rows][:, None].long()))

    def window(self, rows: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Actions and events [B, H] of the steps from each row on; what lies past a recording's end is masked later."""
        ahead = (rows[:, None] + torch.arange(horizon)).clamp(max=self.size - 1)
        return self.actions[ahead], self.events[ahead]
