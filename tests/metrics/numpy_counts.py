"""The counts of a cast by plain numpy, on the whole master, from the definitions in `CastCounts`; knows no shard and no kernel."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.formats import model
from zerocast import QuantizedWeight, get_format

LIMITS = {"e4m3": 464.0, "e5m2": 61440.0, "e2m1": 7.0, "int4": 7.5}  # the largest value and half of the step below it
ONES = {"e4m3": 0x38, "e5m2": 0x3C, "e2m1": 0x22, "int4": 0x99}  # a byte of codes that stand for 1.0

Buffers = dict[str, NDArray[Any]]


def buffers_of(weight: QuantizedWeight) -> Buffers:
    """Return copies of the rowwise bytes with their shapes. numpy gets words for bf16."""
    held = {"rowwise_data": weight.rowwise_data, "rowwise_scale_inv": weight.rowwise_scale_inv, "amax": weight.amax}
    words = {
        name: t.view(torch.uint16) if t is not None and t.dtype is torch.bfloat16 else t for name, t in held.items()
    }
    return {name: tensor.numpy().copy() for name, tensor in words.items() if tensor is not None}


def counts(fmt: str, master: NDArray[np.float32], before: Buffers, now: Buffers) -> dict[str, float]:
    """Return every field of `CastCounts`, for the elements of a whole weight `[M, K]`."""
    spec = get_format(fmt)
    assert spec.element
    cast = model.Cast(spec.name, "unused", model.Settings(element=spec.element.name))
    with np.errstate(all="ignore"):
        value = cast.dequantized(now, columnwise=False)
        one = {**now, "rowwise_data": np.full_like(now["rowwise_data"], ONES[spec.element.name])}
        scale = np.broadcast_to(cast.dequantized(one, columnwise=False), master.shape)
        finite = np.isfinite(master)
        clipped = np.abs(master) > np.float32(LIMITS[spec.element.name]) * scale  # beside Inf nothing is clipped
        error = (value - master)[finite].astype(np.float64)
    return {
        "elements": master.size,
        "nonfinite": int((~finite).sum()),
        "saturated": int((clipped & (scale != 0)).sum()),
        "flushed": int(((master != 0) & ~np.isnan(master) & (value == 0)).sum()),
        "unchanged": int((_codes(spec.element.name, before) == _codes(spec.element.name, now)).sum()),
        "square_error": float(np.square(error).sum()),
        "square_sum": float(np.square(master[finite].astype(np.float64)).sum()),
        "amax": float(np.abs(master[~np.isnan(master)]).max(initial=0.0)),
    }


def _codes(element: str, buffers: Buffers) -> NDArray[np.uint8]:
    data = buffers["rowwise_data"]
    return np.stack((data & 15, data >> 4), -1) if element in ("e2m1", "int4") else data
