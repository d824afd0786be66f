"""Adam over all parameters in one launch: clamp, weight decay, moments, step, and the copies in low precision (Triton).

PyTorch's own fused Adam takes each of these small tensors in pieces of 65,536 numbers, so that most of the GPU idles.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers a program
COLUMNS = 7  # of the table: parameter, gradient, two moments, low copy (or 0), numbers, whether the gradient is low


@triton.jit
def _adam_kernel(
    table, done, rate, clamp, decay, low: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr,
    log_beta1: tl.constexpr, log_beta2: tl.constexpr, block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0) * columns
    at = tl.arange(0, block)
    here = at < tl.load(entry + 5)
    parameter = tl.load(entry).to(tl.pointer_type(tl.float32)) + at
    moment1 = tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + at
    moment2 = tl.load(entry + 3).to(tl.pointer_type(tl.float32)) + at
    if tl.load(entry + 6) != 0:
        grad = tl.load(tl.load(entry + 1).to(tl.pointer_type(low)) + at, mask=here, other=0.0).to(tl.float32)
    else:
        grad = tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + at, mask=here, other=0.0)
    clamped = tl.minimum(tl.maximum(grad, -clamp), clamp)
    p = tl.load(parameter, mask=here, other=0.0)
    g = tl.where(grad == grad, clamped, grad) + decay * p  # not-a-number stays visible
    m = tl.load(moment1, mask=here, other=0.0)
    v = tl.load(moment2, mask=here, other=0.0)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    steps = tl.load(done)
    share1, share2 = 1 - tl.exp(steps * log_beta1), 1 - tl.exp(steps * log_beta2)  # of the moments that is there yet
    p = p - tl.load(rate) / share1 * m / (tl.sqrt(v / share2) + eps)
    tl.store(moment1, m, mask=here)
    tl.store(moment2, v, mask=here)
    tl.store(parameter, p, mask=here)
    copy = tl.load(entry + 4)
    if copy != 0:
        tl.store(copy.to(tl.pointer_type(low)) + at, p.to(low), mask=here)


class Adam:
    """Steps for a torch.optim.Adam, with its own moments, so that checkpoints are the same with and without this."""

    def __init__(self, optimizer: torch.optim.Adam, low: dict[Tensor, Tensor], clamp: float):
        self.group = optimizer.param_groups[0]
        self.parameters: list[Tensor] = self.group["params"]
        self.low, self.clamp = low, clamp
        self.low_dtype = next(iter(low.values())).dtype
        device = self.parameters[0].device
        state = optimizer.state
        known = [state[p]["step"] for p in self.parameters if p in state]
        self.done = torch.tensor(float(known[0]) if known else 0.0, device=device)
        for p in self.parameters:
            if p not in state:
                state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state[p]["step"] = self.done  # one for all: they are equal
        self.state = state
        # Which parameter, and from where in it, each program takes.
        self.entries = [(i, start) for i, p in enumerate(self.parameters) for start in range(0, p.numel(), BLOCK)]
        self.table = torch.zeros(len(self.entries), COLUMNS, dtype=torch.int64, device=device)

    def step(self, grads: Sequence[Tensor]) -> None:
        """grads in the order of the parameters, each lying in memory as its parameter does."""
        assert all(g.stride() == p.stride() for g, p in zip(grads, self.parameters, strict=True))
        self.grads = grads
        if not (self.table.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.settle()
        self.done += 1
        low = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[self.low_dtype]
        beta1, beta2 = self.group["betas"]
        rate = torch.as_tensor(self.group["lr"], dtype=torch.float32, device=self.table.device)
        _adam_kernel[(len(self.entries),)](
            self.table, self.done, rate, self.clamp, self.group["weight_decay"], low, beta1, beta2,
            self.group["eps"], math.log(beta1), math.log(beta2), BLOCK, COLUMNS,
        )  # fmt: skip

    def settle(self) -> None:
        """Write down where everything lies: at once, or after a capture for all of its replays."""
        rows = []
        for index, start in self.entries:
            p, grad = self.parameters[index], self.grads[index]
            moments = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            places = [t.data_ptr() + start * t.element_size() for t in (p, grad, *moments)]
            low = self.low.get(p)
            copy = 0 if low is None else low.data_ptr() + start * low.element_size()
            rows.append([*places, copy, min(BLOCK, p.numel() - start), int(grad.dtype != torch.float32)])
        self.table.copy_(torch.tensor(rows))
