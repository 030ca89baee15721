"""replace_raw_data: move the rowwise codes of a tensor into the caller's storage."""

from typing import Any

import torch
from torch import Tensor

from zerocast.formats import Columnwise

from .adapters import adapter_of, quantizer_of
from .entry import directions, is_hybrid


@torch.no_grad()
def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Copy a tensor's rowwise codes into `new_raw_data`, which becomes the tensor's buffer.

    `new_raw_data` may be a part of a flat buffer. Of a Hybrid tensor the rowwise direction is
    moved. MXFP8 in tiles of 32x32 gets the same storage for its columnwise codes. Raises TypeError
    for anything but a tensor of TransformerEngine, ValueError for storage of a wrong dtype, shape
    or device, NotImplementedError for MXFP8 in blocks of 1x32, whose columnwise codes are separate
    and would not move.
    """
    if is_hybrid(tensor):
        rowwise = dict(directions(tensor)).get("rowwise")
        if rowwise is None:
            raise NotImplementedError("the Hybrid tensor has no rowwise direction: no raw data to replace")
        replace_raw_data(rowwise, new_raw_data)
        return
    quantizer = quantizer_of(tensor)
    adapter = adapter_of(quantizer)
    fmt = adapter.format(quantizer)
    if fmt.casts_columnwise:
        raise NotImplementedError(
            f"a {type(tensor).__name__} has codes by rows and by columns, and one buffer cannot hold both"
        )
    attribute = adapter.of_tensor["rowwise_data"]
    old = getattr(tensor, attribute)
    if old is None:
        raise ValueError(f"the {type(tensor).__name__} has no {attribute}: no raw data to replace")
    given, needed = [(t.dtype, tuple(t.shape), t.device) for t in (new_raw_data, old)]
    if given != needed:
        raise ValueError("the new raw data is {} {} on {}, {} {} on {} is needed".format(*given, *needed))
    new_raw_data.detach().copy_(old)
    setattr(tensor, attribute, new_raw_data)
    if fmt.columnwise is Columnwise.SHARED:
        setattr(tensor, adapter.of_tensor["columnwise_data"], new_raw_data)
