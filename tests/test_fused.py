"""The fused kernels against plain PyTorch: values and gradients.

Without a GPU they run in Triton's interpreter, which is the same code, operation by operation. Its bfloat16 products are
wrong in Triton 3.6 (it multiplies the bit patterns), so there float16 stands for the low precision.
"""

import copy
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="Triton is made for Linux alone")

from presage.config import ModelConfig
from presage.events import Targets
from presage.fused import fits
from presage.fused_perception import block_weights, blocks, perceive
from presage.fused_prediction import Loss, last_states
from presage.model import Model, Perception, loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# Relative errors ‖fused - plain‖ / ‖plain‖ that are allowed: float32 sums in another order; products of 8 or 11 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}
SMALL = {"channels": (16, 16, 32), "state_size": 12, "hidden_size": 20}


def far(fused, plain) -> float:
    return float((fused.detach() - plain.detach()).norm() / plain.detach().norm())


def weights_of(model: Model) -> list[torch.Tensor]:
    layers = (model.prediction.f1, model.prediction.f2, model.valuation.inner, model.valuation.out)
    return [tensor for layer in layers for tensor in (layer.weight, layer.bias)]


def case(batch: int, horizon: int, size: int):
    h0 = torch.randn(batch, size, device=DEVICE, requires_grad=True)
    controls = torch.randint(-1, 2, (batch, horizon, 3), device=DEVICE).float()
    return h0, controls, Targets(*(torch.rand(batch, horizon, device=DEVICE) < p for p in (0.3, 0.3, 0.8)))


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(
    ("kind", "size", "hidden", "batch", "horizon"),
    [("rrnn", 12, 20, 5, 4), ("plain", 12, 20, 5, 4), ("rrnn", 16, 31, 33, 2), ("rrnn", 100, 500, 18, 3)],
)
def test_the_recurrence_valuation_and_loss(kind, size, hidden, batch, horizon, dtype):
    """The loss and the gradient of everything it depends on; sizes that fill a power of two, and rows past a block."""
    torch.manual_seed(0)
    model = Model(ModelConfig(kind, (4, 4, 4), size, hidden)).to(DEVICE)
    h0, controls, targets = case(batch, horizon, size)
    inputs = [h0, *weights_of(model)]
    plain = loss(model.valuation(model.prediction(h0, controls)), *targets)
    fused = Loss.apply(h0, controls, targets, kind == "rrnn", dtype, *weights_of(model))
    assert far(fused, plain) < TOLERANCE[dtype] / 10
    names = ["h0", "w1", "b1", "w2", "b2", "inner_w", "inner_b", "out_w", "out_b"]
    gradients = zip(names, torch.autograd.grad(2 * fused, inputs), torch.autograd.grad(2 * plain, inputs), strict=True)
    worst = {name: far(a, b) for name, a, b in gradients}
    assert max(worst.values()) < TOLERANCE[dtype], worst


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("kind", ["rrnn", "plain"])
def test_the_states_that_planning_looks_at(kind, dtype):
    torch.manual_seed(1)
    model = Model(ModelConfig(kind, (4, 4, 4), 12, 20)).to(DEVICE)
    h = torch.randn(3, 12, device=DEVICE)
    controls = torch.randint(-1, 2, (3, 50, 6, 3), device=DEVICE).float()  # more sequences than a block has rows
    plain = model.prediction.last(h.repeat_interleave(50, 0), controls.flatten(0, 1))
    fused = last_states(h, controls, weights_of(model)[:4], kind == "rrnn", dtype)
    assert far(fused, plain) < TOLERANCE[dtype]


def test_the_first_layer_on_blocks_is_the_same_convolution():
    torch.manual_seed(2)
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    weight = torch.randn(16, 4, 8, 8, device=DEVICE)
    plain = torch.nn.functional.conv2d(frames / 255, weight, stride=4)
    fused = torch.nn.functional.conv2d(blocks(frames, torch.float32), block_weights(weight))
    assert far(fused, plain) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_perception(dtype):
    """Its output, the gradient of every parameter, and the running statistics that it leaves behind.

    Low precision is held to its output and to gradients of matrices: in so small a batch the normalisations' own
    gradients are sums that nearly cancel.
    """
    torch.manual_seed(3)
    plain = Perception(SMALL["channels"], 12).to(DEVICE).train()
    fused = copy.deepcopy(plain)
    frames = torch.randint(0, 256, (6, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    wanted = torch.randn(6, 12, device=DEVICE)
    a, b = perceive(fused, frames, dtype), plain(frames)
    (a * wanted).sum().backward()
    (b * wanted).sum().backward()
    assert far(a, b) < TOLERANCE[dtype]
    pairs = list(zip(plain.named_parameters(), fused.parameters(), strict=True))
    worst = {name: far(q.grad, p.grad) for (name, p), q in pairs if dtype == torch.float32 or p.dim() > 1}
    assert max(worst.values()) < (1e-4 if dtype == torch.float32 else 0.2), worst
    for (name, left), mine in zip(plain.named_buffers(), fused.buffers(), strict=True):
        if "running" in name:
            torch.testing.assert_close(mine, left, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_kernels_are_used_only_where_they_fit():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert fits(Model(ModelConfig()), cuda)
    assert not fits(Model(ModelConfig()), cpu)
    assert not fits(Model(ModelConfig(prediction="lstm")), cuda)
    assert not fits(Model(ModelConfig(channels=(32, 48, 64))), cuda)
