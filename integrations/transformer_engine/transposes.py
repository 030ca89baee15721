"""post_all_gather_processing: columnwise copies of TransformerEngine's tensors from their gathered rowwise codes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast import backends
from zerocast.columnwise import ColumnwiseCopies

from .adapters import is_quantized
from .entry import parts_of
from .twin import Twin, twin_of

_Kept = tuple[list[Twin], ColumnwiseCopies]
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the first tensor of a list: tables of where everything lies


@torch.no_grad()
def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise copies of one tensor or a list of them, where this GPU's products read any.

    A copy that is there is written again, where it lies. Plain tensors are passed over. TypeError or ValueError for tensors that
    are not cast, and for tensors on several devices; nothing is written then.
    """
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    found = list(_copied(weights))
    devices = {twin.weight.device for _, twin in found}
    if len(devices) > 1:
        raise ValueError(f"the weights of one call lie on one device, got {sorted(map(str, devices))}")
    if not found:
        return
    _copies_of(found, devices.pop()).make()
    for tensor, twin in found:
        twin.hand_over_columnwise(tensor)
        twin.adapter.copied(tensor)


def forget_copies() -> None:
    """Hold on to no columnwise copy that a tensor may have dropped."""
    _kept.clear()


def _copies_of(found: list[tuple[Any, Twin]], device: torch.device) -> ColumnwiseCopies:
    twins = [twin for _, twin in found]
    before: _Kept | None = _kept.get(found[0][0])
    if before is None or len(before[0]) != len(twins) or any(a is not b for a, b in zip(before[0], twins, strict=True)):
        before = _kept[found[0][0]] = twins, ColumnwiseCopies([twin.weight for twin in twins], backends.choose(device))
    return before[1]


def _copied(weights: Any) -> Iterator[tuple[Any, Twin]]:
    """(tensor, twin) of what needs a copy."""
    needed: dict[int, bool] = {}  # by adapter
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor) and not is_quantized(weight):
            continue
        try:
            for part in parts_of(weight):
                twin = twin_of(part, weight.dtype)
                key = id(twin.adapter)
                if key not in needed:
                    needed[key] = twin.adapter.copies()
                if needed[key] and twin.derives and not twin.codes_in_transpose:
                    twin.follow_columnwise(part)
                    yield part, twin
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"model weight {index}: {error}") from error
