"""Faults under FSDP2: a rank that cannot cast, a step on one rank only, a load that failed partway."""

import contextlib
import itertools
import sys
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net
from tests.observed import debug_mode
from tests.workers import error_of, on_ranks
from zerocast import VerificationError, fsdp2, verify
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.fsdp2.cast_group import CastGroup
from zerocast.fsdp2.manager import CastManager
from zerocast.fsdp2.plan import ShardPlan
from zerocast.weight import validity


def trained(formats: tuple[str, ...]) -> Any:
    """Return a model after two steps, with a third one's cast due, and its optimizer."""
    model = models.sharded(Net(formats, 64, 96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(3), 64)
    return model, optimizer


@on_ranks(2)
def test_a_first_scale_that_is_not_found() -> None:
    model, _ = trained((models.DELAYED, models.DELAYED))
    saved = {
        name: {key: value.clone() for key, value in state.items()}
        for name, state in zerocast.fsdp2.state_dict(model).items()
    }
    missing = next(iter(saved))
    with pytest.warns(UserWarning, match=missing):
        zerocast.fsdp2.load_state_dict(model, {name: state for name, state in saved.items() if name != missing})
    cast = CastGroup.cast

    def breaks_off(group: CastGroup, repeat: bool) -> None:
        cast(group, repeat)
        raise MemoryError

    with mock.patch.object(CastGroup, "cast", breaks_off), pytest.raises(MemoryError):
        zerocast.fsdp2.refresh(model)
    states = [group.delayed.state_dict() for group in models.manager(model).plan.cast_groups]
    held = {name: state for found in states for name, state in found.items() if name != missing}
    assert [
        f"{name} {key}"
        for name, state in held.items()
        for key in state
        if not torch.equal(state[key], saved[name][key])
    ] == []


def interrupted_cast(at: int) -> tuple[bool, list[Any], str]:
    """Press Ctrl-C at line number `at` of the functions that make a cast and count it, or as they enter or leave a context.

    Return whether there are so many lines, what the next forward pass gathers and that after another step, and the error of a
    backward pass whose forward pass came before the cast.
    """
    model = models.sharded(Net((models.DELAYED,), 64, 96))
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter, _ in models.masters(model).values()]

    def step() -> None:
        for optimizer in optimizers:
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = -parameter.detach()
            optimizer.step()
            optimizer.zero_grad()

    def gathered() -> list[Any]:
        return [value for _, weight in models.unsharded(model) for value in models.bytes_of(weight).values()]

    step()
    loss = model(models.batch(0, 64)).float().square().mean()
    step()
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code, caller = frame.f_code, frame.f_back
        is_context = code.co_filename == contextlib.__file__ and caller is not None and caller.f_code in CAST_CODE
        if (event == "line" or (event == "call" and is_context)) and next(lines) == at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace if code in CAST_CODE else None

    before = sys.gettrace()
    # Kept to the end with the frames of the cast, as a notebook keeps the last error.
    errors: list[KeyboardInterrupt] = []
    sys.settrace(trace)
    try:
        models.forward(model)
    except KeyboardInterrupt as error:
        errors.append(error)
    finally:
        sys.settrace(before)
    found, said = gathered(), error_of(loss.backward)
    step()
    return bool(errors), found + gathered(), said


