"""Under FSDP2: a rank that cannot cast, steps on one rank alone, a load that broke off."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import FORMATS, Net
from tests.workers import Ranks, error_of
from zerocast import fsdp2, verify
from zerocast.fsdp2.cast_group import CastGroup


def trained(formats: tuple[str, ...] = FORMATS) -> Any:
    """A model after two steps, with a third one's cast due, and its optimizer."""
    model = models.sharded(Net(formats, 64, 96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(3), 64)
    return model, optimizer


def weight_bytes(model: Any) -> casts.Bytes:
    """The bytes of all gathered weights, by weight and buffer."""
    return {f"{name} {key}": raw for name, w in models.unsharded(model) for key, raw in models.bytes_of(w).items()}


def written(model: Any) -> None:
    """Cast, and then every master is written to."""
    weight_bytes(model)
    for parameter in models.held(model):
        parameter.data.mul_(1.5)


def begun_halfway() -> list[str]:
    """What delayed scaling has lost of weights with a saved state, where the first scale of another weight could not be found."""
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
    return [
        f"{name} {key}"
        for name, state in held.items()
        for key in state
        if not torch.equal(state[key], saved[name][key])
    ]


def test_a_first_scale_that_is_not_found(ranks: Ranks) -> None:
    assert ranks(2)(begun_halfway) == [[], []]


def steps_alone() -> tuple[str, bool]:
    """In debug mode, after an optimizer step on rank 1 only: what a forward pass says; and whether all go on after a refresh."""
    zerocast.set_debug(True)
    try:
        model, optimizer = trained(("nvfp4",))
        models.complaints(model, "")  # casts
        if dist.get_rank() == 1:
            optimizer.step()
        with pytest.raises(RuntimeError) as caught, torch.no_grad():
            model(models.batch(3, 64))
    finally:
        zerocast.set_debug(False)
    return str(caught.value), _is_there(model)


def _is_there(model: Any) -> bool:
    fsdp2.refresh(model)
    return verify(model).ok


def test_a_step_on_one_rank_in_debug_mode(ranks: Ranks) -> None:
    for said, together in ranks(2)(steps_alone):
        assert "ranks make different calls: rank 0 gathers after cast" in said
        assert "rank 1 casts and gathers after cast" in said
        assert together


class SecondWrite(TorchDispatchMode):
    """Memory runs out once the second parameter of a step of torch's AdamW was written."""

    written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.written += func is torch.ops.aten.addcdiv_.default
        if self.written == 2:
            raise torch.OutOfMemoryError("injected")
        return result


def raised_within_torch() -> list[str]:
    """In debug mode, what two forward passes say after a step of torch's AdamW that raised on rank 1 alone."""
    zerocast.set_debug(True)
    try:
        model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        models.train(model, optimizer, range(2), 64)
        model(models.batch(2, 64)).float().square().mean().backward()
        raises = SecondWrite() if dist.get_rank() == 1 else contextlib.nullcontext()
        with contextlib.suppress(torch.OutOfMemoryError), raises:
            optimizer.step()
        return [error_of(lambda: model(models.batch(3, 64))) for _ in range(2)]
    finally:
        zerocast.set_debug(False)


@pytest.mark.notices(
    "torch's optimizer raises on one rank alone, within its step, and the loop catches that and goes on",
    where="FSDP2",
    answer="in debug mode all ranks raise at the next gather; else they wait there for the timeout of their group",
)
def test_torchs_step_that_raised_on_one_rank_in_debug_mode(ranks: Ranks) -> None:
    for texts in ranks(2)(raised_within_torch):
        assert all("ranks make different calls: rank 0 casts and gathers after cast" in text for text in texts), texts


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
