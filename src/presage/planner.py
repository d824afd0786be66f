"""Playing by imagining: many control sequences, their outcomes, a choice, and why (S17–S20).

Knows neither networks nor games: it is given a function that tells what comes of control sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from presage.events import Outlook
from presage.pools import Array
from presage.tasks import FRAME, STACK

# (state [N, S], controls [N, k, H, 3]) -> P(died), P(scored), [N, k] each
Imagine = Callable[[Tensor, Tensor], Outlook]
Perceive = Callable[[Tensor], Tensor]  # frames uint8 [N, 4, 84, 84] -> state [N, S]


class Choice(NamedTuple):
    chosen: Tensor  # int64 [N]: which sequence
    safe: Tensor  # bool [N, k]: P(died) under the threshold


class Plan(NamedTuple):
    """What was considered for N games, and what was chosen."""

    actions: Tensor  # int64 [N, k, H]: the sequences; the first is the last plan carried on, where there was one
    outlook: Outlook  # [N, k] each, after the last step
    choice: Choice

    @property
    def best(self) -> Tensor:
        """The chosen sequences, int64 [N, H]."""
        return self.actions[torch.arange(len(self.actions), device=self.actions.device), self.choice.chosen]


def choose(outlook: Outlook, threshold: Tensor) -> Choice:
    """Among safe sequences the likeliest to score; where none is safe, the least likely to die (S18).

    Ties go to the lower index: a plan carried on beats a new one that promises no more. threshold: [N].
    """
    safe = outlook.died < threshold[:, None]
    best_safe = outlook.scored.masked_fill(~safe, -1.0).argmax(1)
    return Choice(torch.where(safe.any(1), best_safe, outlook.died.argmin(1)), safe)


class Planner:
    """Plans for N games at once, each with its own actions and threshold. It remembers their last frames and plans.

    Its tensors lie where the network's do, so that only frames go there and only actions come back.
    """

    def __init__(
        self,
        perceive: Perceive,
        imagine: Imagine,
        tables: Tensor,  # float32 [N, most actions, 3]: each row's controls
        action_counts: Tensor,  # int64 [N]
        thresholds: Tensor,  # float32 [N]
        k: int,
        horizon: int,
        generator: torch.Generator,
        carry: bool = True,
        hold: float = 1.0,
    ):
        self.perceive, self.imagine = perceive, imagine
        self.tables, self.action_counts, self.thresholds = tables, action_counts, thresholds
        self.k, self.horizon, self.generator, self.carry, self.hold = k, horizon, generator, carry, hold
        self.rows = torch.arange(len(tables), device=tables.device)
        self.stacks = torch.zeros(len(tables), STACK, FRAME, FRAME, dtype=torch.uint8, device=tables.device)
        self.carried = torch.zeros(len(tables), horizon, dtype=torch.int64, device=tables.device)

    def see(self, frames: Tensor, fresh: Tensor, rows: Tensor) -> Tensor:
        """Put the newest frames [n, 84, 84] on the stacks of these rows; the stacks [n, 4, 84, 84].

        A new episode's first frame fills the whole stack: frames of the one before are never shown (S2).
        """
        newest = frames[:, None]
        older = torch.where(fresh[:, None, None, None], newest, self.stacks[rows, 1:])
        stacks = torch.cat([older, newest], 1)
        self.stacks[rows] = stacks
        return stacks

    def candidates(self, rows: Tensor, fresh: Tensor) -> Tensor:
        """k sequences a row, uniformly random; the first is last step's best moved up by one, unless fresh (S17)."""
        counts = self.action_counts[rows][:, None, None]
        actions = (self.uniform(rows) * counts).long().clamp(max=counts - 1)  # u * n may round up to n
        if self.hold > 1:
            changes = self.uniform(rows) * self.hold < 1
            steps = torch.arange(self.horizon, device=rows.device)
            actions = actions.gather(2, torch.where(changes, steps, 0).cummax(2).values)  # as the last change left it
        if self.carry:
            moved_on = torch.cat([self.carried[rows, 1:], actions[:, 0, -1:]], 1)
            actions[:, 0] = torch.where(fresh[:, None], actions[:, 0], moved_on)
        return actions

    def uniform(self, rows: Tensor) -> Tensor:
        """A number from 0 to 1 for each step of each sequence."""
        return torch.rand(len(rows), self.k, self.horizon, generator=self.generator, device=rows.device)

    def plan(self, stacks: Tensor, fresh: Tensor, rows: Tensor) -> Plan:
        """stacks: uint8 [len(rows), 4, 84, 84]; fresh: bool, an episode starts here."""
        actions = self.candidates(rows, fresh)
        controls = self.tables[rows[:, None, None], actions]  # [N, k, H, 3]
        outlook = self.imagine(self.perceive(stacks), controls)
        plan = Plan(actions, outlook, choose(outlook, self.thresholds[rows]))
        self.carried[rows] = plan.best
        return plan

    def act(self, frames: Tensor, fresh: Tensor, rows: Tensor) -> Tensor:
        """The first actions of the chosen plans [n], from the newest frames [n, 84, 84]."""
        return self.plan(self.see(frames, fresh, rows), fresh, rows).best[:, 0]

    def __call__(self, frames: Array, fresh: Array, rows: Array | None = None) -> Array:
        """The same for arrays, of all rows unless told: an arena's Chooser."""
        device = self.rows.device
        index = self.rows if rows is None else torch.from_numpy(rows).to(device)
        actions = self.act(torch.from_numpy(frames).to(device), torch.from_numpy(fresh).to(device), index)
        return np.asarray(actions.cpu().numpy())
