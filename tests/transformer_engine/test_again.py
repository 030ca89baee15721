"""A call of a list that was called before does the same again at once, unless anything has changed: then it sees that."""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests import casts
from tests.transformer_engine.host_on_cpu import integration, needs_te
from tests.transformer_engine.tensors import TILES, Casting, bytes_of, quantizer, weights_of
from zerocast import get_format

pytestmark = [needs_te, pytest.mark.usefixtures("te")]

FORMATS = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "identity", TILES)
PER_BLOCK = ("fp8_block", "mxfp8", "nvfp4", TILES)
OLD_MEMORY: list[Tensor] = []


class Loop:
    """A list of tensors, one a format, with masters that stay where they are."""

    def __init__(self, *formats: str) -> None:
        self.cases = weights_of(*formats or FORMATS)
        self.tensors: list[Any] = Casting(self.cases, columnwise=True).tensors
        self.masters = [case.master().reshape(-1).clone() for case in self.cases]

    def step(self, step: int) -> None:
        """Other values in the same masters, cast, transposed."""
        for case, master in zip(self.cases, self.masters, strict=True):
            master.copy_(case.master(step).reshape(-1)[: master.numel()])
        starts = [0] * len(self.cases)
        integration().quantize_master_weights(self.tensors, self.masters, starts, None, None, True)
        integration().post_all_gather_processing(self.tensors)

    def of_format(self, fmt: str) -> Any:
        """The tensor of a format."""
        return self.tensors[[case.fmt for case in self.cases].index(fmt)]

    def check(self, other: "Loop") -> None:
        """The same bytes, and copies that the host takes for valid."""
        for case, mine, theirs in zip(self.cases, self.tensors, other.tensors, strict=True):
            casts.assert_same_bytes(bytes_of(mine), bytes_of(theirs), case.fmt)
            assert getattr(mine, "_transpose_invalid", False) is False
        nvfp4 = self.of_format("nvfp4")
        assert torch.equal(nvfp4._amax_columnwise, nvfp4._amax_rowwise)


def fresh(steps: int) -> Loop:
    """The same steps with nothing kept from one to the next."""
    loop = Loop()
    for step in range(steps):
        integration().release(loop.tensors)
        loop.step(step)
    return loop


def _move_in_place(buffer: Tensor) -> None:
    """Move a tensor object to new memory. The old memory stays referenced, so that it is not
    allocated again.
    """
    OLD_MEMORY.append(buffer.detach().view(buffer.shape))
    buffer.data = buffer.detach().clone()


def rowwise_replaced(loop: Loop) -> None:
    for fmt in FORMATS:
        if fmt != "mxfp8":
            one = loop.of_format(fmt)
            old = next(getattr(one, name) for name in ("_data", "_rowwise_data", "_hp_data") if hasattr(one, name))
            integration().replace_raw_data(one, torch.zeros_like(old))


def rowwise_moved_in_place(loop: Loop) -> None:
    for fmt in PER_BLOCK:
        _move_in_place(loop.of_format(fmt)._rowwise_data)
        _move_in_place(loop.of_format(fmt)._rowwise_scale_inv)


def columnwise_moved_in_place(loop: Loop) -> None:
    for fmt in PER_BLOCK:
        _move_in_place(loop.of_format(fmt)._columnwise_data)
        _move_in_place(loop.of_format(fmt)._columnwise_scale_inv)


def copies_dropped(loop: Loop) -> None:
    for fmt in ("fp8_current", "fp8_delayed", "fp8_block", "nvfp4", TILES):
        loop.of_format(fmt).update_usage(rowwise_usage=True, columnwise_usage=False)


def copies_replaced(loop: Loop) -> None:
    for fmt in ("fp8_current", "fp8_delayed"):
        loop.of_format(fmt)._transpose = torch.zeros_like(loop.of_format(fmt)._transpose)
    loop.of_format(TILES)._columnwise_data = torch.zeros_like(loop.of_format(TILES)._columnwise_data)


def copies_marked_invalid(loop: Loop) -> None:
    for fmt in ("fp8_current", "fp8_delayed"):
        loop.of_format(fmt)._transpose_invalid = True


def columnwise_amax_dropped(loop: Loop) -> None:
    loop.of_format("nvfp4")._amax_columnwise = None


