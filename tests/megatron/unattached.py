"""What becomes of quantized weights in the host where nothing of zerocast's casts them, on the ranks of a pool."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import zerocast
from tests import casts
from tests.megatron import training
from tests.megatron.attached import METADATA, Attached
from tests.megatron.ranks_host import host
from tests.megatron.training import FORMATS, Case, Run, build, build_optimizer
from tests.workers import error_of
from zerocast import QuantizedWeight
from zerocast.integrations import megatron as integration

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


def detached_torn(case: Case) -> tuple[list[str], list[str], list[str]]:
    """After a step that failed partway: what goes on when it is detached, when it is attached again, and after a load."""
    with host():
        attached = Attached(case)
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
        detached = [error_of(call) for call in calls]
        attached.attachment = integration.attach(attached.run.optimizer, attached.run.ddp)
        again = [error_of(call) for call in (*calls, attached.attachment.refresh)]
        attached.load(state)
        attached.run.step(1)
        return detached, again, list(attached.run.stale_bytes())


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


def torch_optimizer(case: Case) -> tuple[str, tuple[str, ...]]:
    """torch's AdamW over the parameters, given gradients by hand as without it."""
    with host():
        with integration.quantized_params():
            run = build(case)
        run.forward_and_backward(0)
        for param in run.ddp.parameters():
            param.grad = param.main_grad.to(param.dtype)
        quantized = [param for param in run.ddp.parameters() if isinstance(param, QuantizedWeight)]
        before = _bytes(run.ddp)
        error = error_of(lambda: torch.optim.AdamW(quantized).step())
        return error, _different(before, _bytes(run.ddp))
