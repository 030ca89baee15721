"""What products read in place of gathered codes is made by one launch for all weights of a gather, and gone with the codes."""

import functools
import gc
import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from tests.fsdp2 import models
from tests.fsdp2.models import Grouped
from tests.scaled_mm import emulated_grouped
from tests.workers import on_ranks
from zerocast import gemm
from zerocast.gemm import per_row
from zerocast.weight.gathered_operands import GatheredOperands

BLOCKS = 2
WIDTH = 64
EXACT = "nvfp4:exact_in_fp8"
# The calls of the extension that make operands of weights, not those of inputs, in a forward and a backward pass over a gather.
LAUNCHES = {"fp8_current": {"transpose": 1}, EXACT: {"upcast_together": 2}}


def built(fmt: str, *, compiled: bool, reshard: bool = True) -> Any:
    """A sharded model of blocks of two weights each."""
    torch._dynamo.reset()
    model: Any = models.Net((fmt,) * BLOCKS, WIDTH, 96)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    return models.sharded(model, reshard_after_forward=reshard)


def run(model: Any, rows: int = 32) -> None:
    """A forward and a backward pass."""
    model(models.batch(0, WIDTH, rows=rows).requires_grad_()).float().square().mean().backward()


def gradients(model: Any, rows: int = 32) -> list[Tensor]:
    """Return the gradients of one batch, and clear them."""
    run(model, rows)
    found = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def left(model: Any) -> int:
    """Return the operands of all groups that no product has asked for."""
    gc.collect()
    of_groups = [operands for group in models.manager(model).plan.param_groups.prepared for operands in group._operands]
    assert len(of_groups) == BLOCKS and all(isinstance(operands, GatheredOperands) for operands in of_groups)
    return sum(len(of_direction.made) for operands in of_groups for of_direction in operands._rounds.values())


def launches_of(model: Any, rows: int = 32) -> tuple[Counter[str], list[Tensor]]:
    """The calls of the extension that make operands in a forward and a backward pass, and the gradients."""
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        name = argument.__name__ if event == "c_call" else ""
        if name in ("transpose", "upcast", "upcast_together"):
            counts[name] += frame.f_code.co_filename.endswith("backends/cpu.py")

    sys.setprofile(note)
    try:
        found = gradients(model, rows)
    finally:
        sys.setprofile(None)
    return +counts, found


@pytest.mark.parametrize(
    ("fmt", "compiled", "reshard"),
    [
        ("fp8_current", True, True),
        models.slow("fp8_current", True, False),
        models.slow("fp8_current", False, True),
        models.slow(EXACT, True, True),
        (EXACT, True, False),
        (EXACT, False, True),
    ],
)
@on_ranks(2)
def test_one_launch_serves_the_weights_of_a_gather(fmt: str, compiled: bool, reshard: bool) -> None:
    """From the second pass on; the first, whose gradients are the same, finds out which weights are asked for."""
    model = built(fmt, compiled=compiled, reshard=reshard)
    with gemm.use("scaled_mm"):
        results = [launches_of(model) for _ in range(3)]
    first, *others = [found for _, found in results]
    are_equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    _, *later = [dict(counts) for counts, _ in results]
    assert later == 2 * [{name: count * BLOCKS for name, count in LAUNCHES[fmt].items()}]
    assert are_equal
    assert left(model) == 0


@on_ranks(2)
def test_one_launch_serves_all_experts_of_a_gather() -> None:
    model: Any = nn.Module()
    model.blocks = nn.ModuleList(Grouped((3, 96, 64)) for _ in range(BLOCKS))
    model.recipe = {"*": EXACT}
    model.forward = lambda x: functools.reduce(lambda x, block: block(x), model.blocks, x)
    model = models.sharded(model)
    gemm.decide.cache_clear()
    with (
        mock.patch.object(torch, "_scaled_grouped_mm", emulated_grouped),
        mock.patch.object(per_row, "hardware", side_effect=lambda case: iter(())),
        gemm.use("scaled_mm"),
    ):
        results = [launches_of(model, rows=24) for _ in range(3)]
    gemm.decide.cache_clear()
    first, *others = [found for _, found in results]
    are_equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    _, *later = [dict(counts) for counts, _ in results]
    assert later == 2 * [{"upcast_together": 2 * BLOCKS}]
    assert are_equal
    assert left(model) == 0


@on_ranks(2)
def test_micro_batches_over_one_gather_take_a_launch_each() -> None:
    model = built(EXACT, compiled=True, reshard=False)
    with gemm.use("scaled_mm"):
        for is_last in (False, False, True):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(is_last)
                    module.set_reshard_after_backward(is_last)
            if not is_last:
                run(model)
        assert launches_of(model)[0] == {"upcast_together": 2 * BLOCKS}
    assert left(model) == 0


@pytest.mark.parametrize("recomputed", [pytest.param(False, marks=pytest.mark.slow), True])
@on_ranks(2)
def test_operands_are_those_of_the_last_gather(recomputed: bool) -> None:
    model, other = (built(EXACT, compiled=False) for _ in range(2))
    if recomputed:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
    with gemm.use("scaled_mm"), torch.no_grad():
        for _ in range(2):
            with torch.enable_grad():
                gradients(model)
        for changed in (model, other):
            for parameter in changed.parameters():
                parameter.mul_(1.5)
        with torch.enable_grad():
            found, expected = gradients(model), gradients(other)
            are_equal = all(map(torch.equal, found, expected))
            # The input of a frozen layer asks for no gradient where nothing before it is trained.
            model.blocks[0].requires_grad_(False)
            model(models.batch(0, WIDTH, rows=32)).float().square().mean().backward()
    assert (are_equal, left(model)) == (True, 0)