def scaling_state_replaced(loop: Loop) -> None:
    delayed = loop.of_format("fp8_delayed")._quantizer
    delayed.amax, delayed.scale = delayed.amax.clone(), delayed.scale.clone()


def a_quantizer_replaced(loop: Loop) -> None:
    loop.of_format("fp8_block")._quantizer = quantizer(get_format("fp8_block"))


def masters_replaced(loop: Loop) -> None:
    loop.masters[:] = [master.clone() for master in loop.masters]


def masters_moved_in_place(loop: Loop) -> None:
    for master in loop.masters:
        _move_in_place(master)


CHANGES: tuple[Callable[[Loop], None], ...] = (
    lambda loop: None,
    rowwise_replaced,
    rowwise_moved_in_place,
    columnwise_moved_in_place,
    copies_dropped,
    copies_replaced,
    copies_marked_invalid,
    columnwise_amax_dropped,
    scaling_state_replaced,
    a_quantizer_replaced,
    masters_replaced,
    masters_moved_in_place,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("<>"))
def test_what_changed_between_calls_is_seen(change: Callable[[Loop], None]) -> None:
    loop = Loop()
    for step in range(2):
        loop.step(step)
    change(loop)
    for step in range(2, 4):  # once where it is seen, once where it is what was seen before
        loop.step(step)
    loop.check(fresh(4))


def test_nothing_is_looked_at_again_where_nothing_changed() -> None:
    """Neither call looks at a tensor a second time in the way it looks at a new one."""
    module = "zerocast.integrations.transformer_engine"
    loop = Loop()
    loop.step(0)
    with (
        mock.patch(f"{module}.master_weights.entries_of", side_effect=AssertionError),
        mock.patch(f"{module}.transposes.view_of", side_effect=AssertionError),
    ):
        loop.step(1)
    loop.check(fresh(2))


def test_another_list_that_begins_alike() -> None:
    """A plain tensor among the others, tensors less, another order: the copies made are those of the tensors that are given."""
    loop = Loop()
    loop.step(0)
    copies = dict.fromkeys(("fp8_delayed", "fp8_current"), "_transpose")
    copies |= dict.fromkeys(("fp8_block", "nvfp4"), "_columnwise_data")
    made = {fmt: getattr(loop.of_format(fmt), name).clone() for fmt, name in copies.items()}
    first, *others = loop.tensors
    mxfp8, nvfp4, identity = (loop.of_format(fmt) for fmt in ("mxfp8", "nvfp4", "identity"))
    for tensors in (
        loop.tensors,
        [first, torch.zeros(2), *others],
        [first, *others[:2]],
        [first, *others[::-1]],
        [mxfp8, identity],
        [mxfp8, nvfp4],
    ):
        for _ in range(2):
            for fmt, name in copies.items():
                getattr(loop.of_format(fmt), name).fill_(7)
            integration().post_all_gather_processing(tensors)
            for fmt, name in copies.items():
                given = any(tensor is loop.of_format(fmt) for tensor in tensors)
                assert torch.equal(getattr(loop.of_format(fmt), name), made[fmt]) is given, fmt


def test_masters_of_other_elements_at_the_same_place() -> None:
    """A master that is cut at its end lies where it lay: one process builds its plan anew, and the rest stays as it was."""
    loop = Loop("fp8_block")
    for step in range(2):
        loop.step(step)
    before, whole = loop.tensors[0]._rowwise_data.clone(), loop.masters[0].data
    whole[128 * 3 :] = 1e4  # what nobody owns any more
    loop.masters[0].data = loop.masters[0].data[: 128 * 3]
    loop.step(2)
    after = loop.tensors[0]._rowwise_data.view(-1)
    assert torch.equal(after[128 * 3 :], before.view(-1)[128 * 3 :])
    assert not torch.equal(after[: 128 * 3], before.view(-1)[: 128 * 3])


def test_nothing_of_a_list_is_kept_alive() -> None:
    """Its masters go with `release`, its tensors with their last owner."""
    loop = Loop()
    for step in range(2):
        loop.step(step)
    masters = [StorageWeakRef(master.untyped_storage()) for master in loop.masters]
    loop.masters.clear()
    assert not any(master.expired() for master in masters)
    integration().release(loop.tensors)
    gc.collect()
    assert all(master.expired() for master in masters)
    tensors = [weakref.ref(tensor) for tensor in loop.tensors]
    del loop
    gc.collect()
    assert not any(reference() is not None for reference in tensors)
