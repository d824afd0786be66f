"""What an NVIDIA GPU is given instead of the plain network: the same function, in fewer and larger pieces.

`fits` says where that is possible; everywhere else the plain PyTorch path runs, which is the reference.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from presage.batches import Batch
from presage.events import Outlook, Targets
from presage.model import RRNN, Model, outlook

LOW = torch.bfloat16  # of matrix products; states, statistics, sums and parameters stay float32
WARM_UP = 3  # calls before a capture: libraries choose their kernels in these


def fits(model: Model, device: torch.device) -> bool:
    """The kernels are for CUDA, the RRNN, and numbers of channels that are powers of two."""
    channels = [conv.out_channels for conv in model.perception.modules() if isinstance(conv, torch.nn.Conv2d)]
    sizes = all(n >= 16 and n & (n - 1) == 0 for n in channels)
    available = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return available and sizes and isinstance(model.prediction, RRNN)


def loss(model: Model, batch: Batch) -> Tensor:
    """What model.loss gives, to be differentiated."""
    from presage.fused_perception import perceive
    from presage.fused_prediction import Loss

    prediction, valuation = model.prediction, model.valuation
    assert isinstance(prediction, RRNN)
    layers = (prediction.f1, prediction.f2, valuation.inner, valuation.out)
    weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    h0 = perceive(model.perception, batch.frames, LOW)
    targets = Targets(batch.died, batch.scored, batch.mask)
    return Loss.apply(h0, batch.controls, targets, prediction.residual, LOW, *weights)  # type: ignore[no-any-return, no-untyped-call]


@torch.inference_mode()
def perceive(model: Model, frames: Tensor) -> Tensor:
    with torch.autocast("cuda", LOW):
        return model.perception(frames).float()  # type: ignore[no-any-return]


@torch.inference_mode()
def imagine(model: Model, h: Tensor, controls: Tensor) -> Outlook:
    """As model.imagine."""
    from presage.fused_prediction import last_states

    prediction = model.prediction
    assert isinstance(prediction, RRNN)
    n, k = controls.shape[:2]
    weights = (prediction.f1.weight, prediction.f1.bias, prediction.f2.weight, prediction.f2.bias)
    last = last_states(h, controls, weights, prediction.residual, LOW)  # [N * k, S]
    return outlook(model.valuation(last).view(n, k, -1))


class Captured:
    """A function of tensors that becomes one CUDA graph after a few calls: then a call costs one launch.

    It must do the same each time, whatever the tensors hold, and never wait for the GPU.
    """

    def __init__(self, work: Callable[..., Tensor]):
        self.work, self.calls = work, 0
        self.graph = torch.cuda.CUDAGraph()
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
            with torch.cuda.graph(self.graph):
                self.result = self.work(*self.given)
        self.graph.replay()
        return self.result
