"""Formats of two, as in `fp8_current|nvfp4`: forward passes read the first, backward passes the second, both cast from a master."""

import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerocast
from tests import casts
from tests.sharded import Cut, Sharded, Weight
from tests.workers import Ranks
from zerocast import CastPlan, QuantizedWeight, Recipe, ZeroConfig, get_format
from zerocast.backends import reference
from zerocast.distributed.group import Group

PAIRS = ("fp8_current|nvfp4", "fp8_block|mxfp4", "nvfp4|fp8_current:element=e5m2", "mxfp4|nvfp4")
SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
BF16 = torch.bfloat16


def both(pair: str, master: torch.Tensor, nominal: torch.dtype = BF16) -> dict[str, Any]:
    """The bytes of a format of two, from casts to each of them."""
    forward, backward = (reference.quantize(get_format(fmt), master, nominal) for fmt in pair.split("|"))
    expected = {
        "rowwise_data": forward.rowwise_data,
        "rowwise_scale_inv": forward.rowwise_scale_inv,
        "columnwise_data": backward.rowwise_data,
        "columnwise_scale_inv": backward.rowwise_scale_inv,
    }
    amax = forward.amax if backward.amax is None else backward.amax
    return {name: casts.raw(t) for name, t in (expected | {"amax": amax}).items() if t is not None}