def a_hook_raises(raises: bool) -> list[Any]:
    """Return what is gathered after three steps, the second of which had a hook that raised on one rank."""
    model = models.sharded(Net((models.DELAYED,), 64, 96), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for step in range(3):
        model(models.batch(step, 64)).float().square().mean().backward()
        if raises and step == 1 and dist.get_rank() == 1:
            handle = optimizer.register_step_post_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            handle.remove()
        else:
            optimizer.step()
        optimizer.zero_grad()
        models.forward(model)
        found += [value for _, weight in models.unsharded(model) for value in models.bytes_of(weight).values()]
    return found


@pytest.mark.notices(
    "a hook of the user that comes after a step raises, on some ranks or on all",
    where="FSDP2",
    answer="the step counts on all ranks: the next forward pass casts its masters",
)
@on_ranks(2)
def test_a_hook_of_the_user_raises_after_a_step() -> None:
    """The masters are those of the step, so delayed scaling takes it too, on all ranks."""
    assert all(map(np.array_equal, a_hook_raises(raises=True), a_hook_raises(raises=False)))


CAST_CODE = {
    function.__wrapped__.__code__ if hasattr(function, "__wrapped__") else function.__code__
    for function in (
        CastManager.cast,
        CastManager.finish_cast,
        ShardPlan.run,
        ShardPlan.done,
        ShardPlan._count_cast,
        validity.changed_together,
    )
}


@pytest.mark.notices(
    "Ctrl-C, or another exception, at any line of a cast",
    where="FSDP2",
    answer="the next forward pass casts again, and delayed scaling moves on once",
)
@on_ranks(1)
def test_a_cast_that_is_interrupted_is_made_once() -> None:
    """Delayed scaling moves on by one step, wherever Ctrl-C comes, and weights count as changed."""
    _, expected, refused = interrupted_cast(-1)
    assert "the weights changed" in refused
    for at in itertools.count():
        is_line, found, said = interrupted_cast(at)
        assert said == refused and all(map(np.array_equal, found, expected)), at
        if not is_line:
            break
    assert at > 20


@on_ranks(2)
@debug_mode()
def test_a_step_on_one_rank_in_debug_mode() -> None:
    model, optimizer = trained(("nvfp4",))
    models.complaints(model, "")  # casts
    if dist.get_rank() == 1:
        optimizer.step()
    said = error_of(lambda: models.forward(model, 3))
    assert "ranks make different calls: rank 0 gathers after cast" in said
    assert "rank 1 casts and gathers after cast" in said
    fsdp2.refresh(model)
    assert verify(model).ok


@on_ranks(2)
def test_an_optimizer_steps_after_another_has_failed_partway() -> None:
    """A step of the second optimizer does not complete the masters of the first."""
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96))
    named = dict(model.named_parameters())
    first, second = (FusedAdamW([p for name, p in named.items() if f"blocks.{i}" in name], lr=1e-2) for i in range(2))
    model(models.batch(0, 64)).float().square().mean().backward()
    is_culprit = dist.get_rank() == 1
    fails = mock.patch.object(ShardPlan, "after_step", side_effect=torch.OutOfMemoryError("injected"))
    with fails if is_culprit else contextlib.nullcontext():
        assert bool(error_of(first.step)) == is_culprit
    assert ("failed partway" in error_of(second.step)) == is_culprit
    assert "failed partway" in error_of(lambda: models.forward(model, 1))


@pytest.mark.parametrize("kind", ["AdamW", "FusedAdamW"])
@pytest.mark.parametrize("stepped", [0, 1])
@on_ranks(2)
def test_a_backward_pass_after_a_step_of_one_of_two_optimizers(kind: str, stepped: int) -> None:
    """All ranks refuse it: also one that has no row of the weight, and sees no write to it."""
    model = models.sharded(Net(("fp8_current", "fp8_current"), 64, 1))
    optimizers = [models.OPTIMIZERS[kind](block) for block in model.blocks]
    for _ in range(2):
        model(models.batch(0, 64)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    loss = model(models.batch(1, 64)).float().square().mean()
    optimizers[stepped].step()
    models.forward(model)
    assert "the weights changed between this forward pass and its backward pass" in error_of(loss.backward)


class SecondWrite(TorchDispatchMode):
    """A mode in which memory runs out after torch's AdamW has written the second parameter of a step."""

    written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.written += func is torch.ops.aten.addcdiv_.default
        if self.written == 2:
            raise torch.OutOfMemoryError("injected")
        return result


@pytest.mark.notices(
    "torch's optimizer raises within its step on one rank alone, and the loop goes on",
    where="FSDP2",
    answer="in debug mode all ranks raise at the next gather; else they wait there until the timeout of their group",
)
@on_ranks(2)
@debug_mode()
def test_torchs_step_that_raised_on_one_rank_in_debug_mode() -> None:
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    models.train(model, optimizer, range(2), 64)
    model(models.batch(2, 64)).float().square().mean().backward()
    raises = SecondWrite() if dist.get_rank() == 1 else contextlib.nullcontext()
    with contextlib.suppress(torch.OutOfMemoryError), raises:
        optimizer.step()
    for _ in range(2):
        said = error_of(lambda: model(models.batch(3, 64)))
        assert "ranks make different calls: rank 0 casts and gathers after cast" in said


def test_a_model_that_was_not_prepared_after_half_a_load() -> None:
    """A state with loaded moments and parameters that were not loaded cannot be saved."""
    model = torch.nn.Linear(8, 8)
    state = fsdp2.TrainingState(model, torch.optim.AdamW(model.parameters()))
    saved = state.state_dict()
    breaks_off = mock.patch.object(model, "load_state_dict", side_effect=torch.OutOfMemoryError("injected"))
    with breaks_off, pytest.raises(torch.OutOfMemoryError):
        state.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="loading a checkpoint failed partway"):
        state.state_dict()
    state.load_state_dict(saved)
    state.state_dict()


# -- masters that become NaN or Inf on one rank: all ranks are told at the next cast or look at the state, once


VALUES = (float("nan"), float("inf"), -float("inf"))
WHAT = ("gradient", "master")
THEN = ("another step", "an evaluation", "the state", "the state at once")
TOLD = f"InvalidWeights: the masters of {len(FEW)} weights were NaN or Inf in the last cast: blocks.0.1.weight, "


