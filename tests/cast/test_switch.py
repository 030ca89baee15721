"""zerocast.switch of a CastPlan: whole bytes of the new formats on every rank, however its masters are cut, and what it refuses."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from tests import casts
from tests.casts import lcg_matrix
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, Recipe, verify
from zerocast.distributed.group import ONE_PROCESS

SHAPE = (32, 96)
NUMEL = 32 * 96
TARGETS = tuple(fmt for fmt in casts.FORMATS if not fmt.startswith("fp8_delayed"))
SPANS = {1: [0, NUMEL], 2: [0, 1001, NUMEL], 3: [0, 97, 97 + 1407, NUMEL]}  # odd cuts share bytes of 4-bit codes


def masters(seed: int) -> Tensor:
    return torch.from_numpy(lcg_matrix(*SHAPE, seed)).reshape(-1).clone()


class Sharded:
    """A plan over some weights of format `before`, stepped by plain SGD over this rank's masters."""

    def __init__(self, before: str, count: int = 2, group: dist.ProcessGroup | None = None) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        first, last = SPANS[world][dist.get_rank() if world > 1 else 0 :][:2]
        self.weights = [QuantizedWeight.empty(SHAPE, before) for _ in range(count)]
        self.whole = [masters(seed) for seed in range(count)]
        self.shards = [torch.nn.Parameter(whole[first:last].clone()) for whole in self.whole]
        detached, names = [shard.detach() for shard in self.shards], ["a", "b"][:count]
        self.plan = CastPlan(self.weights, detached, [first] * count, group, names=names)
        self.sgd = torch.optim.SGD(self.shards, lr=0.5)
        self.plan.attach(self.sgd)
        self.plan.cast()

    def step(self) -> None:
        """Take a step, which every rank also computes for all elements."""
        for shard, whole in zip(self.shards, self.whole, strict=True):
            shard.grad = torch.full_like(shard, 0.25)
            whole.sub_(torch.full_like(whole, 0.25), alpha=0.5)
        self.sgd.step()

    def check(self, formats: dict[str, str], scale: dict[str, float]) -> None:
        for index, name in enumerate(self.plan._names):
            fmt = formats[name]
            wanted = casts.unsharded(fmt, self.whole[index].view(SHAPE), torch.bfloat16, scale.get(name, 1.0))
            found = casts.bytes_of(self.weights[index])
            casts.assert_same_bytes({key: found[key] for key in wanted}, wanted, f"{name} as {fmt}")


EXACT = "nvfp4:exact_in_fp8=True"
ON_RANKS = ["identity", "nvfp4", EXACT, "mxfp8", "fp8_block", "fp8_delayed:amax_history_len=4"]


@pytest.mark.parametrize(
    ("before", "after", "world"),
    [
        *(("mxfp4" if after == "mxfp8" else "mxfp8", after, 0) for after in [*TARGETS, casts.FORMATS[0]]),
        *(
            ("nvfp4" if after in ("fp8_block", EXACT) else "fp8_current", after, n)
            for n in (2, 3)
            for after in ON_RANKS
        ),
    ],
)
@on_ranks()
def test_every_format(before, after):
    """A switch between any two formats keeps the masters. On several ranks spans end anywhere."""
    sharded = Sharded(before)
    sharded.step()
    zerocast.switch(sharded.plan, Recipe({"b": after}, default=after))
    scale = {}
    for name, weight in zip("ab", sharded.weights, strict=True):
        if weight.scale is not None:  # seeded from the amax of these masters
            scale[name] = float(weight.scale)
    sharded.check({"a": after, "b": after}, scale)
    verify(sharded.plan).raise_for_differences()
    sharded.step()  # the hook casts by the same plan
    for weight in sharded.weights:
        assert str(weight.format) == after
    if not dist.is_initialized():
        sharded.plan.post_all_gather()
        sharded.check({"a": after, "b": after}, scale)