@pytest.mark.parametrize("pair", PAIRS)
def test_text_and_buffers(pair: str) -> None:
    fmt = get_format(pair)
    assert str(fmt) == pair and [str(half) for half in fmt.halves] == pair.split("|")
    assert [half.backward for half in fmt.halves] == [None, None]
    assert fmt.halves == tuple(map(get_format, pair.split("|"))) and get_format(fmt) is fmt
    weight = QuantizedWeight.empty(SHAPE, pair)
    nbytes = [half.bits / 8 for half in fmt.halves if half.bits]
    assert weight.columnwise_data is not None
    assert [data.numel() / NUMEL for data in (weight.rowwise_data, weight.columnwise_data)] == nbytes


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("fp8_current|nvfp4|mxfp4", {}, "one for forward passes and one for backward passes, got 3"),
        ("fp8_current|mxfp8", {}, "mxfp8 cannot be one of two formats"),
        ("identity|nvfp4", {}, "identity cannot be one of two formats"),
        ("fp8_delayed|nvfp4", {}, "fp8_delayed cannot be one of two formats"),
        ("fp8_current|nvfp5", {}, "unknown format 'nvfp5'"),
        ("fp8_current|nvfp4", {"element": "e5m2"}, "are written behind the format that they belong to"),
    ],
)
def test_what_is_no_format_of_two(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        get_format(text, **options)


def test_a_shape_that_one_of_them_cannot_take() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        QuantizedWeight.empty((48, 64), "nvfp4|mxfp4")


@pytest.mark.parametrize("pair", PAIRS)
def test_one_plan_on_one_rank(pair: str, backend: str) -> None:
    master = torch.randn(SHAPE) * torch.logspace(-2, 2, SHAPE[0])[:, None]
    weight = casts.cast_whole(pair, master, backend=backend)
    casts.assert_same_bytes(casts.bytes_of(weight), both(pair, master), pair)


def cut(*ends: int) -> tuple[Cut, ...]:
    return tuple(itertools.pairwise((0, *ends, NUMEL)))


CASES = tuple(
    Weight(pair, SHAPE, spans, nominal, "wide", seed)
    for seed, (pair, spans, nominal) in enumerate(
        itertools.product(PAIRS, (cut(1001, 3003), cut(96, 97), cut(2048, 4096)), (BF16, torch.float32))
    )
)


def complaints(cases: tuple[Weight, ...]) -> list[str]:
    """Of the owned elements of both codes, and of all scales; one all-reduce for all."""
    rank = dist.get_rank()
    here = Sharded(cases, rank)
    CastPlan(here.weights, here.masters, here.starts).cast()
    found = []
    for case, weight in zip(cases, here.weights, strict=True):
        wanted, held = both(case.fmt, case.master(), case.nominal), casts.bytes_of(weight)
        (start, stop), halves = case.spans[rank], get_format(case.fmt).halves
        for name, value in wanted.items():
            part = slice(None)
            if name.endswith("data"):
                per_byte = halves[name.startswith("columnwise")].elements_per_byte
                part = slice(start // per_byte, -(-stop // per_byte))  # a byte of two owners is written whole
            if not (held[name][part] == value[part]).all():
                found.append(f"{name} of {case}")
    return found


def test_any_cuts_give_the_bytes_of_an_unsharded_cast(ranks: Ranks) -> None:
    assert ranks(3)(complaints, CASES) == [[]] * 3


@pytest.mark.parametrize("pair", PAIRS)
def test_products_read_one_and_gradients_the_other(pair: str) -> None:
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    master = layer.weight.detach().clone()
    zerocast.quantize_(layer, Recipe({"weight": pair}), dtype=BF16)
    forward, backward = (casts.cast_whole(fmt, master).read(columnwise=False, dtype=BF16) for fmt in pair.split("|"))
    assert not torch.equal(forward, backward)
    x, grad = torch.randn(16, SHAPE[1], dtype=BF16, requires_grad=True), torch.randn(16, SHAPE[0], dtype=BF16)
    y = layer(x)
    y.backward(grad)
    assert torch.equal(y, F.linear(x, forward)) and torch.equal(layer.weight.dequantize(), forward)
    assert x.grad is not None and torch.equal(x.grad, grad @ backward)
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, grad.t() @ x)
    transposed = torch.mm(grad, layer.weight)
    assert torch.equal(transposed, grad @ forward)


def test_compiled_products_are_those_of_eager_ones() -> None:
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    zerocast.quantize_(layer, Recipe({"weight": PAIRS[0]}), dtype=BF16)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = torch.ones(4, SHAPE[1], dtype=BF16, requires_grad=True)
        y = run(x)
        y.backward(y.detach())
        found.append((y, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def trained(pair: str, steps: int) -> tuple[nn.Module, zerocast.ZeroAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, bias=False), nn.GELU(), nn.Linear(64, 96))
    zerocast.quantize_(model, Recipe({"*.weight": pair}), dtype=BF16)
    optimizer = zerocast.ZeroAdamW(model.bfloat16().named_parameters(), lr=1e-2, config=ZeroConfig(deterministic=True))
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: zerocast.ZeroAdamW, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 96, dtype=BF16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_run(pair: str) -> tuple[list[dict[str, Any]], int]:
    """(the masters' names and bytes after a run with checkpoints and switches, differences from unsharded casts)."""
    model, optimizer = trained(pair, 2)
    wrong = len(zerocast.verify(optimizer).differences)
    state = optimizer.state_dict()
    zerocast.switch(optimizer, Recipe({"*.weight": "nvfp4"}))
    wrong += len(zerocast.verify(optimizer).differences)
    train(model, optimizer, 1)
    zerocast.switch(optimizer, Recipe({"*.weight": pair}))
    wrong += len(zerocast.verify(optimizer).differences)
    before = [{name: raw.tobytes() for name, raw in casts.bytes_of(model[i].weight).items()} for i in (0, 2)]  # type: ignore[arg-type]
    _, other = trained("fp8_block", 0)
    other.load_state_dict(state)  # which holds no format
    wrong += len(zerocast.verify(other).differences)
    return before, wrong


def test_training_checkpoints_and_switches_on_any_number_of_ranks(ranks: Ranks) -> None:
    ((alone, wrong),) = ranks(1)(a_run, PAIRS[0])
    assert wrong == 0
    found = ranks(2)(a_run, PAIRS[0])
    assert [wrong for _, wrong in found] == [0, 0]
    assert found[0][0] == found[1][0] and found[0][0][0].keys() == alone[0].keys()


def gathered() -> int:
    """The bytes of weights that one step gathers."""
    model, optimizer = trained(PAIRS[0], 1)
    sizes, gather = [], Group.all_gather_into

    def watched(self: Group, out: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if "weight" in named.get("what", ""):  # and no gradients
            sizes.append(out.numel() * out.element_size())
        return gather(self, out, *arguments, **named)

    with mock.patch.object(Group, "all_gather_into", watched):
        train(model, optimizer, 1)
    return sum(sizes)


def test_bytes_on_the_wire(ranks: Ranks) -> None:
    plain = 256 * BF16.itemsize  # the bias, padded
    assert ranks(2)(gathered) == [1.5 * 2 * NUMEL + plain] * 2


def test_hosts_that_hold_one_format_refuse() -> None:
    weight, shard = QuantizedWeight.empty((32, 32), PAIRS[0]), torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"holds one format, and fp8_current.nvfp4 has two"):
        CastPlan([weight], [torch.randn(1024)], [0], fsdp_shard_model_weights=[shard])
