"""The live page: a game, what the agent thinks of it, and everything one may change. Each tab plays a game of its own.

Built on NiceGUI: controls, their events, the connection to the browser and its loss are the library's; the pictures are
drawing.py's.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nicegui import app, background_tasks, ui
from nicegui.events import KeyEventArguments

from presage import drawing
from presage.config import Planning
from presage.errors import UsageError
from presage.games import atari_games, find, known_games
from presage.live import Moment
from presage.progress import say
from presage.session import MOST_SEQUENCES, SPEED, Networks, Session

MOST_GAMES = 8  # open at a time; each has an emulator and its share of the processor
PARTS: dict[str, Callable[[Moment], str]] = {
    "game": drawing.game,
    "died": lambda moment: drawing.outlook(moment, "died"),
    "scored": lambda moment: drawing.outlook(moment, "scored"),
    "controls": drawing.controls,
    "history": drawing.history,
}


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

    return ui.number(name, value=value, min=least, max=most, on_change=changed).props("dense outlined debounce=400")


class Page:
    """What one tab shows, and what its controls do."""

    def __init__(self, session: Session):
        self.session = session
        live, networks = session.live, session.networks
        names = {
            name: name.replace("_", " ")
            for name in known_games([*networks.newest.specs, live.task.name, *atari_games()])
        }
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
            self.pause = button("Pause", lambda: self.set_paused(not session.paused))
            button("Step", self.step)
            self.person = button("Take over", self.toggle_person)
            self.tape = button("Record", self.toggle_tape)
            choice("game", names, live.task.name, self.choose_game)
            number("steps a second", SPEED, 1, 120, self.choose_speed)
            number("seed", live.seed, 0, 2**31 - 1, self.choose_seed)
        with ui.element().classes("panel"):
            iterations = {i: f"iteration {i}" for i in networks.iterations}
            choice("network", iterations, live.agent.iteration, self.choose_network)
            number("sequences", live.how.k, 1, MOST_SEQUENCES, lambda k: self.set("k", int(k or networks.k)))
            bound = number("P(died) under", live.how.threshold, 0, 1, lambda bound: self.set("threshold", bound))
            bound.props('placeholder="its own" stack-label')
            never = ui.switch("P(died) never falls", value=live.how.monotone)
            never.on_value_change(lambda event: self.set("monotone", bool(event.value)))
        ui.keyboard(self.key, repeating=False, ignore=["input", "textarea"])

    def show(self, moment: Moment) -> None:
        for name, draw in PARTS.items():
            self.parts[name].set_content(draw(moment))
        self.title.set_text(moment.game.replace("_", " "))
        self.facts.set_text(" · ".join([*drawing.facts(moment), f"{self.session.rate:.0f} steps/s"]))
        self.reason.set_text(moment.plan.reason)

    async def run(self) -> None:
        """Play on until the tab is closed."""
        go_on: Callable[[], Awaitable[Moment | None]] = self.session.after  # at first it is only looked at
        while not self.session.closed:
            began = time.monotonic()
            if not self.session.paused:
                try:
                    await self.do(go_on())
                    go_on = self.session.step
                except Exception as error:  # whatever it is: a game must not stop without a word
                    self.set_paused(True)
                    with self.facts:
                        ui.notify(f"it stopped: {error}", type="negative")
            await asyncio.sleep(max(0.005, 1 / self.session.speed - (time.monotonic() - began)))

    async def do(self, what: Awaitable[Moment | None]) -> None:
        moment = await what
        if moment is not None:
            self.show(moment)

    def set_paused(self, paused: bool) -> None:
        self.session.paused = paused
        self.pause.set_text("Play" if paused else "Pause")

    async def step(self) -> None:
        self.set_paused(True)
        await self.do(self.session.step())

    async def toggle_person(self) -> None:
        person = not self.session.person
        self.person.set_text("Hand back" if person else "Take over")
        ui.run_javascript(f"window.presagePlays = {str(person).lower()}; document.activeElement.blur()")
        if person:
            ui.notify("Arrow keys and space are yours.")
        await self.do(self.session.after(lambda: self.session.take_over(person)))

    async def toggle_tape(self) -> None:
        session, files = self.session, list[Path | None]()

        def toggle() -> None:
            if session.live.tape is None:
                session.live.record(session.recordings)
            else:
                files.append(session.live.stop_recording())

        await self.do(session.after(toggle))
        self.tape.set_text("Record" if session.live.tape is None else "Stop recording")
        for file in files:
            ui.notify(f"recorded in {file}" if file else "nothing was played, so nothing was recorded")

    async def choose_game(self, name: str) -> None:
        await self.do(self.session.after(lambda: self.session.change_game(name)))
        self.tape.set_text("Record")

    async def choose_network(self, iteration: int) -> None:
        await self.do(self.session.after(lambda: self.session.change_network(iteration)))

    async def set(self, name: str, value: Any) -> None:
        await self.do(self.session.after(lambda: self.session.change_plans(**{name: value})))

    async def choose_seed(self, seed: float | None) -> None:
        if seed is not None:  # the field was not cleared
            await self.do(self.session.after(lambda: self.session.restart(int(seed))))

    def choose_speed(self, speed: float | None) -> None:
        self.session.speed = speed or SPEED

    def key(self, event: KeyEventArguments) -> None:
        self.session.press(event.key.name, bool(event.action.keydown))


def serve(path: Path, game: str, host: str, port: int, how: Planning, recordings: Path) -> None:
    """Show the page until interrupted."""
    networks = Networks(path, how)
    first = game or known_games([*networks.newest.specs, *atari_games()])[0]
    find([first])
    check_port(host, port)
    tabs: dict[str, Session | None] = {}  # by client; None: about to begin

    @ui.page("/", title="presage")
    async def page() -> None:
        client = ui.context.client
        await client.connected()  # whatever only fetches the page gets no game
        if len(tabs) >= MOST_GAMES:
            ui.label(f"{MOST_GAMES} games are open already: close a tab first.")
            return
        tabs[client.id] = None

        async def leave() -> None:
            session = tabs.pop(client.id)
            if session:
                await session.leave()
            say(f"a tab was closed: {len(tabs)} open")

        client.on_delete(leave)
        session = await asyncio.to_thread(Session, networks, first, recordings)
        if client.id not in tabs:  # gone already
            session.close()
            return
        tabs[client.id] = session
        say(f"a tab was opened: {len(tabs)} open")
        background_tasks.create(Page(session).run())

    async def leave_all() -> None:
        """What is being recorded is kept, whatever becomes of other tabs."""
        left = await asyncio.gather(*(session.leave() for session in tabs.values() if session), return_exceptions=True)
        for error in filter(None, left):
            say(f"a tab's game did not end well: {error}")

    app.on_shutdown(leave_all)
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
