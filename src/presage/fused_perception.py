"""Perception's layers with batch normalisation, ReLU and residual sum fused around cuDNN's convolutions (Triton).

Activations are bfloat16 [B, C, H, W] with channels last in memory, so a kernel sees a matrix of B·H·W cases and C
channels. Statistics are float32. PyTorch's own kernels for this shape take most of Perception's time.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from presage.model import Perception

BLOCK = 4  # the first layer's stride: it is computed on blocks of 4×4 pixels, see `blocks`
GROUPS = 128  # partial sums, at most


@triton.jit
def _blocks_kernel(frames, out, side: tl.constexpr, channels: tl.constexpr, padded: tl.constexpr):
    """uint8 [B, 4, 4·side, 4·side] -> [B, side, side, channels·16] in [0, 1]; a program makes one row of blocks."""
    program = tl.program_id(0)
    image, by = program // side, program % side
    at = tl.arange(0, padded)
    bx, inside = at // (channels * 16), at % (channels * 16)
    channel, dy, dx = inside // 16, inside // 4 % 4, inside % 4
    source = ((image * channels + channel) * side * 4 + by * 4 + dy) * side * 4 + bx * 4 + dx
    value = tl.load(frames + source, mask=bx < side, other=0).to(tl.float32) / 255.0
    tl.store(out + program * side * channels * 16 + at, value.to(out.dtype.element_ty), mask=bx < side)


@triton.jit
def _moments_kernel(x, partial, cases, channels: tl.constexpr, rows: tl.constexpr):
    """Mean and sum of squared differences from it, of one group of cases."""
    group = tl.program_id(0)
    row, col = group * rows + tl.arange(0, rows)[:, None], tl.arange(0, channels)[None, :]
    value = tl.load(x + row * channels + col, mask=row < cases, other=0.0).to(tl.float32)
    number = tl.minimum(cases - group * rows, rows).to(tl.float32)
    mean = tl.sum(value, 0) / number
    away = tl.where(row < cases, value - mean[None, :], 0.0)
    at = partial + group * 2 * channels + tl.arange(0, channels)
    tl.store(at, mean)
    tl.store(at + channels, tl.sum(away * away, 0))


@triton.jit
def _normalise_kernel(
    x, skip, partial, gamma, beta, running_mean, running_var, out, stats, cases, groups, group_rows,
    channels: tl.constexpr, rows: tl.constexpr, most: tl.constexpr, has_skip: tl.constexpr,
    momentum: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """relu(normalised x + skip). Every program puts the groups' moments together for itself (Chan's formula)."""
    channel = tl.arange(0, channels)
    group = tl.arange(0, most)[:, None]
    number = tl.minimum(tl.maximum(cases - group * group_rows, 0), group_rows).to(tl.float32)
    at = partial + group * 2 * channels + channel[None, :]
    means = tl.load(at, mask=group < groups, other=0.0)
    squares = tl.load(at + channels, mask=group < groups, other=0.0)
    mean = tl.sum(means * number, 0) / cases
    away = means - mean[None, :]
    var = (tl.sum(squares, 0) + tl.sum(away * away * number, 0)) / cases
    inverse = 1.0 / tl.sqrt(var + eps)
    if tl.program_id(0) == 0:
        tl.store(stats + channel, mean)
        tl.store(stats + channels + channel, inverse)
        old_mean, old_var = tl.load(running_mean + channel), tl.load(running_var + channel)
        tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + channel, old_var + momentum * (var * cases / (cases - 1) - old_var))
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    where = row * channels + channel[None, :]
    value = tl.load(x + where, mask=row < cases, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * (inverse * tl.load(gamma + channel))[None, :] + tl.load(beta + channel)[None, :]
    if has_skip:
        value += tl.load(skip + where, mask=row < cases, other=0.0).to(tl.float32)
    tl.store(out + where, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=row < cases)


@triton.jit
def _sums_backward_kernel(grad_out, out, x, stats, partial, cases, channels: tl.constexpr, rows: tl.constexpr):
    """Sums that the gradients of beta, gamma and x need, of one group of cases."""
    channel = tl.arange(0, channels)
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    where = row * channels + channel[None, :]
    grad = tl.load(grad_out + where, mask=row < cases, other=0.0).to(tl.float32)
    grad = tl.where(tl.load(out + where, mask=row < cases, other=0.0) > 0, grad, 0.0)
    value = tl.load(x + where, mask=row < cases, other=0.0).to(tl.float32)
    mean, inverse = tl.load(stats + channel), tl.load(stats + channels + channel)
    normal = (value - mean[None, :]) * inverse[None, :]
    at = partial + tl.program_id(0) * 2 * channels + channel
    tl.store(at, tl.sum(grad, 0))
    tl.store(at + channels, tl.sum(grad * normal, 0))


@triton.jit
def _normalise_backward_kernel(
    grad_out, out, x, stats, gamma, partial, grad_x, grad_skip, grad_gamma, grad_beta, cases, groups,
    channels: tl.constexpr, rows: tl.constexpr, most: tl.constexpr, has_skip: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, channels)
    group = tl.arange(0, most)[:, None]
    at = partial + group * 2 * channels + channel[None, :]
    total = tl.sum(tl.load(at, mask=group < groups, other=0.0), 0)
    total_normal = tl.sum(tl.load(at + channels, mask=group < groups, other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(grad_beta + channel, total)
        tl.store(grad_gamma + channel, total_normal)
    mean, inverse = tl.load(stats + channel), tl.load(stats + channels + channel)
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    where = row * channels + channel[None, :]
    grad = tl.load(grad_out + where, mask=row < cases, other=0.0).to(tl.float32)
    grad = tl.where(tl.load(out + where, mask=row < cases, other=0.0) > 0, grad, 0.0)
    if has_skip:
        tl.store(grad_skip + where, grad.to(grad_skip.dtype.element_ty), mask=row < cases)
    value = tl.load(x + where, mask=row < cases, other=0.0).to(tl.float32)
    normal = (value - mean[None, :]) * inverse[None, :]
    grad = grad - (total / cases)[None, :] - normal * (total_normal / cases)[None, :]
    grad = grad * (inverse * tl.load(gamma + channel))[None, :]
    tl.store(grad_x + where, grad.to(grad_x.dtype.element_ty), mask=row < cases)


def blocks(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [B, 4, 84, 84] -> [B, 64, 21, 21] in [0, 1], channels last: each block of 4×4 pixels becomes channels.

    An 8×8 convolution with stride 4 over four channels is a 2×2 one over these 64, which matrix units like better.
    """
    batch, channels, height, _ = frames.shape
    side = height // BLOCK
    out = torch.empty(batch, side, side, channels * BLOCK**2, dtype=dtype, device=frames.device)
    padded = triton.next_power_of_2(side * channels * BLOCK**2)
    _blocks_kernel[(batch * side,)](frames, out, side, channels, padded)
    return out.permute(0, 3, 1, 2)


