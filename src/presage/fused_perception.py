"""Perception forward and back, without autograd: what depends on nothing else is done beside the rest."""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from presage.batches import Stacks
from presage.fused_layers import (
    Layer,
    block_weights,
    blocks,
    convolve,
    convolve_backward,
    finish,
    kernel_gradient,
    leave,
    unblocked,
    way_back,
)  # fmt: skip
from presage.fused_prediction import product
from presage.graphs import Branch
from presage.model import MOTION, Perception


class Seen(NamedTuple):
    """Perception's way forward, kept for its way back."""

    layers: list[Layer]
    last: Tensor  # [B, C, 4, 4]: the last block's output
    out_weight: Tensor  # low precision [S, 4·4·C]
    h0: Tensor  # float32 [B, S]


def forward(perception: Perception, stacks: Stacks, low: list[Tensor], branch: Branch) -> Seen:
    """Stacks -> h0, while training.

    low: the matrices in low precision, in the order of `matrices`.
    """
    norms = [layer for layer in perception.modules() if isinstance(layer, nn.BatchNorm2d)]
    *kernels, out_weight = low
    with branch.beside():
        sizes = [2 * norm.num_features for norm in norms for _ in ("sums", "grad_sums")]
        room = (part.view(2, -1) for part in torch.split(torch.zeros(sum(sizes), device=out_weight.device), sizes))
        kernels[0] = block_weights(kernels[0]).contiguous(memory_format=torch.channels_last)
        out_weight = pixels_first(out_weight, norms[-1].num_features)
    x = blocks(stacks, out_weight.dtype, MOTION * perception.motion)
    branch.join()
    layers: list[Layer] = []
    for stage in range(0, len(kernels), 3):  # a strided layer, then a residual block of two
        layers.append(convolve(x, None, kernels[stage], norms[stage], 1 if stage == 0 else 2, 0, room))
        for number in (stage + 1, stage + 2):
            layers.append(convolve(layers[-1].z, layers[-1], kernels[number], norms[number], 1, 1, room))
        x = finish(layers[-1], skip=layers[-2].x)
    h0 = product(by_pixels(x), out_weight.T) + perception.out.bias
    return Seen(layers, x, out_weight, h0)


def backward(seen: Seen, grad_h0: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
    """The gradients of Perception's parameters, in their order; those of matrices on the branches in turn,
    convolutions' in low precision."""
    low, layers, turns = grad_h0.to(seen.out_weight.dtype), seen.layers, cycle(branches)
    with next(turns).beside(low, seen):
        of_out = [channels_first(product(low.T, by_pixels(seen.last)), seen.last.shape[1]), grad_h0.sum(0)]
    grads: list[Tensor] = []
    grad = around = leave(low @ seen.out_weight, seen.last, layers[-1])
    for number in range(len(layers) - 1, -1, -1):
        layer, place = layers[number], number % 3  # in its stage: the strided one, the block's first, its second
        around = grad if place == 2 else around  # of the block's output, and so of what went around it
        grad_z = way_back(layer, grad) if place == 0 else torch.empty_like(layer.z)
        if number:
            grad = convolve_backward(layer, grad, grad_z, layers[number - 1], around if place == 1 else None)
        with next(turns).beside(grad_z, seen):
            kernel = kernel_gradient(layer, grad_z)
            kernel = (unblocked(kernel) if number == 0 else kernel).contiguous(memory_format=torch.channels_last)
        of_beta, of_gamma = layer.grad_sums
        grads = [kernel, of_gamma, of_beta, *grads]
    return [*grads, *of_out]


def by_pixels(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H·W·C], as it lies in memory."""
    return x.permute(0, 2, 3, 1).flatten(1)


def pixels_first(weight: Tensor, channels: int) -> Tensor:
    """[S, C·H·W] -> [S, H·W·C]: a weight for `by_pixels`."""
    return weight.view(len(weight), channels, -1).transpose(1, 2).reshape(len(weight), -1)


def channels_first(weight: Tensor, channels: int) -> Tensor:
    """The inverse of pixels_first."""
    return weight.view(len(weight), -1, channels).transpose(1, 2).reshape(len(weight), -1)


def matrices(perception: Perception) -> list[Tensor]:
    """The parameters that are multiplied in low precision."""
    return [layer.weight for layer in perception.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
