"""Perception's layers with batch normalisation, ReLU and residual sum fused around cuDNN's convolutions (Triton).

Activations are bfloat16 [B, C, H, W] with channels last in memory, so a kernel sees a matrix of B·H·W cases and C
channels. Statistics are float32. PyTorch's own kernels for this shape take most of Perception's time.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from presage.fused_prediction import product
from presage.graphs import Branch
from presage.model import Perception

BLOCK = 4  # the first layer's stride: it is computed on blocks of 4×4 pixels, see `blocks`
GROUPS = 128  # partial sums, at most


@triton.jit
def _blocks_kernel(frames, index, out, side: tl.constexpr, channels: tl.constexpr, padded: tl.constexpr):
    """Frames uint8 [., 4·side, 4·side] -> [B, side, side, channels·16] in [0, 1]; a program makes a row of blocks."""
    program = tl.program_id(0)
    image, by = program // side, program % side
    at = tl.arange(0, padded)
    bx, inside = at // (channels * 16), at % (channels * 16)
    channel, dy, dx = inside // 16, inside // 4 % 4, inside % 4
    frame = tl.load(index + image * channels + channel)  # int64: a store has more than 2³¹ pixels
    source = (frame * side * 4 + by * 4 + dy) * side * 4 + bx * 4 + dx
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


def blocks(frames: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """frames uint8 [N, 84, 84], stacks of them int64 [B, 4] -> [B, 64, 21, 21] in [0, 1], channels last.

    Each block of 4×4 pixels becomes channels: an 8×8 convolution with stride 4 over four channels is a 2×2 one over
    these 64, which matrix units like better.
    """
    (batch, channels), side = index.shape, frames.shape[1] // BLOCK
    out = torch.empty(batch, side, side, channels * BLOCK**2, dtype=dtype, device=frames.device)
    padded = triton.next_power_of_2(side * channels * BLOCK**2)
    _blocks_kernel[(batch * side,)](frames, index, out, side, channels, padded)
    return out.permute(0, 3, 1, 2)


def block_weights(weight: Tensor) -> Tensor:
    """[C, 4, 8, 8] -> [C, 64, 2, 2]: the same convolution on blocks."""
    after, before, kernel, _ = weight.shape
    apart = weight.reshape(after, before, kernel // BLOCK, BLOCK, kernel // BLOCK, BLOCK)  # …, by, dy, bx, dx
    return apart.permute(0, 1, 3, 5, 2, 4).reshape(after, before * BLOCK**2, kernel // BLOCK, kernel // BLOCK)


def unblocked(weight: Tensor) -> Tensor:
    """The inverse of block_weights."""
    after, channels, kernel, _ = weight.shape
    apart = weight.reshape(after, channels // BLOCK**2, BLOCK, BLOCK, kernel, kernel)
    return apart.permute(0, 1, 4, 2, 5, 3).reshape(after, channels // BLOCK**2, kernel * BLOCK, kernel * BLOCK)


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


class Layer(NamedTuple):
    """One convolution with its normalisation, and what it leaves for the way back."""

    norm: nn.BatchNorm2d
    kernel: Tensor  # low precision
    stride: int
    padding: int
    x: Tensor
    z: Tensor  # the convolution's output
    out: Tensor
    stats: Tensor  # float32 [2, C]: mean and 1/σ
    has_skip: bool


def apply_layer(
    x: Tensor, kernel: Tensor, norm: nn.BatchNorm2d, stride: int, padding: int, skip: Tensor | None = None
) -> Layer:
    """relu(batch_norm(convolution(x)) + skip), with the running statistics moved on as PyTorch does."""
    z = F.conv2d(x, kernel, stride=stride, padding=padding)
    cut, channels = Cut.of(z), z.shape[1]
    partial = torch.empty(cut.groups, 2, channels, device=x.device)
    stats, out = torch.empty(2, channels, device=x.device), torch.empty_like(z)
    _moments_kernel[(cut.groups,)](z, partial, cut.cases, channels, cut.group_rows)
    _normalise_kernel[(triton.cdiv(cut.cases, cut.rows),)](
        z, z if skip is None else skip, partial, norm.weight, norm.bias, norm.running_mean, norm.running_var,
        out, stats, cut.cases, cut.groups, cut.group_rows, channels, cut.rows, GROUPS, skip is not None,
        norm.momentum, norm.eps,
    )  # fmt: skip
    return Layer(norm, kernel, stride, padding, x, z, out, stats, skip is not None)


def layer_backward(layer: Layer, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the convolution's output, of the skip (grad_out behind the ReLU), of gamma and of beta."""
    cut, channels, z = Cut.of(layer.z), layer.z.shape[1], layer.z
    partial = torch.empty(cut.groups, 2, channels, device=z.device)
    grad_z, grad_skip = torch.empty_like(z), torch.empty_like(z) if layer.has_skip else grad_out
    grad_gamma, grad_beta = torch.empty(2, channels, device=z.device)
    _sums_backward_kernel[(cut.groups,)](
        grad_out, layer.out, z, layer.stats, partial, cut.cases, channels, cut.group_rows
    )
    _normalise_backward_kernel[(triton.cdiv(cut.cases, cut.rows),)](
        grad_out, layer.out, z, layer.stats, layer.norm.weight, partial, grad_z, grad_skip, grad_gamma, grad_beta,
        cut.cases, cut.groups, channels, cut.rows, GROUPS, layer.has_skip,
    )  # fmt: skip
    return grad_z, grad_skip, grad_gamma, grad_beta


