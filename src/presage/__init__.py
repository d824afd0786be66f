"""Predictive Reinforcement Learning: one network foresees death and score for any controls; planning with it plays."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("presage")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.1.0"

if TYPE_CHECKING:
    from presage.agent import Agent, load
    from presage.errors import RunError, UsageError
    from presage.evaluation import evaluate
    from presage.run import Run, train
    from presage.tasks import StepResult, Task

__all__ = ["Agent", "Run", "RunError", "StepResult", "Task", "UsageError", "evaluate", "load", "train"]

_HOMES = {
    "Agent": "agent",
    "Run": "run",
    "RunError": "errors",
    "StepResult": "tasks",
    "Task": "tasks",
    "UsageError": "errors",
    "evaluate": "evaluation",
    "load": "agent",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `presage --help` need not wait for PyTorch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'presage' has no attribute {name!r}")
    return getattr(importlib.import_module(f"presage.{_HOMES[name]}"), name)
