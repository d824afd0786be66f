"""How fast every stage is here, each beside the floor it cannot go below; and what this machine has."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ale_py
import gymnasium
import numpy as np
import torch

from presage import __version__
from presage.agent import Agent, device_of
from presage.arena import Arena, play
from presage.batches import Batch, Sampler, assemble, controls_table, stream
from presage.collect import collect_shard, open_arena, random_chooser
from presage.config import Config, preset, with_fields
from presage.errors import UsageError
from presage.games import atari_games, find
from presage.model import Model
from presage.progress import Interrupt, say
from presage.store import Store, budget, machine_memory, shard_path
from presage.tasks import Spec, Task
from presage.training import make_optimizer, update_once

ENVS = 16
STEPS = 100  # of each environment in the shards that are played


def measure(seconds: float, device_name: str, games: Sequence[str | Task]) -> dict[str, Any]:
    """All figures, taken one after the other in this process with the paper's network."""
    tasks, device = find(games), device_of(device_name)
    if seconds <= 0:
        raise UsageError(f"seconds must be more than 0, not {seconds}.")
    shard = ENVS * STEPS
    config = with_fields(
        preset("paper"), games=tuple(task.name for task in tasks), iterations=1, envs=ENVS, shard_steps=shard,
        first_steps=shard, later_steps=shard, heldout_steps=shard, device=device_name,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(config.model).to(device)
    agent = Agent(model, [Spec.of(task) for task in tasks], config, 1, device)
    with TemporaryDirectory() as folder:
        run = Path(folder)
        say("emulator …")
        emulator = raw_steps_per_s(tasks, seconds)
        say("collecting …")
        with closing(open_arena(config, tasks)) as arena:
            collected = collect_shard(run, config, arena, agent, 1, 1, Interrupt())
        say("planning …")
        planning = plan_times(agent, tasks, seconds)
        say("updates …")
        updates = update_times(model, run, config, tasks, device, seconds)
    return {
        "version": __version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
        "environments": len(tasks) * ENVS,
        "k": agent.k,
        "emulator_steps_per_s": emulator,
        "collect_steps_per_s": collected["steps_per_s"],
        "collect_over_emulator": collected["steps_per_s"] / emulator,
        "bytes_per_step": collected["bytes"] / collected["steps"],
        **planning,
        **updates,
    }


def raw_steps_per_s(tasks: Sequence[Task], seconds: float) -> float:
    """Random actions, nothing stored: the floor for collecting."""
    arena = Arena(tasks, ENVS)
    turns = play(arena, random_chooser(tasks, ENVS, 0), (0,))
    next(turns)
    rate = arena.rows / timed(lambda: next(turns), seconds, torch.device("cpu"))
    arena.close()
    return rate


def plan_times(agent: Agent, tasks: Sequence[Task], seconds: float) -> dict[str, float]:
    """One step of all games, planned; and the bare network on a batch of the same size."""
    specs = [Spec.of(task) for task in tasks for _ in range(ENVS)]
    planner = agent.planner(specs, seed=0)
    frames = np.random.default_rng(0).integers(0, 256, (len(specs), 4, 84, 84), dtype=np.uint8)
    fresh = np.zeros(len(specs), bool)
    on_device = torch.from_numpy(frames).to(agent.device)
    controls = torch.zeros(len(specs), agent.k, agent.config.data.horizon, 3, device=agent.device)
    plan = timed(lambda: planner(frames, fresh), seconds, agent.device)
    network = timed(lambda: agent.model.imagine(agent.model.perceive(on_device), controls), seconds, agent.device)
    return {"plan_ms": plan * 1e3, "plan_network_ms": network * 1e3, "plan_over_network": plan / network}


def update_times(
    model: Model, run: Path, config: Config, tasks: Sequence[Task], device: torch.device, seconds: float
) -> dict[str, float]:
    """An update with its data, and the plain PyTorch update on a batch that is already there."""
    store = Store(tasks, budget(config, len(tasks), machine_memory(device)), device)
    for index, task in enumerate(tasks):
        store.add(shard_path(run, 1, 1, task.name), 1, index, heldout=False)
    model.train()
    optimizer = make_optimizer(model, config.train)
    sampler = Sampler(store, 3.0, 3, (0,))
    size, horizon = config.train.batch_size, config.data.horizon
    fixed = assemble(store, sampler.rows(0, size), controls_table(tasks), horizon)
    fixed = Batch(*(t.to(device) for t in fixed))
    eager = timed(lambda: update_once(model, optimizer, fixed, 1.0), seconds, device)
    batches = stream(store, sampler, range(10**9), size, horizon)
    waited = 0.0

    def update() -> None:
        nonlocal waited
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        update_once(model, optimizer, Batch(*(t.to(device) for t in batch)), 1.0)

    update()
    waited, began, count = 0.0, time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        update()
        count += 1
    synchronize(device)
    total = time.perf_counter() - began
    batches.close()
    return {"update_ms": total / count * 1e3, "update_eager_ms": eager * 1e3, "data_wait_fraction": waited / total}


def timed(work: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """Mean seconds a call, after two calls to warm up."""
    work(), work()
    synchronize(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        count += 1
    synchronize(device)
    return (time.perf_counter() - began) / count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def examine() -> dict[str, str]:
    """What this machine has, and what would be slow here."""
    memory, disk = machine_memory(torch.device("cpu")) / 2**30, shutil.disk_usage(Path.cwd()).free / 2**30
    paper = budget(preset("paper"), 3, machine_memory(device_of("auto")))
    cuda = torch.cuda.is_available()
    return {
        "presage": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ale-py, gymnasium": f"{ale_py.__version__}, {gymnasium.__version__}",
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "games with a ROM": str(len(atari_games())),
        "memory": f"{memory:.1f} GiB",
        "disk free here": f"{disk:.1f} GiB",
        "preset paper": f"{paper}; " + ("as meant" if cuda else "slow here: it wants a GPU"),
    }
