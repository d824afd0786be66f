"""The live page: a game, what the agent thinks of it, and everything one may change. Each tab plays a game of its own.

Built on NiceGUI: controls, their events, the connection to the browser and its loss are the library's; the pictures are
drawing.py's.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from nicegui import app, background_tasks, ui
from nicegui.events import KeyEventArguments

from presage import checkpoint, drawing
from presage.agent import Agent, load
from presage.arena import SKIP
from presage.errors import UsageError
from presage.games import atari_games, find
from presage.live import Live, Moment
from presage.progress import say
from presage.tasks import Control

SPEED = 60 // SKIP  # the game's own, in steps a second
MOST_GAMES = 8  # open at a time; each has an emulator and its share of the processor
KEYS: dict[str, Control] = {
    "ArrowLeft": (0, -1, 0), "ArrowRight": (0, 1, 0), "ArrowUp": (0, 0, 1), "ArrowDown": (0, 0, -1), " ": (1, 0, 0),
}  # fmt: skip
PARTS: dict[str, Callable[[Moment], str]] = {
    "game": drawing.game,
    "died": lambda moment: drawing.outlook(moment, "died"),
    "scored": lambda moment: drawing.outlook(moment, "scored"),
    "controls": drawing.controls,
    "history": drawing.history,
}


class Networks:
    """Those of a run's finished iterations, or the one of an export. Each is loaded once, for all tabs."""

    def __init__(self, path: Path, monotone: bool | None):
        self.newest = load(path).playing(monotone=monotone)
        exported = (path / "agent.json").exists()
        self.iterations = [self.newest.iteration] if exported else checkpoint.finished(path)
        self.at: Callable[[int], Agent] = cache(lambda iteration: load(path, iteration))


class Session:
    """One tab's game. What takes long happens in a thread, one thing at a time."""

    def __init__(self, networks: Networks, game: str, k: int | None, recordings: Path):
        self.networks, self.recordings = networks, recordings
        self.live = Live(networks.newest, game)
        self.live.k = k or self.live.k
        self.paused, self.speed, self.pressed = False, float(SPEED), set[str]()
        self.busy = asyncio.Lock()
        self.shown: Moment | None = None  # the moment that is on the screen
        self.taken = time.monotonic()  # when it was
        self.rate = 0.0  # steps a second, as measured
        self.closed = False

    async def look(self) -> Moment:
        """The present moment, anew: after something was changed."""
        async with self.busy:
            self.shown = await asyncio.to_thread(self.live.look)
        return self.shown

    async def step(self) -> Moment:
        async with self.busy:
            self.shown = await asyncio.to_thread(self._step)
        now = time.monotonic()
        self.rate, self.taken = 0.9 * self.rate + 0.1 / max(now - self.taken, 1e-3), now
        return self.shown

    def _step(self) -> Moment:
        self.live.play(self.shown or self.live.look())
        return self.live.look()

    async def change_game(self, game: str) -> None:
        find([game])  # refuse it before the old one is gone
        async with self.busy:
            old, agent = self.live, self.live.agent
            self.live = await asyncio.to_thread(lambda: Live(agent, game))
            self.live.k, self.live.held, self.live.monotone = old.k, old.held, old.monotone
            old.close()

    async def change_network(self, iteration: int) -> None:
        agent = await asyncio.to_thread(self.networks.at, iteration)
        async with self.busy:
            self.live.agent = agent

    async def restart(self, seed: int) -> None:
        async with self.busy:
            await asyncio.to_thread(self.live.start, seed)

    def take_over(self, person: bool) -> None:
        self.pressed.clear()
        self.live.held = (0, 0, 0) if person else None

    def press(self, key: str, down: bool) -> None:
        """A person's key, while they play."""
        if key in KEYS and self.live.held is not None:
            (self.pressed.add if down else self.pressed.discard)(key)
            shoot, across, up = (sum(KEYS[key][i] for key in self.pressed) for i in range(3))
            self.live.held = (shoot, across, up)

    def record(self, on: bool) -> Path | None:
        """Begin; or end, and the file that was left."""
        if on:
            self.live.tape = []
            return None
        return self.live.save_tape(self.recordings)

    async def close(self) -> None:
        self.closed = True
        async with self.busy:
            self.live.close()


def button(name: str, act: Callable[[], Any]) -> ui.button:
    return ui.button(name, on_click=act).props("unelevated no-caps")


