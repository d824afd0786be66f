"""The fused kernels against plain PyTorch: values and gradients.

Without a GPU they run in Triton's interpreter (conftest.py): the same code, operation by operation. Its bfloat16
products are wrong in Triton 3.6 (it multiplies the bit patterns), so there float16 stands for the low precision. On a
GPU float32 products are made exact on both sides, which otherwise keep 10 bits (TF32).
"""

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from conftest import TINY
from presage import fused_adam, fused_layers, fused_perception, fused_prediction
from presage.agent import Agent
from presage.batches import Batch, Stacks, assemble
from presage.config import ModelConfig, Planning, TrainConfig, with_fields
from presage.events import Targets
from presage.fused import Learner, fits, imagine, shape_fits
from presage.fused_layers import block_weights, blocks, unblocked
from presage.fused_perception import matrices
from presage.fused_prediction import Weights, last_logits, prepare
from presage.games import find
from presage.graphs import Branch, Captured
from presage.model import Model, Perception, loss
from presage.store import Budget, Store, shard_path
from presage.training import make_optimizer, set_rate, take_statistics, update_once

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# Relative errors ‖fused - plain‖ / ‖plain‖ that are allowed: float32 sums in another order; products of 11 or 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Gradients through layers that carry little of what comes in: errors grow on the way.
TOLERANCE_DEEP = {torch.float32: 1e-4, torch.float16: 0.2, torch.bfloat16: 0.3}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs a kernel's programs one after the other: few and large ones, but always several."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(fused_layers, "PROGRAMS", 3)
        monkeypatch.setattr(fused_layers, "ROWS", (16, 1024))


@pytest.fixture(autouse=True)
def exact_products():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products are exact unless told otherwise
        yield


def far(fused, plain) -> float:
    return float((fused.detach() - plain.detach()).norm() / plain.detach().norm())


def all_weights(model: Model) -> torch.Tensor:
    """As one vector: a GPU adds up in no fixed order, and Adam makes a whole step of a gradient that is nothing but
    that, so single weights may differ."""
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def weights_of(model: Model) -> Weights:
    return Weights(*model.prediction.parameters(), *model.valuation.parameters())


def a_batch(size: int, horizon: int) -> Batch:
    frames = torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    controls = torch.randint(-1, 2, (size, horizon, 3), device=DEVICE).float()
    return Batch(frames, controls, *(torch.rand(size, horizon, device=DEVICE) < p for p in (0.3, 0.3, 0.8)))


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(
    ("kind", "size", "hidden", "batch", "horizon"),
    [("rrnn", 12, 20, 5, 4), ("plain", 12, 20, 5, 4), ("rrnn", 16, 31, 33, 2), ("rrnn", 100, 500, 18, 3)],
)
def test_the_recurrence_valuation_and_loss(kind, size, hidden, batch, horizon, dtype):
    """The loss and the gradient of everything it depends on; sizes that fill a power of two, and rows past a block."""
    if DEVICE.type == "cuda" and dtype == torch.float32 and hidden == 500:
        pytest.skip("no GPU has the shared memory for the paper's network in float32")
    torch.manual_seed(0)
    model = Model(ModelConfig(kind, (4, 4, 4), size, hidden)).to(DEVICE)
    _, controls, *flags = a_batch(batch, horizon)
    h0, weights = torch.randn(batch, size, device=DEVICE, requires_grad=True), weights_of(model)
    plain = loss(model.valuation(model.prediction(h0, controls)), *flags)
    with torch.no_grad():
        fused, *of_h0, of_weights = fused_prediction.loss_and_gradients(
            h0,
            controls,
            targets := Targets(*flags),
            weights,
            prepare(weights, targets, dtype),
            kind == "rrnn",
            branch := Branch(DEVICE),
        )
        branch.join()
    assert far(fused, plain) < TOLERANCE[dtype] / 10
    wanted = torch.autograd.grad(plain, [h0, *weights])
    worst = {n: far(a, b) for n, a, b in zip(("h0", *Weights._fields), of_h0 + of_weights, wanted, strict=True)}
    assert max(worst.values()) < (TOLERANCE if kind == "rrnn" else TOLERANCE_DEEP)[dtype], worst


