"""What an NVIDIA GPU is given instead of the plain network: the same function, in fewer and larger pieces.

`fits` says where that is possible; everywhere else the plain PyTorch path runs, which is the reference.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from presage.batches import Batch, Stacks, aims
from presage.events import Outlook, Targets
from presage.graphs import Branch
from presage.model import LOW, RRNN, Model, outlook
from presage.store import Resident, Store
from presage.tasks import STACK


def fits(model: Model, device: torch.device) -> bool:
    """There are a GPU with bfloat16 and Triton, and the network is of a kind and size that the kernels are made for."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and shape_fits(model)


def shape_fits(model: Model) -> bool:
    """The RRNN, normalised; no wider than shared memory bears; numbers of channels that are powers of two."""
    if not isinstance(model.prediction, RRNN) or not model.prediction.normal:
        return False
    hidden, inputs = model.prediction.f1.weight.shape
    channels = [conv.out_channels for conv in model.perception.modules() if isinstance(conv, torch.nn.Conv2d)]
    return inputs < 128 and hidden < 1024 and all(n in (16, 32, 64) for n in channels)


class Learner:
    """Updates of a whole network without autograd: every gradient is written out, and many are found side by side."""

    def __init__(self, model: Model, optimizer: torch.optim.Adam, clamp: float, low: torch.dtype = LOW):
        from presage.fused_adam import Adam
        from presage.fused_perception import matrices

        assert isinstance(model.prediction, RRNN)
        self.model, self.residual = model, model.prediction.residual
        self.low = {p: torch.empty_like(p, dtype=low) for p in matrices(model.perception)}
        for parameter, copy in self.low.items():
            copy.copy_(parameter.detach())
        self.adam = Adam(optimizer, self.low, clamp)
        device = next(model.parameters()).device
        self.ahead, self.branch = Branch(device), Branch(device)

    @torch.no_grad()
    def update(self, batch: Batch) -> Tensor:
        """One update; its loss."""
        frames = batch.frames.flatten(0, 1)
        ages = torch.full((len(frames),), STACK - 1, dtype=torch.uint8, device=frames.device)
        newest = torch.arange(STACK - 1, len(frames), STACK, device=frames.device)
        targets = Targets(batch.died, batch.scored, batch.mask)
        return self._update(Stacks(frames, newest, ages), batch.controls, targets)

    @torch.no_grad()
    def update_from(self, store: Store, rows: Tensor, horizon: int, moves: Sequence[Tensor] = ()) -> Tensor:
        """One update with cases of a store on the GPU, as `assemble` would make of them; frames are read from where
        they lie."""
        assert isinstance(store.frames, Resident)
        with self.ahead.beside():  # wanted only when Perception is done
            controls, targets = aims(store, rows, horizon)
        return self._update(Stacks(store.frames.frames, rows, store.ages, *moves), controls, targets)

    def _update(self, stacks: Stacks, controls: Tensor, targets: Targets) -> Tensor:
        loss, grads = self.loss_and_gradients(stacks, controls, targets)
        self.adam.step(grads)
        return loss

    def loss_and_gradients(self, stacks: Stacks, controls: Tensor, targets: Targets) -> tuple[Tensor, list[Tensor]]:
        """Gradients in the order of the model's parameters."""
        from presage import fused_perception, fused_prediction

        low = list(self.low.values())
        weights = fused_prediction.Weights(*self.model.prediction.parameters(), *self.model.valuation.parameters())
        with self.ahead.beside():
            ready = fused_prediction.prepare(weights, targets, low[0].dtype)
        seen = fused_perception.forward(self.model.perception, stacks, low, self.branch)
        self.ahead.join()
        loss, grad_h0, later = fused_prediction.loss_and_gradients(
            seen.h0, controls, targets, weights, ready, self.residual, self.branch
        )
        grads = fused_perception.backward(seen, grad_h0, (self.ahead, self.branch))
        self.ahead.join()
        self.branch.join()
        return loss, [*grads, *later]


@torch.inference_mode()
def perceive(model: Model, frames: Tensor) -> Tensor:
    """As model.perceive."""
    with torch.autocast("cuda", LOW):
        return model.perception(frames)  # type: ignore[no-any-return]


@torch.inference_mode()
def imagine(model: Model, h: Tensor, controls: Tensor, monotone: bool = False) -> Outlook:
    """As model.imagine."""
    from presage.fused_prediction import Weights, last_logits

    prediction = model.prediction
    assert isinstance(prediction, RRNN)
    weights = Weights(*prediction.parameters(), *model.valuation.parameters())
    return outlook(last_logits(h, controls, weights, prediction.residual, monotone, LOW))
