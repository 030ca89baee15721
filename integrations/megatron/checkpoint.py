"""Checkpoints: the entries of quantized weights in Megatron's sharded state dicts.

The model's entries of quantized weights are plain tensors of their values in the nominal dtype. The
exact values are the FP32 masters among the optimizer's entries, which also include the state of
delayed scaling. A frozen weight has no master: its own bytes are saved in addition to its values,
as `zerocast.<name>.<buffer>`, and a load uses these.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerocast import QuantizedWeight
from zerocast.checkpoint.untrained import own_buffers, take_buffers
from zerocast.quantize import cast_whole
from zerocast.weight.owners import Claim
from zerocast.weight.weight import define

from . import host
from .primary import is_primary, is_te_tensor, make_te_copies, weight_of

# The padded length of a format's text in the entry of a frozen weight: a checkpoint's tensors have
# fixed shapes.
FORMAT_BYTES = 256
# The attribute of an entry that every rank reads before anything is written or loaded. An error
# there raises on all ranks.
_ASKED_FIRST = "without_data"


def dequantize_(sharded_state_dict: Any, is_loading: bool = False) -> Any:
    """Replace quantized weights in a sharded state dict with their values in the nominal dtype.

    Megatron's `dist_checkpointing.save` and `load` read and write plain tensors. Make the
    optimizer's part of the state dict first: it finds parameters by identity. With `is_loading` the
    tensors, which a load fills, have any content, and no weight is read. Returns the state dict.
    Raises RuntimeError for weights that a step, a cast or a gather has left partial, unless they
    are to be loaded.

    A frozen QuantizedWeight gets an entry `<name>.<buffer>` for each buffer of its bytes too, which
    the checkpoint calls `zerocast.<name>.<buffer>`. A checkpoint that lacks them, since the weight
    was trained or plain there or divided in another way, loads with `strict="log_unexpected"`
    (`--dist-ckpt-strictness log_unexpected`), and the values are then cast.
    """
    for holder, key, entry in list(_entries(sharded_state_dict)):
        param = getattr(entry, "data", None)
        if not is_primary(param):
            continue
        weight = weight_of(param)
        if is_loading:
            # The weight is not read, since it may be partial.
            entry.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        else:
            entry.data = weight.dequantize()
        vars(entry).pop(_ASKED_FIRST, None)
        if isinstance(param, QuantizedWeight) and not (param.requires_grad or weight.state.validity.has_masters):
            holder.update({f"{key}.{name}": own for name, own in _own_bytes(entry, weight, is_loading).items()})
    return sharded_state_dict


def _own_bytes(entry: Any, weight: QuantizedWeight, is_loading: bool) -> dict[str, Any]:
    """Return the entries of a weight's own bytes; `entry` is the entry of its values.

    A weight may be one part of the tensor that Megatron saves: it is divided over tensor-parallel
    ranks, or layers are stacked. Each part has its own scales, so the bytes of the parts do not
    concatenate to the bytes of that tensor. So each part is an entry with its own name: it has
    `.{offset}of{size}` for every axis that is divided.
    """
    pieces = list(_entries([entry.build()])) if hasattr(entry, "build") else [(None, None, entry)]
    first = pieces[0][2]
    extents = (1,) * first.prepend_axis_num + tuple(first.local_shape)
    places = zip(first.global_offset, extents, first.global_shape, strict=True)
    part = "".join(f".{offset}of{size}" for offset, extent, size in places if extent != size)
    sharded = host.module(host.CHECKPOINT_MAPPING).ShardedTensor
    return {
        name: sharded.from_rank_offsets(
            f"zerocast.{entry.key}{part}.{name}",
            torch.empty_like(buffer) if is_loading else buffer,
            replica_id=entry.replica_id,
        )
        for name, buffer in _own_tensors(weight).items()
    }


def _own_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return a dict from name of a buffer to its bytes, and from "format" to the format as text.

    The bytes do not distinguish formats of one width, such as E4M3 and E5M2.
    """
    text = str(weight.format).encode().ljust(FORMAT_BYTES, b"\0")
    return {**own_buffers(weight), "format": torch.tensor(list(text), dtype=torch.uint8, device=weight.device)}


def _take_own(weight: QuantizedWeight, own: dict[str, Tensor], name: str) -> None:
    """Copy a frozen weight's bytes from a checkpoint. Raises ValueError for a different format."""
    saved_format = own.pop("format").cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    if saved_format != str(weight.format):
        raise ValueError(
            f"the frozen weight {name} is {weight.format}, and {saved_format} in the checkpoint: it has no master to be cast from, "
            "so load it in the format that it was saved in"
        )
    take_buffers(weight, own)


def _not_written(weight: QuantizedWeight, *_: Any, **__: Any) -> NoReturn:
    """Raise: a checkpoint's writer or reader got a quantized weight instead of its values."""
    raise RuntimeError(
        f"{weight!r} is not written to a checkpoint as it is, nor read from one: call "
        "zerocast.integrations.megatron.dequantize_ on the sharded state dict before dist_checkpointing.save, with "
        "is_loading=True before dist_checkpointing.load"
    )


# `is_pinned` is the first operator that a checkpoint's writer calls on a tensor.
define(torch.ops.aten.is_pinned.default, _not_written)


def refusing_quantized(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's method: saving or loading its entries raises on every rank until `dequantize_`
    has replaced them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        entries = sharded_state_dict(*args, **kwargs)
        for _, _, entry in _entries(entries):
            if isinstance(data := getattr(entry, "data", None), QuantizedWeight):
                vars(entry)[_ASKED_FIRST] = functools.partial(_not_written, data)
        return entries

    return call


def _entries(nested: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each entry of a nested state dict, as (container, key, entry)."""
    for key, value in nested.items() if isinstance(nested, dict) else enumerate(nested):
        if isinstance(value, (dict, list, tuple)):
            yield from _entries(value)
        else:
            yield nested, key, value


def cast_in(
    claims: Mapping[int, Claim], module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Cast the plain entries of a module's quantized weights into them, and copy the own bytes of
    frozen ones: a pre-hook of `load_state_dict`.

    The entry is then replaced by the weight itself, which the module copies onto itself. `claims`
    maps the id of a parameter to the claim of its weight's owner.
    """
    for name, param in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if is_primary(param) and isinstance(value, Tensor) and not is_primary(value):
            if value.shape != param.shape:
                raise ValueError(
                    f"{prefix + name} has shape {tuple(param.shape)}, and {tuple(value.shape)} in the checkpoint"
                )
            weight = weight_of(param)
            entries = {buffer: f"{prefix}{name}.{buffer}" for buffer in _own_tensors(weight)}
            own = {buffer: state_dict.pop(entry) for buffer, entry in entries.items() if entry in state_dict}
            if len(own) == len(entries):
                _take_own(weight, own, prefix + name)
            else:
                cast_whole(weight, value.detach().to(param.device), claim=claims.get(id(param)))
            state_dict[prefix + name] = param
            if is_te_tensor(param):
                make_te_copies([param])
                # A second tensor over the same buffers.
                state_dict[prefix + name] = param.detach()