def test_a_weight_whose_format_stays_keeps_bytes_and_history():
    sharded = Sharded("fp8_delayed:amax_history_len=4")
    for _ in range(2):
        sharded.step()
    kept, buffers = casts.bytes_of(sharded.weights[0]), dict(sharded.weights[0].state.buffers)
    zerocast.switch(sharded.plan, Recipe({"b": "identity"}, default="fp8_delayed:amax_history_len=4"))
    assert sharded.weights[0].rowwise_data is buffers["rowwise_data"]
    found = casts.bytes_of(sharded.weights[0])
    casts.assert_same_bytes({key: found[key] for key in kept}, kept)
    sharded.check({"a": "fp8_delayed", "b": "identity"}, {"a": float(sharded.plan.delayed.cast_scale("a") or 0)})


def test_whoever_stands_for_a_weight_follows():
    """Detached, transposed and tied objects share one storage, and follow a switch."""
    sharded = Sharded("nvfp4", count=1)
    (weight,) = sharded.weights
    detached, transposed = weight.detach(), weight.t()
    sharded.plan.post_all_gather()
    zerocast.switch(sharded.plan, Recipe({}, default="identity"))
    for other in (detached, transposed):
        assert isinstance(other, QuantizedWeight)
        assert str(other.format) == "identity"
    value = sharded.whole[0].view(SHAPE).bfloat16()
    assert torch.equal(detached.dequantize(), value)
    assert torch.equal(transposed.dequantize(), value.t())
    assert weight.read(columnwise=True, dtype=torch.bfloat16) is weight.rowwise_data  # products copy nothing
    assert weight.dequantize().data_ptr() != weight.rowwise_data.data_ptr()
    x = torch.randn(4, SHAPE[1], dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, SHAPE[0], dtype=torch.bfloat16) @ value)


def test_compiled_products_are_compiled_again():
    sharded = Sharded("fp8_current", count=1)
    (weight,) = sharded.weights
    sharded.plan.post_all_gather()
    x = torch.randn(4, SHAPE[1], dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, w: torch.nn.functional.linear(x, w), backend="aot_eager")
    for fmt in ("fp8_current", "nvfp4", "identity", "fp8_current"):
        zerocast.switch(sharded.plan, Recipe({}, default=fmt))
        assert torch.equal(compiled(x, weight), torch.nn.functional.linear(x, weight)), fmt


@pytest.mark.parametrize("late", ["identity", "mxfp8"])
def test_a_compiled_sequential_is_switched(late: str) -> None:
    """torch compiles no function of its own modules, and must not compile the inside of their products in place of these."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    zerocast.quantize_(model, {"*.weight": "nvfp4"}, dtype=torch.bfloat16)
    model.bfloat16()
    optimizer = zerocast.ZeroAdamW(model.named_parameters())
    model.compile(backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    for recipe in ("nvfp4", late, "nvfp4"):
        zerocast.switch(optimizer, Recipe({}, default=recipe))
        y = model(x)
        assert torch.equal(y, model.forward(x)), recipe
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch._dynamo.utils.counters["graph_break"]


def _with_storage() -> CastPlan:
    weight, storage = QuantizedWeight.empty(SHAPE, "fp8_current"), torch.zeros(NUMEL, dtype=torch.uint8)
    return CastPlan([weight], [masters(0)], [0], ONE_PROCESS, fsdp_shard_model_weights=[storage])


def _with_gap() -> CastPlan:
    return CastPlan([QuantizedWeight.empty(SHAPE, "fp8_current")], [masters(0)[5:]], [5], ONE_PROCESS)


def _partial() -> CastPlan:
    plan = CastPlan([QuantizedWeight.empty(SHAPE, "fp8_current")], [masters(0)], [0], ONE_PROCESS)
    with pytest.raises(ZeroDivisionError), plan.validity.transaction("a step"):
        _ = 1 / 0
    return plan


REFUSED = {
    "storage of the caller": (_with_storage, "is in storage that the caller laid out"),
    "gaps": (_with_gap, "have no master on any rank"),
    "partial": (_partial, "a step failed partway"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_switched(case):
    build, said = REFUSED[case]
    plan = build()
    with pytest.raises(RuntimeError, match=said):
        zerocast.switch(plan, Recipe({}, default="nvfp4"))
    assert str(plan.weights[0].format) == "fp8_current"


def test_storage_of_the_caller_stays_with_a_weight_that_does_not_change():
    weights, storage = (
        [QuantizedWeight.empty(SHAPE, "fp8_current") for _ in range(2)],
        torch.zeros(NUMEL, dtype=torch.uint8),
    )
    both = [masters(0), masters(1)]
    plan = CastPlan(weights, both, [0, 0], ONE_PROCESS, fsdp_shard_model_weights=[storage, None], names=["a", "b"])
    zerocast.switch(plan, Recipe({"b": "nvfp4"}, default="fp8_current"))
    wanted = casts.unsharded("fp8_current", both[0].view(SHAPE), torch.bfloat16)
    assert (casts.raw(storage) == wanted["rowwise_data"]).all()
    assert not weights[0].rowwise_data.any()


def test_not_within_a_transaction():
    plan = CastPlan([QuantizedWeight.empty(SHAPE, "fp8_current")], [masters(0)], [0], ONE_PROCESS)
    with plan.validity.transaction("a step"), pytest.raises(RuntimeError, match="between two steps"):
        zerocast.switch(plan, Recipe({}, default="nvfp4"))


def test_frozen_weights_keep_their_formats():
    frozen = casts.cast_whole("nvfp4", masters(1).view(SHAPE))
    weight = QuantizedWeight.empty(SHAPE, "nvfp4")
    plan = CastPlan([frozen, weight], [None, masters(0)], [None, 0], ONE_PROCESS)
    before: Any = casts.bytes_of(frozen)
    zerocast.switch(plan, Recipe({}, default="fp8_block"))
    assert [str(w.format) for w in (frozen, weight)] == ["nvfp4", "fp8_block"]
    casts.assert_same_bytes(casts.bytes_of(frozen), before)


def gather(buffers: list[Tensor]) -> None:
    """Gather every rank's elements into these buffers of one code an element."""
    for rank, (first, last) in enumerate(itertools.pairwise(SPANS[dist.get_world_size()])):
        for buffer in buffers:
            dist.broadcast(buffer.view(-1)[first:last].view(torch.uint8), src=rank)