class Run:
    """A model with two weights of each format and its optimizer; the first weight of each block is poisoned."""

    def __init__(self, optimizer: str, keep_codes: bool) -> None:
        self.model = models.sharded(Net(FEW, 64, 96), keep_codes=keep_codes)
        self.optimizer = models.OPTIMIZERS[optimizer](self.model)
        self.state = TrainingState(self.model, self.optimizer)

    def forward(self) -> None:
        models.forward(self.model, 1)

    def step(self, what: str = "", value: float = 0.0, culprit: int = -1) -> None:
        """Take a step in which one element of a gradient or a master of one rank is `value`."""
        self.model(models.batch(0, 64)).float().square().mean().backward()
        for name, (parameter, _) in models.masters(self.model).items():
            if what and name.endswith(".1.weight") and dist.get_rank() == culprit:
                poisoned = parameter.grad if what == "gradient" else parameter
                with torch.no_grad():
                    poisoned.to_local()[-1, 3] = value
        self.optimizer.step()
        self.optimizer.zero_grad()

    def repair(self) -> None:
        """Make all masters finite again, and forget the moments."""
        with torch.no_grad():
            for parameter in models.held(self.model):
                parameter.to_local().nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.state.clear()
        fsdp2.refresh(self.model)

    def told(self, then: str) -> str:
        """Return the error of the call that follows a step with a master that is not finite."""
        if then == "the state at once":
            return error_of(self.state.state_dict)
        if then == "the state":
            self.model(models.batch(0, 64))  # gathers
            return error_of(self.state.state_dict)
        if then == "another step":
            self.step()
        return error_of(self.forward)


@pytest.mark.notices(
    "a master becomes NaN or Inf, by its gradient or by hand",
    where="FSDP2",
    answer="the next cast, evaluation or read of the state raises on all ranks",
)
@pytest.mark.parametrize(
    ("optimizer", "keep_codes"),
    [
        ("AdamW", False),
        models.slow("FusedAdamW", False),
        ("FusedAdamW", True),
        models.slow("8-bit moments", False),
        models.slow("8-bit moments", True),
    ],
)
@on_ranks(2)
def test_all_ranks_are_told(optimizer: str, keep_codes: bool) -> None:
    """All ranks are told of each case once."""
    run = Run(optimizer, keep_codes)
    run.step()
    for number, (what, then) in enumerate(itertools.product(WHAT, THEN)):
        value = VALUES[number % len(VALUES)]
        run.step(what, value, 1)
        said = run.told(then)
        again = "" if then == "another step" else error_of(run.forward)  # of the same cast
        run.repair()
        again += error_of(run.forward)
        assert said.startswith(TOLD), (what, value, then)
        assert again == "", (what, value, then)


@on_ranks(2)
def test_a_load_and_verify_go_on() -> None:
    """A load repairs the state, and `verify` counts it. Neither is refused."""
    run = Run("FusedAdamW", keep_codes=False)
    run.step()
    saved = {name: p.detach().full_tensor() for name, p in run.model.named_parameters()}
    run.step("master", VALUES[0], 1)
    report = verify(run.model, allow_nonfinite=True)
    run.step()
    state = run.state.state_to_overwrite()
    state["model"] = saved
    for moments in state["optim"]["state"].values():
        for moment in moments.values():
            getattr(moment, "_local_tensor", moment).nan_to_num_(0.0)
    loaded = error_of(lambda: run.state.load_state_dict(state))
    assert (loaded, report.ok, len(report.not_finite), [error_of(run.forward), error_of(run.step)]) == (
        "",
        True,
        len(FEW),
        ["", ""],
    )


# -- zerocast.verify every so many steps. What it finds: tests/hosts/test_verify.py


def kept_codes(model: Any, weight: Any) -> torch.Tensor:
    """Return the codes that this rank keeps of a weight and sends."""
    (group,) = models.manager(model).plan.cast_groups
    return group.kept_codes(weight.name).view(-1)


def _break_the_cast(model: Any) -> None:
    _, weight = models.masters(model)["blocks.1.3.weight"]
    plan = models.manager(model).plan
    launch = plan.launch

    def broken(**options: Any) -> None:
        launch(**options)
        kept_codes(model, weight)[0] ^= 1

    plan.launch = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 0, 0, 1, 1, 1]), (2, [0, 0, 0, 1, 0, 1])])
@on_ranks(2)
def test_verify_every(every: int, wanted: list[int]) -> None:
    net = Net(("nvfp4", models.DELAYED), 64, 96)
    model = models.sharded(net, prepared={"verify_every": every}, keep_codes=True)
    optimizer, raised = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            _break_the_cast(model)
        try:
            models.train(model, optimizer, range(step, step + 1), 64)
        except VerificationError as error:
            raised.append("blocks.1.3.weight" in str(error))
            models.train(model, optimizer, range(step, step + 1), 64)  # says it once a cast
        else:
            raised.append(False)
    assert raised == [bool(value) for value in wanted]


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="verify_every is None or at least 1, got 0"):
        zerocast.fsdp2.prepare(nn.Linear(32, 32), zerocast.Recipe({"weight": "nvfp4"}), verify_every=0)
