"""Decode stored weights to the values that `QuantizedWeight.dequantize` returns.

For readers that compute in bf16, such as a plain model of transformers that generates during a run.
Dtypes, names and shapes determine how a weight is stored (`zerocast.serve.namings`). The tensor
amax of an NVFP4 weight is recovered from the stored global scale, so that values are bitwise equal
where the nominal dtype is bf16.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule, get_format, layout
from zerocast.serve.namings import TOP
from zerocast.weight import QuantizedWeight

# The tensors of a weight by the suffix after its name.
Stored = Mapping[str, Tensor]
_SUFFIXES = ("_packed", "_global_scale", "_scale", "_scale_2", "_scale_inv", "_shape")


def dequantized(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
    """Decode stored tensors one at a time, as (name, value).

    Quantized weights come in `dtype`, which must be their nominal dtype, other tensors unchanged.
    Raises ValueError for tensors that no naming stores.
    """
    weights: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((s for s in _SUFFIXES if name.endswith(s) and _is_weight(name.removesuffix(s), tensors)), "")
        weights.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
    for name, stored in weights.items():
        if list(stored) == [""] and stored[""].dtype not in (torch.uint8, torch.float8_e4m3fn):
            yield name, stored[""]
        else:
            yield name, _weight(name, stored, dtype).dequantize()


def _is_weight(name: str, tensors: Mapping[str, Tensor]) -> bool:
    return name in tensors or f"{name}_packed" in tensors


# The format by the dtypes of codes and scales.
_FORMATS = {
    (torch.int32, torch.bfloat16): "int4",
    (torch.uint8, torch.uint8): "mxfp4",
    (torch.uint8, torch.float8_e4m3fn): "nvfp4",
    (torch.float8_e4m3fn, torch.uint8): "mxfp8",
    (torch.float8_e4m3fn, torch.float32): "fp8_block",
}


def _weight(name: str, stored: Stored, dtype: torch.dtype) -> QuantizedWeight:
    """Return the weight that these tensors store. Raises ValueError if no naming stores a weight
    like that.
    """
    codes = stored.get("_packed", stored.get(""))
    scales = stored.get("_scale", stored.get("_scale_inv"))
    key = None if codes is None or scales is None else _FORMATS.get((codes.dtype, scales.dtype))
    if codes is None or scales is None or key is None or not _has_parts(key, codes, scales, stored):
        parts = ", ".join(f"{name}{suffix} {t.dtype} {tuple(t.shape)}" for suffix, t in stored.items())
        raise ValueError(f"no naming stores a weight as {parts}")
    if key == "fp8_block" and scales.dim() == 1:
        key = "fp8_current"
        scales = scales[:1]
    fmt, codes = get_format(key), codes.view(torch.uint8)
    shape = codes.shape[0], codes.shape[1] * fmt.elements_per_byte
    buffers = {"rowwise_data": codes, "rowwise_scale_inv": _padded(name, fmt, shape, scales)}
    if key == "nvfp4":
        buffers["amax"] = _amax(name, stored, dtype)
    return QuantizedWeight.of_buffers(shape, fmt, dtype, buffers)


def _has_parts(key: str, codes: Tensor, scales: Tensor, stored: Stored) -> bool:
    """Return True if the tensors have the dimensions of a stored weight: a matrix of codes, and
    scales of blocks or one scale of the tensor, which may be repeated for each row. nvfp4 also
    needs a global scale.
    """
    if codes.dim() != 2:
        return False
    if key == "nvfp4":
        return any(stored[s].numel() == 1 for s in ("_scale_2", "_global_scale") if s in stored)
    if key == "fp8_block" and scales.dim() == 1:
        return scales.numel() > 0 and bool((scales == scales[0]).all())
    return scales.dim() in (2, 4)


def _amax(name: str, stored: Stored, dtype: torch.dtype) -> Tensor:
    """Return the tensor amax that the stored global scale derives from: 2688 times a bf16 number,
    as `nvfp4:exact_in_fp8` stores it, or a number of the nominal dtype.
    """
    is_factor = "_scale_2" in stored
    stored_scale = stored["_scale_2" if is_factor else "_global_scale"].view(1)
    amax = stored_scale * TOP if is_factor else TOP / stored_scale
    for candidate in ((amax / TOP).bfloat16().float() * TOP, amax.to(dtype).float()):
        if torch.equal(candidate / TOP if is_factor else TOP / candidate, stored_scale):
            return candidate
    raise ValueError(
        f"no tensor amax of dtype {dtype} gives {name} the global scale {float(stored_scale)}: the nominal dtype is another one"
    )


def _padded(name: str, fmt: FormatSpec, shape: tuple[int, int], scales: Tensor) -> Tensor:
    """Scales in a buffer of the format, with its padding.

    Raises ValueError unless there is one scale for each block.
    """
    layout.check_shape(fmt, shape)
    buffer = layout.rowwise_scale_inv(fmt, *shape)
    assert buffer is not None
    if len(buffer.shape) == 1:
        return scales.float()
    padded = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=scales.device)
    block_rows, block_columns = layout.amax_grid(fmt.block, *shape)
    block_rows = block_rows if fmt.scale_rule is ScaleRule.FP32 else shape[0]
    if scales.shape[0] != block_rows or scales.numel() != block_rows * block_columns:
        raise ValueError(
            f"{name} has scales {tuple(scales.shape)}, and a {fmt} weight of {shape[0]}x{shape[1]} has {block_rows}x{block_columns}"
        )
    scales = scales.reshape(block_rows, block_columns)
    padded[:block_rows, :block_columns] = scales.view(buffer.dtype)
    return padded
