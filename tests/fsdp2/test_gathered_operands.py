"""One launch makes the operands that products read for all weights of a gather. They are freed with the codes."""

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
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.checkpoint import checkpoint

import zerocast
from tests.fsdp2 import models, test_loops
from tests.fsdp2.models import Grouped, Net
from tests.gemm.scaled_mm import emulated_grouped
from tests.workers import on_ranks
from zerocast import gemm
from zerocast.cast.tables import WeightTable
from zerocast.fsdp2 import plan, torch_fsdp
from zerocast.gemm import per_row
from zerocast.weight.gathered_operands import GatheredOperands

BLOCKS = 2
WIDTH = 64
EXACT = "nvfp4:exact_in_fp8"
# The calls of the extension that make operands of weights, not those of inputs, in a forward and a backward pass over a gather.
LAUNCHES = {"fp8_current": {"transpose": 1}, EXACT: {"upcast_together": 2}}


def built(fmt: str, *, compiled: bool, reshard: bool = True) -> Any:
    """Return a sharded model of blocks of two weights each."""
    torch._dynamo.reset()
    model: Any = models.Net((fmt,) * BLOCKS, WIDTH, 96)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    return models.sharded(model, reshard_after_forward=reshard)


def run(model: Any, rows: int = 32) -> None:
    """Run a forward and a backward pass."""
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
    """Count the calls that make operands in a forward and a backward pass. Return them with the gradients."""
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        name = argument.__name__ if event == "c_call" else ""
        if name in ("transpose", "upcast", "upcast_together"):
            counts[name] += frame.f_code.co_filename.endswith("backends/extension.py")

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
    """One launch serves a gather from the second pass on. The first, which has the same gradients, finds out
    which weights are asked for.
    """
    model = built(fmt, compiled=compiled, reshard=reshard)
    with gemm.use("scaled_mm"):
        first = gradients(model)
        later = [launches_of(model) for _ in range(2)]
    for counts, found in later:
        assert counts == {name: count * BLOCKS for name, count in LAUNCHES[fmt].items()}
        assert all(map(torch.equal, found, first))
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


# -- codes that are cast at each gather or kept between casts: the same bytes, how often, and what is left of them


@pytest.mark.parametrize("lacking", [0, 1])
@on_ranks(2)
def test_few_codes_are_kept_by_default(lacking: int) -> None:
    codes = 2 * 64 * 96 // 2 // 2  # of two weights, half a byte an element, on two ranks
    with mock.patch.object(plan, "MAX_KEPT_BYTES", codes - lacking):
        for told, kept in ((None, not lacking), (False, False), (True, True)):
            model = models.sharded(Net(("nvfp4",), 64, 96), keep_codes=told)
            zerocast.fsdp2.refresh(model)
            assert [group.keep_codes for group in models.manager(model).plan.cast_groups] == [kept]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("keep_codes", [False, True])
@on_ranks(2)
def test_casts_of_codes(keep_codes: bool, micro_batches: int) -> None:
    """Each gather of a block, for the forward or the backward pass, casts its two weights in one launch and
    leaves nothing. With kept codes there is one launch a step.
    """
    model: Any = models.sharded(Net(("nvfp4",) * 3, 64, 96), keep_codes=keep_codes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    name = "cast_rest" if keep_codes else "partial_cast"
    for step in range(3):
        made = mock.patch.object(WeightTable, name, autospec=True, side_effect=getattr(WeightTable, name))
        with made as launched:
            for index in range(micro_batches):
                model(models.batch(10 * step + index, 64).requires_grad_()).float().square().mean().backward()
        counts.append(launched.call_count)
        optimizer.step()
        optimizer.zero_grad()
    groups = models.manager(model).plan.param_groups.prepared
    left = {codes.untyped_storage() for group in groups for parts in group._outgoing for codes in parts}
    assert counts[1:] == [1 if keep_codes else 3 * 2 * micro_batches] * 2
    assert keep_codes or sum(storage.nbytes() for storage in left) == 0


@on_ranks(2)
def test_steps_within_a_backward_pass_keep_codes() -> None:
    model: Any = models.sharded(test_loops.Rooted())
    test_loops.loss(model, 0).backward()
    assert not models.manager(model).plan.keep_codes
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    test_loops.loss(model, 1).backward()
    models.check(model, "stepped within")
    assert models.manager(model).plan.keep_codes


@on_ranks(2)
def test_a_hook_at_the_second_gather_is_refused() -> None:
    """A torch whose FSDP2 does not ask `GatheredByGroup` would fill the scales of nothing."""
    model: Any = models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=True)
    model(models.batch(0, 64))
    for group in torch_fsdp.groups(model):
        for param in group.fsdp_params:
            param.__class__ = FSDPParam
    with pytest.raises(RuntimeError, match="calls the hook of"):
        model(models.batch(1, 64))
