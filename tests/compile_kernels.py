"""Compile every kernel of an update and of a plan of the paper's network for real GPUs, on a machine without one.

Not a test by itself: test_fused.py runs it in a process of its own, as Triton's interpreter must be off, with an
architecture and the shared memory it has. Kernels are compiled where they would be launched, so sizes and types are
those of a run; what they would have computed is garbage.
"""

import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from presage import fused_prediction
from presage.batches import Batch, Stacks
from presage.config import ModelConfig, TrainConfig
from presage.fused import Learner
from presage.fused_layers import blocks
from presage.model import Model
from presage.training import make_optimizer

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.bool: "*i1", torch.int64: "*i64",
}  # fmt: skip
compiled: dict[tuple[str, str], int] = {}  # (kernel, everything it depends on) -> shared memory in bytes


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def check_waits(name: str, code: str) -> None:
    """A product that runs on by itself and reads registers must be waited for before a loop fills them anew. Triton 3.6
    forgets that where it splits a product in two: the second is still under way at the end of the loop."""
    for product, operands in re.findall(r"(%\S+) = ttng.warp_group_dot (.*isAsync = true.*)", code):
        waited = re.search(rf"warp_group_dot_wait {product}\b.*pendings = (\d+)", code)
        if "dot_op" in operands and waited and waited.group(1) != "0":
            raise SystemExit(f"{name} may overwrite registers that {product} still reads")


def compile_instead(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **options: int) -> None:
    constants = {p.num: value for p, value in zip(kernel.params, arguments, strict=True) if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.num in constants else type_of(value)
        for p, value in zip(kernel.params, arguments, strict=True)
    }
    key = (kernel.__name__, str((signature, constants, options)))
    if key not in compiled:
        aligned = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if p.num not in constants}
        source = ASTSource(kernel, signature, {(number,): value for number, value in constants.items()}, aligned)
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        made = triton.compile(source, target=target, options=options)
        check_waits(kernel.__name__, made.asm["ttgir"])
        compiled[key] = made.metadata.shared


JITFunction.run = compile_instead
fused_prediction.shared_memory = lambda device: int(sys.argv[2])
frames, controls = torch.zeros(100, 4, 84, 84, dtype=torch.uint8), torch.zeros(100, 25, 3)
batch = Batch(frames, controls, *torch.zeros(3, 100, 25, dtype=torch.bool))
for motion in (False, True):
    model = Model(ModelConfig(motion=motion)).train()
    Learner(model, make_optimizer(model, TrainConfig()), 1.0).update(batch)
    rows = torch.zeros(3, 100, dtype=torch.int64)
    blocks(
        Stacks(frames.flatten(0, 1), rows[0], torch.zeros(400, dtype=torch.uint8), *rows[1:]),
        torch.bfloat16,
        4.0 * motion,
    )
weights = fused_prediction.Weights(*model.prediction.parameters(), *model.valuation.parameters())
with torch.no_grad():
    for monotone in (False, True):
        fused_prediction.last_logits(
            torch.zeros(48, 100), torch.zeros(48, 200, 25, 3), weights, True, monotone, torch.bfloat16
        )
for (name, _), shared in compiled.items():
    print(name, shared)
