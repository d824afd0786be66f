"""The two ways things go wrong that a person can do something about; each message is one sentence that says what."""

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """What was asked for cannot be done as asked (exit status 2); nothing has been written."""


class RunError(RuntimeError):
    """The work was asked for rightly but failed (exit status 1); what was saved before is intact."""


def nearest(name: str, known: Iterable[str]) -> str:
    """How a sentence about a misspelt name ends: '; did you mean a or b?', or with a stop when nothing is near."""
    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "."
