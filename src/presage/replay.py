"""One full episode, to look at: its score, and a film of it."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from presage.agent import Agent
from presage.drawing import DARK, GAME, rasterise, scene
from presage.errors import UsageError
from presage.live import Live, Moment
from presage.pools import SKIP, Array
from presage.progress import Bar
from presage.tasks import Task

FPS = 60 / SKIP  # the game's own speed
MAX_STEPS = 27_000
GIF_WIDTH, GIF_COLOURS = 640, 128


def episode(
    agent: Agent,
    game: str | Task,
    seed: int = 0,
    video: Path | None = None,
    plain: bool = False,
    start: float = 0.0,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Play it to its end; its score, steps and deaths. A film may begin late and end early, in seconds of play."""
    score, steps, deaths, ended = 0.0, 0, 0, False
    with ExitStack() as stack:
        film = stack.enter_context(closing(Film(video, plain))) if video else None
        live = stack.enter_context(closing(Live(agent, game or next(iter(agent.specs)), seed)))
        name = live.task.name
        bar = stack.enter_context(Bar(f"play {name}", MAX_STEPS, "steps"))
        while not ended:
            moment = live.look()
            if film and start <= steps / FPS < start + seconds:
                film.add(moment)
            turn = live.play(moment)
            score, steps, deaths = score + float(turn.rewards[0]), steps + 1, deaths + int(turn.died[0])
            ended = bool(turn.ended[0])
            bar.advance(1, f"score {score:g}")
    if film and steps <= start * FPS:
        raise UsageError(f"the episode ended after {steps / FPS:.1f} s, before the film's start.")
    return {"game": name, "score": score, "steps": steps, "deaths": deaths, "iteration": agent.iteration, "seed": seed}


class Film:
    """Moments at the game's own speed: an MP4, or a GIF for pages that show no films. plain: the screen alone."""

    def __init__(self, path: Path, plain: bool = False):
        try:
            import imageio.v2 as imageio
        except ImportError:
            raise UsageError("films need more packages: pip install 'presage[video]'.") from None
        if path.suffix not in (".mp4", ".gif"):
            raise UsageError(f"a film's name ends in .mp4 or .gif, not {path.name!r}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.plain = path, plain
        self.images: list[Any] = []  # a GIF's, which is written at once
        self.writer = imageio.get_writer(path, fps=FPS, macro_block_size=1) if path.suffix == ".mp4" else None

    def add(self, moment: Moment) -> None:
        left, top, width, height = GAME
        screen = stretched(moment.picture, width, height)
        if self.plain:
            frame = screen
        else:
            frame = rasterise(scene(moment, screen=False), DARK)
            frame[top : top + height, left : left + width] = screen  # much faster than inside the SVG
        if self.writer:
            self.writer.append_data(frame)
        else:
            self.images.append(in_few_colours(frame, self.images[0] if self.images else None))

    def close(self) -> None:
        if self.writer:
            self.writer.close()
        elif self.images:
            first, *rest = self.images
            first.save(self.path, save_all=True, append_images=rest, duration=1000 / FPS, loop=0, optimize=True)


def stretched(picture: Array, width: int, height: int) -> Array:
    """[height, width, 3], with sharp pixels."""
    rows, columns = picture.shape[:2]
    y, x = np.arange(height) * rows // height, np.arange(width) * columns // width
    return np.asarray(picture[y[:, None], x])


def in_few_colours(frame: Array, like: Any) -> Any:
    """A small image for a GIF; all have the first one's colours, so that what stands still costs nothing."""
    from PIL import Image

    size = (GIF_WIDTH, frame.shape[0] * GIF_WIDTH // frame.shape[1])
    small = Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)
    return small.quantize(GIF_COLOURS, Image.Quantize.MAXCOVERAGE, palette=like, dither=Image.Dither.NONE)