def convolution_backward(layer: Layer, grad_z: Tensor, of: Literal["input", "kernel"]) -> Tensor:
    both, stride, padding = (layer.x, layer.kernel), [layer.stride] * 2, [layer.padding] * 2
    wanted = [of == "input", of == "kernel", False]
    grads = torch.ops.aten.convolution_backward(grad_z, *both, None, stride, padding, [1, 1], False, [0, 0], 1, wanted)
    return grads[0 if of == "input" else 1]  # type: ignore[no-any-return]


class Seen(NamedTuple):
    """Perception's way forward, kept for its way back."""

    layers: list[Layer]
    flat: Tensor  # [B, features]: the last layer's output
    out_weight: Tensor  # low precision
    h0: Tensor  # float32 [B, S]


def forward(perception: Perception, frames: Tensor, index: Tensor, low: list[Tensor]) -> Seen:
    """frames uint8 [N, 84, 84], stacks of them [B, 4] -> h0, while training.

    low: the matrices in low precision, in the order of `matrices`.
    """
    norms = [layer for layer in perception.modules() if isinstance(layer, nn.BatchNorm2d)]
    *kernels, out_weight = low
    kernels[0] = block_weights(kernels[0])
    x, layers = blocks(frames, index, out_weight.dtype), []
    for stage in range(0, len(kernels), 3):  # a strided layer, then a residual block of two
        norm, norm1, norm2 = norms[stage : stage + 3]
        enter, first, second = kernels[stage : stage + 3]
        layers.append(apply_layer(x, enter, norm, stride=1 if stage == 0 else 2, padding=0))
        layers.append(apply_layer(layers[-1].out, first, norm1, stride=1, padding=1))
        layers.append(apply_layer(layers[-1].out, second, norm2, stride=1, padding=1, skip=layers[-2].out))
        x = layers[-1].out
    flat = x.flatten(1)
    return Seen(layers, flat, out_weight, product(flat, out_weight.T) + perception.out.bias)


def backward(seen: Seen, grad_h0: Tensor, branch: Branch) -> list[Tensor]:
    """The gradients of Perception's parameters, in their order; those of matrices on the branch, in low precision."""
    low = grad_h0.to(seen.out_weight.dtype)
    with branch.beside(low, seen):
        of_out = [product(low.T, seen.flat), grad_h0.sum(0)]
    last = seen.layers[-1].out
    grad = (low @ seen.out_weight).view(last.shape).contiguous(memory_format=torch.channels_last)
    grads: list[Tensor] = []
    grad_around = grad  # of the input of the residual block that is being gone through
    for number in range(len(seen.layers) - 1, -1, -1):
        layer = seen.layers[number]
        grad_z, grad_skip, grad_gamma, grad_beta = layer_backward(layer, grad)
        with branch.beside(grad_z):
            kernel = convolution_backward(layer, grad_z, "kernel")
            kernel = (unblocked(kernel) if number == 0 else kernel).contiguous(memory_format=torch.channels_last)
        grads = [kernel, grad_gamma, grad_beta, *grads]
        if layer.has_skip:
            grad_around = grad_skip
        if number:
            grad = convolution_backward(layer, grad_z, "input")
        if number % 3 == 1:  # the residual block's first layer: its input also went around the block
            grad += grad_around
    return [*grads, *of_out]


def matrices(perception: Perception) -> list[Tensor]:
    """The parameters that are multiplied in low precision."""
    return [layer.weight for layer in perception.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
