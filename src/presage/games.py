"""Every Atari game that one can play alone: its controls, its death rule, its reference scores (S3, S11, S14, S19)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import gymnasium as gym
from ale_py import ALEInterface, LoggerMode, roms

from presage.config import Schedule
from presage.errors import UsageError, nearest
from presage.tasks import Control, Task
from presage.toy import TOY

Death = Literal["lives", "negative_reward", "game_over"]


@dataclass(frozen=True)
class AtariTask(Task):
    """A game of the Arcade Learning Environment, played many at a time by its vector environment."""

    death: Death = "lives"
    actions: tuple[str, ...] = field(default=())
    """The emulator's names of the actions, in the order of controls."""


# ALE reports no lives for these; where the opponent's points come as negative rewards, a lost point is a death.
# Skiing's reward is minus the time at every step, so there only the end counts.
WITHOUT_LIVES: dict[str, Death] = {
    "bowling": "game_over",
    "boxing": "negative_reward",
    "carnival": "game_over",
    "double_dunk": "negative_reward",
    "enduro": "game_over",
    "fishing_derby": "negative_reward",
    "freeway": "game_over",
    "ice_hockey": "negative_reward",
    "journey_escape": "negative_reward",
    "koolaid": "game_over",
    "laser_gates": "game_over",
    "pong": "negative_reward",
    "private_eye": "negative_reward",
    "skiing": "game_over",
    "tennis": "negative_reward",
    "tetris": "game_over",
}
TWO_PLAYERS = ("combat", "joust", "maze_craze", "warlords")  # the emulator refuses to play these alone

MNIH = "Mnih et al. 2015"
WANG = "Wang et al. 2016"
# random, human; the paper compares with Mnih et al., most later work with Wang et al. (no-op starts, 108,000 frames).
SCORES: dict[str, tuple[float, float]] = {
    "alien": (227.8, 7127.7),
    "amidar": (5.8, 1719.5),
    "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3),
    "asteroids": (719.1, 47388.7),
    "atlantis": (12850.0, 29028.1),
    "bank_heist": (14.2, 753.1),
    "battle_zone": (2360.0, 37187.5),
    "beam_rider": (363.9, 16926.5),
    "berzerk": (123.7, 2630.4),
    "bowling": (23.1, 160.7),
    "boxing": (0.1, 12.1),
    "centipede": (2090.9, 12017.0),
    "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4),
    "defender": (2874.5, 18688.9),
    "double_dunk": (-18.6, -16.4),
    "enduro": (0.0, 860.5),
    "fishing_derby": (-91.7, -38.7),
    "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7),
    "gopher": (257.6, 2412.5),
    "gravitar": (173.0, 3351.4),
    "hero": (1027.0, 30826.4),
    "ice_hockey": (-11.2, 0.9),
    "jamesbond": (29.0, 302.8),
    "kangaroo": (52.0, 3035.0),
    "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3),
    "montezuma_revenge": (0.0, 4753.3),
    "ms_pacman": (307.3, 6951.6),
    "name_this_game": (2292.3, 8049.0),
    "phoenix": (761.4, 7242.6),
    "pitfall": (-229.4, 6463.7),
    "private_eye": (24.9, 69571.3),
    "qbert": (163.9, 13455.0),
    "riverraid": (1338.5, 17118.0),
    "road_runner": (11.5, 7845.0),
    "robotank": (2.2, 11.9),
    "seaquest": (68.4, 42054.7),
    "skiing": (-17098.1, -4336.9),
    "solaris": (1236.3, 12326.7),
    "space_invaders": (148.0, 1668.7),
    "star_gunner": (664.0, 10250.0),
    "surround": (-10.0, 6.5),
    "tennis": (-23.8, -8.3),
    "time_pilot": (3568.0, 5229.2),
    "tutankham": (11.4, 167.6),
    "up_n_down": (533.4, 11693.2),
    "venture": (0.0, 1187.5),
    "video_pinball": (16256.9, 17667.9),
    "wizard_of_wor": (563.5, 4756.5),
    "yars_revenge": (3092.9, 54576.9),
    "zaxxon": (32.5, 9173.3),
}
PAPER_SCORES = {"pong": (-20.7, 9.3), "breakout": (1.7, 31.8), "demon_attack": (152.1, 3401.0)}
PAPER_THRESHOLDS: dict[str, Schedule] = {"demon_attack": ((1, 0.2), (4, 0.1), (7, 0.005), (16, 0.001))}
SERVES = ("breakout",)  # S14; in other games the agent finds out by itself that it must shoot


@cache
def atari_games() -> tuple[str, ...]:
    """Every game that one can play alone."""
    return tuple(sorted(set(roms.get_all_rom_ids()) - set(TWO_PLAYERS)))


def control(action: str) -> Control:
    """'UPRIGHTFIRE' -> (1, 1, 1)."""
    return (
        int("FIRE" in action),
        int("RIGHT" in action) - int("LEFT" in action),
        int("UP" in action) - int("DOWN" in action),
    )


def load_rom(emulator: ALEInterface, name: str) -> None:
    """Start an emulator of a game, or start it anew."""
    ALEInterface.setLoggerMode(LoggerMode.Error)
    emulator.loadROM(Path(str(roms.get_rom_path(name))))


@cache
def atari_task(name: str) -> AtariTask:
    """The game with its minimal action set, as the emulator knows it."""
    emulator = ALEInterface()
    load_rom(emulator, name)
    actions = tuple(action.name for action in emulator.getMinimalActionSet())
    random, human = PAPER_SCORES.get(name) or SCORES.get(name) or (None, None)
    return AtariTask(
        name=name,
        make=lambda: gym.make("ale_py:" + gym_id(name), frameskip=1, repeat_action_probability=0.0),
        controls=tuple(control(action) for action in actions),
        thresholds=PAPER_THRESHOLDS.get(name, ((1, 0.0),)),
        noop=actions.index("NOOP") if "NOOP" in actions else 0,  # Backgammon, for one, cannot wait
        serve=actions.index("FIRE") if name in SERVES else None,
        human=human,
        random=random,
        source="" if human is None else MNIH if name in PAPER_SCORES else WANG,
        death=WITHOUT_LIVES.get(name, "lives"),
        actions=actions,
    )


def gym_id(name: str) -> str:
    return "ALE/" + "".join(word.capitalize() for word in name.split("_")) + "-v5"


def find(games: Sequence[str | Task]) -> tuple[Task, ...]:
    """Tasks from names of Atari games (or of the toy) and tasks of one's own."""
    named = {TOY.name: TOY}
    tasks = []
    for game in games:
        if isinstance(game, Task):
            tasks.append(game)
        elif game in named:
            tasks.append(named[game])
        elif game in atari_games():
            tasks.append(atari_task(game))
        elif game in TWO_PLAYERS:
            raise UsageError(f"{game} needs two players, so it cannot be learned by one agent.")
        else:
            raise UsageError(
                f"there is no game {game!r}{nearest(game, [*atari_games(), *named])} `presage games` lists them all."
            )
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise UsageError(f"each game can be named only once: {', '.join(names)}.")
    return tuple(tasks)


def known_games(names: Sequence[str]) -> tuple[str, ...]:
    """Those of these, each once, that anyone can play: a task of one's own is known only where it was made."""
    return tuple(name for name in dict.fromkeys(names) if name == TOY.name or name in atari_games())
