"""A cast makes as many calls for the 44,544 experts of a large model as for 8 weights; a plan sends as much among any ranks."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch

import zerocast
from tests.benchmarks import plan_build
from tests.fsdp2.test_host_work import calls_of, calls_of_zerocast
from zerocast import CastPlan, QuantizedWeight
from zerocast.formats.layout import BUFFERS
from zerocast.weight.buffers import into_flat_buffer

EXPERTS = 44_544  # weights of a model with 671 B parameters
SHAPE = (32, 32)
# Calls of functions of zerocast in a cast, and the files that they are in. With every gain these bounds come down.
MAX_CALLS = {"nvfp4": 50, "fp8_block": 50, "fp8_current": 50, "fp8_delayed": 63}
MAX_FILES = 12


def plan_of(count: int, fmt: str) -> CastPlan:
    """Return a plan of weights in flat buffers, of which this process owns everything."""
    weights = [QuantizedWeight.empty(SHAPE, fmt) for _ in range(count)]
    for name in BUFFERS:
        into_flat_buffer([weight for weight in weights if weight.state.buffers[name] is not None], name)
    masters = torch.randn(count, SHAPE[0] * SHAPE[1], generator=torch.Generator().manual_seed(0))
    return CastPlan(weights, list(masters), [0] * count)


@pytest.mark.parametrize("many", [200, pytest.param(EXPERTS, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block", "mxfp8", "fp8_delayed"])
def test_a_cast_calls_as_often_for_many_weights(fmt: str, many: int) -> None:
    plans = plan_of(8, fmt), plan_of(many, fmt)
    for plan in plans:  # what is made once, and again once any weight has other storage
        plan.cast()
    few, found = (calls_of(plan.cast) for plan in plans)
    assert few == found < 400


@pytest.mark.parametrize("fmt", MAX_CALLS)
def test_a_cast_makes_few_calls(fmt: str) -> None:
    plan = plan_of(8, fmt)
    plan.cast()
    by_file = calls_of_zerocast(plan.cast)
    assert by_file.total() <= MAX_CALLS[fmt] and len(by_file) <= MAX_FILES, by_file


def test_building_a_plan_calls_no_function_of_a_weight() -> None:
    """`__torch_function__` would take microseconds for each attribute of each weight that a plan reads."""
    weights = [QuantizedWeight.empty(SHAPE, fmt) for fmt in MAX_CALLS]
    masters = [torch.randn(weight.numel()) for weight in weights]
    refused = mock.patch.object(QuantizedWeight, "__torch_function__", side_effect=AssertionError("a weight is asked"))
    with refused:
        plan = CastPlan(weights, masters, [0] * len(weights))
    plan.cast()


@pytest.mark.parametrize("prepare", [zerocast.quantize_, zerocast.fsdp2.prepare])
def test_quantizing_calls_in_proportion_to_the_weights(prepare: Callable[..., object]) -> None:
    """Quantizing looks at every module once, and not once for every weight."""
    few, many = (torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(count)) for count in (20, 160))
    prepare(torch.nn.ModuleList([torch.nn.Linear(32, 32)]), {"*.weight": "nvfp4"})  # what is made once
    calls = [calls_of(partial(prepare, model, {"*.weight": "nvfp4"})) for model in (few, many)]
    assert calls[1] < 10 * calls[0]


def test_a_plan_exchanges_as_much_on_many_ranks() -> None:
    """Building a plan takes three collectives, of 24 bytes a weight and some more, on any number of ranks."""
    with mock.patch.object(plan_build, "REPEATS", 1):
        rows = [plan_build.measure(ranks, 200, "end to end", "fp8_block") for ranks in (8, 2048, 16384)]
    assert {row["collectives"] for row in rows} == {3}
    (nbytes,) = {row["bytes"] for row in rows}
    assert 24 * 200 < nbytes < 24 * 200 + 1000


@pytest.mark.slow
def test_a_plan_of_many_weights_on_many_ranks_fits_into_a_gigabyte() -> None:
    row = plan_build.apart(2048, EXPERTS, Namespace(cut="end to end", format="fp8_block"))
    assert 50 < float(row["peak_mb"]) < 1000, "in a process of its own, whose extension alone takes 80 MB"
    assert row["bytes"] < 24 * EXPERTS + 1000
