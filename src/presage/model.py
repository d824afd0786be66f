"""The network: Perception -> Prediction -> Valuation (S4–S9). It is never told which game it sees."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from presage.config import ModelConfig
from presage.events import Outlook
from presage.tasks import FRAME, STACK

CONTROL = 3  # numbers in a control
OUTCOMES = 2  # died, scored
LOW = torch.bfloat16  # of matrix products, where that is wanted; states, statistics, sums and parameters stay float32
ASLEEP = 1e-3  # of its layer's largest: a unit with weights of less is lost
MOTION = 4.0  # by how much changes are enlarged: a ball is a pixel or two


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Perception(nn.Module):
    """Four frames -> h0. Three stages, each a strided layer and a residual block, all with batch norm and ReLU (S4)."""

    def __init__(self, channels: tuple[int, int, int], state_size: int, motion: bool = False):
        super().__init__()
        self.motion = motion
        stages: list[nn.Module] = []
        before, side = STACK, FRAME
        for after, (kernel, stride) in zip(channels, ((8, 4), (4, 2), (3, 2)), strict=True):
            stages += [nn.Conv2d(before, after, kernel, stride, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            stages += [ResidualBlock(after)]
            before, side = after, (side - kernel) // stride + 1  # 84 -> 20 -> 9 -> 4
        # Channels last: on a CPU the first layer alone is three times as fast so.
        self.stages = nn.Sequential(*stages)
        self.stages.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Linear(before * side * side, state_size)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.to(torch.float32, memory_format=torch.channels_last) / 255  # [B, 4, 84, 84]
        if self.motion:
            x = torch.cat([MOTION * x.diff(dim=1), x[:, -1:]], 1).contiguous(memory_format=torch.channels_last)
        return self.out(self.stages(x).flatten(1)).float()  # type: ignore[no-any-return]  # [B, S]: float32, too, where layers are in LOW


class RRNN(nn.Module):
    """r = f(LN(h)·x), h' = h + r (S5, S8). Ablations: with residual=False h' = f(LN(h)·x), with normal=False no LN."""

    def __init__(self, state_size: int, hidden_size: int, residual: bool, normal: bool = True):
        super().__init__()
        self.residual, self.normal = residual, normal
        self.f1 = nn.Linear(state_size + CONTROL, hidden_size)
        self.f2 = nn.Linear(hidden_size, state_size)

    def forward(self, h: Tensor, controls: Tensor) -> Tensor:
        """h: [B, S], controls: [B, H, 3] -> the states after each step [B, H, S]."""
        from_h, from_x = self.f1.weight[:, :-CONTROL], self.f1.weight[:, -CONTROL:]
        pushes = F.linear(controls, from_x, self.f1.bias)  # [B, H, hidden]: what the controls do, for all steps at once
        states = []
        for push in pushes.unbind(1):
            h = self.step(h, push, from_h)
            states.append(h)
        return torch.stack(states, 1)

    def walk(self, h: Tensor, controls: Tensor) -> Iterator[Tensor]:
        """The same states [B, S] one after the other: planning has thousands of rows, too many for all to be kept."""
        from_h, from_x = self.f1.weight[:, :-CONTROL], self.f1.weight[:, -CONTROL:]
        for x in controls.unbind(1):
            h = self.step(h, F.linear(x, from_x, self.f1.bias), from_h)
            yield h

    def step(self, h: Tensor, push: Tensor, from_h: Tensor) -> Tensor:
        seen = layer_norm(h) if self.normal else h
        # ReLU comes before each linear layer, so that r may be negative; the control does not go through it.
        inner = torch.addmm(push, F.relu(seen), from_h.T)  # f1 of the concatenation, in two halves
        r: Tensor = self.f2(F.relu(inner))
        return h + r if self.residual else r


class LSTM(nn.Module):
    """An LSTM of as many parameters as the RRNN, with linear maps from h0 to its cell and from its output to h (S8)."""

    def __init__(self, state_size: int, hidden_size: int):
        super().__init__()
        cells = self.equal_cells(state_size, hidden_size)
        self.enter = nn.Linear(state_size, cells)
        self.cell = nn.LSTM(CONTROL, cells, batch_first=True)
        self.leave = nn.Linear(cells, state_size)

    @staticmethod
    def equal_cells(state_size: int, hidden_size: int) -> int:
        """n cells have 4n² + (2S + 21)n + S parameters, enter and leave included; solved for the RRNN's number."""
        rrnn = (state_size + CONTROL + 1) * hidden_size + (hidden_size + 1) * state_size
        b = 2 * state_size + 1 + 4 * (CONTROL + 2)
        return max(1, round((math.sqrt(b * b + 16 * (rrnn - state_size)) - b) / 8))

    def forward(self, h: Tensor, controls: Tensor) -> Tensor:
        cell = self.enter(h)[None]
        out, _ = self.cell(controls, (torch.tanh(cell), cell))
        return self.leave(out)  # type: ignore[no-any-return]

    def walk(self, h: Tensor, controls: Tensor) -> Iterator[Tensor]:
        yield from self(h, controls).unbind(1)


