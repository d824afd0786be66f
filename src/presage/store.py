"""Everything ever played: each frame once, in immutable checksummed shards, and the rows that training draws from.

A shard is what `envs` copies of one task played in T steps: one safetensors file, and beside it its SHA-256 in the form
that `sha256sum -c` reads. docs/data.md describes the format. Streamed frames are read from these files when needed;
resident ones are unpacked once. Both give the same batches.
"""

import json
import math
import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from presage.arena import Turn
from presage.config import Config
from presage.errors import RunError
from presage.events import stack_ages
from presage.files import checksum, encode_tensors, read_tensors, write_bytes
from presage.pools import Array
from presage.tasks import FRAME, STACK, Task

FORMAT = "presage-shard-2"
FRAME_BYTES = FRAME * FRAME
RUN = 8  # consecutive steps whose frames are packed together: half the size of single ones, and still quick to read
ROW_BYTES = 3 + 1  # control, events and age of a step, and its share of where its run of frames lies
DIED, SCORED, LAST = 1, 2, 4  # bits of a step's events; last: of an episode or a recording
COLUMNS = {"actions": "u1", "rewards": "f4", "died": "?", "scored": "?", "ended": "?"}  # of a shard, and their types
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
    """Takes one task's turns as they are played and leaves one shard; keeps only packed frames.

    room: uint8 [envs, T, 84, 84], a store's, where the frames are left as they are, too.
    """

    def __init__(self, path: Path, task: Task, metadata: dict[str, Any], room: Tensor | None = None):
        self.path, self.task, self.metadata, self.room = path, task, metadata, room
        self.steps = 0
        # Each grows at its end. Run by run they would lie scattered, with holes between them as large as the frames.
        self.columns = {name: bytearray() for name in COLUMNS}  # [T, E]
        self.packed, self.sizes = bytearray(), list[list[int]]()  # [runs, E]

    def add(self, turns: Turn) -> None:
        """A run of turns, [E, n, …] each: RUN of them, or fewer as the last."""
        start, self.steps = self.steps, self.steps + turns.frames.shape[1]
        if self.room is not None:
            self.room[:, start : self.steps] = torch.from_numpy(turns.frames)
        runs = [zlib.compress(run, 1) for run in turns.frames]
        self.packed += b"".join(runs)
        self.sizes.append([len(run) for run in runs])
        for name, kind in COLUMNS.items():
            self.columns[name] += getattr(turns, name).T.astype(kind).tobytes()

    def close(self) -> Episodes:
        sizes = np.array(self.sizes)  # [runs, E]
        ends = sizes.cumsum().reshape(sizes.shape)
        runs = [self.packed[end - size : end] for end, size in zip(ends.T.flat, sizes.T.flat, strict=True)]

        def column(name: str) -> Tensor:  # [E, T]
            flat = np.frombuffer(self.columns[name], COLUMNS[name])
            return torch.from_numpy(flat.reshape(self.steps, -1).T.copy())

        tensors = {
            "frames": torch.frombuffer(bytearray().join(runs), dtype=torch.uint8),  # zlib streams, env by env
            "run_ends": torch.from_numpy(sizes.T.cumsum()),  # [E * runs]
            **{name: column(name) for name in COLUMNS},
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


def unpack(packed: bytes | memoryview) -> Array:
    """A run's frames uint8 [n, 84, 84]."""
    return np.frombuffer(zlib.decompress(packed), np.uint8).reshape(-1, FRAME, FRAME)


class Resident:
    """Frames unpacked in memory, on the host or on the device that trains."""

    def __init__(self, capacity: int, device: torch.device):
        # Memory that is not yet filled costs nothing: the operating system gives it on first use.
        self.frames = torch.empty((capacity, FRAME, FRAME), dtype=torch.uint8, device=device)

    def add(self, start: int, shard: dict[str, Tensor], path: Path) -> None:  # noqa: ARG002
        data = memoryview(shard["frames"].numpy())  # type: ignore[arg-type]
        bounds = [0, *shard["run_ends"].tolist()]
        for first, last in pairwise(bounds):  # in the order of the rows
            run = torch.from_numpy(unpack(data[first:last]).copy())
            self.frames[start : start + len(run)] = run
            start += len(run)

    def at(self, rows: Tensor) -> Tensor:
        """uint8 [..., 84, 84]"""
        return self.frames[rows]


class Packed(NamedTuple):
    """A shard's frames on disk."""

    path: Path
    length: int  # steps of each environment
    bounds: Tensor  # int64 [runs + 1]: where in the file each run begins and ends


class Streamed:
    """Frames left on disk, read and unpacked when they are asked for."""

    def __init__(self) -> None:
        self.first_rows: list[int] = []
        self.shards: list[Packed] = []

    def add(self, start: int, shard: dict[str, Tensor], path: Path) -> None:
        header, data = read_header(path)
        first = data + int(header["frames"]["data_offsets"][0])
        bounds = first + torch.cat([torch.zeros(1, dtype=torch.int64), shard["run_ends"]])
        self.first_rows.append(start)
        self.shards.append(Packed(path, shard["actions"].shape[1], bounds))

    def at(self, rows: Tensor) -> Tensor:
        flat = rows.flatten().tolist()
        out = np.empty((len(flat), FRAME, FRAME), np.uint8)
        runs: dict[tuple[int, int], Array] = {}  # a stack's frames are mostly of one run: it is read once
        for i, row in enumerate(flat):
            owner = bisect_right(self.first_rows, row) - 1
            shard = self.shards[owner]
            env, step = divmod(row - self.first_rows[owner], shard.length)
            run = env * math.ceil(shard.length / RUN) + step // RUN
            if (owner, run) not in runs:
                runs[owner, run] = self._read(shard, run)
            out[i] = runs[owner, run][step % RUN]
        return torch.from_numpy(out).view(*rows.shape, FRAME, FRAME)

    def _read(self, shard: Packed, run: int) -> Array:
        start, stop = shard.bounds[run : run + 2].tolist()
        with shard.path.open("rb", buffering=0) as file:  # opened each time: shards may be thousands
            file.seek(start)
            return unpack(file.read(stop - start))


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
            raise RunError(f"{path} is another run's or version's: its {name} is {described.get(name)}. Delete it.")


@dataclass(frozen=True)
class Budget:
    """Where a run's frames will lie, decided and said before any memory is spent."""

    rows: int
    place: str  # gpu, memory or disk
    allowed: dict[str, int]  # bytes, of the GPU's memory and of the machine's

    def __str__(self) -> str:
        allowed = ", ".join(f"{size / 2**30:.1f} GiB of {name}" for name, size in self.allowed.items())
        where = {"gpu": "kept on the GPU", "memory": "kept in memory", "disk": "streamed from disk"}[self.place]
        return f"{self.rows:,} frames, {self.rows * FRAME_BYTES / 2**30:.2f} GiB unpacked, allowed {allowed}: {where}"


def budget(config: Config, tasks: int, memory: int, gpu: int = 0) -> Budget:
    """On the GPU if they fit into seven tenths of it, in memory if into two fifths, unless the configuration says
    how much; else on disk. memory, gpu: bytes there are."""
    iterations = range(1, config.iterations + 1)
    rows = sum(sum(shard_lengths(config, i)) for i in iterations) * config.data.envs * tasks
    allowed = {"memory": int(config.machine.memory_gib * 2**30) or memory * 2 // 5}
    if gpu:
        allowed = {"gpu": int(config.machine.gpu_memory_gib * 2**30) or gpu * 7 // 10, **allowed}
    size = rows * (FRAME_BYTES + ROW_BYTES)
    return Budget(rows, next((name for name, limit in allowed.items() if size <= limit), "disk"), allowed)


def gpu_memory(device: torch.device) -> int:
    """Bytes on the GPU, 0 where there is none."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def machine_memory() -> int:
    """Bytes that machine and control group give."""
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
    """All rows, one a step played. A case is a row: the stack that ends there and the steps that follow from there.

    Everything lies on `home`: the GPU, if the frames do. `device` is where the batches are wanted.
    """

    def __init__(self, tasks: Sequence[Task], budget: Budget, device: torch.device):
        self.tasks, self.device = tuple(tasks), device
        self.home = device if budget.place == "gpu" else torch.device("cpu")
        self.spans: list[Span] = []
        self.size = 0
        # The controls of all tasks in one table, so that a step's control is one small number.
        self.table = torch.tensor([c for task in tasks for c in task.controls], dtype=torch.float32, device=self.home)
        self.first_code = np.cumsum([0, *(len(task.controls) for task in tasks)])
        code = torch.uint8 if len(self.table) <= 256 else torch.int16
        self.codes = torch.zeros(budget.rows, dtype=code, device=self.home)  # which control was played
        self.events = torch.zeros(budget.rows, dtype=torch.uint8, device=self.home)  # see DIED, SCORED, LAST
        self.ages = torch.zeros(budget.rows, dtype=torch.uint8, device=self.home)  # older frames in its stack, to 3
        self.frames = Streamed() if budget.place == "disk" else Resident(budget.rows, self.home)
        self.back = torch.arange(STACK - 1, -1, -1, device=self.home)  # [3, 2, 1, 0]

    @property
    def keeps(self) -> bool:
        """Frames lie unpacked in memory, on the GPU or the host."""
        return isinstance(self.frames, Resident)

    def room(self, start: int, envs: int, length: int) -> Tensor | None:
        """Where the frames of a shard that starts at that row would be unpacked [envs, length, 84, 84]; not on disk."""
        if not isinstance(self.frames, Resident):
            return None
        return self.frames.frames[start : start + envs * length].view(envs, length, FRAME, FRAME)

    def add(self, path: Path, iteration: int, task: int, heldout: bool, unpacked: bool = False) -> None:
        """Take a shard in; `unpacked`: its frames were left in the room for them when it was played."""
        shard = read_shard(path)
        check_owner(path, self.tasks[task], iteration)
        envs, length = shard["actions"].shape
        start, stop = self.size, self.size + envs * length
        if stop > len(self.codes):
            raise RunError(f"{path} holds more steps than the run's settings allow: was config.json edited?")
        last = shard["ended"].clone()
        last[:, -1] = True
        events = shard["died"] * DIED + shard["scored"] * SCORED + last * LAST
        self.codes[start:stop] = (shard["actions"].flatten().long() + int(self.first_code[task])).to(self.codes)
        self.events[start:stop] = events.flatten().to(self.events)
        self.ages[start:stop] = torch.cat([stack_ages(ended, STACK - 1) for ended in shard["ended"]]).to(self.ages)
        if not unpacked:
            self.frames.add(start, shard, path)
        self.spans.append(Span(iteration, task, start, stop, heldout))
        self.size = stop

    def stack_rows(self, rows: Tensor) -> Tensor:
        """Where the frames of each stack lie [B, 4]: in an episode younger than the stack, its first is repeated."""
        return rows[:, None] - torch.minimum(self.back, self.ages[rows][:, None])

    def stacks(self, rows: Tensor) -> Tensor:
        """uint8 [B, 4, 84, 84]"""
        return self.frames.at(self.stack_rows(rows))

    def window(self, rows: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Controls [B, H, 3] and events [B, H] of the steps from each row on; past a recording's end: masked later."""
        ahead = rows[:, None] + torch.arange(horizon, device=self.home)
        ahead = ahead.clamp(max=len(self.codes) - 1)
        return self.table[self.codes[ahead].long()], self.events[ahead]