def choice(name: str, options: dict[Any, str], value: Any, act: Callable[[Any], Any]) -> ui.select:
    found = ui.select(options, label=name, value=value, on_change=lambda event: act(event.value))
    return found.props("dense outlined")


def number(name: str, value: float | None, least: float, most: float, act: Callable[[Any], Any]) -> ui.number:
    """What is out of bounds is not handed on."""

    def changed(event: Any) -> Any:
        fits = event.value is None or least <= event.value <= most
        return act(event.value) if fits else None

    return ui.number(name, value=value, min=least, max=most, on_change=changed).props("dense outlined")


class Page:
    """What one tab shows, and what its controls do."""

    def __init__(self, session: Session):
        self.session = session
        live, networks = session.live, session.networks
        known = list(networks.newest.specs)
        names = {name: name.replace("_", " ") for name in [*known, *(g for g in atari_games() if g not in known)]}
        names.setdefault(live.task.name, live.task.name)
        ui.dark_mode(None)  # as the reader's system is
        ui.colors(primary=drawing.LIGHT["scored"])
        ui.add_css(STYLE)
        ui.add_head_html(KEEP_KEYS)
        with ui.element().classes("top"):
            self.title = ui.label().classes("title")
            self.facts = ui.label().classes("facts")
        with ui.element().classes("stage"):
            self.parts = {name: ui.html(sanitize=False).classes(f"part at-{name}") for name in PARTS}
            self.reason = ui.label().classes("reason")
        with ui.element().classes("panel"):
            self.pause = button("Pause", self.toggle_pause)
            button("Step", self.step)
            self.person = button("Take over", self.toggle_person)
            self.tape = button("Record", self.toggle_tape)
            choice("game", names, live.task.name, self.choose_game)
            number("steps a second", SPEED, 1, 120, self.choose_speed)
            number("seed", live.seed, 0, 2**31 - 1, self.choose_seed)
        with ui.element().classes("panel"):
            iterations = {i: f"iteration {i}" for i in networks.iterations}
            choice("network", iterations, live.agent.iteration, self.choose_network)
            number("sequences", live.k, 1, 1000, self.choose_k)
            number("P(died) under", None, 0, 1, self.choose_threshold).props('placeholder="its own" stack-label')
            ui.switch(
                "P(died) never falls", value=live.monotone, on_change=lambda event: self.choose_monotone(event.value)
            )
        ui.keyboard(self.key, repeating=False, ignore=["input", "textarea"])

    def show(self, moment: Moment) -> None:
        for name, draw in PARTS.items():
            self.parts[name].set_content(draw(moment))
        self.title.set_text(moment.game.replace("_", " "))
        self.facts.set_text(" · ".join([*drawing.facts(moment), f"{self.session.rate:.0f} steps/s"]))
        self.reason.set_text(moment.plan.reason)

    async def run(self) -> None:
        """Play on until the tab is closed."""
        self.show(await self.session.look())
        while not self.session.closed:
            began = time.monotonic()
            if not self.session.paused:
                self.show(await self.session.step())
            await asyncio.sleep(max(0.005, 1 / self.session.speed - (time.monotonic() - began)))

    async def refresh(self) -> None:
        self.show(await self.session.look())

    def toggle_pause(self) -> None:
        self.session.paused = not self.session.paused
        self.pause.set_text("Play" if self.session.paused else "Pause")

    async def step(self) -> None:
        if not self.session.paused:
            self.toggle_pause()
        self.show(await self.session.step())

    async def toggle_person(self) -> None:
        person = self.session.live.held is None
        self.session.take_over(person)
        self.person.set_text("Hand back" if person else "Take over")
        ui.run_javascript(f"window.presagePlays = {str(person).lower()}; document.activeElement.blur()")
        if person:
            ui.notify("Arrow keys and space are yours.")
        await self.refresh()

    def toggle_tape(self) -> None:
        on = self.session.live.tape is None
        file = self.session.record(on)
        self.tape.set_text("Stop recording" if on else "Record")
        if file:
            ui.notify(f"recorded in {file}")

    async def choose_game(self, name: str) -> None:
        await self.session.change_game(name)
        self.tape.set_text("Record")
        await self.refresh()

    async def choose_network(self, iteration: int) -> None:
        await self.session.change_network(iteration)
        await self.refresh()

    async def choose_k(self, k: float | None) -> None:
        self.session.live.k = int(k or self.session.live.agent.k)
        await self.refresh()

    async def choose_threshold(self, threshold: float | None) -> None:
        self.session.live.threshold = threshold
        await self.refresh()

    async def choose_monotone(self, monotone: bool) -> None:
        self.session.live.monotone = bool(monotone)
        await self.refresh()

    def choose_speed(self, speed: float | None) -> None:
        self.session.speed = speed or SPEED

    async def choose_seed(self, seed: float | None) -> None:
        await self.session.restart(int(seed or 0))
        await self.refresh()

    def key(self, event: KeyEventArguments) -> None:
        self.session.press(event.key.name, bool(event.action.keydown))


