"""A layer of Perception as one kernel: a convolution that takes in what stands around it (Triton, NVIDIA GPUs).

A layer is convolution, batch normalisation, ReLU. The normalisation needs sums over all cases, so it cannot be done
where its convolution ends; but it can where the next one begins. So each kernel normalises what it reads and adds up
what it writes. The way back has the same shape: a kernel goes through a normalisation and a convolution, and adds up
what the normalisation before needs. In a batch of 100 each of these would be a kernel that has next to nothing to do.

Activations are bfloat16 [B, C, H, W] with channels last in memory, so a kernel sees a matrix of B·H·W cases and C
channels. Sums are float32. The gradients of convolution kernels are left to cuDNN, beside all this.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from presage.batches import Stacks
from presage.tasks import STACK

BLOCK = 4  # the first layer's stride: it is computed on blocks of 4×4 pixels, see `blocks`
PROGRAMS = 264  # two for each multiprocessor of a large GPU: what a kernel is cut into if cases are few
ROWS = 16, 64  # cases a program, at least and at most
# Of a convolution. With four, Triton 3.6 takes Hopper's asynchronous products and lets a loop overwrite registers that
# one of them still reads: right while nothing else runs on the GPU, garbage now and then beside planning.
WARPS = 2


@triton.jit
def _blocks_kernel(
    frames, newest, ages, down, right, out,
    side: tl.constexpr, channels: tl.constexpr, motion: tl.constexpr, move: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Frames uint8 [., 4·side, 4·side] -> [B, side, side, channels·16] in [0, 1] or, if there is `motion`, what changed
    by the next frame, that many times enlarged; with `move`, moved. A program makes a row of blocks."""
    program = tl.program_id(0)
    image, by = program // side, program % side
    at = tl.arange(0, padded)
    bx, inside = at // (channels * 16), at % (channels * 16)
    channel, dy, dx = inside // 16, inside // 4 % 4, inside % 4
    row = tl.load(newest + image)  # int64: a store has more than 2³¹ pixels
    age, y, x = tl.load(ages + row).to(tl.int32), by * 4 + dy, bx * 4 + dx
    if move:
        y = tl.minimum(tl.maximum(y - tl.load(down + image).to(tl.int32), 0), side * 4 - 1)
        x = tl.minimum(tl.maximum(x - tl.load(right + image).to(tl.int32), 0), side * 4 - 1)
    pixel = y * side * 4 + x
    frame = frames + (row - tl.minimum(channels - 1 - channel, age)) * side * side * 16
    value = tl.load(frame + pixel, mask=bx < side, other=0).to(tl.float32) / 255.0
    if motion != 0:
        older = channel < channels - 1
        frame = frames + (row - tl.minimum(channels - 2 - channel, age)) * side * side * 16
        later = tl.load(frame + pixel, mask=(bx < side) & older, other=0).to(tl.float32) / 255.0
        value = tl.where(older, motion * (later - value), value)
    tl.store(out + program * side * channels * 16 + at, value.to(out.dtype.element_ty), mask=bx < side)


@triton.jit
def _moments(sums, channel, cases, channels: tl.constexpr):
    """Mean and variance of each channel, from the sums of its values and of their squares."""
    mean = tl.load(sums + channel) / cases
    return mean, tl.maximum(tl.load(sums + channels + channel) / cases - mean * mean, 0.0)


@triton.jit
def _remember(running_mean, running_var, channel, mean, var, cases, momentum: tl.constexpr):
    """Move the running statistics on, as PyTorch does; one program is enough."""
    if tl.program_id(0) == 0:
        old_mean, old_var = tl.load(running_mean + channel), tl.load(running_var + channel)
        tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean))
        tl.store(running_var + channel, old_var + momentum * (var * cases / (cases - 1) - old_var))


