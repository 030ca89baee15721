"""Under FSDP2: a rank that cannot cast, steps on one rank alone, a load that broke off."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.observed import debug_mode
from tests.workers import error_of, on_ranks
from zerocast import fsdp2, verify
from zerocast.fsdp2 import FusedAdamW
from zerocast.fsdp2.cast_group import CastGroup
from zerocast.fsdp2.plan import ShardPlan


def trained(formats: tuple[str, ...]) -> Any:
    """A model after two steps, with a third one's cast due, and its optimizer."""
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
    """Its step does not complete the masters of the other one."""
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


class SecondWrite(TorchDispatchMode):
    """Memory runs out once the second parameter of a step of torch's AdamW was written."""

    written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.written += func is torch.ops.aten.addcdiv_.default
        if self.written == 2:
            raise torch.OutOfMemoryError("injected")
        return result


@pytest.mark.notices(
    "torch's optimizer raises on one rank alone, within its step, and the loop catches that and goes on",
    where="FSDP2",
    answer="in debug mode all ranks raise at the next gather; else they wait there for the timeout of their group",
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
    """Moments that were loaded and parameters that were not are no state to save."""
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