def serve(path: Path, game: str, host: str, port: int, k: int | None, monotone: bool | None, recordings: Path) -> None:
    """Show the page until interrupted."""
    networks = Networks(path, monotone)
    first = game or next(iter(networks.newest.specs))
    find([first])
    check_port(host, port)
    sessions: set[Session] = set()

    @ui.page("/", title="presage")
    async def page() -> None:
        if len(sessions) >= MOST_GAMES:
            ui.label(f"{MOST_GAMES} games are open already: close a tab first.")
            return
        session = Session(networks, first, k, recordings)
        sessions.add(session)
        say(f"a tab was opened: {len(sessions)} open")

        async def leave() -> None:
            sessions.discard(session)
            await session.close()
            say(f"a tab was closed: {len(sessions)} open")

        shown = Page(session)
        ui.context.client.on_delete(leave)
        background_tasks.create(shown.run())

    app.on_startup(lambda: say(f"http://{host}:{port} shows {path}; Ctrl+C stops it."))
    if host != "127.0.0.1":
        say(f"careful: everyone who can reach {host} can play here.")
    ui.run(
        host=host, port=port, title="presage", reload=False, show=False, show_welcome_message=False,
        message_history_length=20, tailwind=False,
    )  # fmt: skip


def check_port(host: str, port: int) -> None:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(f"cannot serve on {host}, port {port} ({error}): choose another --port.") from None


STYLE = f"""
{drawing.style(drawing.LIGHT)}
@media (prefers-color-scheme: dark) {{ {drawing.style(drawing.DARK)} }}
body {{ background: {drawing.LIGHT["paper"]}; color: {drawing.LIGHT["ink"]}; }}
@media (prefers-color-scheme: dark) {{ body {{ background: {drawing.DARK["paper"]}; color: {drawing.DARK["ink"]}; }} }}
.nicegui-content {{ padding: 0; gap: 0; }}
.top, .stage, .panel {{ box-sizing: border-box; width: 100%; max-width: 78rem; margin: 0 auto; padding: 0.6rem 1rem; }}
.top {{ display: flex; flex-wrap: wrap; align-items: baseline; gap: 0.2rem 1.5rem; }}
.top .title {{ font-size: 1.6rem; font-weight: 650; text-transform: capitalize; }}
.top .facts {{ opacity: 0.75; font-variant-numeric: tabular-nums; }}
.stage {{ display: grid; gap: 0.8rem; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr);
  grid-template-areas: "game died" "game scored" "controls history" "reason reason"; }}
.part > svg {{ display: block; width: 100%; height: auto; }}
.part.at-game {{ grid-area: game; }} .part.at-died {{ grid-area: died; }} .part.at-scored {{ grid-area: scored; }}
.part.at-game > svg {{ border-radius: 6px; }}
.part.at-controls {{ grid-area: controls; }} .part.at-history {{ grid-area: history; }}
.reason {{ grid-area: reason; opacity: 0.75; font-size: 0.85rem; }}
.panel {{ display: flex; flex-wrap: wrap; gap: 0.6rem; align-items: center; }}
.panel .q-field {{ width: 7.9rem; }}
@media (max-width: 48rem) {{
  .stage {{ grid-template-columns: minmax(0, 1fr);
    grid-template-areas: "game" "died" "scored" "controls" "history" "reason"; }}
}}
"""
# While a person plays, arrow keys must not scroll the page, nor space press a button.
KEEP_KEYS = """<script>
addEventListener("keydown", (event) => {
  if (window.presagePlays && (event.key.startsWith("Arrow") || event.key === " ")) event.preventDefault();
}, true);
</script>"""
