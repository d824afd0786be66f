"""The commands. Results go to standard output, progress to standard error; each error is one sentence."""

import json as json_module
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from presage import __version__
from presage.config import AS_THE_RUN, PRESETS, Config, Planning, check, preset
from presage.errors import RunError, UsageError, nearest

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def games(names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="GAME")] = ()) -> None:
    """List the games: controls, death rule, threshold, reference scores.

    Args:
        names: Only these, with every control.
    """
    from presage.games import AtariTask, atari_games, find
    from presage.progress import Bar

    table = Table("game", "actions", "dies when", "P(died) under", "random", "human", "source")
    rules = {"lives": "a life is lost", "negative_reward": "a point is lost", "game_over": "the game ends"}
    with Bar("asking the emulator", len(names or atari_games()), "games") as bar:
        for name in names or atari_games():
            (task,) = find([name])
            rule = rules[task.death] if isinstance(task, AtariTask) else task.died.__name__
            limits = ", ".join(f"{value:g} from iteration {start}" for start, value in task.thresholds)
            limits = f"{task.thresholds[0][1]:g}" if len(task.thresholds) == 1 else limits
            actions = "\n".join(map(str, task.controls)) if names else str(len(task.controls))
            table.add_row(name, actions, rule, limits, _number(task.random), _number(task.human), task.source)
            bar.advance()
    Console().print(table)


@dataclass(frozen=True)
class Train:
    """Train one network on several games at once. The same command on the same folder goes on where it stopped."""

    run: Path
    """The run's folder."""
    config: Config = field(default_factory=Config)