class Valuation(nn.Module):
    """A state -> logits of P(died), P(scored) (S7)."""

    def __init__(self, state_size: int):
        super().__init__()
        self.inner = nn.Linear(state_size, state_size)
        self.out = nn.Linear(state_size, OUTCOMES)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(F.relu(self.inner(layer_norm(h)))).float()  # type: ignore[no-any-return]  # [..., 2]


def layer_norm(h: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1, nothing learned: so no component exceeds √n (S6)."""
    return F.layer_norm(h, h.shape[-1:])


class Model(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.perception = Perception(config.channels, config.state_size, config.motion)
        self.prediction: RRNN | LSTM
        if config.prediction == "lstm":
            self.prediction = LSTM(config.state_size, config.hidden_size)
        else:
            residual = config.prediction == "rrnn"
            self.prediction = RRNN(config.state_size, config.hidden_size, residual, config.layer_norm)
        self.valuation = Valuation(config.state_size)

    def forward(self, frames: Tensor, controls: Tensor) -> Tensor:
        """frames [B, 4, 84, 84], controls [B, H, 3] -> logits [B, H, 2] after each step."""
        return self.valuation(self.prediction(self.perception(frames), controls))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def perceive(self, frames: Tensor) -> Tensor:
        return self.perception(frames)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def imagine(self, h: Tensor, controls: Tensor, monotone: bool = False) -> Outlook:
        """h [N, S], controls [N, k, H, 3] -> P after the last step [N, k]; monotone: see PlanConfig."""
        n, k = controls.shape[:2]
        highest = torch.full((), -torch.inf, device=h.device)  # of P(died) so far, as a logit
        for state in self.prediction.walk(h.repeat_interleave(k, 0), controls.flatten(0, 1)):  # [N * k, S]
            if monotone:
                highest = torch.maximum(highest, self.valuation(state)[:, 0])
        died, scored = self.valuation(state).view(n, k, OUTCOMES).unbind(-1)
        return outlook(torch.stack([torch.maximum(died, highest.expand(n * k).view(n, k)), scored], -1))

    @torch.inference_mode()
    def imagine_steps(self, h: Tensor, controls: Tensor, monotone: bool = False) -> Outlook:
        """As imagine, but P after every step [N, k, H]: what a person looks at."""
        n, k, horizon = controls.shape[:3]
        states = self.prediction(h.repeat_interleave(k, 0), controls.flatten(0, 1))  # [N * k, H, S]
        died, scored = outlook(self.valuation(states).view(n, k, horizon, OUTCOMES))
        return Outlook(died.cummax(-1).values if monotone else died, scored)

    def parts(self) -> dict[str, nn.Module]:
        return {"perception": self.perception, "prediction": self.prediction, "valuation": self.valuation}

    def parameters_by_part(self) -> dict[str, int]:
        return {name: sum(p.numel() for p in part.parameters()) for name, part in self.parts().items()}

    def asleep(self) -> dict[str, tuple[int, int]]:
        """Of each part's units those that have lost all their weights, and how many there are: weight decay does it."""
        return {name: asleep(part) for name, part in self.parts().items()}


def asleep(part: nn.Module) -> tuple[int, int]:
    """Units whose weights are next to nothing beside their layer's largest; and all."""
    sizes = [weight.detach().flatten(1).norm(dim=1) for weight in part.parameters() if weight.dim() > 1]
    return sum(int((size < ASLEEP * size.max()).sum()) for size in sizes), sum(map(len, sizes))


def outlook(logits: Tensor) -> Outlook:
    return Outlook(*logits.sigmoid().unbind(-1))


def loss(logits: Tensor, died: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
    """Mean binary cross-entropy over both outcomes and all unmasked steps (S21)."""
    each, weight = _cross_entropies(logits, died, scored, mask)
    return (each * weight).sum() / (weight.sum() * OUTCOMES)


def case_losses(logits: Tensor, died: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
    """The same of each case by itself [B]; its first step is never masked."""
    each, weight = _cross_entropies(logits, died, scored, mask)
    return (each * weight).sum((1, 2)) / (weight.sum((1, 2)) * OUTCOMES)


def _cross_entropies(logits: Tensor, died: Tensor, scored: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of each case, step and outcome [B, H, 2]; and which count [B, H, 1]."""
    wanted = torch.stack([died, scored], -1).float()
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none"), mask[..., None].float()
