"""No step without an attachment: an optimizer over quantized weights has the right bytes, or raises before any byte changes."""

from pathlib import Path

import pytest

from tests.megatron import unattached
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.training import ALL, MIXED, NARROW, Case
from tests.megatron.unattached import ATTACHED, DETACHED, INSIDE, NEVER
from tests.workers import Ranks
from zerocast.integrations.megatron import host
from zerocast.integrations.megatron.unattached import refuse

pytestmark = needs_megatron
NOT_ATTACHED = "is not attached: Megatron's own copy would write over the codes of its quantized weights. Call attach("
WAS_DETACHED = "was detached: nothing casts its masters, and Megatron's own copy would write over the codes"
SLOW = pytest.mark.slow


@pytest.mark.notices(
    "an optimizer that was built in quantized_params() steps without attach",
    where="Megatron",
    answer="raises on every rank, before anything is written, and names `attach`",
)
@pytest.mark.notices(
    "an optimizer steps after detach()", where="Megatron", answer="raises on every rank, and says to attach again"
)
@pytest.mark.notices(
    "DistributedDataParallel or the optimizer is built outside of quantized_params(), or in another one",
    where="Megatron",
    answer="raises where it is built, and names `quantized_params()`",
)
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=SLOW)], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", [*(pytest.param(f, marks=SLOW) for f in ALL if f != MIXED), MIXED])
def test_right_bytes_or_an_error_before_any_changes(ranks: Ranks, formats: str, overlap: bool) -> None:
    for outcomes in ranks(2)(unattached.combinations, formats, overlap, timeout=300.0):
        assert set(outcomes) == set(unattached.COMBINATIONS)
        for key, outcome in outcomes.items():
            _, ddp, optimizer, state = key
            assert not outcome.changed and not outcome.stale, (key, outcome)
            if ddp != INSIDE or optimizer != INSIDE:
                assert "quantized_params()" in outcome.error, (key, outcome)
            else:
                expected = {NEVER: NOT_ATTACHED, DETACHED: WAS_DETACHED, ATTACHED: ""}[state]
                assert expected in outcome.error and bool(expected) == bool(outcome.error), (key, outcome)


@pytest.mark.notices(
    "a checkpoint is loaded into an optimizer that is not attached",
    where="Megatron",
    answer="raises on every rank, before anything is written",
)
@pytest.mark.parametrize("detached", [False, True], ids=["never attached", "detached"])
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=SLOW)], ids=["one", "two"])
def test_whatever_writes_raises_first(ranks: Ranks, tmp_path: Path, experts: bool, detached: bool) -> None:
    for found in ranks(2)(unattached.every_call, Case(MIXED, experts=experts), detached, str(tmp_path)):
        for name, (error, changed) in found.items():
            assert (WAS_DETACHED if detached else NOT_ATTACHED) in error, (name, error)
            assert not changed, (name, changed)


def test_every_method_of_the_host_that_writes_is_refused() -> None:
    """A method that reads the name of a copy of masters to parameters, in whichever release, is refused, or asks one that is."""
    base = host.module(host.OPTIMIZER_BASES)
    kind = host.module(host.OPTIMIZER).DistributedOptimizer
    copies = {
        "_copy_main_params_to_model_params",
        "_copy_main_params_to_param_buffer",
        "_copy_model_params_to_main_params",
    }

    class Bare(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            pass

    one = Bare()
    refuse(one)
    assert copies & set(dir(kind)) <= set(vars(one))
    for cls in (kind, base.MixedPrecisionOptimizer, base.MegatronOptimizer):
        for name, method in vars(cls).items():
            code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
            if code is not None and copies & set(code.co_names):
                assert name in vars(one), f"{cls.__name__}.{name} copies masters and goes on"


def test_what_is_torn_stays_torn_when_it_is_detached(ranks: Ranks) -> None:
    for detached, again, stale in ranks(2)(unattached.detached_torn, Case(NARROW)):
        assert all("an optimizer step failed partway" in error for error in detached + again), (detached, again)
        assert all("load a checkpoint" in error for error in again) and not stale


def test_one_of_two_optimizers(ranks: Ranks) -> None:
    for attached, step in ranks(2)(unattached.one_of_two, MIXED):
        assert "no optimizer that was given owns the quantized weights" in attached and NOT_ATTACHED in step
    assert ranks(2)(unattached.one_of_two, "half") == [("", "")] * 2


@pytest.mark.parametrize("formats", ALL)
def test_an_optimizer_of_torch_over_the_parameters(ranks: Ranks, formats: str) -> None:
    for error, changed in ranks(2)(unattached.torch_optimizer, Case(formats)):
        assert "QuantizedWeight" in error and not changed
