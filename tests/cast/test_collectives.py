"""One all-reduce a cast, whatever is cast; no host work a tensor; process groups of every kind."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests import casts
from tests.casts import Cut, Outcome, Sharded, Weight
from tests.observed import Dispatched
from tests.workers import Ranks, on_ranks
from zerocast import CastPlan, QuantizedWeight, post_all_gather_processing, quantize_master_weights

SHAPE = (64, 96)


def cut(world: int, offset: int = 0) -> tuple[Cut, ...]:
    """Return near-even spans. An odd `offset` puts NVFP4 cuts in the middle of a byte."""
    numel = SHAPE[0] * SHAPE[1]
    inner = [numel * rank // world + offset for rank in range(1, world)]
    return tuple(zip([0, *inner], [*inner, numel], strict=True))


def every_format(world: int, offset: int = 0) -> tuple[Weight, ...]:
    """Return one weight of each format and nominal dtype."""
    return tuple(Weight(fmt, SHAPE, cut(world, offset), nominal) for fmt in casts.FORMATS for nominal in casts.NOMINAL)


def count_collectives(cases: tuple[Weight, ...]) -> list[dict[str, int]]:
    here = Sharded(cases, dist.get_rank())
    plan = CastPlan(here.weights, here.masters, here.starts)
    counts = []
    for run in (plan.cast, plan.cast, plan.post_all_gather):
        with CommDebugMode() as mode:
            run()
        counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
    return counts


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("count", [1, None])
def test_one_all_reduce_a_cast(ranks: Ranks, offset: int, count: int | None) -> None:
    """The number of weights, their formats and odd cuts between them do not change the number of collectives."""
    cases = every_format(3, offset)[:count]
    for first, second, processing in ranks(3)(count_collectives, cases):
        assert first == second == {"c10d.allreduce_": 1}
        assert processing == {}


def test_identity_needs_no_collective(ranks: Ranks) -> None:
    assert ranks(2)(count_collectives, (Weight("identity", SHAPE, cut(2)),)) == [[{}, {}, {}]] * 2


def counted_step(weights: int, backend: str) -> tuple[int, list[str]]:
    flat = torch.randn(weights * 1024)
    model = [QuantizedWeight.empty((32, 32), fmt) for fmt in ("nvfp4", "mxfp8") for _ in range(weights // 2)]
    plan = CastPlan(model, list(flat.split(1024)), [0] * weights, backend=backend)
    for _ in range(2):  # columnwise copies get their storage at first; the plan then looks where everything lies
        plan.cast()
        plan.post_all_gather()
    with Dispatched() as ops:
        plan.cast()
        plan.post_all_gather()
    return len(ops.names), ops.stages


def test_ops_a_step_do_not_grow_with_the_weights(backend: str) -> None:
    count, ours = counted_step(4, backend)
    assert sorted(ours) == ["compute_scales"] * 2 + ["partial_amax"] * 2 + ["partial_cast"] * 2 + ["transpose"]
    if backend != "reference":  # whose stages are torch operators themselves
        assert counted_step(200, backend) == (count, ours)


def packed_dtype(cases: tuple[Weight, ...]) -> torch.dtype:
    here = Sharded(cases, dist.get_rank())
    return CastPlan(here.weights, here.masters, here.starts).amaxes.buffer.dtype


def test_the_packed_buffer_is_bf16_when_every_nominal_dtype_is(ranks: Ranks) -> None:
    bf16 = tuple(Weight(fmt, SHAPE, cut(2, 1)) for fmt in casts.FORMATS)
    identity = Weight("identity", SHAPE, cut(2), torch.float32)
    assert ranks(2)(packed_dtype, (*bf16, identity)) == [torch.bfloat16] * 2
    assert ranks(2)(packed_dtype, (*bf16, Weight("mxfp8", SHAPE, cut(2), torch.float16))) == [torch.float32] * 2


@on_ranks(4)
def test_groups_that_are_none() -> None:
    weight, messages = QuantizedWeight.empty((2, 2), "fp8_current"), []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for group in (mesh, "world", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises((TypeError, ValueError)) as caught:
            CastPlan([weight], [None], [None], group)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    mesh, text, outsider = messages
    assert mesh.startswith("ValueError") and "mesh['name']" in mesh
    assert text.startswith("TypeError") and "str" in text
    assert outsider.startswith("TypeError")


@pytest.mark.parametrize("manual", [True, False])
@on_ranks(3)
def test_the_two_calls_of_a_host(manual: bool) -> None:
    """The two calls of a host's optimizer cast like a plan, twice."""
    cases = tuple(case for case in every_format(3, 1) if "delayed" not in case.fmt)
    here = Sharded(cases, dist.get_rank())
    for step in range(2):
        here.set_masters(step)
        quantize_master_weights(here.weights, here.masters, here.starts, None, None, manual)
        here.gather()
        if manual:
            post_all_gather_processing(here.weights)
        else:
            assert all(w.columnwise_data is None for w in here.weights if str(w.format) != "mxfp8")
            for weight in here.weights:
                if weight.format.name != "identity":
                    weight.read(columnwise=True, dtype=torch.float32)
    rank = dist.get_rank()
    outcome = Outcome([[casts.bytes_of(weight) for weight in here.weights]], here.complaints)
    casts.assert_unsharded(outcome, cases, f"rank {rank}", step=1)