@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("kind", ["rrnn", "plain"])
def test_what_planning_looks_at(kind, dtype, monotone):
    torch.manual_seed(1)
    model = Model(ModelConfig(kind, (4, 4, 4), 12, 20)).to(DEVICE)
    h = torch.randn(3, 12, device=DEVICE)
    controls = torch.randint(-1, 2, (3, 50, 6, 3), device=DEVICE).float()  # more sequences than a block has rows
    plain = model.imagine(h, controls, monotone)
    with torch.no_grad():
        logits = last_logits(h, controls, weights_of(model), kind == "rrnn", monotone, dtype)
    for fused, wanted in zip(logits.sigmoid().unbind(-1), plain, strict=True):
        assert far(fused, wanted) < TOLERANCE[dtype]
    assert monotone == (plain.died > model.imagine(h, controls).died).any()


def test_the_first_layer_on_blocks_is_the_same_convolution():
    torch.manual_seed(2)
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    weight = torch.randn(16, 4, 8, 8, device=DEVICE)
    plain = torch.nn.functional.conv2d(frames / 255, weight, stride=4)
    newest, ages = torch.tensor([3, 7], device=DEVICE), torch.full((8,), 3, dtype=torch.uint8, device=DEVICE)
    seen = blocks(Stacks(frames.flatten(0, 1), newest, ages), torch.float32)
    fused = torch.nn.functional.conv2d(seen, block_weights(weight))
    assert far(fused, plain) < 2e-5
    assert torch.equal(unblocked(block_weights(weight)), weight)
    ages[7] = 1  # of a young episode: its first frame stands for those before it
    old = Stacks(frames.flatten(0, 1)[[0, 1, 2, 3, 6, 6, 6, 7]], newest, torch.full_like(ages, 3))
    assert torch.equal(blocks(Stacks(frames.flatten(0, 1), newest, ages), torch.float32), blocks(old, torch.float32))


@pytest.mark.parametrize(("dtype", "motion"), [(torch.float32, False), (LOW, False), (torch.float32, True)])
def test_perception(dtype, motion):
    """Its output, the gradient of every parameter, and the running statistics that it leaves behind.

    A unit whose input is within rounding of 0 may be on in one and off in the other, which shows in the gradients of
    all before it by a hundredth. So on a GPU, which adds up in another order each time, only the best of a few batches
    is held to rounding itself.
    """
    errors = [perception_error(dtype, motion, seed) for seed in ((3, 4, 5, 6) if DEVICE.type == "cuda" else (3,))]
    assert min(errors) < TOLERANCE_DEEP[dtype], errors
    assert max(errors) < max(TOLERANCE_DEEP[dtype], 0.1), errors


