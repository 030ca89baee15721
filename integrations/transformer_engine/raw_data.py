"""replace_raw_data: the rowwise codes of a tensor, moved into storage of the caller's."""

from typing import Any

import torch
from torch import Tensor

from .adapters import adapter_of, quantizer_of
from .entry import directions, is_hybrid


@torch.no_grad()
def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Copy a tensor's rowwise codes into `new_raw_data`, such as a slice of a flat buffer, and let
    the tensor hold that.

    Of a Hybrid tensor the rowwise direction is moved. Raises TypeError for what is no tensor of
    TransformerEngine, ValueError for storage of another dtype, shape or device, NotImplementedError
    for MXFP8, whose codes by columns would stay behind.
    """
    if is_hybrid(tensor):
        rowwise = dict(directions(tensor)).get("rowwise")
        if rowwise is None:
            raise NotImplementedError("the Hybrid tensor has no rowwise direction: no raw data to replace")
        replace_raw_data(rowwise, new_raw_data)
        return
    adapter = adapter_of(quantizer_of(tensor))
    if adapter.two_payloads:
        raise NotImplementedError(
            f"a {type(tensor).__name__} has codes by rows and by columns, and one buffer cannot take both"
        )
    attribute = adapter.of_tensor["rowwise_data"]
    old = getattr(tensor, attribute)
    if old is None:
        raise ValueError(f"the {type(tensor).__name__} has no {attribute}: no raw data to replace")
    found, needed = [(t.dtype, tuple(t.shape), t.device) for t in (new_raw_data, old)]
    if found != needed:
        raise ValueError("the new raw data is {} {} on {}, {} {} on {} is needed".format(*found, *needed))
    new_raw_data.detach().copy_(old)
    setattr(tensor, attribute, new_raw_data)