@triton.jit
def _neighbour(row, dy, dx, side: tl.constexpr, other: tl.constexpr, up: tl.constexpr, down: tl.constexpr):
    """Case `row` of images of that side -> the case at (y·up + dy, x·up + dx) / down of images of the `other` side, and
    whether there is one."""
    image, y, x = row // (side * side), row // side % side * up + dy, row % side * up + dx
    there = (y >= 0) & (y < other * down) & (x >= 0) & (x < other * down)
    if down > 1:
        there = there & (y % down == 0) & (x % down == 0)
    return (image * other + y // down) * other + x // down, there


@triton.jit
def _convolution_kernel(
    x, sums, gamma, beta, running_mean, running_var, weight, seen, z, z_sums, cases,
    side: tl.constexpr, z_side: tl.constexpr, channels: tl.constexpr, z_channels: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr, normalise: tl.constexpr,
    momentum: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """z = convolution of x, and the sums of z. With `normalise`, x is the z of the layer before: what is convolved is
    relu(batch_norm(x)), which is left in `seen`."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    channel, z_channel = tl.arange(0, channels), tl.arange(0, z_channels)
    if normalise:
        mean, var = _moments(sums, channel, cases, channels)
        _remember(running_mean, running_var, channel, mean, var, cases, momentum)
        scale = tl.load(gamma + channel) / tl.sqrt(var + eps)
        shift = tl.load(beta + channel) - mean * scale
    total = tl.zeros([rows, z_channels], tl.float32)
    for tap in range(kernel * kernel):
        at, there = _neighbour(row, tap // kernel - padding, tap % kernel - padding, z_side, side, stride, 1)
        there = (there & (row < cases))[:, None]
        where = at[:, None] * channels + channel[None, :]
        value = tl.load(x + where, mask=there, other=0.0)
        if normalise:
            value = tl.maximum(value.to(tl.float32) * scale[None, :] + shift[None, :], 0.0)
            value = tl.where(there, value, 0.0).to(x.dtype.element_ty)
            tl.store(seen + where, value, mask=there & (tap == kernel * kernel // 2))
        matrix = tl.load(weight + (z_channel[None, :] * kernel * kernel + tap) * channels + channel[:, None])
        total = tl.dot(value, matrix, total, input_precision="ieee")
    where = row[:, None] * z_channels + z_channel[None, :]
    low = total.to(z.dtype.element_ty)
    tl.store(z + where, low, mask=(row < cases)[:, None])
    total = low.to(tl.float32)  # 0 past the end
    tl.atomic_add(z_sums + z_channel, tl.sum(total, 0), sem="relaxed")
    tl.atomic_add(z_sums + z_channels + z_channel, tl.sum(total * total, 0), sem="relaxed")


@triton.jit
def _finish_kernel(
    z, skip, sums, gamma, beta, running_mean, running_var, out, cases,
    channels: tl.constexpr, momentum: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """relu(batch_norm(z) + skip): the end of a residual block."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    channel = tl.arange(0, channels)
    mean, var = _moments(sums, channel, cases, channels)
    _remember(running_mean, running_var, channel, mean, var, cases, momentum)
    scale = tl.load(gamma + channel) / tl.sqrt(var + eps)
    shift = tl.load(beta + channel) - mean * scale
    where = row * channels + channel[None, :]
    value = tl.load(z + where, mask=row < cases, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    value += tl.load(skip + where, mask=row < cases, other=0.0).to(tl.float32)
    tl.store(out + where, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=row < cases)


@triton.jit
def _leave(
    grad, out, z, sums, grad_out, grad_sums, row, channel, cases,
    channels: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """A gradient of a layer's output: kept behind the ReLU, with the sums that its normalisation needs."""
    live = (row < cases)[:, None]
    where = row[:, None] * channels + channel[None, :]
    grad = tl.where(tl.load(out + where, mask=live, other=0.0) > 0, grad, 0.0).to(grad_out.dtype.element_ty)
    tl.store(grad_out + where, grad, mask=live)
    mean, var = _moments(sums, channel, cases, channels)
    value = tl.load(z + where, mask=live, other=0.0).to(tl.float32)
    normal = (value - mean[None, :]) / tl.sqrt(var + eps)[None, :]
    grad = grad.to(tl.float32)
    tl.atomic_add(grad_sums + channel, tl.sum(grad, 0), sem="relaxed")
    tl.atomic_add(grad_sums + channels + channel, tl.sum(grad * normal, 0), sem="relaxed")


@triton.jit
def _leave_kernel(
    grad, out, z, sums, grad_out, grad_sums, cases,
    channels: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.arange(0, channels)
    where = row[:, None] * channels + channel[None, :]
    value = tl.load(grad + where, mask=(row < cases)[:, None], other=0.0).to(tl.float32)
    _leave(value, out, z, sums, grad_out, grad_sums, row, channel, cases, channels, eps)


@triton.jit
def _way_back(sums, grad_sums, gamma, channel, cases, channels: tl.constexpr, eps: tl.constexpr):
    """Through a normalisation, the gradient g becomes that of z: factor·g + tilt·z + offset."""
    mean, var = _moments(sums, channel, cases, channels)
    inverse = 1.0 / tl.sqrt(var + eps)
    factor = inverse * tl.load(gamma + channel)
    tilt = -factor * inverse * tl.load(grad_sums + channels + channel) / cases
    return factor, tilt, -factor * tl.load(grad_sums + channel) / cases - tilt * mean


@triton.jit
def _way_back_kernel(
    grad, z, sums, grad_sums, gamma, grad_z, cases, channels: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    channel = tl.arange(0, channels)
    factor, tilt, offset = _way_back(sums, grad_sums, gamma, channel, cases, channels, eps)
    where = row * channels + channel[None, :]
    value = tl.load(z + where, mask=row < cases, other=0.0).to(tl.float32) * tilt[None, :] + offset[None, :]
    value += tl.load(grad + where, mask=row < cases, other=0.0).to(tl.float32) * factor[None, :]
    tl.store(grad_z + where, value.to(grad_z.dtype.element_ty), mask=row < cases)


@triton.jit
def _convolution_backward_kernel(
    grad, z, sums, grad_sums, gamma, weight, grad_z, around, x, x_z, x_sums, grad_x, x_grad_sums, cases,
    side: tl.constexpr, z_side: tl.constexpr, channels: tl.constexpr, z_channels: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr, normalised: tl.constexpr,
    has_around: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """From the gradient of z to that of x, kept behind the ReLU that made x, and the sums which the layer that made x
    needs. With `normalised` (z has as many cases as x then), grad is that of z's normalisation; grad_z is left."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    channel, z_channel = tl.arange(0, channels), tl.arange(0, z_channels)
    if normalised:
        factor, tilt, offset = _way_back(sums, grad_sums, gamma, z_channel, cases, z_channels, eps)
    total = tl.zeros([rows, channels], tl.float32)
    for tap in range(kernel * kernel):
        at, there = _neighbour(row, padding - tap // kernel, padding - tap % kernel, side, z_side, 1, stride)
        there = (there & (row < cases))[:, None]
        where = at[:, None] * z_channels + z_channel[None, :]
        value = tl.load(grad + where, mask=there, other=0.0)
        if normalised:
            behind = tl.load(z + where, mask=there, other=0.0).to(tl.float32) * tilt[None, :] + offset[None, :]
            behind += value.to(tl.float32) * factor[None, :]
            value = tl.where(there, behind, 0.0).to(grad.dtype.element_ty)
            tl.store(grad_z + where, value, mask=there & (tap == kernel * kernel // 2))
        matrix = tl.load(weight + (z_channel[:, None] * kernel * kernel + tap) * channels + channel[None, :])
        total = tl.dot(value, matrix, total, input_precision="ieee")
    if has_around:
        where = row[:, None] * channels + channel[None, :]
        total += tl.load(around + where, mask=(row < cases)[:, None], other=0.0).to(tl.float32)
    _leave(total, x, x_z, x_sums, grad_x, x_grad_sums, row, channel, cases, channels, eps)


def blocks(stacks: Stacks, dtype: torch.dtype, motion: float = 0.0) -> Tensor:
    """Stacks -> [B, 64, 21, 21] in [0, 1], channels last; with motion, changes from frame to frame, that many times
    enlarged, instead of all but the newest.

    Each block of 4×4 pixels becomes channels: an 8×8 convolution with stride 4 over four channels is a 2×2 one over
    these 64, which matrix units like better.
    """
    frames, newest, ages, *moves = stacks
    batch, side = len(newest), frames.shape[1] // BLOCK
    out = torch.empty(batch, side, side, STACK * BLOCK**2, dtype=dtype, device=frames.device)
    padded, move = triton.next_power_of_2(side * STACK * BLOCK**2), moves[0] is not None
    down, right = moves if move else (newest, newest)
    _blocks_kernel[(batch * side,)](frames, newest, ages, down, right, out, side, STACK, motion, move, padded)
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


class Layer(NamedTuple):
    """One convolution and the normalisation behind it."""

    norm: nn.BatchNorm2d
    kernel: Tensor  # low precision [C, before, n, n], channels last
    stride: int
    padding: int
    x: Tensor  # what was convolved
    z: Tensor
    sums: Tensor  # float32 [2, C]: of z and of its squares
    grad_sums: Tensor  # [2, C]: the gradients of beta and gamma, once the way back has come here


def cases_of(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def cut(cases: int) -> tuple[tuple[int], int]:
    """A kernel's programs and the cases of each."""
    fewest, most = ROWS
    rows = min(max(triton.next_power_of_2(triton.cdiv(cases, PROGRAMS)), fewest), most)
    return (triton.cdiv(cases, rows),), rows


def empty(like: Tensor, channels: int, side: int) -> Tensor:
    shape = (len(like), channels, side, side)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def convolve(
    x: Tensor,
    before: Layer | None,
    kernel: Tensor,
    norm: nn.BatchNorm2d,
    stride: int,
    padding: int,
    room: Iterator[Tensor],
) -> Layer:
    """The next layer. Its input is x or, where the layer before is given, that one's output, which is still to be made
    of x. room: for sums, zeros."""
    z_channels, channels, size, _ = kernel.shape
    side = x.shape[2]
    z = empty(x, z_channels, (side + 2 * padding - size) // stride + 1)
    seen, sums, grad_sums = x if before is None else torch.empty_like(x), next(room), next(room)
    old = norm if before is None else before.norm
    grid, rows = cut(cases_of(z))
    _convolution_kernel[grid](
        x, sums if before is None else before.sums, old.weight, old.bias, old.running_mean, old.running_var, kernel,
        seen, z, sums, cases_of(z), side, z.shape[2], channels, z_channels, size, stride, padding, before is not None,
        old.momentum, old.eps, rows, num_warps=WARPS,
    )  # fmt: skip
    return Layer(norm, kernel, stride, padding, seen, z, sums, grad_sums)


def finish(layer: Layer, skip: Tensor) -> Tensor:
    """A residual block's output."""
    out, norm, cases = torch.empty_like(layer.z), layer.norm, cases_of(layer.z)
    grid, rows = cut(cases)
    _finish_kernel[grid](
        layer.z, skip, layer.sums, norm.weight, norm.bias, norm.running_mean, norm.running_var, out, cases,
        layer.z.shape[1], norm.momentum, norm.eps, rows,
    )  # fmt: skip
    return out


def leave(grad: Tensor, out: Tensor, layer: Layer) -> Tensor:
    """The gradient of a layer's output, kept behind its ReLU."""
    grad_out, cases = torch.empty_like(out), cases_of(out)
    grid, rows = cut(cases)
    _leave_kernel[grid](
        grad, out, layer.z, layer.sums, grad_out, layer.grad_sums, cases, out.shape[1], layer.norm.eps, rows
    )
    return grad_out


def way_back(layer: Layer, grad: Tensor) -> Tensor:
    """The gradient of z from that of its normalisation."""
    grad_z, cases = torch.empty_like(layer.z), cases_of(layer.z)
    grid, rows = cut(cases)
    _way_back_kernel[grid](
        grad, layer.z, layer.sums, layer.grad_sums, layer.norm.weight, grad_z, cases, grad.shape[1], layer.norm.eps,
        rows,
    )  # fmt: skip
    return grad_z


def convolve_backward(layer: Layer, grad: Tensor, grad_z: Tensor, before: Layer, around: Tensor | None) -> Tensor:
    """The gradient of the output of the layer before, kept behind its ReLU.

    grad: of this layer's normalisation. grad_z is there already if the layer is strided, else it is made on the way.
    around: a gradient to be added.
    """
    z_channels, channels, size, _ = layer.kernel.shape
    grad_x, cases, strided = torch.empty_like(layer.x), cases_of(layer.x), layer.stride > 1
    grid, rows = cut(cases)
    _convolution_backward_kernel[grid](
        grad_z if strided else grad, layer.z, layer.sums, layer.grad_sums, layer.norm.weight, layer.kernel, grad_z,
        grad if around is None else around, layer.x, before.z, before.sums, grad_x, before.grad_sums, cases,
        layer.x.shape[2], layer.z.shape[2], channels, z_channels, size, layer.stride, layer.padding, not strided,
        around is not None, layer.norm.eps, rows, num_warps=WARPS,
    )  # fmt: skip
    return grad_x


def kernel_gradient(layer: Layer, grad_z: Tensor) -> Tensor:
    both, stride, padding = (layer.x, layer.kernel), [layer.stride] * 2, [layer.padding] * 2
    wanted = [False, True, False]
    grads = torch.ops.aten.convolution_backward(grad_z, *both, None, stride, padding, [1, 1], False, [0, 0], 1, wanted)
    return grads[1]  # type: ignore[no-any-return]