@pytest.mark.notices(
    "a caller still gathers the buffers from before `switch`",
    where="CastPlan",
    answer="the cast after that gather raises on all ranks",
)
@pytest.mark.parametrize(("after", "idle"), [("fp8_block", 0), ("identity", 2)])
@pytest.mark.parametrize("forgets", [False, True])
@on_ranks(2)
def test_old_buffers_that_are_gathered_on(after: str, forgets: bool, idle: int):
    """A caller forgets the new buffers, or not, after `idle` casts that change or gather nothing."""
    sharded = Sharded("fp8_current")
    old = [weight.rowwise_data for weight in sharded.weights]
    for _ in range(2):
        sharded.step()
        gather(old)
        sharded.plan.post_all_gather()
    zerocast.switch(sharded.plan, Recipe({}, default=after))
    for _ in range(idle):
        sharded.plan.cast(repeat=True)
        gather([weight.rowwise_data for weight in sharded.weights])
        sharded.plan.post_all_gather()
        sharded.plan.cast(repeat=True)  # of which nothing is gathered
    for number in range(3):
        said = error_of(sharded.step)
        if forgets and number:  # the first has gathered nothing yet
            assert "2 weights differ between ranks after their all-gather, the first is a" in said
        else:
            assert said == ""
        gather(old if forgets else [weight.rowwise_data for weight in sharded.weights])
        sharded.plan.post_all_gather()
    assert (sharded.plan._switched is None) is not forgets
    if not forgets:
        sharded.check({"a": after, "b": after}, {})
        verify(sharded.plan).raise_for_differences()


@on_ranks(2)
def test_the_digest_of_a_cast_sees_a_switch():
    """A rank whose plan was built anew and one whose plan was not are in different calls."""
    # Ranks number the plans of a group, so this one has a group that no other test numbers in.
    group = dist.new_group()
    sharded = Sharded("fp8_current", group=group)
    if dist.get_rank() == 0:
        sharded.plan._lay_out()
    with pytest.raises(RuntimeError, match=r"ranks make different calls: .* casts by plan"):
        sharded.plan.cast()
    dist.destroy_process_group(group)
