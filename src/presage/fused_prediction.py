"""The RRNN's steps as one kernel, forward and backward, and Valuation with its loss as another (Triton, NVIDIA GPUs).

In plain PyTorch the 25 steps are hundreds of launches of kernels that have next to nothing to do. Here each program
takes a few rows through all steps with h in registers and reads the weights once a step. What h is multiplied with is
bfloat16 (or whatever type the packed weights have); h itself, sums and gradients of h are float32. The gradients of the
weights need no order in time: they are left to one matrix product each, after the last step.

Every linear layer carries its bias inside its matrix: the state is padded to a power of two anyway, so one of the spare
columns is a constant 1 and, in front of it, three are the control. See `pack`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from presage.events import Targets
from presage.graphs import Branch
from presage.model import CONTROL

EPS = 1e-5  # of layer normalisation, as in torch.nn.functional.layer_norm


@triton.jit
def _normalised(h, real, size: tl.constexpr, eps: tl.constexpr):
    """LN(h) and 1/σ; padding stays 0."""
    mean = tl.sum(h, 1) / size
    centred = tl.where(real, h - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / size + eps)
    return centred * inverse[:, None], inverse


@triton.jit
def _normalised_backward(grad, n, inverse, real, size: tl.constexpr):
    """The gradient of h behind n = LN(h)."""
    grad = tl.where(real, grad, 0.0)
    along = tl.sum(grad * n, 1) / size
    mean = tl.sum(grad, 1) / size
    return tl.where(real, (grad - mean[:, None] - n * along[:, None]) * inverse[:, None], 0.0)


@triton.jit
def _pack_kernel(
    weight, bias, out, n_out, n_in, width: tl.constexpr, rows: tl.constexpr, carry: tl.constexpr,
):  # fmt: skip
    """out [., width]: the weights, the bias as one more column; with carry, one more row that hands the 1 on."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    col = tl.arange(0, width)[None, :]
    value = tl.load(weight + row * n_in + col, mask=(row < n_out) & (col < n_in), other=0.0)
    value += tl.load(bias + row + col * 0, mask=(row < n_out) & (col == n_in), other=0.0)
    if carry:
        value += tl.where((row == n_out) & (col == n_in), 1.0, 0.0)
    tl.store(out + row * width + col, value.to(out.dtype.element_ty))


@triton.jit
def _input(h, controls, row, step, col, live, size: tl.constexpr, horizon: tl.constexpr, eps: tl.constexpr):
    """What f is applied to at a step: relu(LN(h)), the control, a 1 for the bias."""
    n, _ = _normalised(h, col < size, size, eps)
    control = live & (step < horizon) & (col >= size) & (col < size + 3)
    x = tl.load(controls + (row * horizon + step) * 3 + col - size, mask=control, other=0.0)
    return tl.maximum(n, 0.0) + x + tl.where(col == size + 3, 1.0, 0.0)


@triton.jit
def _valued(h, w, out_w, out_b, col, size: tl.constexpr, width: tl.constexpr, eps: tl.constexpr):
    """Valuation of states [rows, width]: both logits, and what its gradients need."""
    real = col < size
    n, inverse = _normalised(h, real, size, eps)
    v = (n + tl.where(col == size, 1.0, 0.0)).to(w.dtype.element_ty)
    matrix = tl.load(w + tl.arange(0, width)[:, None] * width + col)  # [width, width]
    y = tl.maximum(tl.dot(v, tl.trans(matrix), input_precision="ieee"), 0.0)
    to_died = tl.load(out_w + col, mask=real, other=0.0)
    to_scored = tl.load(out_w + size + col, mask=real, other=0.0)
    logit_died = tl.sum(y * to_died, 1) + tl.load(out_b)
    logit_scored = tl.sum(y * to_scored, 1) + tl.load(out_b + 1)
    return logit_died, logit_scored, n, inverse, v, y


