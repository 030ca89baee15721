"""Bad input raises a clear error on every rank, hangs none, and leaves every byte of the weights as it was."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from tests.casts import lcg_matrix
from tests.observed import same_on_all
from tests.workers import on_ranks
from zerocast import CastPlan, QuantizedWeight, get_format, post_all_gather_processing, quantize_master_weights

NUMEL = 32 * 64


@dataclass
class Call:
    """The arguments of a good plan on this rank, for a case to spoil."""

    rank: int
    weights: list[Any] = field(init=False)
    masters: list[Any] = field(init=False)
    starts: list[Any] = field(init=False)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        formats = ("nvfp4", "fp8_block", "mxfp8", "identity")
        whole = torch.from_numpy(lcg_matrix(32, 64, 0))
        self.weights = [casts.cast_whole(fmt, whole) for fmt in formats]
        first, last = NUMEL * self.rank // dist.get_world_size(), NUMEL * (self.rank + 1) // dist.get_world_size()
        self.masters = [-whole.view(-1)[first:last].clone() for _ in formats]
        self.starts = [first] * len(formats)

    def shards(self) -> list[Any]:
        """Return good storage for the shards alone."""
        sizes = [
            (m.numel() + 2) // (2 if w.format.name == "nvfp4" else 1)
            for w, m in zip(self.weights, self.masters, strict=True)
        ]
        bytes_ = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        return [bytes_[0], bytes_[1], (bytes_[2], bytes_[2].clone()), torch.zeros(sizes[3], dtype=torch.bfloat16)]


def put(name: str, index: int, change: Callable[[Any], Any]) -> Callable[[Call], None]:
    """Return a change that spoils one element of a list of the call."""

    def spoil(call: Call) -> None:
        values = getattr(call, name)
        values[index] = change(values[index])

    return spoil


def with_shards(index: int, change: Callable[[Any], Any]) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        call.options["fsdp_shard_model_weights"] = call.shards()
        call.options["fsdp_shard_model_weights"][index] = change(call.options["fsdp_shard_model_weights"][index])

    return spoil


def failing_gather(call: Call) -> None:
    """Let a gather fail with an error that is neither of the two that a check raises."""

    def fail(weight: QuantizedWeight) -> None:
        raise ConnectionError("the gather in flight failed")

    call.options["fsdp_shard_model_weights"] = call.shards()
    call.weights[1].state.validity.before_read = fail


def twice(call: Call) -> None:
    call.weights[1] = call.weights[0].detach()


def without_memory(call: Call) -> None:
    call.weights = [QuantizedWeight.empty((32, 64), weight.format, device="meta") for weight in call.weights]
    call.masters, call.starts = [None] * len(call.weights), [None] * len(call.weights)


def swap(call: Call) -> None:
    for values in (call.weights, call.masters, call.starts):
        values[0], values[1] = values[1], values[0]


def drop_last(call: Call) -> None:
    for values in (call.weights, call.masters, call.starts):
        values.pop()


def other(fmt: str, shape: tuple[int, int] = (32, 64), nominal: torch.dtype = torch.bfloat16) -> Callable[[Any], Any]:
    return lambda weight: QuantizedWeight.empty(shape, fmt, nominal)


# name: (what to do to the arguments of one rank, the exception, part of its message)
SPOILT: dict[str, tuple[Callable[[Call], None], type[Exception], str]] = {
    "dtype": (put("masters", 1, Tensor.half), TypeError, "torch.float16; float32 or the nominal torch.bfloat16"),
    "double": (put("masters", 1, Tensor.double), TypeError, "torch.float64"),
    "shape": (put("masters", 0, lambda m: m.view(1, -1)), ValueError, "flat and contiguous"),
    "stride": (put("masters", 0, lambda m: torch.stack((m, m), 1)[:, 0]), ValueError, r"strides \(2,\)"),
    "negated": (put("masters", 1, lambda m: torch._neg_view(m)), ValueError, "a pending negation"),
    "device": (put("masters", 2, lambda m: m.to("meta")), ValueError, "the master is on meta and the weight on cpu"),
    "sparse": (put("masters", 2, Tensor.to_sparse), ValueError, "flat and contiguous"),
    "no tensor": (put("masters", 2, Tensor.tolist), TypeError, "the master is a list"),
    "no start": (put("starts", 0, lambda s: None), ValueError, "needs its start offset"),
    "float start": (put("starts", 0, float), ValueError, "needs its start offset"),
    "bool start": (put("starts", 0, bool), ValueError, "needs its start offset"),
    "negative start": (put("starts", 3, lambda s: -1), ValueError, r"elements \[-1, "),
    "start past the end": (put("starts", 3, lambda s: NUMEL), ValueError, "are not inside the weight's 2048"),
    "one past the end": (put("starts", 3, lambda s: NUMEL - 600), ValueError, "are not inside the weight's 2048"),
    "more masters": (lambda call: call.masters.append(None), ValueError, "4 model weights, 5 master weights"),
    "fewer starts": (lambda call: call.starts.clear(), ValueError, "0 start offsets"),
    "more shards": (lambda call: call.options.update(fsdp_shard_model_weights=[None]), ValueError, "1 shard tensors"),
    "twice": (twice, ValueError, "model weights 0 and 1 are the same weight"),
    "plain weight": (put("weights", 0, lambda w: torch.zeros(32, 64)), TypeError, "model weight 0 is a Tensor"),
    "transposed": (put("weights", 0, lambda w: w.t()), TypeError, "model weight 0 is a"),
    "meta weight": (
        put("weights", 0, lambda w: QuantizedWeight.empty((32, 64), "nvfp4", device="meta")),
        ValueError,
        "meta",
    ),
    "meta weights": (without_memory, ValueError, "the weights are on the meta device"),
    "backend": (lambda call: call.options.update(backend="fast"), ValueError, "unknown backend 'fast'"),
    "overlap": (put("starts", 1, lambda s: s - 1), ValueError, "ranks 0 and 1 both own elements of weight 1"),
    "other format": (
        put("weights", 1, other("fp8_current")),
        ValueError,
        "weight 1 is fp8_block .* on rank 0 and fp8_current",
    ),
    "other option": (put("weights", 1, other("fp8_block:element=e5m2")), ValueError, "fp8_block:element=e5m2"),
    "other shape": (put("weights", 2, other("mxfp8", (64, 32))), ValueError, r"\(64, 32\)"),
    "other nominal": (put("weights", 0, other("nvfp4", nominal=torch.float32)), ValueError, "torch.float32"),
    "other order": (swap, ValueError, "weight 0 is nvfp4 .* on rank 0 and fp8_block"),
    "fewer weights": (drop_last, ValueError, "rank 0 passes 4 weights and rank 1 3"),
    "shard too small": (with_shards(1, lambda t: t[:100]), ValueError, "its storage has 100"),
    "shard dtype": (
        with_shards(3, lambda t: t.view(torch.uint8)),
        ValueError,
        "shard storage is contiguous torch.bfloat16",
    ),
    "shard stride": (with_shards(1, lambda t: t.repeat(2)[::2]), ValueError, "shard storage is contiguous"),
    "shard of one direction": (with_shards(2, lambda t: t[0]), TypeError, "has 2 tensors, got 1"),
    "shard of two directions": (with_shards(1, lambda t: (t, t.clone())), TypeError, "has 1 tensors, got 2"),
    "failing gather": (failing_gather, RuntimeError, "the gather in flight failed"),
    "shard that is no tensor": (with_shards(1, lambda t: "bytes"), TypeError, "str"),
}
ALONE = [name for name in SPOILT if not name.startswith(("other", "overlap", "fewer weights"))]


@pytest.mark.notices(
    "an argument of a plan is wrong on one rank", where="CastPlan", answer="raises on all ranks, no byte changed"
)
@on_ranks(1, 3)
def test_one_rank_is_wrong_and_all_say_so(world: int) -> None:
    """All ranks name the wrong one, and a good plan still works afterwards."""
    rank = dist.get_rank()
    good = Call(rank)
    for name in SPOILT if world > 1 else ALONE:
        spoil, kind, message = SPOILT[name]
        call = Call(rank)
        kept = list(call.weights)
        before = [casts.bytes_of(weight) for weight in kept]
        if rank == min(1, world - 1):
            spoil(call)
        with pytest.raises(kind, match=message) as caught:
            CastPlan(call.weights, call.masters, call.starts, **call.options)
        assert type(caught.value) is kind, name
        said = same_on_all(str(caught.value))
        assert world > 1 or not said.startswith("rank"), name
        assert world == 1 or name not in ALONE or said.startswith("rank 1: "), name
        for weight, bytes_ in zip(kept, before, strict=True):
            weight.state.validity.before_read = None
            casts.assert_same_bytes(casts.bytes_of(weight), bytes_, name)
        CastPlan(good.weights, good.masters, good.starts).cast()


@on_ranks(2)
def test_masters_overlap_by_one_element() -> None:
    """Two ranks may share a byte of NVFP4 and never an element."""
    weight, rank = QuantizedWeight.empty((16, 16), "nvfp4"), dist.get_rank()
    with pytest.raises(ValueError, match="may not overlap") as caught:
        CastPlan([weight], [torch.ones((101, 156)[rank])], [(0, 100)[rank]])
    CastPlan([weight], [torch.ones((101, 155)[rank])], [(0, 101)[rank]]).cast()
    assert "from 100 on" in same_on_all(str(caught.value))


@pytest.mark.parametrize("arguments", [(None, [], []), ([], None, []), (5, 5, 5), (iter([]), [], [])])
def test_no_lists(arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(TypeError):
        CastPlan(*arguments)


def test_the_calls_of_a_host_check_as_a_plan_does() -> None:
    weight = casts.cast_whole("nvfp4", torch.randn(32, 64))
    before = casts.bytes_of(weight)
    with pytest.raises(ValueError, match="are not inside"):
        quantize_master_weights([weight], [torch.ones(10)], [NUMEL - 9])
    casts.assert_same_bytes(casts.bytes_of(weight), before)


@pytest.mark.parametrize("fmt", casts.FORMATS)
def test_post_all_gather_before_a_cast(fmt: str) -> None:
    weight, cast = QuantizedWeight.empty((32, 64), fmt), casts.cast_whole(fmt, torch.randn(32, 64))
    before = casts.bytes_of(weight), casts.bytes_of(cast)
    with pytest.raises(RuntimeError, match=r"model weight 1 .* was never cast"):
        post_all_gather_processing([cast, weight])
    with pytest.raises(RuntimeError, match="before the first cast"):
        CastPlan([cast, weight], [None, torch.ones(NUMEL)], [None, 0]).post_all_gather()
    assert casts.bytes_of(weight).keys() == before[0].keys()
    casts.assert_same_bytes(casts.bytes_of(weight), before[0])
    casts.assert_same_bytes(casts.bytes_of(cast), before[1])


def test_post_all_gather_of_a_plain_tensor() -> None:
    with pytest.raises(TypeError, match="model weight 0 is a Tensor"):
        post_all_gather_processing([torch.zeros(2, 2)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("fmt", "shape", "message"),
    [
        ("nvfp4", (24, 32), "rows that are a multiple of 16, got 24"),
        ("nvfp4", (32, 40), "columns that are a multiple of 16, got 40"),
        ("mxfp8", (16, 32), "rows that are a multiple of 32, got 16"),
        ("mxfp8", (32, 48), "columns that are a multiple of 32, got 48"),
        ("nvfp4", (4, 8, 32), "rows that are a multiple of 16, got 8"),
        ("mxfp8", (2, 48, 32), "rows that are a multiple of 32, got 48"),
        ("fp8_current", (0, 4), "at least one element"),
        ("identity", (), "at least one element"),
    ],
)
def test_shapes_that_a_format_cannot_take(fmt: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.empty(shape, fmt)
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.of_buffers(shape, get_format(fmt), torch.bfloat16, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_nominal_dtypes_that_are_none(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="the nominal dtype is one of"):
        QuantizedWeight.empty((32, 32), "nvfp4", dtype)