def perception_error(dtype, motion, seed) -> float:
    """The gradients' largest. Low precision is held to its output and to gradients of matrices: in so small a batch
    the normalisations' own gradients are sums that nearly cancel."""
    torch.manual_seed(seed)
    plain = Perception((16, 16, 32), 12, motion).to(DEVICE).train()
    fused = copy.deepcopy(plain)
    frames, wanted = a_batch(6, 1).frames, torch.randn(6, 12, device=DEVICE)
    newest, ages = torch.arange(3, 24, 4, device=DEVICE), torch.full((24,), 3, dtype=torch.uint8, device=DEVICE)
    b = plain(frames)
    (b * wanted).sum().backward()
    with torch.no_grad():
        low, branch = [p.to(dtype) for p in matrices(fused)], Branch(DEVICE)
        seen = fused_perception.forward(fused, Stacks(frames.flatten(0, 1), newest, ages), low, branch)
        grads = fused_perception.backward(seen, wanted, [branch, other := Branch(DEVICE)])
        branch.join()
        other.join()
    assert far(seen.h0, b) < TOLERANCE[dtype]
    for (name, left), mine in zip(plain.named_buffers(), fused.buffers(), strict=True):
        if "running" in name:
            torch.testing.assert_close(mine, left, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    pairs = zip(plain.parameters(), grads, strict=True)
    return max(far(g, p.grad) for p, g in pairs if dtype == torch.float32 or p.dim() > 1)


def test_whole_updates_with_clamp_weight_decay_and_adam():
    """Three updates of both, a learning rate that changes; then the optimisers' states, as a checkpoint has them."""
    torch.manual_seed(4)
    plain = Model(ModelConfig(channels=(16, 16, 16), state_size=12, hidden_size=20)).to(DEVICE).train()
    fused, clamp = copy.deepcopy(plain), 0.02
    optimizers = [make_optimizer(model, TrainConfig(weight_decay=0.1)) for model in (plain, fused)]
    learner = Learner(fused, optimizers[1], clamp, torch.float32)
    for rate in (1e-2, 1e-2, 3e-3):
        batch = a_batch(4, 3)
        for optimizer in optimizers:
            set_rate(optimizer, rate)
        a, b = learner.update(batch), update_once(plain, optimizers[0], batch, clamp)
        assert far(a, b) < 1e-4
    for (name, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=2e-3, atol=2e-4, msg=name)
    for p, low in learner.low.items():
        assert torch.equal(p.detach(), low)  # the copies follow
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for i in states[0]:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(states[1][i][key], states[0][i][key], rtol=2e-2, atol=1e-4)
            assert states[1][i][key].stride() == states[0][i][key].stride()


@pytest.mark.parametrize("motion", [False, True])
@pytest.mark.parametrize("moves", [(), ((3, 0, -4, 1), (0, -5, 2, 84))])
def test_an_update_from_a_store_reads_what_a_batch_holds(tiny_run, motion, moves):
    """Frames taken from where they lie, controls and targets made on the way: the same loss and weights."""
    tasks = find(TINY["games"])
    store = Store(tasks, Budget(1024, "gpu" if DEVICE.type == "cuda" else "memory", {}), DEVICE)
    for index, task in enumerate(tasks):
        store.add(shard_path(tiny_run.path, 1, 1, task.name), 1, index, heldout=False)
    torch.manual_seed(5)
    rows = torch.randint(0, store.size, (4,), device=DEVICE)
    config = ModelConfig(channels=(16, 16, 16), state_size=12, hidden_size=20, motion=motion)
    one = Model(config).to(DEVICE).train()
    models, losses = (one, copy.deepcopy(one)), []
    for model, from_store in zip(models, (True, False), strict=True):
        optimizer = make_optimizer(model, TrainConfig())
        set_rate(optimizer, 1e-2)
        learner = Learner(model, optimizer, 1.0, torch.float32)
        by = [torch.tensor(move, device=DEVICE) for move in moves]
        batch = assemble(store, rows, 3, by)
        losses.append(learner.update_from(store, rows, 3, by) if from_store else learner.update(batch))
    torch.testing.assert_close(*losses)
    assert far(*map(all_weights, models)) < 1e-3  # an update moves a weight by a hundredth; see `all_weights`


def test_the_kernels_are_used_only_where_they_fit():
    assert fits(Model(ModelConfig()), DEVICE) == (DEVICE.type == "cuda")
    assert shape_fits(Model(ModelConfig()))
    assert shape_fits(Model(ModelConfig(prediction="plain")))
    assert not shape_fits(Model(ModelConfig(prediction="lstm")))
    assert not shape_fits(Model(ModelConfig(layer_norm=False)))
    assert not shape_fits(Model(ModelConfig(channels=(32, 48, 64))))
    assert not shape_fits(Model(ModelConfig(channels=(32, 64, 128))))
    assert not shape_fits(Model(ModelConfig(state_size=125)))


@pytest.mark.parametrize(("architecture", "shared"), [("86", 99 * 1024), ("90", 227 * 1024)])
def test_every_kernel_compiles_for_real_gpus(architecture, shared):
    """For GeForce cards of 2020 and for the H100, with no more shared memory than they have: the interpreter lets pass
    what a compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, Path(__file__).parent / "compile_kernels.py", architecture, str(shared)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    used = [line.split() for line in done.stdout.splitlines()]
    ours = (fused_adam, fused_layers, fused_prediction)
    assert {name for name, _ in used} == {n for module in ours for n in vars(module) if n.endswith("_kernel")}
    assert max(int(size) for _, size in used) <= shared


on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")


@on_gpu
def test_captured_updates_are_those_done_directly():
    """Six updates, of which the last three are replays; rows and rate change between them."""
    torch.manual_seed(6)
    one = Model(ModelConfig(channels=(16, 16, 16), state_size=12, hidden_size=20)).to(DEVICE).train()
    models = (one, copy.deepcopy(one))
    optimizers = [make_optimizer(model, TrainConfig()) for model in models]
    direct, captured = (Learner(m, o, 1.0, torch.float32) for m, o in zip(models, optimizers, strict=True))
    replay = Captured(lambda *parts: captured.update(Batch(*parts)), captured.adam.settle)
    for number in range(6):
        batch = a_batch(8, 3)
        for optimizer in optimizers:
            set_rate(optimizer, 1e-3 * (number + 1))
        torch.testing.assert_close(replay(*batch), direct.update(batch), rtol=1e-3, atol=1e-4)
    assert far(*map(all_weights, models)) < 1e-2


@on_gpu
@pytest.mark.parametrize("hold", [1.0, 4.0])
def test_captured_plans_are_those_made_directly(tiny_run, hold):
    """The same seed, frames and episode starts: the same actions, with numbers drawn inside the graph."""
    model = Model(ModelConfig(channels=(16, 16, 16), state_size=12, hidden_size=20))
    config = with_fields(tiny_run.config, hold=hold)
    agent = Agent(model, list(tiny_run.agent().specs.values()), config, 1, DEVICE)
    specs = [spec for spec in agent.specs.values() for _ in range(3)]
    captured, direct = agent.chooser(specs, 9), agent.planner(specs, 9)
    random = np.random.default_rng(0)
    for _ in range(8):
        frames, fresh = random.integers(0, 256, (6, 84, 84), dtype=np.uint8), random.random(6) < 0.3
        assert captured(frames, fresh).tolist() == direct(frames, fresh).tolist()
    again, anew = agent.chooser(specs, 10), agent.planner(specs, 10)  # another play with what was captured
    for number in range(4):
        frames, fresh = random.integers(0, 256, (6, 84, 84), dtype=np.uint8), np.full(6, number == 0)
        assert again(frames, fresh).tolist() == anew(frames, fresh).tolist()
    assert len(agent.captured) == 1
    assert not agent.playing(Planning(k=3)).captured


@on_gpu
def test_statistics_taken_anew_lie_where_captured_updates_keep_theirs():
    """A graph knows addresses and how much a batch counts; both must be as before. At rate 0, always the same batch."""
    torch.manual_seed(8)
    model = Model(ModelConfig(channels=(16, 16, 16), state_size=12, hidden_size=20)).to(DEVICE).train()
    optimizer = make_optimizer(model, TrainConfig())
    set_rate(optimizer, 0.0)
    learner, batch = Learner(model, optimizer, 1.0, LOW), a_batch(8, 3)
    update = Captured(lambda *parts: learner.update(Batch(*parts)), learner.adam.settle)
    for _ in range(5):
        update(*batch)
    store = SimpleNamespace(device=DEVICE, home=DEVICE, stacks=lambda rows: batch.frames)
    sampler = SimpleNamespace(rows=lambda update, size: np.arange(size))
    updater = SimpleNamespace(store=store, size=8, precision=lambda: torch.autocast(DEVICE.type, LOW))
    take_statistics(model, updater, sampler, range(3))
    mean = model.perception.stages[1].running_mean
    taken = mean.clone()
    mean.zero_()
    update(*batch)
    assert far(mean, 0.1 * taken) < TOLERANCE[LOW]


@on_gpu
def test_updates_stay_right_while_another_thread_plans():
    """The same update again and again, at rate 0: its gradients may differ by the order of sums and no more."""
    torch.manual_seed(7)
    model, planning = (Model(ModelConfig()).to(DEVICE) for _ in range(2))
    optimizer = make_optimizer(model.train(), TrainConfig())
    set_rate(optimizer, 0.0)
    learner = Learner(model, optimizer, 1.0)
    batch, done = a_batch(100, 25), threading.Event()
    update = Captured(lambda *parts: learner.update(Batch(*parts)), learner.adam.settle)
    for _ in range(5):
        update(*batch)
    usual = [grad.float().clone() for grad in learner.adam.grads]

    def plan() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            h, controls = torch.randn(60, 100, device=DEVICE), torch.ones(60, 200, 25, 3, device=DEVICE)
            act = Captured(lambda *given: imagine(planning, *given).died)
            while not done.is_set():
                act(h, controls).cpu()

    with ThreadPoolExecutor(1) as thread:
        planned = thread.submit(plan)
        worst = torch.zeros((), device=DEVICE)
        for _ in range(2000):
            update(*batch)
            errors = [(g.float() - u).norm() / u.norm() for g, u in zip(learner.adam.grads, usual, strict=True)]
            worst = torch.maximum(worst, torch.stack(errors).nan_to_num(torch.inf).max())
        done.set()
        planned.result()
    assert worst < 0.5  # 0.25 alone: the gradients of normalisations nearly cancel out
