"""How fast every stage is here, each beside the floor it cannot go below; and what this machine has."""

import os
import platform
import shutil
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ale_py
import gymnasium
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from presage import __version__
from presage.agent import Agent, device_of
from presage.arena import Arena, play
from presage.batches import Batch, Sampler, assemble
from presage.collect import collect_shard, open_arenas, random_chooser
from presage.config import Config, check_schedule, preset, with_fields
from presage.errors import UsageError
from presage.games import atari_games, find
from presage.graphs import WARM_UP
from presage.model import LOW, Model
from presage.progress import Interrupt, say
from presage.run import provenance
from presage.store import HELDOUT, Store, budget, gpu_memory, machine_memory, shard_path
from presage.tasks import Spec, Task
from presage.training import Updater, make_optimizer, update_once


class Scale(NamedTuple):
    """How much is done at a time."""

    envs: int  # games of each kind
    groups: int
    k: int
    steps: int  # of each environment in the shard that is played


# What a run uses: late iterations of the paper's on a GPU, early ones on a CPU.
SCALES = {"cuda": Scale(envs=40, groups=2, k=200, steps=2_000), "cpu": Scale(envs=16, groups=1, k=25, steps=100)}
FIRST = 20  # steps of the held-out shard that comes before it


def measure(
    seconds: float,
    device_name: str,
    games: Sequence[str | Task],
    envs: int | None = None,
    groups: int | None = None,
    k: int | None = None,
    threads: int = 0,
    bfloat16: bool = False,
) -> dict[str, Any]:
    """All figures, taken one after the other in this process with the paper's network."""
    tasks, device = find(games), device_of(device_name)
    if seconds <= 0:
        raise UsageError(f"seconds must be more than 0, not {seconds}.")
    usual = SCALES[device.type]
    told = {"envs": envs, "groups": groups, "k": k}
    scale = usual._replace(**{name: value for name, value in told.items() if value is not None})
    check_schedule("k", ((1, scale.k),), least=1)
    shard = scale.envs * scale.steps
    config = with_fields(
        preset("paper"), games=tuple(task.name for task in tasks), iterations=1, envs=scale.envs, groups=scale.groups,
        shard_steps=shard, first_steps=shard, later_steps=shard, heldout_steps=scale.envs * FIRST, k=((1, scale.k),),
        device=device_name, threads=threads, bfloat16=bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(config.model).to(device)
    agent = Agent(model, [Spec.of(task) for task in tasks], config, 1, device)
    with TemporaryDirectory() as folder, open_arenas(config, tasks) as arenas:
        run = Path(folder)
        store = Store(tasks, budget(config, len(tasks), machine_memory(), gpu_memory(device)), device)
        say("planning …")
        planning = plan_times(agent, tasks, scale, seconds)
        say("emulator …")
        before = raw_steps_per_s(arenas, scale.steps)
        say("collecting …")
        recorded = collect_shard(run / "random", config, arenas, None, 1, 1, Interrupt(), store)
        collect_shard(run, config, arenas, agent, 1, HELDOUT, Interrupt())  # as in a run: planning is captured in it
        collected = collect_shard(run, config, arenas, agent, 1, 1, Interrupt(), store)
        emulator = (before + raw_steps_per_s(arenas, scale.steps)) / 2  # machines drift
        for index, task in enumerate(tasks):
            store.add(shard_path(run, 1, 1, task.name), 1, index, heldout=False, unpacked=store.keeps)
        say("updates …")
        updates = update_times(model, store, config, seconds)
    flops = arithmetic(model, config)
    rate = matrix_flops(device)
    sequences = scale.envs * len(tasks) * scale.k
    return {
        "version": __version__,
        "commit": provenance(device)["commit"],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
        "environments": len(tasks) * scale.envs,
        "groups": scale.groups,
        "emulator_threads": arenas[0].threads,
        "k": scale.k,
        "bfloat16": agent.fast or agent.low,
        "emulator_steps_per_s": emulator,
        "record_steps_per_s": recorded["steps_per_s"],
        "record_over_emulator": recorded["steps_per_s"] / emulator,
        "collect_steps_per_s": collected["steps_per_s"],
        "collect_over_emulator": collected["steps_per_s"] / emulator,
        "bytes_per_step": collected["bytes"] / collected["steps"],
        **planning,
        **updates,
        "matrix_tflops": rate / 1e12,
        "plan_arithmetic_ms": flops["sequence"] * sequences / rate * 1e3,
        "update_arithmetic_ms": flops["update"] / rate * 1e3,
    }


def raw_steps_per_s(arenas: Sequence[Arena], steps: int) -> float:
    """Random actions in the same emulators, nothing stored: the floor for collecting. For as many steps as a shard has,
    lest what comes and goes within seconds count for one and not for the other."""
    plays = [play(arena, random_chooser(arena.tasks, arena.envs, 0), (0,)) for arena in arenas]
    everyone = zip(*plays, strict=True)
    next(everyone)
    began = time.perf_counter()
    for _ in range(steps):
        next(everyone)
    return sum(arena.rows for arena in arenas) * steps / (time.perf_counter() - began)


def plan_times(agent: Agent, tasks: Sequence[Task], scale: Scale, seconds: float) -> dict[str, float]:
    """One step of all games, planned; and the plain PyTorch network on a batch of the same size."""
    specs = [Spec.of(task) for task in tasks for _ in range(scale.envs)]
    planner = agent.chooser(specs, seed=0)
    frames = np.random.default_rng(0).integers(0, 256, (len(specs), 84, 84), dtype=np.uint8)
    fresh = np.zeros(len(specs), bool)
    stacks = torch.from_numpy(frames)[:, None].expand(-1, 4, -1, -1).contiguous().to(agent.device)
    controls = torch.zeros(len(specs), agent.k, agent.config.data.horizon, 3, device=agent.device)
    plan = timed(lambda: planner(frames, fresh), seconds, agent.device)
    network = timed(lambda: agent.model.imagine(agent.model.perceive(stacks), controls), seconds, agent.device)
    return {"plan_ms": plan * 1e3, "plan_network_ms": network * 1e3, "plan_over_network": plan / network}


def update_times(model: Model, store: Store, config: Config, seconds: float) -> dict[str, float]:
    """An update with its data as a run does it, and the plain PyTorch update on a batch that is already there."""
    device = store.device
    model.train()
    sampler = Sampler(store, 3.0, 3, (0,))
    rows = torch.from_numpy(sampler.rows(0, config.train.batch_size)).to(store.home)
    fixed = Batch(*(t.to(device) for t in assemble(store, rows, config.data.horizon)))
    optimizer = make_optimizer(model, config.train)
    eager = timed(lambda: update_once(model, optimizer, fixed, 1.0), seconds, device)
    updater = Updater(model, optimizer, store, config)
    waited = 0.0
    with closing(updater.inputs(sampler, range(10**9))) as inputs:

        def update() -> None:
            nonlocal waited
            asked = time.perf_counter()
            given = next(inputs)
            waited += time.perf_counter() - asked
            updater(*given)

        for _ in range(WARM_UP + 1):
            update()
        synchronize(device)
        waited, began, count = 0.0, time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            update()
            count += 1
        synchronize(device)
        total = time.perf_counter() - began
    return {"update_ms": total / count * 1e3, "update_eager_ms": eager * 1e3, "data_wait_fraction": waited / total}


def arithmetic(model: Model, config: Config) -> dict[str, int]:
    """Floating-point operations of an update, and of one imagined sequence."""
    shape, horizon = config.model, config.data.horizon
    frames = torch.zeros(config.train.batch_size, 4, 84, 84, dtype=torch.uint8, device=next(model.parameters()).device)
    controls = torch.zeros(config.train.batch_size, horizon, 3, device=frames.device)
    with FlopCounterMode(display=False) as counter:
        model(frames, controls).sum().backward()
    step = 2 * shape.hidden_size * (2 * shape.state_size + 3)
    return {"update": int(counter.get_total_flops()), "sequence": step * horizon}


def matrix_flops(device: torch.device) -> float:
    """What a large matrix product reaches here, in the precision that updates use: the floor's denominator."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / timed(lambda: a @ b, 0.2, device)


def stages(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table that a person reads: each stage's time, rate, ratio to its floor, and what bounds it."""
    games, k = result["environments"], result["k"]
    emulator, record, collect = (result[f"{stage}_steps_per_s"] for stage in ("emulator", "record", "collect"))
    plan, update = result["plan_ms"], result["update_ms"]
    hidden = result["groups"] > 1 and games / plan * 1e3 > emulator
    waits = result["data_wait_fraction"] > 0.05
    small = update > 3 * result["update_arithmetic_ms"]

    def beside(ms: float, name: str, floor: float) -> str:
        return f"{ms / floor:.2f} × {name} ({floor:.3g} ms)"

    return [
        ("emulator, random actions", f"{games / emulator * 1e3:.2f}", f"{emulator:,.0f} steps", "", "CPU cores"),
        (
            "the same, recorded",
            f"{games / record * 1e3:.2f}",
            f"{record:,.0f} steps",
            f"{result['record_over_emulator']:.2f} of the emulator's rate",
            "the emulator, and packing beside it",
        ),
        (
            f"collect, planned with k = {k}",
            f"{games / collect * 1e3:.2f}",
            f"{collect:,.0f} steps",
            f"{result['collect_over_emulator']:.2f} of the emulator's rate",
            "the emulator" if hidden else "emulator and planning in turn",
        ),
        (
            "plan for all games",
            f"{plan:.2f}",
            f"{games / plan * 1e3:,.0f} plans",
            f"{beside(plan, 'plain network', result['plan_network_ms'])}\n"
            + beside(plan, "arithmetic", result["plan_arithmetic_ms"]),
            "arithmetic" if plan < 3 * result["plan_arithmetic_ms"] else "memory and launches",
        ),
        (
            "update with its data",
            f"{update:.3f}",
            f"{1e3 / update:,.0f} updates",
            f"{beside(update, 'plain update', result['update_eager_ms'])}\n"
            + beside(update, "arithmetic", result["update_arithmetic_ms"]),
            "waiting for data" if waits else "latency of many small kernels" if small else "arithmetic",
        ),
    ]


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


def bfloat16_speed() -> str:
    """A product of the size that planning has, side by side; the better of several tries of each."""
    a, b = torch.rand(3_200, 100), torch.rand(100, 500)
    a_low, b_low = a.to(LOW), b.to(LOW)
    low, usual = (min(timeit.repeat(work, number=3, repeat=5)) for work in (lambda: a_low @ b_low, lambda: a @ b))
    return f"{usual / low:.1f} times as fast as float32: --bfloat16 " + (
        "pays" if usual > 1.5 * low else "does not pay"
    )


def examine() -> dict[str, str]:
    """What this machine has, and what would be slow here."""
    memory, disk = machine_memory() / 2**30, shutil.disk_usage(Path.cwd()).free / 2**30
    paper = budget(preset("paper"), 3, machine_memory(), gpu_memory(device_of("auto")))
    cuda = torch.cuda.is_available()
    return {
        "presage": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ale-py, gymnasium": f"{ale_py.__version__}, {gymnasium.__version__}",
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "bfloat16 on the CPU": bfloat16_speed(),
        "games with a ROM": str(len(atari_games())),
        "memory": f"{memory:.1f} GiB",
        "disk free here": f"{disk:.1f} GiB",
        "preset paper": f"{paper}; " + ("as meant" if cuda else "slow here: it wants a GPU"),
    }
