"""One full episode, to look at: its score, and what the network saw as a film."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from presage.agent import Agent
from presage.arena import SKIP, Arena, Array, Turn, play
from presage.collect import whole_seed
from presage.errors import UsageError
from presage.games import find
from presage.progress import Bar
from presage.tasks import Spec, Task

ARENA, CHOOSER = 6, 7  # which generator a seed is for
SCALE = 4  # screen pixels for each of the network's
MAX_STEPS = 27_000


def episode(agent: Agent, game: str | Task, seed: int = 0, video: Path | None = None) -> dict[str, Any]:
    """Play it to its end; its score, steps and deaths."""
    if seed < 0:
        raise UsageError(f"the seed must not be negative, not {seed}.")
    task = find([game or next(iter(agent.specs))])[0]
    film = Film(video) if video else None
    score, steps, deaths = 0.0, 0, 0
    with Bar(f"play {task.name}", MAX_STEPS, "steps") as bar, closing(Arena([task], 1)) as arena:
        for turn in play(arena, agent.chooser([Spec.of(task)], whole_seed(seed, CHOOSER)), (seed, ARENA)):
            score, steps, deaths = score + float(turn.rewards[0]), steps + 1, deaths + int(turn.died[0])
            if film:
                film.add(turn)
            bar.advance(1, f"score {score:g}")
            if turn.ended[0]:
                break
    if film:
        film.close()
    return {
        "game": task.name,
        "score": score,
        "steps": steps,
        "deaths": deaths,
        "iteration": agent.iteration,
        "seed": seed,
    }


class Film:
    """An MP4 at the game's own speed."""

    def __init__(self, path: Path):
        try:
            import imageio.v2 as imageio
        except ImportError:
            raise UsageError("films need two more packages: pip install 'presage[video]'.") from None
        if path.suffix != ".mp4":
            raise UsageError(f"a film's name ends in .mp4, not {path.name!r}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.writer = imageio.get_writer(path, fps=60 / SKIP, macro_block_size=1)

    def add(self, turn: Turn) -> None:
        large: Array = turn.frames[0].repeat(SCALE, 0).repeat(SCALE, 1)
        self.writer.append_data(np.stack([large] * 3, -1))

    def close(self) -> None:
        self.writer.close()
