"""post_all_gather_processing: columnwise copies of TransformerEngine's tensors from their gathered rowwise codes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.columnwise import ColumnwiseCopies

from .adapters import is_quantized
from .entry import parts_of
from .twin import Twin, twin_of


@torch.no_grad()
def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise copies of one tensor or a list of them, where this GPU's products read any.

    A copy that is there is written again, where it lies. Plain tensors are passed over. TypeError or ValueError for tensors that
    are not cast, and for tensors on several devices; nothing is written then.
    """
    weights = list(model_weights) if isinstance(model_weights, (list, tuple)) else [model_weights]
    found = [pair for index, weight in enumerate(weights) for pair in _copied(index, weight)]
    devices = {twin.weight.device for _, twin in found}
    if len(devices) > 1:
        raise ValueError(f"the weights of one call lie on one device, got {sorted(map(str, devices))}")
    if not found:
        return
    copies = ColumnwiseCopies([twin.weight for _, twin in found], backends.choose(devices.pop()))
    copies.make()
    for tensor, twin in found:
        twin.hand_over_columnwise(tensor)
        twin.adapter.copied(tensor)


def _copied(index: int, weight: Any) -> Sequence[tuple[Any, Twin]]:
    """(tensor, twin) of what needs a copy of a weight."""
    if isinstance(weight, Tensor) and not is_quantized(weight):
        return []
    try:
        pairs = [(part, twin_of(part, weight.dtype)) for part in parts_of(weight)]
        found = [
            (p, twin) for p, twin in pairs if twin.derives and not twin.codes_in_transpose and twin.adapter.copies()
        ]
        for part, twin in found:
            twin.follow_columnwise(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"model weight {index}: {error}") from error
    return found
