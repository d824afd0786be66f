"""Progress on standard error: a live bar on a terminal, a line now and then in a log file."""

import signal
import threading
import time
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False)
LOG_SECONDS = 30.0  # between two lines where there is no terminal
LIVE_SECONDS = 0.1  # between two looks of a live bar


def say(text: str) -> None:
    console.print(text, soft_wrap=True)


class Bar:
    """One long stage: how far, how fast, how much longer. Two may run at once: they share the terminal."""

    shared: Progress | None = None
    sharing: int = 0
    lock = threading.RLock()

    def __init__(self, title: str, total: int, unit: str, start: int = 0):
        self.title, self.total, self.unit, self.done, self.start = title, total, unit, start, start
        self.began = self.told = time.monotonic()
        self.live: Progress | None = None  # the shared one, while entered on a terminal
        self.note = ""

    def __enter__(self) -> "Bar":
        if console.is_terminal:
            columns = (TextColumn("{task.description:<32}"), BarColumn(30), MofNCompleteColumn())
            times = (TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            with Bar.lock:
                if Bar.shared is None:
                    Bar.shared = Progress(*columns, *times, console=console)
                    Bar.shared.start()
                Bar.sharing += 1
                self.live = Bar.shared
            self.task = self.live.add_task(self.title, total=self.total, completed=self.done, note="")
        return self

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        """A note stays until the next one."""
        self.done += steps
        self.note = self.note if note is None else note
        now = time.monotonic()
        if now - self.told < (LIVE_SECONDS if self.live else LOG_SECONDS):
            return
        self.told = now
        rate = (self.done - self.start) / max(now - self.began, 1e-9)
        text = f"{rate:,.0f} {self.unit}/s  {self.note}" if rate >= 1 else self.note
        if self.live:
            self.live.update(self.task, completed=self.done, note=text)
        else:
            left = f"{(self.total - self.done) / rate:,.0f} s left" if rate else "…"
            say(f"{self.title}: {self.done:,} of {self.total:,} · {left} · {text}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.update(self.task, completed=self.done)
            with Bar.lock:
                Bar.sharing -= 1
                if not Bar.sharing:
                    self.live.stop()
                    Bar.shared = None
        elif kind is None:
            seconds = time.monotonic() - self.began
            say(f"{self.title}: {self.done:,} {self.unit} in {seconds:.1f} s")


class Interrupted(KeyboardInterrupt):
    """A person asked to stop; everything is saved."""


class Interrupt:
    """While entered, Ctrl-C (or a polite kill) is noted and the work stops at the next safe place; twice: at once."""

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> "Interrupt":
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        say("stopping after this step …")

    def check(self) -> None:
        """Stop here, if that is wanted: everything is saved."""
        if self.wanted:
            raise Interrupted

    def __exit__(self, *_: object) -> None:
        if self.main:
            for number, handler in self.before.items():
                signal.signal(number, handler)
