"""Bars that share a terminal, and lines where there is none."""

import io

from rich.console import Console

from presage import progress
from presage.progress import Bar


def test_two_bars_at_once_share_a_terminal(monkeypatch):
    """While the next iteration is played this one trains: both are shown, and the last to end tidies up."""
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, force_terminal=True, width=120))
    monkeypatch.setattr(progress, "LIVE_SECONDS", 0)
    with Bar("train", 10, "updates") as train:
        with Bar("play", 20, "steps") as play:
            assert train.live is play.live
            train.advance(5, "loss 0.5")
            play.advance(20)
        train.advance(5)
        assert Bar.shared is train.live
    assert Bar.shared is None
    assert Bar.sharing == 0
    shown = screen.getvalue()
    assert "play" in shown
    assert "10/10" in shown
    assert "20/20" in shown
    assert "loss 0.5" in shown


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, width=120))
    with Bar("train", 10, "updates") as bar:
        bar.advance(3)
        assert screen.getvalue() == ""  # it has only just begun
        bar.told -= 31
        bar.advance(2, "loss 0.5")
    first, last = screen.getvalue().splitlines()
    assert first.startswith("train: 5 of 10")
    assert "left" in first
    assert "loss 0.5" in first
    assert last.startswith("train: 5 updates in ")
