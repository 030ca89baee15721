"""Namings: the names and layouts under which readers of quantized checkpoints expect a weight.
`dequantized` decodes stored weights again.

| naming | weights | tensors of `<name>.weight` |
|---|---|---|
| `bf16` | all, dequantized | `weight` |
| `compressed-tensors` | nvfp4 | `weight_packed`, `weight_scale`, `weight_global_scale` |
| `compressed-tensors` | mxfp4 | `weight_packed`, `weight_scale` |
| `compressed-tensors` | int4 | `weight_packed`, `weight_scale`, `weight_shape` |
| `compressed-tensors` | mxfp8, fp8_block, fp8_current, fp8_delayed | `weight`, `weight_scale` |
| `modelopt` | nvfp4 | `weight`, `weight_scale`, `weight_scale_2` |
| `modelopt` | mxfp8, fp8_block, fp8_current, fp8_delayed | `weight`, `weight_scale` |
| `deepseek` | fp8_block | `weight`, `weight_scale_inv` |

Codes of nvfp4 and mxfp4 are u8 `[M, K/2]` with the even element in the low half, those of int4 the
same bytes as int32 `[M, K/8]`, those of FP8 `[M, K]` E4M3. Scales have no padding:

* nvfp4: E4M3 `[M, K/16]`; `weight_global_scale` is f32 `[1]`, 2688 / amax, and `weight_scale_2` f32
  `[]`, amax / 2688;
* mxfp4, mxfp8: biased exponents, u8 `[M, K/32]`;
* int4: bf16 `[M, K/32]`; `weight_shape` is `(M, K)`, int64;
* fp8_block: f32 `[M/128, K/128]`, rounded up; `[M/128, 1, K/128, 1]` for modelopt;
* fp8_current, fp8_delayed: f32 `[1]`; for modelopt the same scale for each row, f32 `[M]`. Its
  per-tensor algorithm takes the scale of activations from the checkpoint too, which only a
  calibration knows; its algorithm of a scale per row quantizes activations when they come.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule, get_format, layout
from zerocast.formats.element import E2M1, E4M3, INT4
from zerocast.formats.layout import buffer_rows
from zerocast.weight import QuantizedWeight

# The largest code of nvfp4 times its largest scale.
TOP = 6.0 * 448.0


@dataclass(frozen=True)
class Part:
    """One of the tensors that store a weight.

    Attributes:
        tensor: its value.
        height: the rows of the weight, as a matrix, for which one row of `tensor` stands; None for
            a tensor that belongs to all rows, such as a global scale.
    """

    tensor: Tensor
    height: int | None = 1


# By the suffix after the weight's name.
Parts = dict[str, Part]


@dataclass(frozen=True)
class Layout:
    """The tensors by which a naming stores weights of one format.

    Attributes:
        algorithm: the naming's own name for the format.
        parts: makes the tensors of a weight.
        shares_amax: True if engines use one tensor amax for weights that they fuse.
        reads_experts: False if a reader of the naming cannot decode experts, or decodes them to
            other values: transformers for compressed-tensors, which knows int4 and one scale a
            tensor; vLLM for modelopt, whose FP8 experts have a scale of activations too.
        has_shape: True if the shape of a weight is stored with it.
    """

    algorithm: str
    parts: Callable[[QuantizedWeight], Parts]
    shares_amax: bool = False
    reads_experts: bool = True
    has_shape: bool = False


def layout_of(naming: str, name: str, fmt: FormatSpec) -> Layout:
    """Return the layout of the weight `name`. Raises ValueError if the naming has none for its
    format.
    """
    layouts = NAMINGS[naming]
    if fmt.name not in layouts or fmt.element not in (E2M1, E4M3, INT4):
        wanted = " and ".join(layouts)
        raise ValueError(
            f"{name} is {fmt}; {naming} has names for {wanted} with E2M1, E4M3 or INT4 codes: export it as bf16"
        )
    return layouts[fmt.name]


def check_naming(naming: str) -> None:
    """Raise ValueError for an unknown naming."""
    if naming not in NAMINGS:
        raise ValueError(f"naming is one of {', '.join(NAMINGS)}, got {naming!r}")


def unpadded(weight: QuantizedWeight, name: str, buffer: Tensor) -> Tensor:
    """Return the codes or scales of a weight without padding, a view `[*leading, rows, columns]`. A
    block has as many rows and columns of them in a slice as in the whole.
    """
    entries = unpadded_matrices(weight, name, buffer)
    leading = tuple(weight.shape[:-2])
    if not leading:
        return entries[0]
    return torch.unflatten(entries, 0, leading) if len(entries) > 1 else torch.unflatten(entries[0], 0, (*leading, -1))


def unpadded_matrices(weight: QuantizedWeight, name: str, buffer: Tensor) -> Tensor:
    """Return the codes or scales of a weight without padding, a view `[matrices, rows, columns]` of
    the matrices that it is stored in.
    """
    count, (rows, columns) = weight.stored_matrices
    block = weight.format.block
    has_scales = name != "rowwise_data" and block is not None
    used_columns = -(-columns // block[1]) if has_scales else buffer.shape[1]
    used_rows = buffer_rows(weight.format, name, rows)
    return buffer.view(count, -1, buffer.shape[1])[:, :used_rows, :used_columns]


def _fp8_codes(weight: QuantizedWeight) -> Tensor:
    return weight.rowwise_data.view(torch.float8_e4m3fn)


def _scales(weight: QuantizedWeight) -> Tensor:
    """Return the stored scales without padding, `[block rows, blocks in a row]`."""
    scales = weight.rowwise_scale_inv
    assert scales is not None
    return unpadded_matrices(weight, "rowwise_scale_inv", scales).flatten(0, 1)


def _amax(weight: QuantizedWeight) -> Tensor:
    assert weight.amax is not None
    # A weight of zeros has an amax of 0, by which the global scale would divide. The amax here
    # makes the scale 1.
    return torch.where(weight.amax > 0, weight.amax, TOP)


def _nvfp4_scales(weight: QuantizedWeight) -> Part:
    return Part(_scales(weight).view(torch.float8_e4m3fn))


def _compressed_nvfp4(weight: QuantizedWeight) -> Parts:
    parts = {"_packed": Part(weight.rowwise_data), "_scale": _nvfp4_scales(weight)}
    return parts | {"_global_scale": Part(TOP / _amax(weight), None)}


def _codes_and_scales(
    weight: QuantizedWeight, codes: str, dtype: torch.dtype, scales: str = "_scale", height: int = 1
) -> Parts:
    """Return the codes in this dtype and the scales of blocks of this height, under the suffixes
    `codes` and `scales`.
    """
    return {codes: Part(weight.rowwise_data.view(dtype)), scales: Part(_scales(weight), height)}


def _compressed_tensor(weight: QuantizedWeight) -> Parts:
    assert weight.rowwise_scale_inv is not None
    return {"": Part(_fp8_codes(weight)), "_scale": Part(weight.rowwise_scale_inv.view(1), None)}


def _modelopt_nvfp4(weight: QuantizedWeight) -> Parts:
    parts = {"": Part(weight.rowwise_data), "_scale": _nvfp4_scales(weight)}
    return parts | {"_scale_2": Part((_amax(weight) / TOP).view(()), None)}


def _modelopt_block(weight: QuantizedWeight) -> Parts:
    return {"": Part(_fp8_codes(weight)), "_scale": Part(_scales(weight)[:, None, :, None], 128)}


def _modelopt_tensor(weight: QuantizedWeight) -> Parts:
    assert weight.rowwise_scale_inv is not None
    return {"": Part(_fp8_codes(weight)), "_scale": Part(weight.rowwise_scale_inv.expand(weight.matrix_shape[0]))}


_packed_u8 = partial(_codes_and_scales, codes="_packed", dtype=torch.uint8)
_packed_int32 = partial(_codes_and_scales, codes="_packed", dtype=torch.int32)
_fp8 = partial(_codes_and_scales, codes="", dtype=torch.float8_e4m3fn)

NAMINGS: Mapping[str, Mapping[str, Layout]] = {
    "bf16": {},
    "compressed-tensors": {
        "nvfp4": Layout("nvfp4-pack-quantized", _compressed_nvfp4, shares_amax=True, reads_experts=False),
        "mxfp4": Layout("mxfp4-pack-quantized", _packed_u8, reads_experts=False),
        "int4": Layout("pack-quantized", _packed_int32, has_shape=True),
        "mxfp8": Layout("mxfp8-quantized", _fp8, reads_experts=False),
        "fp8_block": Layout("float-quantized", partial(_fp8, height=128), reads_experts=False),
        "fp8_current": Layout("float-quantized", _compressed_tensor),
        "fp8_delayed": Layout("float-quantized", _compressed_tensor),
    },
    "modelopt": {
        "nvfp4": Layout("W4A16_NVFP4", _modelopt_nvfp4, shares_amax=True),
        "mxfp8": Layout("MXFP8", _fp8),
        "fp8_block": Layout("FP8_PB_WO", _modelopt_block, reads_experts=False),
        "fp8_current": Layout("FP8_PER_CHANNEL_PER_TOKEN", _modelopt_tensor, reads_experts=False),
        "fp8_delayed": Layout("FP8_PER_CHANNEL_PER_TOKEN", _modelopt_tensor, reads_experts=False),
    },
    "deepseek": {"fp8_block": Layout("fp8", partial(_fp8, scales="_scale_inv", height=128))},
}


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
        buffers["amax"] = _recovered_amax(name, stored, dtype)
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


def _recovered_amax(name: str, stored: Stored, dtype: torch.dtype) -> Tensor:
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
