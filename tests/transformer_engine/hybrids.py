"""Hybrid tensors of two cases of one shape."""

from typing import Any

import torch
from torch import Tensor

from tests import casts
from tests.sharded import Weight
from tests.transformer_engine.host_on_cpu import integration
from tests.transformer_engine.tensors import bytes_of, host_tensors, tensor


def columnwise_only(case: Weight, device: str = "cpu") -> Any:
    """A tensor as TransformerEngine makes it by columns alone: FP8 in its transpose, other formats as by rows."""
    made = tensor(case, device, columnwise=True)
    if hasattr(made, "_data"):
        made._data = None
        made._transpose_invalid = False
    return made


def hybrid(rowwise: Weight | None, columnwise: Weight | None, source: str = "original", device: str = "cpu") -> Any:
    """A Hybrid tensor of two cases of one shape; None for a direction that was dropped."""
    te = host_tensors()
    one = rowwise or columnwise
    assert one is not None
    row = tensor(rowwise or one, device)
    column = columnwise_only(columnwise or one, device)
    made = te.HybridQuantizer(
        rowwise_quantizer=row._quantizer, columnwise_quantizer=column._quantizer, columnwise_source=source
    )
    return te.HybridQuantizedTensor(
        shape=one.shape,
        dtype=one.nominal,
        rowwise_storage=row if rowwise else None,
        columnwise_storage=column if columnwise else None,
        quantizer=made,
        device=torch.device(device),
    )


def codes_of(part: Any) -> casts.Bytes:
    """Codes and scales of a direction; the amax of delayed scaling."""
    held = bytes_of(part)
    if getattr(part, "_data", True) is None:
        held["columnwise_data"] = casts.raw(part._transpose).copy()
    return held


def cast(weight: Any, master: Tensor | None, start: int | None, **options: Any) -> list[casts.Bytes]:
    """One call of one weight; the bytes of its directions."""
    integration().quantize_master_weights([weight], [master], [start], None, **options)
    parts = (weight._rowwise_storage, weight._columnwise_storage)
    return [{} if part is None else codes_of(part) for part in parts]
