"""A game that somebody watches: what may be done with it, from wherever, while it plays."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from presage import checkpoint
from presage.agent import Agent, load
from presage.config import Planning
from presage.errors import UsageError
from presage.live import Live, Moment
from presage.pools import SKIP
from presage.tasks import Control

SPEED = 60 // SKIP  # the game's own, in steps a second
MOST_SEQUENCES = 1000
KEYS: dict[str, Control] = {
    "ArrowLeft": (0, -1, 0), "ArrowRight": (0, 1, 0), "ArrowUp": (0, 0, 1), "ArrowDown": (0, 0, -1), " ": (1, 0, 0),
}  # fmt: skip


class Networks:
    """Those of a run's finished iterations, or the one of an export. Each is loaded once, for all tabs."""

    def __init__(self, path: Path, how: Planning):
        self.newest = load(path)
        usual = self.newest.playing(how)
        self.k = usual.k  # whichever network is shown
        self.how = replace(how, k=self.k, monotone=usual.config.plan.monotone)
        if self.k > MOST_SEQUENCES:
            raise UsageError(f"the page shows at most {MOST_SEQUENCES} sequences, not {self.k}.")
        exported = (path / "agent.json").exists()
        self.iterations = [self.newest.iteration] if exported else checkpoint.finished(path)
        self.at: Callable[[int], Agent] = cache(lambda iteration: load(path, iteration))


class Session:
    """One tab's game. Whatever plays, plans, loads or writes does so in a thread, one thing at a time."""

    def __init__(self, networks: Networks, game: str, recordings: Path):
        self.networks, self.recordings = networks, recordings
        self.live = Live(networks.newest, game, how=networks.how)
        self.paused, self.speed = False, float(SPEED)
        self.person = False  # plays, not the agent
        self.pressed, self.tapped = set[str](), set[str]()  # keys that are down, that were since the last step
        self.busy, self.closed = asyncio.Lock(), False
        self.shown: Moment | None = None  # the moment that is on the screen
        self.taken = time.monotonic()  # when it was
        self.rate = 0.0  # steps a second, as measured

    async def after(self, change: Callable[[], object] = lambda: None) -> Moment | None:
        """The present moment, once something was done; nothing when the tab is gone."""
        async with self.busy:
            if self.closed:
                return None
            self.shown = await asyncio.to_thread(self._after, change)
        return self.shown

    def _after(self, change: Callable[[], object]) -> Moment:
        change()
        return self._look(self.pressed | self.tapped)

    def _look(self, keys: set[str]) -> Moment:
        self.live.held = control(keys) if self.person else None
        return self.live.look()

    async def step(self) -> Moment | None:
        now = time.monotonic()
        self.rate, self.taken = 0.9 * self.rate + 0.1 / max(now - self.taken, 1e-3), now
        return await self.after(self._play)

    def _play(self) -> None:
        """What is shown; but a person's keys as they are now, with those let go again since the last step."""
        if self.person or self.shown is None:
            down = self.pressed.copy()
            counted, self.tapped = self.tapped, set()  # one that is tapped from here on waits for the next step
            self.shown = self._look(down | counted)
        self.live.play(self.shown)

    def press(self, key: str, down: bool) -> None:
        if key in KEYS and down:
            self.pressed.add(key)
            self.tapped.add(key)
        else:
            self.pressed.discard(key)

    def take_over(self, person: bool) -> None:
        self.person = person
        self.pressed.clear()
        self.tapped.clear()

    def change_game(self, game: str) -> None:
        old, self.shown = self.live, None
        self.live = Live(old.agent, game, old.seed, old.how)
        try:
            old.stop_recording()
        finally:
            old.close()

    def change_plans(self, **how: Any) -> None:
        self.live.how = replace(self.live.how, **how)

    def change_network(self, iteration: int) -> None:
        self.live.agent = self.networks.at(iteration)

    def restart(self, seed: int) -> None:
        self.live.start(seed)
        self.shown = None

    def close(self) -> None:
        try:
            self.live.stop_recording()
        finally:
            self.live.close()

    async def leave(self) -> None:
        async with self.busy:
            self.closed = True
            await asyncio.to_thread(self.close)


def control(keys: set[str]) -> Control:
    """What is pressed with these."""
    shoot, across, up = (sum(KEYS[key][i] for key in keys) for i in range(3))
    return (shoot, across, up)
