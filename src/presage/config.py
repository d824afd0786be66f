"""Every number of an experiment, with its meaning; the presets; and what is refused."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from presage.errors import UsageError, nearest

Schedule = tuple[tuple[int, float], ...]  # (from this iteration on, value), first entry at iteration 1


class Bounds(NamedTuple):
    """What a number may be, and how that is told to whoever gives another."""

    told: str
    least: float
    below: float = 2**63


NOT_NEGATIVE = Bounds("must be a number that is not negative", 0)
FROM_ONE = Bounds("must be at least 1", 1)
Count = Annotated[int, FROM_ONE]
Length = Annotated[float, FROM_ONE]
Whole = Annotated[int, NOT_NEGATIVE]
Amount = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, Bounds("is a share from 0 to less than 1", 0, 1)]
Chance = Annotated[float, Bounds("is a chance between 0 and 1", 0, math.nextafter(1, 2))]


def at(schedule: Schedule, iteration: int) -> float:
    """The value in force at an iteration."""
    return [value for start, value in schedule if start <= iteration][-1]


@dataclass(frozen=True)
class DataConfig:
    """How much is played, and how (S15)."""

    first_steps: Count = 400_000
    """Cases a game in iteration 1, played at random."""
    later_steps: Count = 200_000
    """Cases a game in every later iteration, played by planning."""
    heldout_steps: Count = 8_000
    """Further cases a game and iteration that are never trained on."""
    shard_steps: Count = 200_000
    """Cases a game in one shard, at most: what an interruption repeats."""
    envs: Count = 40
    """Games of each kind played in parallel. Fewer see further into a game: all start anew with each shard."""
    groups: Count = 2
    """Groups that these are split into: while the emulator plays one, plans are made for another."""
    noop_max: Whole = 30
    """Each episode starts with 0 to this many steps of doing nothing."""
    sticky: Chance = 0.0
    """Chance that the emulator repeats the previous action instead (0: as in the paper)."""
    horizon: Count = 25
    """Steps looked ahead."""
    hold: Length = 1.0
    """Steps between new controls in random sequences, played or imagined, on average. 1: one at each step."""
    stray: Share = 0.0
    """Share of planned play in which a random sequence is played out: what comes of plans that nobody would choose."""
    shards_from: str = ""
    """Take the shards that this run has instead of playing them: other networks, equal data."""
    overlap: bool = False
    """Play the next iteration while this one trains, with the network of the iteration before (from the third on)."""


@dataclass(frozen=True)
class ModelConfig:
    """Perception -> Prediction -> Valuation."""

    prediction: Literal["rrnn", "lstm", "plain"] = "rrnn"
    """The recurrent part: the paper's RRNN, an LSTM of equal size, or the RRNN without its residual path."""
    channels: tuple[Count, Count, Count] = (32, 64, 64)
    """Channels of Perception's three stages."""
    state_size: Count = 100
    """Numbers in h, the state that Prediction moves forward."""
    hidden_size: Count = 500
    """Width of f, the function inside the RRNN."""
    layer_norm: bool = True
    """Normalise h before f; off: the ablation."""
    motion: bool = False
    """Show Perception the newest frame and what changed from each frame to the next, instead of four frames."""


@dataclass(frozen=True)
class TrainConfig:
    """One training phase."""

    updates: Count = 48_000
    """Parameter updates an iteration."""
    batch_size: Count = 100
    """Cases in an update."""
    lr: Schedule = ((1, 1e-4), (4, 5e-5), (7, 1e-5))
    """Adam's learning rate: pairs of (from iteration, value)."""
    lr_decay: Literal["halve", "anneal", "cosine"] = "halve"
    """Halved for the second half of each iteration (the paper), or a cosine down to zero: in each iteration (anneal) or
    over the whole run (cosine)."""
    weight_decay: Amount = 1e-4
    """L2 penalty, added to the gradient."""
    clamp: Amount = 1.0
    """Each gradient component is clamped to plus or minus this."""
    weight_growth: Amount = 3.0
    """Factor by which the sampling weight of newer iterations grows ..."""
    weight_every: Count = 3
    """... each time this many iterations have passed."""
    hard: Share = 0.0
    """Share of each batch that is drawn by how wrong the network is about a case: hard ones come more often."""
    shift: Whole = 0
    """Show each case moved by up to so many pixels, up or down and left or right, as if there were more cases."""
    checkpoint_every: Count = 2_000
    """Updates between checkpoints inside a training phase, at least."""
    log_every: Count = 500
    """Updates between two lines of metrics."""
    trainable: Literal["all", "valuation"] = "all"
    """Train the whole network, or Valuation alone with the rest frozen."""
    init_from: str = ""
    """Start from the network of this run or export instead of a random one."""


