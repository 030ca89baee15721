"""fp8_delayed over many steps on several ranks, against a simulation without ranks (docs/formats/fp8_delayed.md)."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts, sharded
from tests.formats import model
from tests.matrices import F32
from tests.selection import examples_on
from tests.sharded import Weight
from tests.strategies import cuts, shapes
from tests.workers import Ranks
from zerocast import CastPlan, QuantizedWeight, get_format
from zerocast.backends import reference
from zerocast.distributed.group import ONE_PROCESS

STEPS = 5


@st.composite
def delayed(draw: st.DrawFn, world: int) -> tuple[Weight, dict[str, Any]]:
    """A sharded weight with delayed scaling, and its options."""
    options: dict[str, Any] = {
        "element": draw(st.sampled_from(["e4m3", "e5m2"])),
        "margin": draw(st.integers(-2, 3)),
        "amax_history_len": draw(st.integers(1, 4)),
        "amax_compute_algo": draw(st.sampled_from(["max", "most_recent"])),
    }
    fmt = "fp8_delayed:" + ",".join(f"{key}={value}" for key, value in options.items())
    shape = draw(shapes(fmt))
    content = draw(st.sampled_from(["normal", "some_zero", "wide", "zero", "inf", "nan", "finite_bits"]))
    nominal, seed = draw(st.sampled_from(casts.NOMINAL)), draw(st.integers(0, 1000))
    return Weight(fmt, shape, draw(cuts(shape, world)), nominal, content, seed), options


def amax_of(case: Weight, step: int) -> float:
    """The amax of what any rank owns, of the rounded master."""
    rounded = case.master(step).to(case.nominal).float().reshape(-1).numpy()[case.owned()]
    rounded = np.abs(rounded[~np.isnan(rounded)])
    return float(rounded.max()) if rounded.size else 0.0


@examples_on(2)  # casts of five steps each
@given(world=st.sampled_from([1, 2, 3, 5]), data=st.data())
def test_every_step_equals_the_simulation(ranks: Ranks, world: int, data: st.DataObject) -> None:
    case, options = data.draw(delayed(world))
    backend = data.draw(st.sampled_from(["reference", None]))
    outcomes = ranks(world)(sharded.cast_and_gather, (case,), backend, STEPS)
    assert not any(outcome.complaints for outcome in outcomes)
    history: F32 = np.zeros(options["amax_history_len"], np.float32)
    scale = np.float32(1)
    for step in range(STEPS):
        expected = sharded.expected(case, float(scale), step)
        if case.owned().any():
            amax, largest = amax_of(case, step), model.MAX[options["element"]]
            history, scale = model.delayed_update(
                history, amax, float(scale), largest, options["margin"], options["amax_compute_algo"]
            )
        expected |= {"scale": np.array([scale]).view(np.uint8), "amax_history": history.view(np.uint8)}
        for rank, outcome in enumerate(outcomes):
            casts.assert_same_bytes(outcome.steps[step][0], expected, f"step {step}, rank {rank}, {case}")


def test_a_skipped_step_rolls_nothing(backend: str) -> None:
    weight = QuantizedWeight.empty((4, 4), "fp8_delayed:amax_history_len=3")
    master = torch.randn(16)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    before = casts.bytes_of(weight)
    master.mul_(3.0)
    plan.cast(skip=torch.tensor([True]))
    casts.assert_same_bytes(casts.bytes_of(weight), before)
    plan.cast(skip=torch.tensor([False]))
    assert weight.amax is not None and weight.amax.item() == master.bfloat16().abs().max()


def test_amax_of_an_earlier_step_is_cleared(backend: str) -> None:
    """TE accumulates into the amax buffer; here an amax belongs to its step."""
    weight = QuantizedWeight.empty((4, 4), "fp8_delayed")
    master = torch.full((16,), 8.0)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    master.fill_(2.0)
    plan.cast()
    assert weight.amax is not None and weight.amax.item() == 2.0


def test_a_host_may_keep_the_history(backend: str) -> None:
    """Without a history buffer the amax grows, exactly, until the host takes it; scale and what is beside the amax stay."""
    history = torch.tensor([[0.0, 3.0000002, -1.0]])  # no bf16 number: bf16 weights reduce in bf16 otherwise
    fmt = get_format("fp8_delayed")
    buffers = {
        "rowwise_data": torch.zeros(4, 4, dtype=torch.uint8),
        "rowwise_scale_inv": torch.zeros(1),
        "scale": torch.tensor([16.0]),
        "amax": history[0, 1:2],
    }
    weight = QuantizedWeight.of_buffers((4, 4), fmt, torch.bfloat16, buffers)
    rolls = QuantizedWeight.empty((4, 4), fmt)
    master, other = torch.full((16,), 2.0), torch.full((16,), 7.0)
    plan = CastPlan([weight, rolls], [master, other], [0, 0], ONE_PROCESS, backend=backend)
    plan.cast()
    assert history.tolist() == [[0.0, torch.tensor(3.0000002).item(), -1.0]]
    master.fill_(-5.0)
    plan.cast()
    assert history.tolist() == [[0.0, 5.0, -1.0]]
    assert (buffers["scale"].item(), buffers["rowwise_scale_inv"].item()) == (16.0, 1 / 16)
    expected = reference.quantize(fmt, master.view(4, 4), torch.bfloat16, torch.tensor([16.0]))
    assert torch.equal(buffers["rowwise_data"], expected.rowwise_data)
    assert rolls.scale is not None and rolls.scale.item() == 64.0  # one beside it keeps its own
