"""CUDA graphs: a whole update as one launch, with branches inside it that run side by side."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # calls before a capture: libraries choose their kernels in these
CAPTURING = threading.Lock()  # one at a time in a process


class Captured:
    """A function of tensors that becomes one CUDA graph after a few calls: then a call costs one launch.

    It must do the same each time, whatever the tensors hold, and never wait for the GPU. `settle` is called once the
    graph is there: what it writes then, all replays see. `generator`: where the work draws random numbers from.
    """

    def __init__(
        self,
        work: Callable[..., Tensor],
        settle: Callable[[], None] = lambda: None,
        generator: torch.Generator | None = None,
    ):
        self.work, self.settle, self.calls = work, settle, 0
        self.graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self.graph.register_generator_state(generator)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, *given: Tensor) -> Tensor:
        if self.calls == 0:
            self.given = [torch.empty_like(tensor, device="cuda") for tensor in given]
        for mine, new in zip(self.given, given, strict=True):
            mine.copy_(new, non_blocking=True)
        self.calls += 1
        if self.calls <= WARM_UP:  # on another stream, as capturing asks for
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.work(*self.given)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == WARM_UP + 1:
            # Another thread may be at work on another stream: that is no error.
            with CAPTURING, torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.work(*self.given)
            self.settle()
        self.graph.replay()
        return self.result


class Branch:
    """Work that nothing waits for until `join`: on a stream of its own; without CUDA on the spot."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.held: list[Any] = []
        self.apart = False  # since the last join

    @contextmanager
    def beside(self, *used: Any) -> Iterator[None]:
        """Do what follows after all that was done so far. `used`: tensors whose memory must not be reused meanwhile."""
        if self.stream is None:
            yield
            return
        self.held += used
        self.apart = True
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        if self.stream is not None and self.apart:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.held.clear()
            self.apart = False
