"""No step without an attachment: an optimizer over quantized weights has the right bytes, or raises before any byte changes."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zerocast
from tests import casts
from tests.megatron import training
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import ALL, FORMATS, METADATA, MIXED, NARROW, Attached, Case, Run, build, build_optimizer
from tests.workers import error_of, on_ranks
from zerocast import QuantizedWeight
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron.unattached import refuse

INSIDE, ANOTHER, OUTSIDE = "inside quantized_params()", "inside another quantized_params()", "outside"
NEVER, ATTACHED, DETACHED = "never attached", "attached", "detached"
NOT_ATTACHED = "is not attached: Megatron's own copy would write over the codes of its quantized weights. Call attach("
WAS_DETACHED = "was detached: nothing casts its masters, and Megatron's own copy would write over the codes"


def _bytes(model: Any) -> casts.Bytes:
    held = {name: param for name, param in model.named_parameters() if isinstance(param, QuantizedWeight)}
    return {f"{n}.{key}": value.copy() for n, weight in held.items() for key, value in casts.bytes_of(weight).items()}


class _Blocks(contextlib.ExitStack):
    """Enters and leaves `quantized_params()` as what is built next asks for."""

    place = OUTSIDE

    def go(self, place: str) -> None:
        if place == ANOTHER or place != self.place:
            self.close()
            if place != OUTSIDE:
                self.enter_context(integration.quantized_params())
        self.place = INSIDE if place == ANOTHER else place


def check_combination(model: str, ddp: str, optimizer: str, state: str, case: Case) -> None:
    """A model is quantized, wrapped, and given an optimizer at these places; then it takes two steps in this state."""
    torch.manual_seed(7)
    config = training.configuration()
    module: Any = training.Model(config)
    quantized: casts.Bytes = {}
    built: list[Run] = []

    def build_all() -> None:
        blocks.go(model)
        zerocast.quantize_(module, zerocast.Recipe(FORMATS[case.formats]))
        quantized.update(_bytes(module))
        blocks.go(ddp)
        wrapped = training.wrap(case, config, module)
        blocks.go(optimizer)
        built.append(Run(wrapped, build_optimizer(case, [wrapped]), case))

    with _Blocks() as blocks:
        refusal = error_of(build_all)
    if ddp != INSIDE or optimizer != INSIDE:
        assert "quantized_params()" in refusal
        casts.assert_same_bytes(_bytes(module), quantized)
        return
    (run,) = built
    attachment = None if state == NEVER else integration.attach(run.optimizer, run.ddp)
    if attachment is not None:
        run.step(0)
    if attachment is not None and state == DETACHED:
        attachment.detach()
    run.forward_and_backward(1)
    before = _bytes(module)
    error = error_of(run.optimizer.step)
    expected = {NEVER: NOT_ATTACHED, DETACHED: WAS_DETACHED, ATTACHED: ""}[state]
    assert expected in error and bool(expected) == bool(error)
    if error:
        casts.assert_same_bytes(_bytes(module), before)
    if case.overlap:
        run.force_sync()
    assert not run.stale_bytes()


def _calls(run: Run, state: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """Whatever of a run and its optimizers would write parameters or masters, or load."""
    own = run.optimizer.chained_optimizers[0]
    model = run.ddp.module.sharded_state_dict(metadata=METADATA)
    name = "prepare_model_params_for_param_sync"  # which a chain has since 0.19
    return {
        "step": run.optimizer.step,
        "step_with_ready_grads": run.optimizer.step_with_ready_grads,
        "prepare_grads": run.optimizer.prepare_grads,
        "reload_model_params": run.optimizer.reload_model_params,
        "load_state_dict": lambda: run.optimizer.load_state_dict(state),
        "load_parameter_state": lambda: run.optimizer.load_parameter_state(folder),
        "what a load fills": lambda: run.optimizer.sharded_state_dict(model, is_loading=True, metadata=METADATA),
        **({name: getattr(run.optimizer, name)} if hasattr(run.optimizer, name) else {}),
        "inner step": own.step,
        "inner step_with_ready_grads": own.step_with_ready_grads,
        "inner load_state_dict": lambda: own.load_state_dict(state),
        "inner reload_model_params": own.reload_model_params,
        "copy": own._copy_main_params_to_model_params,
        "copy to the buffer": own._copy_main_params_to_param_buffer,
        "read": own._copy_model_params_to_main_params,
        "a chain of one's own": lambda: type(run.optimizer)([own]).step(),
    }


@on_ranks(2)
@host()
def test_what_is_torn_stays_torn_when_it_is_detached() -> None:
    """A step failed partway: that lasts when it is attached again as well, until a load."""
    attached = Attached(Case(NARROW))
    attached.run.step(0)
    state = attached.saved()
    attached.run.forward_and_backward(1)
    own = attached.own[0]

    def dies() -> None:
        raise torch.OutOfMemoryError("injected")

    with mock.patch.object(own.optimizer, "step", dies), contextlib.suppress(torch.OutOfMemoryError):
        attached.run.optimizer.step()
    weight = next(iter(attached.run.weights.values()))
    attached.attachment.detach()
    calls = (attached.run.optimizer.step, attached.run.optimizer.state_dict, own.state_dict, weight.dequantize)
    assert all("an optimizer step failed partway" in error_of(call) for call in calls)
    attached.attachment = integration.attach(attached.run.optimizer, attached.run.ddp)
    for call in (*calls, attached.attachment.refresh):
        said = error_of(call)
        assert "an optimizer step failed partway" in said
        assert "load a checkpoint" in said
    attached.load(state)
    attached.run.step(1)
    assert not attached.run.stale_bytes()


pytestmark = needs_megatron
SLOW = pytest.mark.slow


@on_ranks(2, timeout=300.0)
@pytest.mark.notices(
    "an optimizer that was built in quantized_params() steps or loads before attach or after detach()",
    where="Megatron",
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.notices(
    "DistributedDataParallel or the optimizer is built outside of quantized_params(), or in another one",
    where="Megatron",
    answer="raises where it is built",
)
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=SLOW)], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", [*(pytest.param(f, marks=SLOW) for f in ALL if f != MIXED), MIXED])
def test_right_bytes_or_an_error_before_any_changes(formats: str, overlap: bool) -> None:
    """A model, its wrapper and its optimizer are built at every combination of places."""
    inside_or_out = (INSIDE, OUTSIDE)
    states = (NEVER, ATTACHED, DETACHED)
    with host():
        for places in itertools.product(inside_or_out, inside_or_out, (INSIDE, ANOTHER, OUTSIDE), states):
            check_combination(*places, Case(formats, overlap))


@on_ranks(2)
@pytest.mark.notices(
    "an optimizer that was built in quantized_params() steps or loads before attach or after detach()",
    where="Megatron",
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize("detached", [False, True], ids=["never attached", "detached"])
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=SLOW)], ids=["one", "two"])
def test_whatever_writes_raises_first(tmp_path: Path, experts: bool, detached: bool) -> None:
    case = Case(MIXED, experts=experts)
    with host():
        attached = Attached(case)
        attached.run.step(0)
        state = attached.saved()
        if detached:
            attached.attachment.detach()
        else:
            with integration.quantized_params():
                attached.run = build(case)
            attached.own = attached.run.optimizer.chained_optimizers
        attached.run.forward_and_backward(1)
        before = attached.everything()
        for name, call in _calls(attached.run, state, str(tmp_path)).items():
            assert (WAS_DETACHED if detached else NOT_ATTACHED) in error_of(call), name
            after = attached.everything()
            assert after.keys() == before.keys(), name
            casts.assert_same_bytes(after, before, name)
        assert not attached.run.stale_bytes()


def test_every_method_of_the_host_that_writes_is_refused() -> None:
    """A method that reads the name of a copy of masters to parameters, in whichever release, is refused, or asks one that is."""
    base = megatron_names.module(megatron_names.OPTIMIZER_BASES)
    kind = megatron_names.module(megatron_names.OPTIMIZER).DistributedOptimizer
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


@on_ranks(2)
@pytest.mark.parametrize(("formats", "second_is_quantized"), [(MIXED, True), ("half", False)])
@host()
def test_one_of_two_optimizers_is_attached(formats: str, second_is_quantized: bool) -> None:
    with integration.quantized_params():
        run = build(Case(formats, experts=True))
    said = error_of(lambda: integration.attach(run.optimizer.chained_optimizers[0], run.ddp))
    run.forward_and_backward(0)
    before = _bytes(run.ddp)
    if second_is_quantized:
        assert "no optimizer that was given owns the quantized weights" in said
        assert NOT_ATTACHED in error_of(run.optimizer.step)
        casts.assert_same_bytes(_bytes(run.ddp), before)
    else:
        assert not said
        run.optimizer.step()
    assert not run.stale_bytes()
