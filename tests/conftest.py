"""What several tests share: one tiny finished run, and the command line as a real process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import presage
from presage.run import Run

TINY = {"games": ["toy", "breakout"], "seed": 3}


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Read it; tests that change a run make their own."""
    return presage.train(preset="debug", run=tmp_path_factory.mktemp("runs") / "tiny", **TINY)


@pytest.fixture(scope="session")
def frames() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 4, 84, 84), dtype=np.uint8)


def cli(*arguments: object, timeout: float = 300, code: str = "") -> subprocess.CompletedProcess[str]:
    """`presage …` in a process of its own; `code` runs first in that process, to inject faults."""
    start = f"import sys; {code}\nfrom presage.cli import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", start, *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment)


def weights(run: Path) -> dict[str, bytes]:
    """Every finished checkpoint's network, byte for byte."""
    return {p.parent.name: p.read_bytes() for p in sorted(run.glob("checkpoints/iter-*/model.safetensors"))}
