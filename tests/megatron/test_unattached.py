"""No step without an attachment: an optimizer over quantized weights has the right bytes, or raises before any byte changes."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests import casts
from tests.megatron import training
from tests.megatron.attached import METADATA, Attached
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import ALL, FORMATS, MIXED, NARROW, Case, Run, build, build_optimizer
from tests.workers import Ranks, error_of, on_ranks
from zerocast import QuantizedWeight
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron.unattached import refuse

INSIDE, ANOTHER, OUTSIDE = "inside quantized_params()", "inside another quantized_params()", "outside"
NEVER, ATTACHED, DETACHED = "never attached", "attached", "detached"
COMBINATIONS = list(
    itertools.product((INSIDE, OUTSIDE), (INSIDE, OUTSIDE), (INSIDE, ANOTHER, OUTSIDE), (NEVER, ATTACHED, DETACHED))
)


@dataclass
class Outcome:
    """The first error, if any; what has changed from before the call that raised it; stale bytes in the end."""

    error: str = ""
    changed: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()


def _bytes(model: Any) -> casts.Bytes:
    held = {name: param for name, param in model.named_parameters() if isinstance(param, QuantizedWeight)}
    return {f"{n}.{key}": value.copy() for n, weight in held.items() for key, value in casts.bytes_of(weight).items()}


def _different(before: casts.Bytes, after: casts.Bytes) -> tuple[str, ...]:
    return tuple(name for name in before.keys() | after.keys() if not (before.get(name) == after.get(name)).all())


class _Blocks(contextlib.ExitStack):
    """Enters and leaves `quantized_params()` as what is built next asks for."""

    place = OUTSIDE

    def go(self, place: str) -> None:
        if place == ANOTHER or place != self.place:
            self.close()
            if place != OUTSIDE:
                self.enter_context(integration.quantized_params())
        self.place = INSIDE if place == ANOTHER else place


def combination(model: str, ddp: str, optimizer: str, state: str, case: Case) -> Outcome:
    """A model quantized, wrapped, and given an optimizer at these places; then two steps in this state."""
    torch.manual_seed(7)
    config = training.configuration()
    module: Any = training.Model(config)
    with _Blocks() as blocks:
        before: casts.Bytes = {}
        try:
            blocks.go(model)
            zerocast.quantize_(module, zerocast.Recipe(FORMATS[case.formats]))
            before = _bytes(module)
            blocks.go(ddp)
            wrapped = training.wrap(case, config, module)
            blocks.go(optimizer)
            run = Run(wrapped, build_optimizer(case, [wrapped]), case)
        except (RuntimeError, ValueError) as error:
            return Outcome(f"{type(error).__name__}: {error}", _different(before, _bytes(module)))
    attachment = None if state == NEVER else integration.attach(run.optimizer, wrapped)
    if attachment is not None:
        run.step(0)
    if attachment is not None and state == DETACHED:
        attachment.detach()
    run.forward_and_backward(1)
    before = _bytes(module)
    error = error_of(run.optimizer.step)
    changed = _different(before, _bytes(module)) if error else ()
    if case.overlap:
        run.force_sync()
    return Outcome(error, changed, tuple(run.stale_bytes()))


def combinations(formats: str, overlap: bool) -> dict[tuple[str, ...], Outcome]:
    with host():
        return {key: combination(*key, Case(formats, overlap)) for key in COMBINATIONS}


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


def every_call(case: Case, detached: bool, folder: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """What each such call says, and what of masters, moments and bytes it has changed."""
    with host():
        attached = Attached(case)
        attached.run.step(0)
        state = attached.saved()
        if not detached:
            with integration.quantized_params():
                run = build(case)
            attached = Attached.__new__(Attached)
            attached.run, attached.own = run, run.optimizer.chained_optimizers
        else:
            attached.attachment.detach()
        run = attached.run
        run.forward_and_backward(1)
        found, before = {}, attached.everything()
        for name, call in _calls(run, state, folder).items():
            error, after = error_of(call), attached.everything()
            found[name] = error, tuple(n for n in before.keys() | after.keys() if not _same(before, after, n))
        assert not run.stale_bytes()
        return found


def _same(before: casts.Bytes, after: casts.Bytes, name: str) -> bool:
    return name in before and name in after and bool((before[name] == after[name]).all())


@on_ranks(2)
def test_what_is_torn_stays_torn_when_it_is_detached() -> None:
    """After a step that failed partway, when it is attached again as well; until a load."""
    with host():
        attached = Attached(Case(NARROW))
        attached.run.step(0)
        state = attached.saved()
        attached.run.forward_and_backward(1)
        own = attached.own[0]

        def dies() -> None:
            raise torch.OutOfMemoryError("injected")

        inner, own.optimizer.step = own.optimizer.step, dies
        with contextlib.suppress(torch.OutOfMemoryError):
            attached.run.optimizer.step()
        own.optimizer.step = inner
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


def one_of_two(formats: str) -> tuple[str, str]:
    """Just one of two optimizers of a chain is attached: what that says, and a step of the chain."""
    with host():
        with integration.quantized_params():
            run = build(Case(formats, experts=True))
        dense, _ = run.optimizer.chained_optimizers
        error = error_of(lambda: integration.attach(dense, run.ddp))
        run.forward_and_backward(0)
        before = _bytes(run.ddp)
        step = error_of(run.optimizer.step)
        assert not step or not _different(before, _bytes(run.ddp))
        assert not run.stale_bytes(), run.stale_bytes()
        return error, step


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
    for outcomes in ranks(2)(combinations, formats, overlap, timeout=300.0):
        assert set(outcomes) == set(COMBINATIONS)
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
    for found in ranks(2)(every_call, Case(MIXED, experts=experts), detached, str(tmp_path)):
        for name, (error, changed) in found.items():
            assert (WAS_DETACHED if detached else NOT_ATTACHED) in error, (name, error)
            assert not changed, (name, changed)


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


def test_one_of_two_optimizers(ranks: Ranks) -> None:
    for attached, step in ranks(2)(one_of_two, MIXED):
        assert "no optimizer that was given owns the quantized weights" in attached and NOT_ATTACHED in step
    assert ranks(2)(one_of_two, "half") == [("", "")] * 2