@dataclass(frozen=True)
class PlanConfig:
    """How plans are made."""

    k: Schedule = ((1, 25), (4, 100), (7, 200))
    """Control sequences imagined at each step: pairs of (from iteration, number)."""
    thresholds: dict[str, Amount] = field(default_factory=dict)
    """Fixed bound on P(died) for a game, instead of that game's own schedule (`presage games` shows it)."""
    carry: bool = True
    """Consider the last step's best sequence again, moved on by one."""
    monotone: bool = False
    """Take P(died) never to fall along a sequence, as death is for good; off: what it is after the last step counts."""


@dataclass(frozen=True)
class Planning:
    """How a network is to plan where that differs from how its run does (None: as the run does)."""

    k: int | None = None
    """Sequences imagined a step; what the next iteration would use unless told."""
    threshold: float | None = None
    """Bound on P(died) in all games; what the next iteration would use unless told."""
    carry: bool | None = None
    """Consider the last step's best sequence again (True) or not (False); as the run does unless told."""
    monotone: bool | None = None
    """Take P(died) never to fall along a sequence (True) or not (False); as the run does unless told."""
    hold: float | None = None
    """Steps between new controls in imagined sequences, on average; as the run does unless told."""


AS_THE_RUN = Planning()


@dataclass(frozen=True)
class MachineConfig:
    """What may differ between machines, and between a run and its continuation."""

    device: str = "auto"
    """auto, cpu or cuda."""
    threads: Whole = 0
    """Threads of PyTorch, and of the emulator for each game of each group; 0: all cores, which the games share."""
    memory_gib: Amount = 0.0
    """Memory for frames; more than that is streamed from disk. 0: two fifths of what there is."""
    gpu_memory_gib: Amount = 0.0
    """The GPU's memory for frames; more than that is kept in memory or streamed. 0: seven tenths of what there is."""
    checkpoint_seconds: Amount = 15.0
    """Seconds between checkpoints inside a training phase, at least: a GPU does thousands of updates in that time."""
    fused: bool = True
    """Use the fused kernels and bfloat16 where the GPU can; off: plain PyTorch in float32."""
    bfloat16: bool = False
    """Without a GPU: matrix products in bfloat16, too. About twice as many plans in the same time where the processor
    has instructions for it, which `presage doctor` tells."""


@dataclass(frozen=True)
class Config:
    """One experiment."""

    preset: Literal["paper", "paper-overlap", "anneal", "best", "quickstart", "debug"] = "paper"
    """Where every other default comes from."""
    games: tuple[str, ...] = ("pong", "breakout", "demon_attack")
    """Games to learn at once, with one network."""
    seed: Whole = 0
    """Everything random follows from this number."""
    iterations: Count = 19
    """Rounds of collecting and training."""
    evaluate_episodes: Whole = 0
    """Full episodes a game played after each iteration; 0: none, evaluate later with `presage evaluate`."""
    data: DataConfig = DataConfig()
    plan: PlanConfig = field(default_factory=PlanConfig)
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    machine: MachineConfig = MachineConfig()


PRESETS: dict[str, Config] = {
    # Every number of the paper.
    "paper": Config(),
    # The same amounts, but emulator and GPU work at the same time: data are one network older than in the paper.
    "paper-overlap": Config(preset="paper-overlap", data=DataConfig(overlap=True)),
    # The same with one change: ten times the learning rates, down to zero in each iteration.
    "anneal": Config(preset="anneal", train=TrainConfig(lr=((1, 1e-3), (4, 5e-4), (7, 1e-4)), lr_decay="anneal")),
    # The same amounts and network, with what did best here (docs/deviations.md).
    "best": Config(
        preset="best",
        data=DataConfig(stray=0.3),
        plan=PlanConfig(monotone=True),
        train=TrainConfig(lr=((1, 2e-4), (4, 1e-4), (10, 5e-5), (16, 2e-5))),
    ),
    # Ten minutes on two CPU cores: little data, a narrow network, a high learning rate, two iterations of planned play.
    "quickstart": Config(
        preset="quickstart",
        iterations=3,
        data=DataConfig(
            first_steps=40_000, later_steps=6_400, heldout_steps=1_600, shard_steps=40_000, envs=16, groups=1
        ),
        plan=PlanConfig(k=((1, 25),), thresholds={"demon_attack": 0.5}),  # bolder: it has learned little of danger
        model=ModelConfig(channels=(8, 32, 32), hidden_size=250),
        train=TrainConfig(
            updates=1_500, batch_size=64, lr=((1, 7e-4),), lr_decay="cosine", checkpoint_every=500, log_every=100
        ),
    ),
    # Every path in seconds: nothing is learned.
    "debug": Config(
        preset="debug",
        iterations=2,
        data=DataConfig(first_steps=128, later_steps=64, heldout_steps=64, shard_steps=64, envs=2, noop_max=5),
        model=ModelConfig(channels=(4, 4, 4), state_size=16, hidden_size=16),
        train=TrainConfig(updates=10, batch_size=8, lr=((1, 1e-3),), checkpoint_every=4),
        plan=PlanConfig(k=((1, 4),)),
        machine=MachineConfig(checkpoint_seconds=0.0),
    ),
}