def train(arguments: Sequence[str]) -> None:
    """Train one network on several games at once; the same command on the same folder goes on."""
    wanted = _value_of(arguments, "--preset")
    folder = _value_of(arguments, "--run")
    if wanted is None and folder is not None and (Path(folder) / "config.json").exists():
        from presage.agent import read_config

        default = read_config(Path(folder))[0]
    else:
        default = preset(wanted or "quickstart")
    # Flags come in pairs (--x, --no-x): so the same command can be typed again, its settings being the defaults then.
    parsed = tyro.cli(
        Train,
        prog="presage train",
        args=list(arguments),
        default=Train(run=tyro.MISSING, config=default),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    check(parsed.config)
    from presage.games import find
    from presage.run import carry_out

    carry_out(parsed.config, find(parsed.config.games), parsed.run)


def evaluate(
    run: Folder,
    games: tuple[str, ...] = (),
    episodes: int = 30,
    planning: Planning = AS_THE_RUN,
    iteration: int | None = None,
    seed: int = 0,
    sticky: float | None = None,
    max_frames: int = 108_000,
    random: bool = False,
    heldout: bool = False,
    probe: int | None = None,
    bfloat16: bool | None = None,
    json: bool = False,
) -> None:
    """Score a run's agent, or an exported one, on full episodes; with --heldout or --probe, on what it foresees.

    Args:
        run: The run's folder, or an exported agent's.
        games: Games to play; all it was trained on unless told.
        episodes: Full episodes a game.
        planning: How plans are made.
        iteration: Which iteration's network; the newest unless told.
        seed: Of no-op starts and imagined sequences.
        sticky: Chance that the emulator repeats the previous action; as the run was played unless told.
        max_frames: Where an episode is cut, in emulator frames: 30 minutes of play unless told.
        random: Play at random instead, in the same way: the score to beat.
        heldout: Do not play: tell how well it foresees what happens in cases that the run has held out.
        probe: Do not count points: at so many moments of its play a game, try out plans that it considers and the one
            it chooses, and tell how well it foresaw what comes of them and how well it chose. With --random, at moments
            of random play, which are the same for every network.
        bfloat16: On a CPU, plan with matrix products in bfloat16 (True) or not (False); as the run does unless told.
        json: Print one JSON object on standard output and nothing else there.
    """
    from presage.agent import load
    from presage.evaluation import evaluate as score
    from presage.run import provenance

    if heldout:
        if random or planning != AS_THE_RUN or any(value is not None for value in (sticky, probe, bfloat16)):
            raise UsageError("--heldout does not play: leave out --random, --sticky, --probe and how to plan.")
        _tell_knowledge(run, iteration, games, json)
        return
    if probe is not None and sticky is not None:
        raise UsageError("--probe looks at play without sticky actions: leave out --sticky.")
    agent = load(run, iteration).playing(planning, bfloat16)
    if probe is not None:
        _tell_probes(run, agent, games, probe, seed, random, json)
        return
    made = provenance(agent.device)  # now: hours later the checkout may hold other code than what runs here
    result = score(agent, games or None, episodes, seed=seed, random=random, sticky=sticky, max_frames=max_frames)
    if _noted(run / "evaluations.jsonl", result | {"made": made}, json):
        return
    player = "random play" if random else f"iteration {result['iteration']}, k = {result['k']}"
    table = Table("game", "mean", "95 % interval", "n", "random", "human", "norm.", title=player)
    for name, game in result["games"].items():
        low, high = map(_number, game["ci95"])
        known = [_number(game["random"]), _number(game["human"]), _number(game["human_normalized"])]
        table.add_row(name, _number(game["mean"]), f"{low} … {high}", str(game["episodes"]), *known)
    Console().print(table)


def _tell_probes(run: Path, agent: Any, games: Sequence[str], number: int, seed: int, random: bool, json: bool) -> None:
    from presage.probe import KINDS, probe
    from presage.run import provenance

    made = provenance(agent.device)
    result = probe(agent, games or None, number, seed, random)
    title = f"iteration {result['iteration']}, k = {result['k']}: plans tried out at moments of {result['policy']} play"
    rows = [(game, f"{kind} plans", found[kind]) for game, found in result["games"].items() for kind in KINDS]
    if _noted(run / "probes.jsonl", result | {"made": made}, json):
        return
    _print_foreseen(title, rows)
    table = Table("game", "moments", "random plans die", "chosen ones", "told apart", title="where it matters")
    for game, found in result["games"].items():
        shares = (found["choices"][name] for name in ("random_died", "chosen_died", "told_apart"))
        table.add_row(game, str(found["choices"]["moments"]), *("" if x is None else f"{x:.1%}" for x in shares))
    Console().print(table)


def _tell_knowledge(run: Path, iteration: int | None, games: Sequence[str], json: bool) -> None:
    from presage.agent import load
    from presage.knowledge import examine
    from presage.run import provenance

    agent = load(run, iteration)
    made = provenance(agent.device)
    result = examine(agent, run, games or None)
    plays = {name: result.get(name, {}) for name in ("random", "planned")}
    rows = [(game, f"{name} play", known) for name, found in plays.items() for game, known in found.items()]
    if not _noted(run / "knowledge.jsonl", result | {"made": made}, json):
        _print_foreseen(f"iteration {result['iteration']} on held-out cases", rows)


def _noted(file: Path, result: dict[str, Any], json: bool) -> bool:
    """Add a result to its run's file if it is of a run and not of an export; print it if it was asked for as JSON."""
    from presage.run import add_line

    if (file.parent / "config.json").exists():
        add_line(file, result)
    if json:
        print(json_module.dumps(result))
    return json


def _print_foreseen(title: str, rows: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    table = Table("game", "of", "n", "loss", "the best constant's", "F1 died", "F1 scored", title=title)
    for game, what, known in rows:
        losses = (f"{known[name]:.4f}" for name in ("cross_entropy", "baseline_cross_entropy"))
        foreseen = (f"{known[outcome]['f1']:.2f}" for outcome in ("died", "scored"))
        table.add_row(game, what, str(known["cases"]), *losses, *foreseen)
    Console().print(table)


def play(
    run: Folder,
    game: str = "",
    video: Path | None = None,
    plain: bool = False,
    start: float = 0.0,
    seconds: float = float("inf"),
    seed: int = 0,
    planning: Planning = AS_THE_RUN,
    iteration: int | None = None,
) -> None:
    """Play one full episode and tell its score; with --video, film it and what the agent thinks.

    Args:
        run: The run's folder, or an exported agent's.
        game: Which game; the first it was trained on unless told.
        video: Write a film here, an .mp4 or a .gif.
        plain: Film the screen alone: many times faster.
        start: Where the film begins, in seconds of play.
        seconds: How long it is; to the end of the episode unless told.
        seed: Of the no-op start and the imagined sequences.
        planning: How plans are made.
        iteration: Which iteration's network; the newest unless told.
    """
    from presage.agent import load
    from presage.replay import episode

    agent = load(run, iteration).playing(planning)
    print(json_module.dumps(episode(agent, game, seed, video, plain, start, seconds)))


def watch(
    run: Folder,
    game: str = "",
    port: int = 8080,
    host: str = "127.0.0.1",
    planning: Planning = AS_THE_RUN,
    recordings: Path = Path("recordings"),
) -> None:
    """Serve a page that shows the agent play and what it thinks, where one can change things and play oneself.

    Args:
        run: The run's folder, or an exported agent's.
        game: Which game first; the first it was trained on unless told.
        port: Of the page.
        host: Who may look: this machine alone unless told.
        planning: How plans are made at first.
        recordings: The folder where recorded play is left.
    """
    try:
        from presage.viewer import serve
    except ImportError:
        raise UsageError("the page needs more packages: pip install 'presage[viewer]'.") from None
    serve(run, game, host, port, planning, recordings)


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    out: Path,
    no_looks: bool = False,
) -> None:
    """Make tables (CSV), figures (SVG, PNG) and one self-contained page of one or more runs.

    Args:
        runs: The runs' folders.
        out: The folder to write.
        no_looks: Only what was measured: do not play, to show moments and films of what the newest network thinks.
    """
    from presage.report import write

    print(write(runs, out, not no_looks))


def bench(
    seconds: float = 5.0,
    device: str = "auto",
    games: tuple[str, ...] = PRESETS["paper"].games,
    envs: int | None = None,
    groups: int | None = None,
    k: int | None = None,
    threads: int = 0,
    bfloat16: bool = False,
    json: bool = False,
) -> None:
    """Measure every stage's speed, its ratio to the floor it cannot go below, and what bounds it.

    Args:
        seconds: How long to measure planning and updates; the emulator is measured over a whole shard.
        device: auto, cpu or cuda.
        games: Games to measure with.
        envs: Games of each kind in parallel; 40 on a GPU, 16 on a CPU unless told.
        groups: Groups they are split into; 2 on a GPU, 1 on a CPU unless told.
        k: Sequences imagined a step; 200 on a GPU, 25 on a CPU unless told.
        threads: Of the emulator, for each game of each group; 0: all cores, which the games share.
        bfloat16: On a CPU, matrix products in bfloat16; the plain network beside it has float32.
        json: Print one JSON object on standard output and nothing else there.
    """
    from presage.bench import measure, stages

    result = measure(seconds, device, games, envs, groups, k, threads, bfloat16)
    if json:
        print(json_module.dumps(result))
        return
    size = f"{result['environments']} games in {result['groups']} groups, k = {result['k']}"
    table = Table("stage", "ms", "a second", "beside its floor", "bounded by", title=f"{result['device']}: {size}")
    for row in stages(result):
        table.add_row(*row)
    Console().print(table)


def doctor() -> None:
    """Tell versions, device, ROMs, memory and disk, and what would be slow here."""
    from presage.bench import examine

    table = Table("what", "found", title="presage doctor")
    for name, value in examine().items():
        table.add_row(name, value)
    Console().print(table)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (games, train, evaluate, play, watch, report, bench, doctor)
}


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        run_command(words)
    except UsageError as error:
        sys.exit(_fail(error, 2))
    except RunError as error:
        sys.exit(_fail(error, 1))
    except OSError as error:
        sys.exit(_fail(f"{error.filename or 'the work'}: {error.strerror or error}.", 1))
    except KeyboardInterrupt:
        from presage.progress import Interrupted

        how = "saved; the same command goes on from here." if isinstance(sys.exception(), Interrupted) else "stopped."
        sys.exit(_fail(how, 130))


def run_command(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print("presage: one network that foresees death and score, and plays by planning with it.\n\nCommands:")
        for name, command in COMMANDS.items():
            print(f"  presage {name:<9} {(command.__doc__ or '').splitlines()[0]}")
        print("\n`presage COMMAND --help` tells more.")
        return
    if words[0] == "--version":
        print(__version__)
        return
    if words[0] not in COMMANDS:
        raise UsageError(f"there is no command {words[0]!r}{nearest(words[0], COMMANDS)} `presage --help` lists them.")
    command = COMMANDS[words[0]]
    if command is train:
        train(words[1:])
    else:
        tyro.cli(command, prog=f"presage {words[0]}", args=words[1:], config=OPTIONS)


def _value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value given for a flag, read before the parser knows its defaults."""
    for i, word in enumerate(arguments):
        if word == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def _fail(error: Any, status: int) -> int:
    print(f"presage: {error}", file=sys.stderr)
    return status