@triton.jit
def _last_kernel(
    h0, controls, w1, w2, w, out_w, out_b, logits, batch, per_state,
    horizon: tl.constexpr, size: tl.constexpr, width: tl.constexpr, hidden: tl.constexpr, chunk: tl.constexpr,
    rows: tl.constexpr, residual: tl.constexpr, monotone: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Row r goes from h0[r // per_state] through its controls; left are the logits after the last step, or with
    monotone the highest of P(died) after any."""
    number = tl.program_id(0) * rows + tl.arange(0, rows)
    row = number[:, None]  # [rows, 1]
    col = tl.arange(0, width)[None, :]  # [1, width]: the state, the control, a 1, padding
    live, real = row < batch, col < size
    h = tl.load(h0 + (row // per_state) * size + col, mask=live & real, other=0.0)
    highest = tl.full([rows], -1e9, tl.float32)
    for step in range(horizon):
        u = _input(h, controls, row, step, col, live, size, horizon, eps).to(w1.dtype.element_ty)
        r = tl.zeros([rows, width], tl.float32)
        for start in range(0, hidden, chunk):
            unit = start + tl.arange(0, chunk)
            first = tl.load(w1 + unit[:, None] * width + col)  # [chunk, width]
            a = tl.maximum(tl.dot(u, tl.trans(first), input_precision="ieee"), 0.0).to(w1.dtype.element_ty)
            second = tl.load(w2 + tl.arange(0, width)[:, None] * hidden + unit[None, :])  # [width, chunk]
            r = tl.dot(a, tl.trans(second), r, input_precision="ieee")
        h = h + r if residual else r
        if monotone:
            so_far, _, _, _, _, _ = _valued(h, w, out_w, out_b, col, size, width, eps)
            highest = tl.maximum(highest, so_far)
    died, scored, _, _, _, _ = _valued(h, w, out_w, out_b, col, size, width, eps)
    tl.store(logits + number * 2, tl.maximum(died, highest), mask=number < batch)
    tl.store(logits + number * 2 + 1, scored, mask=number < batch)


@triton.jit
def _forward_kernel(
    h0, controls, w1, w2, states, inputs, inner, batch,
    horizon: tl.constexpr, size: tl.constexpr, width: tl.constexpr, hidden: tl.constexpr, chunk: tl.constexpr,
    rows: tl.constexpr, residual: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Every state, and what the way back needs.

    The batch fills a few multiprocessors only, so what counts is latency: steps and parts of the hidden layer are one
    loop here, and the next weights are fetched across the end of a step.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    col = tl.arange(0, width)[None, :]
    live, real = row < batch, col < size
    parts: tl.constexpr = hidden // chunk
    h = tl.load(h0 + row * size + col, mask=live & real, other=0.0)
    u = _input(h, controls, row, 0, col, live, size, horizon, eps).to(w1.dtype.element_ty)
    tl.store(states + row * (horizon + 1) * size + col, h, mask=live & real)
    tl.store(inputs + row * horizon * width + col, u, mask=live)
    r = tl.zeros([rows, width], tl.float32)
    for number in range(horizon * parts):
        step, part = number // parts, number % parts
        at = row * horizon + step
        unit = part * chunk + tl.arange(0, chunk)
        first = tl.load(w1 + unit[:, None] * width + col)  # [chunk, width]
        second = tl.load(w2 + tl.arange(0, width)[:, None] * hidden + unit[None, :])  # [width, chunk]
        a = tl.maximum(tl.dot(u, tl.trans(first), input_precision="ieee"), 0.0).to(w1.dtype.element_ty)
        tl.store(inner + at * hidden + unit[None, :], a, mask=live)
        r = tl.dot(a, tl.trans(second), r, input_precision="ieee")
        if part == parts - 1:
            h = h + r if residual else r
            r = tl.zeros([rows, width], tl.float32)
            u = _input(h, controls, row, step + 1, col, live, size, horizon, eps).to(w1.dtype.element_ty)
            tl.store(states + (row * (horizon + 1) + step + 1) * size + col, h, mask=live & real)
            tl.store(inputs + (at + 1) * width + col, u, mask=live & (step + 1 < horizon))


@triton.jit
def _backward_kernel(
    grad_states, states, inner, w1, w2, grad_h0, grad_inner, grad_r, batch,
    horizon: tl.constexpr, size: tl.constexpr, width: tl.constexpr, hidden: tl.constexpr, chunk: tl.constexpr,
    rows: tl.constexpr, residual: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Back through the steps: the gradient of h0, and of both layers' outputs at every step."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    col = tl.arange(0, width)[None, :]
    live, real = row < batch, col < size
    parts: tl.constexpr = hidden // chunk
    grad_h = tl.load(grad_states + (row * horizon + horizon - 1) * size + col, mask=live & real, other=0.0)
    du = tl.zeros([rows, width], tl.float32)
    for number in range(horizon * parts):
        step, part = horizon - 1 - number // parts, number % parts
        at = row * horizon + step
        unit = part * chunk + tl.arange(0, chunk)
        second = tl.load(w2 + tl.arange(0, width)[:, None] * hidden + unit[None, :])  # [width, chunk]
        first = tl.load(w1 + unit[:, None] * width + col)  # [chunk, width]
        a = tl.load(inner + at * hidden + unit[None, :], mask=live, other=0.0)
        dr = grad_h.to(w1.dtype.element_ty)
        dz = tl.where(a > 0, tl.dot(dr, second, input_precision="ieee"), 0.0).to(w1.dtype.element_ty)
        tl.store(grad_inner + at * hidden + unit[None, :], dz, mask=live)
        du = tl.dot(dz, first, du, input_precision="ieee")
        if part == parts - 1:
            tl.store(grad_r + at * width + col, dr, mask=live)
            h = tl.load(states + (row * (horizon + 1) + step) * size + col, mask=live & real, other=0.0)
            n, inverse = _normalised(h, real, size, eps)
            through = _normalised_backward(tl.where(n > 0, du, 0.0), n, inverse, real, size)
            grad_h = grad_h + through if residual else through
            du = tl.zeros([rows, width], tl.float32)
            earlier = live & real & (step > 0)
            grad_h += tl.load(grad_states + (at - 1) * size + col, mask=earlier, other=0.0)
    tl.store(grad_h0 + row * size + col, grad_h, mask=live & real)


@triton.jit
def _valuation_kernel(
    states, w, out_w, out_b, died, scored, mask, count, losses, inputs, inner, grad_inner, grad_logits, grad_states,
    cases, horizon: tl.constexpr, size: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Each state's share of the loss, and at once everything its gradients need."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # a case is a state after a step: [B * H]
    col = tl.arange(0, width)[None, :]
    live, real = (row < cases)[:, None], col < size
    at = ((row // horizon) * (horizon + 1) + row % horizon + 1)[:, None]  # states has h0 in front
    h = tl.load(states + at * size + col, mask=live & real, other=0.0)
    logit_died, logit_scored, n, inverse, v, y = _valued(h, w, out_w, out_b, col, size, width, eps)
    weight = tl.load(mask + row, mask=row < cases, other=0).to(tl.float32) / (2 * tl.load(count))
    has_died = tl.load(died + row, mask=row < cases, other=0).to(tl.float32)
    has_scored = tl.load(scored + row, mask=row < cases, other=0).to(tl.float32)
    # Cross-entropy of a logit l and a target t: max(l, 0) - l t + log(1 + exp(-|l|)), which never overflows.
    loss = tl.maximum(logit_died, 0.0) - logit_died * has_died + tl.log(1.0 + tl.exp(-tl.abs(logit_died)))
    loss += tl.maximum(logit_scored, 0.0) - logit_scored * has_scored + tl.log(1.0 + tl.exp(-tl.abs(logit_scored)))
    tl.store(losses + row, loss * weight, mask=row < cases)
    d_died = (tl.sigmoid(logit_died) - has_died) * weight
    d_scored = (tl.sigmoid(logit_scored) - has_scored) * weight
    tl.store(grad_logits + row * 2, d_died, mask=row < cases)
    tl.store(grad_logits + row * 2 + 1, d_scored, mask=row < cases)
    dy = d_died[:, None] * tl.load(out_w + col, mask=real, other=0.0)
    dy += d_scored[:, None] * tl.load(out_w + size + col, mask=real, other=0.0)
    dy = tl.where(y > 0, dy, 0.0).to(w.dtype.element_ty)
    tl.store(inputs + row[:, None] * width + col, v, mask=live)
    tl.store(inner + row[:, None] * width + col, y.to(w.dtype.element_ty), mask=live)
    tl.store(grad_inner + row[:, None] * width + col, dy, mask=live)
    matrix = tl.load(w + tl.arange(0, width)[:, None] * width + col)  # [width, width]
    dn = tl.dot(dy, matrix, input_precision="ieee")
    grad = _normalised_backward(dn, n, inverse, real, size)
    tl.store(grad_states + row[:, None] * size + col, grad, mask=live & real)


class Launch(NamedTuple):
    """How a kernel is cut up: found by measurement (docs/performance.md)."""

    rows: int
    chunk: int
    warps: int
    stages: int


TRAIN_FORWARD = Launch(rows=16, chunk=64, warps=4, stages=3)
TRAIN_BACKWARD = Launch(rows=16, chunk=128, warps=8, stages=3)  # 144 KiB of shared memory
SMALL_BACKWARD = Launch(rows=16, chunk=64, warps=4, stages=3)  # for cards that have 99
PLAN = Launch(rows=64, chunk=64, warps=4, stages=3)  # 128 KiB with monotone
SMALL_PLAN = Launch(rows=64, chunk=64, warps=4, stages=2)
VALUATION = Launch(rows=16, chunk=0, warps=4, stages=1)


def shared_memory(device: torch.device) -> float:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return float("inf")
    number = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"])


class Shape(NamedTuple):
    """What the kernels must know when they are compiled."""

    size: int  # numbers in h
    width: int  # of h, the control and the 1, padded
    hidden: int  # of f's inner layer and a 1, padded

    @classmethod
    def of(cls, w1: Tensor) -> "Shape":
        hidden, inputs = w1.shape
        return cls(inputs - CONTROL, padded(inputs + 1), padded(hidden + 1))


def padded(size: int) -> int:
    """The power of two that holds so many columns; the matrix units take no fewer than 16."""
    return max(16, 1 << (size - 1).bit_length())


def pack(weight: Tensor, bias: Tensor, height: int, width: int, dtype: torch.dtype, carry: bool = False) -> Tensor:
    """[out, in] and [out] -> one padded matrix. A 1 in column `in` of what it is applied to adds the bias.

    carry: its row `out` hands that 1 on, so that the next layer's bias works in the same way.
    """
    out = torch.empty(height, width, dtype=dtype, device=weight.device)
    rows = 16
    _pack_kernel[(height // rows,)](weight, bias, out, *weight.shape, width, rows, carry)
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whatever they are."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def weight_gradient(outputs: Tensor, inputs: Tensor, weight: Tensor) -> list[Tensor]:
    """[cases, out], [cases, in] -> the gradients of a weight and, from the column of ones behind it, its bias."""
    grad = product(outputs.T, inputs)
    n_out, n_in = weight.shape
    return [grad[:n_out, :n_in].contiguous(), grad[:n_out, n_in].contiguous()]


class Weights(NamedTuple):
    """Prediction's two layers and Valuation's two, float32, in the order of the model's parameters."""

    w1: Tensor  # [hidden, S + 3]
    b1: Tensor
    w2: Tensor  # [S, hidden]
    b2: Tensor
    inner_w: Tensor  # [S, S]
    inner_b: Tensor
    out_w: Tensor  # [2, S]
    out_b: Tensor


class Ready(NamedTuple):
    """What can be made before h0 is there."""

    first: Tensor  # f's two layers and Valuation's inner one, packed
    second: Tensor
    matrix: Tensor
    counted: Tensor  # float32 []: how many steps the loss is over


def prepare(weights: Weights, targets: Targets, dtype: torch.dtype) -> Ready:
    _, width, hidden = Shape.of(weights.w1)
    return Ready(
        pack(weights.w1, weights.b1, hidden, width, dtype, carry=True),
        pack(weights.w2, weights.b2, width, hidden, dtype),
        pack(weights.inner_w, weights.inner_b, width, width, dtype),
        targets.mask.sum(dtype=torch.float32),
    )


def loss_and_gradients(
    h0: Tensor, controls: Tensor, targets: Targets, weights: Weights, ready: Ready, residual: bool, branch: Branch
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss of states h0 [B, S] under controls [B, H, 3]; its gradient of h0; on the branch, of the weights."""
    batch, horizon = controls.shape[:2]
    size, width, hidden = shape = Shape.of(weights.w1)
    first, second, matrix, counted = ready
    cases = batch * horizon
    states = h0.new_empty(batch, horizon + 1, size)  # float32, h0 in front
    inputs, inner = first.new_empty(cases, width), first.new_empty(cases, hidden)
    rows, chunk, warps, stages = TRAIN_FORWARD
    _forward_kernel[(triton.cdiv(batch, rows),)](
        h0, controls, first, second, states, inputs, inner, batch,
        horizon, *shape, min(chunk, hidden), rows, residual, EPS, num_warps=warps, num_stages=stages,
    )  # fmt: skip

    losses, grad_logits, grad_states = h0.new_empty(cases), h0.new_empty(cases, 2), h0.new_empty(cases, size)
    seen, valued, grad_valued = (matrix.new_empty(cases, width) for _ in range(3))
    rows, _, warps, stages = VALUATION
    _valuation_kernel[(triton.cdiv(cases, rows),)](
        states, matrix, weights.out_w, weights.out_b, *targets, counted, losses,
        seen, valued, grad_valued, grad_logits, grad_states, cases,
        horizon, size, width, rows, EPS, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    with branch.beside(losses, grad_logits, valued, grad_valued, seen):
        loss = losses.sum()
        of_valuation = weight_gradient(grad_valued, seen, weights.inner_w)
        of_valuation += [grad_logits.T @ valued[:, :size].float(), grad_logits.sum(0)]

    grad_h0, grad_r, grad_inner = torch.empty_like(h0), torch.empty_like(inputs), torch.empty_like(inner)
    rows, chunk, warps, stages = TRAIN_BACKWARD if shared_memory(h0.device) > 144 * 1024 else SMALL_BACKWARD
    _backward_kernel[(triton.cdiv(batch, rows),)](
        grad_states, states, inner, first, second, grad_h0, grad_inner, grad_r, batch,
        horizon, *shape, min(chunk, hidden), rows, residual, EPS, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    with branch.beside(grad_inner, inputs, grad_r, inner):
        of_prediction = weight_gradient(grad_inner, inputs, weights.w1) + weight_gradient(grad_r, inner, weights.w2)
    return loss, grad_h0, of_prediction + of_valuation


def last_logits(
    h0: Tensor, controls: Tensor, weights: Weights, residual: bool, monotone: bool, dtype: torch.dtype
) -> Tensor:
    """h0 [N, S] under k control sequences each [N, k, H, 3] -> logits of P(died), P(scored) at the end [N, k, 2]."""
    n, k, horizon = controls.shape[:3]
    _, width, hidden = shape = Shape.of(weights.w1)
    first = pack(weights.w1, weights.b1, hidden, width, dtype, carry=True)
    second = pack(weights.w2, weights.b2, width, hidden, dtype)
    matrix = pack(weights.inner_w, weights.inner_b, width, width, dtype)
    logits = h0.new_empty(n, k, 2)
    rows, chunk, warps, stages = PLAN if shared_memory(h0.device) >= 128 * 1024 or not monotone else SMALL_PLAN
    _last_kernel[(triton.cdiv(n * k, rows),)](
        h0, controls, first, second, matrix, weights.out_w, weights.out_b, logits, n * k, k,
        horizon, *shape, min(chunk, hidden), rows, residual, monotone, EPS, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return logits
