"""The run on one screen: play, store, learn, look, save; and again. The same call on the same folder goes on."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from presage import __version__, checkpoint
from presage.agent import Agent, device_of, load, read_config
from presage.batches import Measured
from presage.checkpoint import Position
from presage.collect import Player, open_arenas, shard_files
from presage.config import Config, differences, to_json, with_fields
from presage.config import preset as preset_config
from presage.errors import RunError, UsageError
from presage.evaluation import evaluate
from presage.files import write_bytes, write_json
from presage.games import AtariTask, find
from presage.knowledge import heldout
from presage.model import Model
from presage.pools import rehearse
from presage.progress import Interrupt, say
from presage.store import HELDOUT, Budget, Store, budget, gpu_memory, machine_memory, shard_path
from presage.tasks import Spec, Task
from presage.training import Updater, make_optimizer, train_phase


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    path: Path
    config: Config

    def agent(self, iteration: int | None = None) -> Agent:
        return load(self.path, iteration)

    def metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        """What was measured, oldest first."""
        return [line for line in read_lines(self.path / "metrics.jsonl") if stage in (None, line["stage"])]

    def evaluations(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "evaluations.jsonl")


def train(
    preset: str = "quickstart",
    run: str | Path = "runs/quickstart",
    games: Sequence[str | Task] | None = None,
    **fields: Any,
) -> Run:
    """Train one network on several tasks in the folder `run`, or go on with what is there; fields as in config.py."""
    tasks = find(preset_config(preset).games if games is None else games)
    config = with_fields(preset_config(preset), games=tuple(task.name for task in tasks), **fields)
    return carry_out(config, tasks, Path(run))


def carry_out(config: Config, tasks: Sequence[Task], path: Path) -> Run:
    check_request(config, tasks, path)
    with ExitStack() as stack:
        stack.enter_context(locked(path))
        interrupt = stack.enter_context(Interrupt())
        arenas = stack.enter_context(open_arenas(config, tasks))
        agree(path, config, tasks)
        device = device_of(config.machine.device)
        fix_threads(config)
        model, optimizer, position, unfinished = restore(path, config, device)
        if position.is_past(config.iterations):
            say(f"{path} is finished: {config.iterations} iterations. `presage evaluate {path}` plays with it.")
            return Run(path, config)
        metrics, clock = Metrics(path, position), Clock()
        metrics.log("start", position.iteration, provenance(device))
        store = Store(tasks, announced_budget(config, tasks, model, device), device)
        updater = Updater(model, optimizer, store, config)
        player = stack.enter_context(Player(path, config, arenas, store, partial(metrics.log, "collect"), interrupt))
        for iteration in range(1, config.iterations + 1):
            # Play, unless it was played before; or take what was played meanwhile.
            for shard, fresh in enumerate(player.shards(iteration)):
                for index, file in enumerate(shard_files(path, iteration, shard, tasks)):
                    store.add(file, iteration, index, heldout=shard == HELDOUT, unpacked=fresh and store.keeps)
            interrupt.check()
            clock.lap("collect")
            if position.is_past(iteration):
                continue
            player.look_ahead(iteration)

            # Learn, from where a checkpoint inside this iteration left off.
            def save(update: int, measured: Measured | None, iteration: int = iteration) -> None:
                checkpoint.save(path, Position(iteration, update, finished=False), model, optimizer, measured)

            start, measured = (position.update, unfinished) if iteration == position.iteration else (0, None)
            log = partial(metrics.log, "train", iteration)
            train_phase(model, optimizer, updater, config, iteration, start, measured, save, log, interrupt)
            clock.lap("train")

            # Look, and finish.
            known = heldout(model, store, config.data.horizon)
            asleep = model.asleep()
            metrics.log("heldout", iteration, {"games": known, "asleep": asleep})
            announce(known, asleep)
            clock.lap("heldout")
            interrupt.check()
            if config.evaluate_episodes:
                agent = Agent(model, [Spec.of(task) for task in tasks], config, iteration, device)
                result = evaluate(agent, tasks, config.evaluate_episodes, seed=config.seed, each_turn=interrupt.check)
                add_line(path / "evaluations.jsonl", result)
                clock.lap("evaluate")
            metrics.log("iteration", iteration, {"seconds": clock.laps()})
            checkpoint.save(path, Position(iteration, config.train.updates, finished=True), model, optimizer)
        return Run(path, config)


def check_request(config: Config, tasks: Sequence[Task], path: Path) -> None:
    """Everything that can be refused before anything is written."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: choose another --run folder.")
    ours = {"config.json", "config.json.part", ".lock"}  # the first things a run writes, were it killed then
    if path.is_dir() and not (path / "config.json").exists() and {p.name for p in path.iterdir()} - ours:
        raise UsageError(f"{path} is not a run and not empty: choose another --run folder.")
    device_of(config.machine.device)
    usual = preset_config(config.preset).plan.thresholds  # a preset's may be of games that are left out
    unknown = set(config.plan.thresholds) - set(config.games) - set(usual)
    if unknown:
        raise UsageError(f"thresholds name {', '.join(sorted(unknown))}, which this run does not play.")
    if config.train.init_from and checkpoint.newest(path) is None:
        donor(config)
    if config.data.shards_from:
        if not (path / "config.json").exists():
            check_lender(config)
        elif not Path(config.data.shards_from).is_dir():
            say(f"{config.data.shards_from} is not there: shards that {path} has not taken yet will be played.")
    for task in tasks:
        if not isinstance(task, AtariTask):
            rehearse(task)


