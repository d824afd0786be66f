"""A trained network that plans: load it, ask it, hand it on."""

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from presage import __version__, checkpoint, fused
from presage.arena import Chooser
from presage.batches import controls_table
from presage.config import Config, Planning, at, from_json, to_json, with_fields
from presage.errors import RunError, UsageError
from presage.events import Outlook
from presage.files import checksum, encode_tensors, read_json, write_bytes, write_json
from presage.games import find
from presage.graphs import Captured
from presage.model import LOW, Model
from presage.planner import Imagine, Perceive, Planner
from presage.pools import Array
from presage.tasks import FRAME, STACK, Spec, Task

FRAMES = (STACK, FRAME, FRAME)


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"there is no device {name!r}: say auto, cpu or cuda.") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"presage runs on cpu or cuda, not on {name!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no {name} here: say --device cpu or auto.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are made on the current one
    return device


@dataclass(frozen=True)
class AgentPlan:
    """What the agent considered and why it chose; for a batch of N, every array has a leading N."""

    action: Any  # int: the number of the chosen plan's first action, what to play now
    control: Array  # [3]: that action's shoot, horizontal, vertical
    sequence: Array  # int [H]: the actions of the chosen plan
    p_died: Array  # [H]: the chosen plan's P(died) after each step
    p_scored: Array  # [H]
    candidates: Array  # int [k, H]: every sequence considered
    candidates_p_died: Array  # [k, H]
    candidates_p_scored: Array  # [k, H]
    safe: Array  # bool [k]: P(died) after the last step is under the threshold
    chosen: Any  # int: which candidate
    threshold: float
    reason: Any  # str