def block_weights(weight: Tensor) -> Tensor:
    """[C, 4, 8, 8] -> [C, 64, 2, 2]: the same convolution on blocks."""
    after, before, kernel, _ = weight.shape
    apart = weight.reshape(after, before, kernel // BLOCK, BLOCK, kernel // BLOCK, BLOCK)  # …, by, dy, bx, dx
    return apart.permute(0, 1, 3, 5, 2, 4).reshape(after, before * BLOCK**2, kernel // BLOCK, kernel // BLOCK)


class Cut(NamedTuple):
    """How cases are shared out: groups whose sums are kept apart, and rows a program for all else."""

    cases: int
    group_rows: int
    groups: int
    rows: int

    @classmethod
    def of(cls, x: Tensor) -> "Cut":
        cases = x.shape[0] * x.shape[2] * x.shape[3]
        group_rows = triton.next_power_of_2(triton.cdiv(cases, 3 * GROUPS // 4))
        return cls(cases, group_rows, triton.cdiv(cases, group_rows), 64)


class NormRelu(torch.autograd.Function):
    """relu(batch_norm(x) + skip), with the running statistics moved on as PyTorch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor | None, gamma: Tensor, beta: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        cut, channels = Cut.of(x), x.shape[1]
        partial = torch.empty(cut.groups, 2, channels, device=x.device)
        stats, out = torch.empty(2, channels, device=x.device), torch.empty_like(x)
        _moments_kernel[(cut.groups,)](x, partial, cut.cases, channels, cut.group_rows)
        _normalise_kernel[(triton.cdiv(cut.cases, cut.rows),)](
            x, x if skip is None else skip, partial, gamma, beta, norm.running_mean, norm.running_var, out, stats,
            cut.cases, cut.groups, cut.group_rows, channels, cut.rows, GROUPS, skip is not None,
            norm.momentum, norm.eps,
        )  # fmt: skip
        ctx.save_for_backward(x, out, stats, gamma)
        ctx.has_skip = skip is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, out, stats, gamma = ctx.saved_tensors
        cut, channels = Cut.of(x), x.shape[1]
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        partial = torch.empty(cut.groups, 2, channels, device=x.device)
        grad_x, grad_gamma, grad_beta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
        grad_skip = torch.empty_like(x) if ctx.has_skip else None
        _sums_backward_kernel[(cut.groups,)](grad_out, out, x, stats, partial, cut.cases, channels, cut.group_rows)
        _normalise_backward_kernel[(triton.cdiv(cut.cases, cut.rows),)](
            grad_out, out, x, stats, gamma, partial, grad_x, grad_x if grad_skip is None else grad_skip,
            grad_gamma, grad_beta, cut.cases, cut.groups, channels, cut.rows, GROUPS, ctx.has_skip,
        )  # fmt: skip
        return grad_x, grad_skip, grad_gamma, grad_beta, None


class Lower(torch.autograd.Function):
    """Many float32 parameters as bfloat16 copies, and their gradients back, in one launch each way."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        copies = tuple(torch.empty_like(p, dtype=dtype) for p in parameters)
        torch._foreach_copy_(copies, parameters)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        copies = tuple(torch.empty_like(g, dtype=torch.float32) for g in grads)
        torch._foreach_copy_(copies, grads)
        return None, *copies


def perceive(perception: Perception, frames: Tensor, dtype: torch.dtype) -> Tensor:
    """What perception(frames) gives while it trains: uint8 [B, 4, 84, 84] -> float32 [B, S]."""
    convs = [layer for layer in perception.modules() if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in perception.modules() if isinstance(layer, nn.BatchNorm2d)]
    out = perception.out
    *kernels, out_weight, out_bias = Lower.apply(dtype, *(conv.weight for conv in convs), out.weight, out.bias)
    x = blocks(frames, dtype)
    kernels[0] = block_weights(kernels[0])
    for stage in range(0, len(convs), 3):  # a strided layer, then a residual block of two
        norm, norm1, norm2 = norms[stage : stage + 3]
        enter, first, second = kernels[stage : stage + 3]
        x = norm_relu(F.conv2d(x, enter, stride=1 if stage == 0 else convs[stage].stride), norm)
        y = norm_relu(F.conv2d(x, first, padding=1), norm1)
        x = norm_relu(F.conv2d(y, second, padding=1), norm2, skip=x)
    return F.linear(x.flatten(1), out_weight, out_bias).float()


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, skip: Tensor | None = None) -> Tensor:
    return NormRelu.apply(x, skip, norm.weight, norm.bias, norm)  # type: ignore[no-any-return]