GROUPS = tuple(f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type))


def preset(name: str) -> Config:
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}{nearest(name, PRESETS)} The presets: {', '.join(PRESETS)}.")
    return PRESETS[name]


def with_fields(config: Config, **fields: Any) -> Config:
    """A copy with fields of any group replaced by name: with_fields(config, seed=3, updates=100)."""
    home = {f.name: group for group in GROUPS for f in dataclasses.fields(getattr(config, group))}
    top = {f.name for f in dataclasses.fields(Config)} - set(GROUPS) - {"preset"}
    for name, value in fields.items():
        if name in top:
            config = dataclasses.replace(config, **{name: _typed(Config, name, value)})
        elif name in home:
            group = getattr(config, home[name])
            group = dataclasses.replace(group, **{name: _typed(type(group), name, value)})
            config = dataclasses.replace(config, **{home[name]: group})
        else:
            raise UsageError(f"there is no setting {name!r}{nearest(name, [*top, *home])}")
    return check(config)


def to_json(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_json(data: dict[str, Any]) -> Config:
    """The inverse of to_json; unknown or ill-typed entries are refused by name."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= value if name in GROUPS else {name: value}
    base = preset(flat.pop("preset", "paper"))
    return with_fields(base, **flat)


def check(config: Config) -> Config:
    """The same config, once it makes sense."""
    for name, bounds, number in bounded(config):
        if not bounds.least <= number < bounds.below:  # catches NaN too
            raise UsageError(f"{name} {bounds.told}, not {number}.")
    data = config.data
    for name in ("first_steps", "later_steps", "heldout_steps"):
        if (steps := getattr(data, name)) % data.envs:
            raise UsageError(f"{name} ({steps}) must be a multiple of envs ({data.envs}).")
    if data.envs % data.groups:
        raise UsageError(f"envs ({data.envs}) must be a multiple of groups ({data.groups}).")
    if data.shard_steps < data.envs:
        raise UsageError(f"shard_steps ({data.shard_steps}) must be at least envs ({data.envs}).")
    check_schedule("lr", config.train.lr, least=1e-30)
    check_schedule("k", config.plan.k, least=1)
    if not config.games or len(set(config.games)) != len(config.games):
        raise UsageError(f"games must name at least one game, each once: {', '.join(config.games) or 'none given'}.")
    return config


def bounded(config: Any) -> Iterator[tuple[str, Bounds, float]]:
    """Every number in these settings, alone or among others, that has bounds."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from bounded(value)
        numbers = {name: value}
        if typing.get_origin(hint) in (tuple, dict):
            hint = typing.get_args(hint)[-1]
            several = value.items() if isinstance(value, dict) else enumerate(value)
            numbers = {f"{name}[{key}]": number for key, number in several}
        for bounds in getattr(hint, "__metadata__", ()):
            yield from ((which, bounds, number) for which, number in numbers.items())


def check_schedule(name: str, schedule: Schedule, least: float) -> None:
    starts, values = [start for start, _ in schedule], [value for _, value in schedule]
    if not starts or starts[0] != 1 or starts != sorted(set(starts)):
        raise UsageError(f"{name} needs pairs of (from iteration, value), the first from iteration 1: {schedule}.")
    if not all(least <= value < float("inf") for value in values) or (least == 1 and any(v % 1 for v in values)):
        kind = "whole numbers from 1" if least == 1 else "numbers above 0" if least else "numbers from 0"
        raise UsageError(f"{name} takes {kind}, not {', '.join(map(str, values))}.")


def differences(ours: Config, theirs: Config) -> dict[str, tuple[Any, Any]]:
    """Both values of each field that differs, apart from what belongs to the machine."""
    a, b = to_json(ours), to_json(theirs)
    found: dict[str, tuple[Any, Any]] = {}
    for group in (*GROUPS, None):
        if group == "machine":
            continue
        mine, other = (a[group], b[group]) if group else (a, b)
        skip = set(GROUPS) | {"preset"} if group is None else set()
        found |= {name: (mine[name], other[name]) for name in mine if name not in skip and mine[name] != other[name]}
    return found


def _typed(owner: type, name: str, value: Any) -> Any:
    hint = typing.get_type_hints(owner)[name]
    try:
        return _coerce(hint, value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} cannot be {value!r}; it is {_describe(hint)}.") from None


def _coerce(hint: Any, value: Any) -> Any:
    """JSON and Python callers may write lists for tuples and whole numbers for floats; nothing else is bent."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        inner = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(inner) == len(value):
            return tuple(_coerce(kind, item) for kind, item in zip(inner, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {_coerce(args[0], k): _coerce(args[1], v) for k, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint and not isinstance(hint, types.GenericAlias):
        return value
    raise ValueError


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    return str(getattr(hint, "__name__", hint)) if isinstance(hint, type) else str(hint)