class Agent:
    """One network and the tasks it was trained on."""

    def __init__(self, model: Model, specs: Sequence[Spec], config: Config, iteration: int, device: torch.device):
        self.model = model.to(device).eval()
        self.specs = {spec.name: spec for spec in specs}
        self.config, self.iteration, self.device = config, iteration, device
        self.plays = iteration + 1  # the iteration whose k and thresholds it plays by
        self.bound: float | None = None  # on P(died) in all games, instead of those thresholds
        self.fast = config.machine.fused and fused.fits(model, device)
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.captured: dict[Any, tuple[torch.Generator, Captured]] = {}

    def playing(self, how: Planning, bfloat16: bool | None = None) -> "Agent":
        """The same network, which plans otherwise; bfloat16: as in MachineConfig, if told."""
        settings = asdict(how) | {"bfloat16": bfloat16}
        told = {name: value for name, value in settings.items() if value is not None}
        bound = told.pop("threshold", self.bound)
        if bound is not None and not bound >= 0:
            raise UsageError(f"the threshold must not be negative, as {bound} is.")
        if "k" in told:
            told["k"] = ((1, float(told["k"])),)
        other = copy(self)
        other.config, other.bound, other.captured = with_fields(self.config, **told), bound, {}
        return other

    @property
    def low(self) -> bool:
        """It plays in bfloat16 without a GPU."""
        return self.config.machine.bfloat16 and self.device.type == "cpu"

    @property
    def k(self) -> int:
        """Sequences imagined a step: what the next iteration would use."""
        return int(at(self.config.plan.k, self.plays))

    def threshold(self, spec: Spec) -> float:
        if self.bound is not None:
            return self.bound
        return self.config.plan.thresholds.get(spec.name, at(spec.thresholds, self.plays))

    def settings(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """How it plans in these, as results note it down."""
        plan, thresholds = self.config.plan, {task.name: self.threshold(self.spec(task)) for task in tasks}
        chosen = {"k": self.k, "thresholds": thresholds, "carry": plan.carry, "monotone": plan.monotone}
        return {"iteration": self.iteration, **chosen, "hold": self.config.data.hold}

    def planner(self, specs: Sequence[Spec], seed: int | None, fast: bool = True) -> Planner:
        """A planner for one game of each spec at a time (name a spec as often as its game is played).

        With no seed it draws from the agent's own generator. fast: as in `network`.
        """
        perceive, imagine = self.network(fast)
        thresholds = [self.threshold(spec) for spec in specs]
        generator = self.generator if seed is None else torch.Generator(self.device).manual_seed(seed)
        return Planner(
            perceive=perceive,
            imagine=imagine,
            tables=controls_table(specs).to(self.device),
            action_counts=torch.tensor([len(spec.controls) for spec in specs], device=self.device),
            thresholds=torch.tensor(thresholds, dtype=torch.float32, device=self.device),
            k=self.k,
            horizon=self.config.data.horizon,
            generator=generator,
            carry=self.config.plan.carry,
            hold=self.config.data.hold,
        )

    def network(self, fast: bool) -> tuple[Perceive, Imagine]:
        """Its two functions: fast, the GPU's fused ones or in bfloat16, where there are such; or as they are."""
        monotone = self.config.plan.monotone
        if fast and self.fast:
            return partial(fused.perceive, self.model), partial(fused.imagine, self.model, monotone=monotone)
        precision = torch.autocast(self.device.type, LOW, enabled=fast and self.low)
        return precision(self.model.perceive), precision(partial(self.model.imagine, monotone=monotone))

    def chooser(self, specs: Sequence[Spec], seed: int, group: int = 0) -> Chooser:
        """A planner for a long play of all these games; on a GPU each step is one launch.

        Capturing that launch takes a part of a second, so the next play of the same games in the same group uses it
        again: a group plays one thing at a time, and what a planner remembers ends where an episode starts.
        """
        if not self.fast:
            return self.planner(specs, seed)
        if (key := (group, *specs)) not in self.captured:
            planner = self.planner(specs, seed)
            act = Captured(lambda frames, fresh: planner.act(frames, fresh, planner.rows), generator=planner.generator)
            self.captured[key] = planner.generator, act
        generator, act = self.captured[key]
        generator.manual_seed(seed)
        return lambda frames, fresh: fetched(act(torch.from_numpy(frames), torch.from_numpy(fresh)))

    def spec(self, task: str | Task) -> Spec:
        """Of a task it was trained on or, just as well, of any other."""
        if isinstance(task, Task):
            return Spec.of(task)
        return self.specs[task] if task in self.specs else Spec.of(find([task])[0])

    def plan(
        self,
        frames: Any,
        task: str | Task,
        k: int | None = None,
        threshold: float | None = None,
        seed: int | None = None,
        previous: AgentPlan | None = None,
    ) -> AgentPlan:
        """Plan for uint8 frames [4, 84, 84], oldest first, or a batch [N, 4, 84, 84].

        Give the plan of the step before as `previous` and it is carried on (S17); leave it out where an episode starts.
        """
        batch, single = checked_frames(frames)
        spec = self.spec(task)
        planner = self.playing(Planning(k, threshold)).planner([spec] * len(batch), seed, fast=False)
        rows, every_step = planner.rows, []

        def imagine(h: Tensor, controls: Tensor) -> Outlook:
            """The plain network's answer, of which every step is kept to be shown."""
            steps = self.model.imagine_steps(h, controls, self.config.plan.monotone)
            every_step.append(steps)
            return Outlook(steps.died[..., -1], steps.scored[..., -1])

        planner.imagine = imagine
        fresh = torch.full((len(batch),), previous is None, device=self.device)
        if previous is not None:
            planner.carried = torch.from_numpy(np.atleast_2d(previous.sequence).copy()).to(self.device)
            if planner.carried.shape != (len(batch), planner.horizon):
                raise UsageError("the previous plan is for another number of games.")
        plan = planner.plan(batch.to(self.device), fresh, rows)
        died, scored = every_step[0]  # [N, k, H] each
        index, safe = plan.choice
        limit = float(planner.thresholds[0])
        arrays = {
            "control": planner.tables[rows, plan.best[:, 0]],
            "sequence": plan.best,
            "p_died": died[rows, index],
            "p_scored": scored[rows, index],
            "candidates": plan.actions,
            "candidates_p_died": died,
            "candidates_p_scored": scored,
            "safe": safe,
        }
        out = {name: (tensor[0] if single else tensor).cpu().numpy() for name, tensor in arrays.items()}
        reasons = [_reason(s, limit) for s in safe]
        first, chosen = plan.best[:, 0].cpu().numpy(), index.cpu().numpy()
        return AgentPlan(
            action=int(first[0]) if single else first,
            chosen=int(chosen[0]) if single else chosen,
            reason=reasons[0] if single else reasons,
            threshold=limit,
            **out,
        )

    def foresee(self, frames: Any, task: str | Task, actions: Any) -> tuple[Array, Array]:
        """P(died) and P(scored) after each step, if these actions int [H] are played from uint8 frames [4, 84, 84]."""
        batch, single = checked_frames(frames)
        table, sequence = controls_table([self.spec(task)])[0], np.asarray(actions)
        if (
            not single
            or sequence.ndim != 1
            or not len(sequence)
            or not 0 <= sequence.min() <= sequence.max() < len(table)
        ):
            raise UsageError("one stack of frames, and one sequence of the task's actions by their numbers.")
        controls = table[torch.from_numpy(sequence)][None, None].to(self.device)  # [1, 1, H, 3]
        h = self.model.perceive(batch.to(self.device))
        died, scored = self.model.imagine_steps(h, controls, self.config.plan.monotone)
        return died[0, 0].cpu().numpy(), scored[0, 0].cpu().numpy()

    def act(self, frames: Any, task: str | Task) -> Any:
        """The action to play now; `plan` with `previous` plays better, as it carries plans on."""
        return self.plan(frames, task).action

    def export(self, folder: str | Path) -> Path:
        """The weights and what rebuilds the model, without data or optimiser: what one hands on."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        data = encode_tensors(self.model.state_dict())
        write_bytes(path / "model.safetensors", data)
        head = {"format": checkpoint.FORMAT, "version": __version__, "iteration": self.iteration}
        rest = {"config": to_json(self.config), "tasks": [spec._asdict() for spec in self.specs.values()]}
        write_json(path / "agent.json", {**head, **rest, "sha256": {"model.safetensors": checksum(data)}})
        return path


def fetched(result: Tensor) -> Array:
    """A GPU's result. This thread sleeps until it is there: `cpu()` would keep one of the emulator's cores busy."""
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    mine = torch.empty_like(result, device="cpu", pin_memory=True)
    mine.copy_(result, non_blocking=True)
    done.record()
    done.synchronize()
    return np.asarray(mine.numpy())


def _reason(safe: Tensor, threshold: float) -> str:
    if safe.any():
        return f"{int(safe.sum())} of {len(safe)} plans have P(died) < {threshold:g}; the likeliest of them to score"
    return f"no plan has P(died) < {threshold:g}; the least likely to die"


def checked_frames(frames: Any) -> tuple[Tensor, bool]:
    """uint8 [N, 4, 84, 84], and whether it was a single one."""
    array = frames.cpu().numpy() if isinstance(frames, Tensor) else np.asarray(frames)
    if array.dtype != np.uint8 or array.shape[-3:] != FRAMES or array.ndim not in (3, 4) or 0 in array.shape:
        raise UsageError(f"frames must be uint8 [4, 84, 84] or [N, 4, 84, 84], not {array.dtype} {list(array.shape)}.")
    single = array.ndim == 3
    return torch.from_numpy(np.ascontiguousarray(array[None] if single else array)), single


def read_config(run: Path) -> tuple[Config, list[Spec]]:
    """A run's configuration and tasks."""
    if not (run / "config.json").exists():
        raise UsageError(f"there is no run in {run}: `presage train --run {run}` starts one.")
    data = read_json(run / "config.json")
    checkpoint.check_format(data.pop("format", None), run / "config.json")
    data.pop("version", None)
    return _parse(data.pop("tasks", None), data, run / "config.json")


def _parse(tasks: Any, config: Any, where: Path) -> tuple[Config, list[Spec]]:
    try:
        return from_json(config), [Spec.from_json(task) for task in tasks]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise RunError(f"{where} is damaged: {error}") from None


def load(path: str | Path, iteration: int | None = None, device: str = "auto") -> Agent:
    """The agent of a run (its newest finished iteration unless told), or of an exported folder."""
    folder = Path(path)
    if (folder / "agent.json").exists():
        data = read_json(folder / "agent.json")
        checkpoint.check_format(data.get("format"), folder / "agent.json")
        config, specs = _parse(data.get("tasks"), data.get("config"), folder / "agent.json")
        exported = data.get("iteration")
        if not isinstance(exported, int) or exported < 1:
            raise RunError(f"{folder / 'agent.json'} is damaged: it does not say its iteration.")
        if iteration not in (None, exported):
            raise UsageError(f"{folder} is an export of iteration {exported} alone.")
        weights, iteration = folder, exported
    else:
        config, specs = read_config(folder)
        done = checkpoint.finished(folder)
        if not done:
            raise UsageError(f"{folder} has no finished iteration yet: `presage train --run {folder}` goes on with it.")
        iteration = done[-1] if iteration is None else iteration
        if iteration not in done:
            raise UsageError(f"{folder} has no finished iteration {iteration}; it has {', '.join(map(str, done))}.")
        weights = folder / "checkpoints" / f"iter-{iteration:02d}"
    model = Model(config.model)
    checkpoint.load_model(weights, model)
    return Agent(model, specs, config, iteration, device_of(device))
