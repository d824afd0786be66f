"""What the network is asked and what it answers: 25-step targets from single events (S1, S10, S12). Pure functions."""

from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """For each case and each step ahead, [B, H] each."""

    died: Tensor  # bool: a life was lost by then
    scored: Tensor  # bool: no life was lost by then, and a point was earned
    mask: Tensor  # bool: this step belongs to the same episode, so there is something to learn


class Outlook(NamedTuple):
    """The answer: probabilities for each imagined sequence, [N, k] after the last step or [N, k, H] after each."""

    died: Tensor
    scored: Tensor


def targets(died: Tensor, scored: Tensor, last: Tensor) -> Targets:
    """From what happened at each of the H steps, bool [B, H]; `last`: an episode or a recording ends with this step."""
    died_by = died.int().cumsum(1) > 0
    scored_by = (scored.int().cumsum(1) > 0) & ~died_by
    ends_before = last.int().cumsum(1) - last.int()  # ends strictly before this step
    return Targets(died_by, scored_by, ends_before == 0)


def stack_ages(ended: Tensor, limit: int) -> Tensor:
    """How many frames before each step belong to its episode, at most `limit`; ended: bool [T], one recording."""
    t = torch.arange(len(ended))
    starts = torch.cat([torch.tensor([0]), t[:-1][ended[:-1]] + 1])  # first steps of the episodes
    start_of = starts[torch.searchsorted(starts, t, right=True) - 1]
    return (t - start_of).clamp(max=limit)
