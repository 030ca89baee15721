"""Debug mode: a weight that is older than its masters is not read, and the error says which call is missing."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.observed import debug_mode
from tests.weight.test_owners import backward, network
from tests.workers import on_ranks
from zerocast import CastPlan, QuantizedWeight, ZeroAdamW, get_format
from zerocast.cast.switch import convert
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.optim import EMA

STALE = "weight of shape (32, 64) is stale"


def weight_and_master() -> tuple[QuantizedWeight, Tensor, CastPlan]:
    """With a cast that has been gathered."""
    weight, master = QuantizedWeight.empty((32, 64), "nvfp4"), torch.randn(32 * 64)
    plan = CastPlan([weight], [master], [0])
    plan.cast()
    plan.post_all_gather()
    return weight, master, plan


def read(weight: QuantizedWeight) -> None:
    """A forward and a backward pass."""
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()


def refusal(weight: QuantizedWeight) -> str:
    with pytest.raises(RuntimeError) as caught:
        read(weight)
    with pytest.raises(RuntimeError):
        weight.dequantize()
    return str(caught.value)


@debug_mode()
def test_masters_that_are_moved_are_as_old_as_their_weight():
    weight, master, plan = weight_and_master()
    moved = torch.empty_like(master).copy_(master)
    plan.move_masters([moved])
    read(weight)
    moved.mul_(2)
    assert STALE in refusal(weight)


OPTIMIZERS: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW([p], foreach=True),
    "fused": lambda p: torch.optim.AdamW([p], fused=True),
    "loop": lambda p: torch.optim.AdamW([p], foreach=False),
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.notices(
    "an optimizer steps over masters and nothing casts them",
    where="CastPlan",
    answer="in debug mode the next read raises",
)
@debug_mode()
def test_a_step_without_a_cast(make, detached):
    weight, master, plan = weight_and_master()
    parameter = master.detach().requires_grad_() if detached else master.requires_grad_()
    optimizer = make(parameter)
    read(weight)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert STALE in (said := refusal(weight)) and "call plan.cast() after the masters change" in said
    plan.cast()
    plan.post_all_gather()
    read(weight)


def test_without_debug_mode_nothing_is_asked():
    weight, master, _ = weight_and_master()
    master.add_(1)
    read(weight)
    with debug_mode():
        read(weight)  # the last cast was not watched


@pytest.mark.notices(
    "weights are read between a cast and its all-gather", where="CastPlan", answer="in debug mode the next read raises"
)
@on_ranks(2)
@debug_mode()
def test_a_cast_without_a_gather():
    """The plan is processed by a call after the gather, and on demand."""
    rank, weight = dist.get_rank(), QuantizedWeight.empty((32, 64), "nvfp4")
    plan = CastPlan([weight], [torch.randn(1024)], [1024 * rank])
    plan.cast()
    said = [refusal(weight)]
    data = weight.rowwise_data.view(-1)
    Group.of(None).all_gather_into(data, data.view(2, -1)[rank])
    said.append(refusal(weight))
    plan.post_all_gather()
    read(weight)
    for text in said:
        assert "holds this rank's part of the last cast only: call plan.cast()" in text
        assert "plan.post_all_gather()" in text
    zerocast.quantize_master_weights(
        [weight], [torch.randn(1024)], [1024 * rank], manual_post_all_gather_processing=False
    )
    Group.of(None).all_gather_into(data, data.view(2, -1)[rank])
    read(weight)


def test_what_is_derived_from_bytes_before_their_gather_is_made_again():
    """A product keeps scales in the layout of tensor cores until the next cast."""
    weight, _, plan = weight_and_master()
    plan.cast()
    before = weight.cached_per_cast("first", lambda: weight.state.rowwise_data[0, 0].clone())
    weight.state.rowwise_data.bitwise_xor_(1)  # as a gather writes it
    plan.post_all_gather()
    for _ in range(2):
        assert weight.cached_per_cast("first", lambda: weight.state.rowwise_data[0, 0].clone()) == before ^ 1
    kept = weight.cached_per_cast("first", lambda: torch.zeros(()))
    assert kept == before ^ 1


def test_weights_do_not_keep_masters_alive():
    model = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    zerocast.quantize_(model, zerocast.Recipe({"*": "nvfp4"}))
    optimizer = ZeroAdamW(model.named_parameters())
    master = weakref.ref(optimizer._masters.master)
    del optimizer
    gc.collect()
    assert master() is None
    read(model.weight)


# -- backward passes through a forward pass of before the weights changed. On every host: tests/hosts/test_matrix.py


SAID = "the weights changed between this forward pass and its backward pass"


@pytest.mark.notices(
    "a backward pass after a step, a load or a swap uses an earlier forward pass",
    where=("ZeroAdamW", "CastPlan"),
    answer="raises if it reads a quantized weight that has changed; not in compiled graphs, nor in what `torch.func.vjp` returned",
)
@pytest.mark.parametrize("change", ["an average", "an average, and a step", "a load"])
def test_a_graph_of_other_weights(change: str) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    average = EMA(optimizer, 0.5)
    backward(model)
    optimizer.step()
    with contextlib.nullcontext() if change == "a load" else average.swapped():
        loss = model(torch.randn(4, 32).bfloat16()).float().square().mean()
    if change == "an average, and a step":
        backward(model)
        optimizer.step()
    if change == "a load":
        optimizer.load_state_dict(optimizer.state_dict())
        average.reset()
    with pytest.raises(RuntimeError, match=SAID):
        loss.backward()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_what_vjp_returned_reads_the_weights_of_now() -> None:
    """So it does with plain weights, since torch.func compares no version counters."""
    for model in (network(), nn.Sequential(nn.Linear(32, 32)).bfloat16()):
        x = torch.randn(4, 32).bfloat16()
        y, pullback = torch.func.vjp(model[0], x)
        is_plain = not isinstance(model[0].weight, QuantizedWeight)
        optimizer = (
            torch.optim.AdamW(model.parameters(), lr=0.1) if is_plain else ZeroAdamW(model.named_parameters(), lr=0.1)
        )
        backward(model)
        optimizer.step()
        _, later = torch.func.vjp(model[0], x)
        assert torch.equal(*(of(torch.ones_like(y))[0] for of in (pullback, later)))


@pytest.mark.parametrize(
    "owner", ["a new ZeroAdamW, and a step", "a new ZeroAdamW, and a load", "an attached plan, and a step"]
)
def test_a_graph_of_weights_of_an_earlier_owner(owner: str) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    backward(model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    loss = model(torch.randn(4, 32).bfloat16()).float().square().mean()
    del optimizer
    if owner == "an attached plan, and a step":
        weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)]
        masters = [nn.Parameter(weight.dequantize().float().flatten()) for weight in weights]
        plan = CastPlan(weights, masters, [0] * len(weights), ONE_PROCESS)
        sgd = torch.optim.SGD(masters, lr=1.0)
        plan.attach(sgd)
        for master in masters:
            master.grad = torch.ones_like(master)
        sgd.step()
        plan.post_all_gather()
    else:
        newer = ZeroAdamW(model.named_parameters(), lr=0.1)
        newer.load_state_dict(state) if owner.endswith("load") else (backward(model), newer.step())
    with pytest.raises(RuntimeError, match=SAID):
        loss.backward()


def test_a_graph_of_weights_that_a_plan_took_over_and_did_not_change() -> None:
    weights = [casts.cast_whole("fp8_current", torch.randn(32, 32))]
    masters = [nn.Parameter(torch.randn(32 * 32))]
    plan = CastPlan(weights, masters, [0])
    sgd = torch.optim.SGD(masters, lr=1.0)
    handle = plan.attach(sgd)
    masters[0].grad = torch.ones_like(masters[0])
    sgd.step()
    plan.post_all_gather()
    handle.remove()
    x = torch.randn(4, 32).bfloat16().requires_grad_()
    loss = nn.functional.linear(x, weights[0]).float().sum()
    newer = CastPlan(weights, masters, [0])
    assert weights[0].state.validity is newer.validity
    loss.backward()


@on_ranks(0, 2)
def test_a_graph_of_before_an_optimizer_is_built(world: int) -> None:
    """The first one may change the values of other ranks than the first. Later ones repeat them."""
    model = network()
    x = torch.randn(4, 32).bfloat16()
    losses = [model(x).float().square().mean()]
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    losses.append(model(x).float().square().mean())
    newer = ZeroAdamW(model.named_parameters(), lr=0.1)
    for loss, is_refused in zip(losses, (world > 1, False), strict=True):
        with pytest.raises(RuntimeError, match=SAID) if is_refused else contextlib.nullcontext():
            loss.backward()
        newer.zero_grad()
    del optimizer


@on_ranks(2)
def test_a_plan_of_several_optimizers_whose_masters_are_on_one_rank() -> None:
    """A step changes a weight on ranks without its master, too, and no weight of another optimizer."""
    rank = dist.get_rank()
    weights = [casts.cast_whole("fp8_current", torch.randn(32, 32)) for _ in range(4)]
    here = [nn.Parameter(torch.randn(32 * 32)) if index % 2 == rank else None for index in range(4)]
    plan = CastPlan(weights, here, [None if master is None else 0 for master in here])
    optimizers = [torch.optim.SGD([m for m in part if m is not None], lr=0.1) for part in (here[:2], here[2:])]
    for optimizer in optimizers:
        plan.attach(optimizer)
    plan.cast()
    plan.post_all_gather()
    x = torch.randn(4, 32).bfloat16().requires_grad_()
    sums = [nn.functional.linear(x, weight).float().sum() for weight in weights]
    for master in filter(None.__ne__, here):
        master.grad = torch.ones_like(master)
    optimizers[0].step()
    plan.post_all_gather()
    for index, loss in enumerate(sums):
        with pytest.raises(RuntimeError, match=SAID) if index < 2 else contextlib.nullcontext():
            loss.backward(retain_graph=True)
    # The first optimizer gets all masters, which a rank knows of its own ones.
    optimizers[0].add_param_group(optimizers[1].param_groups[0])
    optimizers[0].step()
    plan.post_all_gather()
    for loss in sums:
        with pytest.raises(RuntimeError, match=SAID):
            loss.backward()


def test_a_product_that_does_not_read_the_weight_again() -> None:
    """Its input needs no gradient."""
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    loss = model[0](torch.randn(4, 32).bfloat16()).float().square().mean()
    backward(model)
    optimizer.step()
    loss.backward()


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_plan(split: bool, is_interrupted: bool) -> None:
    """One of several optimizers has changed the weights of its masters alone, also if Ctrl-C comes as the cast ends."""
    weights = [casts.cast_whole("fp8_current", torch.randn(32, 32)) for _ in range(2)]
    masters = [nn.Parameter(torch.randn(32 * 32)) for _ in weights]
    plan = CastPlan(weights, [master.detach() for master in masters], [0, 0], ONE_PROCESS)
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in ([masters[:1], masters[1:]] if split else [masters])]
    for optimizer in optimizers:
        plan.attach(optimizer)
    plan.cast()
    plan.post_all_gather()
    x = torch.randn(4, 32).bfloat16().requires_grad_()
    first, last = (nn.functional.linear(x, weight).float().sum() for weight in weights)
    for master in masters:
        master.grad = torch.ones_like(master)
    cast = CastPlan.cast

    def cast_until_interrupted(plan: CastPlan) -> None:
        cast(plan)
        if is_interrupted:
            raise KeyboardInterrupt

    with mock.patch.object(CastPlan, "cast", cast_until_interrupted), contextlib.suppress(KeyboardInterrupt):
        optimizers[-1].step()
    plan.post_all_gather()
    with contextlib.nullcontext() if split else pytest.raises(RuntimeError, match=SAID):
        first.backward()
    with pytest.raises(RuntimeError, match=SAID):
        last.backward()


def test_the_format_of_a_weight_without_graphs_changes() -> None:
    """Inference tensors have no counter of writes to raise."""
    with torch.inference_mode():
        weight: Any = QuantizedWeight.empty((32, 32), "nvfp4")
        convert(weight, get_format("fp8_block"))
    assert weight.format == get_format("fp8_block")
