"""Export: the weights of a model as safetensors, in the names and layouts of inference engines.

| naming | weights | tensors of `<name>.weight` |
|---|---|---|
| `bf16` | all, dequantized | `weight` |
| `compressed-tensors` | nvfp4 | `weight_packed`, `weight_scale`, `weight_global_scale` |
| `compressed-tensors` | mxfp4 | `weight_packed`, `weight_scale` |
| `modelopt` | nvfp4 | `weight`, `weight_scale`, `weight_scale_2` |
| `deepseek` | fp8_block | `weight` E4M3 `[M, K]`, `weight_scale_inv` f32 |

Codes of nvfp4 and mxfp4 are u8 `[M, K/2]` with the even element in the low half. Scales of nvfp4
are E4M3 `[M, K/16]`, those of mxfp4 biased exponents, u8 `[M, K/32]`; `weight_global_scale` is f32
`[1]`, 2688 / amax, and `weight_scale_2` f32 `[]`, amax / 2688, or 1536 in place of 2688 where
`scale_max` is 256. `weight_scale_inv` is `[M/128, K/128]`, rounded up. Scales have no padding. All
other tensors are written unchanged.

The export has weights only: an engine that also quantizes activations needs their scales from a
calibration. Layers that an engine fuses (query, key and value) keep one global scale each, and some
engines want a common one.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zerocast.checkpoint.whole_folder import WholeFolder, sync_file
from zerocast.formats import FormatSpec
from zerocast.formats.element import E2M1, E4M3
from zerocast.formats.layout import amax_grid
from zerocast.weight import QuantizedWeight

SHARD_BYTES = 5 * 10**9
LARGEST_CODE = 6.0  # of nvfp4
INDEX = "model.safetensors.index.json"
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Item:
    """A tensor that is made when it is written; `format` is None unless it is a QuantizedWeight."""

    numel: int
    format: FormatSpec | None
    make: Callable[[], Tensor]


def export_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], naming: str = "bf16", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write the parameters and persistent buffers of `model` into `folder`, which is new or empty.

    One process calls it: under ZeroAdamW every rank has whole weights. A file has at most
    `shard_bytes` bytes, unless a single tensor is larger; one file at a time is copied to the host.
    Returns the paths, the index last. Raises ValueError, with nothing written, for an unknown
    naming, a weight whose format the naming cannot express and a folder that is not empty;
    ModuleNotFoundError without the package safetensors.
    """
    items = {name: _item(tensor) for name, tensor in _tensors(model)}
    return write_safetensors(items, Path(folder), naming, shard_bytes)


def write_safetensors(
    items: Mapping[str, Item], folder: Path, naming: str = "bf16", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write tensors that are made one by one, like `export_safetensors`; the folder appears
    complete.
    """
    if naming not in NAMINGS:
        raise ValueError(f"naming is one of {', '.join(NAMINGS)}, got {naming!r}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    whole = WholeFolder(folder.absolute())  # "." has no name to write beside
    if whole.holds_anything():
        raise ValueError(f"{whole.path} is not empty: export into a new folder")
    for name, item in items.items():
        _check(name, item.format, naming)
    whole.begin()
    try:
        files = _write(items, whole.partial, naming, shard_bytes)
        for file in files:
            sync_file(file)
        whole.commit()
    except BaseException:
        whole.abandon()
        raise
    return [whole.path / file.name for file in files]


def _write(items: Mapping[str, Item], folder: Path, naming: str, shard_bytes: int) -> list[Path]:
    from safetensors.torch import save_file  # noqa: PLC0415

    shards = _shards(items, shard_bytes)
    files: list[Path] = []
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        parts = {key: part for name in names for key, part in _parts(name, items[name].make(), naming).items()}
        save_file(parts, path, metadata={"format": "pt", "naming": naming})
        files.append(path)
        places |= {key: path.name for key in parts}
        total += sum(part.nbytes for part in parts.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    return [*files, folder / INDEX]


def _item(tensor: Tensor) -> Item:
    return Item(tensor.numel(), tensor.format if isinstance(tensor, QuantizedWeight) else None, lambda: tensor)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones once, and persistent buffers, by name."""
    saved = model.state_dict().keys()
    yield from ((name, parameter) for name, parameter in model.named_parameters() if name in saved)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _check(name: str, fmt: FormatSpec | None, naming: str) -> None:
    if fmt is None or naming == "bf16":
        return
    if fmt.name not in NAMINGS[naming] or fmt.element not in (E2M1, E4M3):
        wanted = " and ".join(NAMINGS[naming])
        raise ValueError(f"{name} is {fmt}; {naming} has names for {wanted} with E2M1 or E4M3 codes: export it as bf16")


def _shards(items: Mapping[str, Item], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, item in items.items():
        nbytes = item.numel * 2  # an estimate: the size in bf16
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _parts(name: str, tensor: Tensor, naming: str) -> Parts:
    if not isinstance(tensor, QuantizedWeight):
        return {name: _own(tensor)}
    tensor.check_filled()
    if naming == "bf16":
        return {name: _own(tensor.dequantize().to(torch.bfloat16))}
    made = NAMINGS[naming][tensor.format.name](tensor)
    return {name + suffix: _own(part) for suffix, part in made.items()}


def _own(tensor: Tensor) -> Tensor:
    """A copy in host memory: safetensors takes no two views of one storage."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _codes(weight: QuantizedWeight) -> Tensor:
    data = weight.rowwise_data
    return data.view(*weight.shape[:-1], data.shape[1])


def _scales(weight: QuantizedWeight, block: tuple[int, int]) -> Tensor:
    """The stored scales without padding, with the leading dimensions of the weight."""
    scales = weight.rowwise_scale_inv
    assert scales is not None
    down, across = amax_grid(block, *weight.matrix_shape)
    return scales[:down, :across].reshape(*weight.shape[:-2], -1, across)


def _top(weight: QuantizedWeight) -> float:
    """The largest scale times the largest code."""
    return LARGEST_CODE * weight.format.scale_max


def _amax(weight: QuantizedWeight) -> Tensor:
    assert weight.amax is not None
    # zeros: factor 1
    return torch.where(weight.amax > 0, weight.amax, torch.full_like(weight.amax, _top(weight)))


def _compressed_nvfp4(weight: QuantizedWeight) -> Parts:
    scales = _scales(weight, (1, 16)).view(torch.float8_e4m3fn)
    return {"_packed": _codes(weight), "_scale": scales, "_global_scale": _top(weight) / _amax(weight)}


def _compressed_mxfp4(weight: QuantizedWeight) -> Parts:
    return {"_packed": _codes(weight), "_scale": _scales(weight, (1, 32))}


def _modelopt_nvfp4(weight: QuantizedWeight) -> Parts:
    scales = _scales(weight, (1, 16)).view(torch.float8_e4m3fn)
    return {"": _codes(weight), "_scale": scales, "_scale_2": (_amax(weight) / _top(weight)).view(())}


def _deepseek_block(weight: QuantizedWeight) -> Parts:
    return {"": _codes(weight).view(torch.float8_e4m3fn), "_scale_inv": _scales(weight, (128, 128))}


NAMINGS: Mapping[str, Mapping[str, Callable[[QuantizedWeight], Parts]]] = {
    "bf16": {},
    "compressed-tensors": {"nvfp4": _compressed_nvfp4, "mxfp4": _compressed_mxfp4},
    "modelopt": {"nvfp4": _modelopt_nvfp4},
    "deepseek": {"fp8_block": _deepseek_block},
}