def check_lender(config: Config) -> None:
    """Shards can be taken from a run that plays these games as much as this one, in as many environments."""
    lender = read_config(Path(config.data.shards_from))[0]
    missing = sorted(set(config.games) - set(lender.games))
    if missing:
        raise UsageError(f"the shards of {config.data.shards_from} do not fit: it has not played {', '.join(missing)}.")
    lent = lender.data
    ours = replace(config.data, shards_from=lent.shards_from, overlap=lent.overlap, horizon=lent.horizon)
    differ = [field.name for field in fields(lent) if getattr(lent, field.name) != getattr(ours, field.name)]
    if differ:
        raise UsageError(f"the shards of {config.data.shards_from} do not fit: it has another {', '.join(differ)}.")


def announced_budget(config: Config, tasks: Sequence[Task], model: Model, device: torch.device) -> Budget:
    """What will be used, said before it is."""
    space = budget(config, len(tasks), machine_memory(), gpu_memory(device))
    counts = [f"{number:,} {part}" for part, number in model.parameters_by_part().items()]
    say(f"network: {', '.join(counts)} parameters, on {device}")
    say(f"data: {space}")
    return space


def announce(known: dict[str, dict[str, Any]], asleep: dict[str, tuple[int, int]]) -> None:
    for name, game in known.items():
        loss, constant = game["cross_entropy"], game["baseline_cross_entropy"]
        foreseen = f"foresees deaths with F1 {game['died']['f1']:.2f}, points with {game['scored']['f1']:.2f}"
        say(f"  {name}: held-out loss {loss:.4f} (the best constant's {constant:.4f}), {foreseen}")
    if lost := [f"{some} of {units} in {part}" for part, (some, units) in asleep.items() if some]:
        say(f"  units without weights: {', '.join(lost)}")


def provenance(device: torch.device) -> dict[str, Any]:
    """What a result was made with and on."""
    checkout, commit = Path(__file__).parents[2], ""
    if (checkout / ".git").exists() and shutil.which("git"):
        asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"presage": __version__, "commit": commit, "torch": torch.__version__, "device": name}


class Clock:
    """Seconds that each stage of an iteration took, in this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage], self.last = now - self.last, now

    def laps(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


def agree(path: Path, config: Config, tasks: Sequence[Task]) -> None:
    """Note down what a new run is to do; of an old one, see that it is the same."""
    if (path / "config.json").exists():
        theirs, specs = read_config(path)
        found = [f"{n} ({a} here, {b} in the run)" for n, (a, b) in differences(config, theirs).items()]
        if [Spec.of(task) for task in tasks] != specs and not found:
            found = ["the tasks' controls or thresholds"]
        if found:
            raise UsageError(
                f"{path} was started with other settings: {'; '.join(found)}. Choose another --run folder."
            )
        return
    head = {"format": checkpoint.FORMAT, "version": __version__}
    write_json(path / "config.json", head | to_json(config) | {"tasks": [Spec.of(task)._asdict() for task in tasks]})


def restore(
    path: Path, config: Config, device: torch.device
) -> tuple[Model, torch.optim.Adam, Position, Measured | None]:
    """The network as the newest checkpoint left it, or a new one; what else training was in the middle of."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Model(config.model)
    position = checkpoint.newest(path)
    if position is None and config.train.init_from:
        model.load_state_dict(donor(config).model.state_dict())
    model.to(device)
    optimizer = make_optimizer(model, config.train)
    if position is None:
        return model, optimizer, Position(1, 0, finished=False), None
    measured = checkpoint.load(path, position, model, optimizer)
    say(f"going on with {path} after {position.folder}")
    return model, optimizer, position, measured


def donor(config: Config) -> Agent:
    agent = load(config.train.init_from, device="cpu")
    if agent.config.model != config.model:
        raise UsageError(f"the network in {config.train.init_from} has another shape than this run's model settings.")
    return agent


def fix_threads(config: Config) -> None:
    """Fix the number now: PyTorch may otherwise change it by itself later, and with it the order of sums."""
    torch.set_num_threads(config.machine.threads or torch.get_num_threads())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time works on a run; the lock goes with the process, however it ends."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another process is working on {path}; wait for it, or stop it first.") from None
        yield


class Metrics:
    """metrics.jsonl. What an interrupted process logged beyond its last checkpoint is dropped: it will come again."""

    def __init__(self, run: Path, position: Position):
        self.path = run / "metrics.jsonl"
        lines = [line for line in read_lines(self.path) if self._stands(line, run, position)]
        write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    @staticmethod
    def _stands(line: dict[str, Any], run: Path, position: Position) -> bool:
        if line["stage"] == "start":
            return True
        if line["stage"] == "collect":
            return all(shard_path(run, line["iteration"], line["shard"], game).exists() for game in line["games"])
        if line["iteration"] != position.iteration:
            return bool(line["iteration"] < position.iteration)
        return position.finished or (line["stage"] == "train" and line["update"] <= position.update)

    def log(self, stage: str, iteration: int, values: dict[str, Any]) -> None:
        add_line(self.path, {"stage": stage, "iteration": iteration, **values})


def add_line(path: Path, content: dict[str, Any]) -> None:
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"  # by a killed process
            else:
                torn = False
            file.write(b"\n" * torn + json.dumps(content).encode() + b"\n")  # one write: threads do not mix
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}.") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines; one that a killed process left half-written is passed over."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
