"""Checks that a tensor has the memory that a layout says it has.

Kernels are given addresses. Over a tensor that is smaller than its weight, or over storage that was
freed or shrunk, they would read and write what belongs to others.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerocast.formats import Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import BUFFERS, Buffer, buffers

# what a product reads, so that no weight is without them
_NEEDED = ("rowwise_data", "rowwise_scale_inv")


def check_buffers(fmt: FormatSpec, matrix: Block, dtype: torch.dtype, held: Mapping[str, object]) -> None:
    """TypeError or ValueError, which names the buffer, unless `held` are the buffers of a weight of
    `matrix` (rows, columns), each as the layout has it and all on one device.

    A columnwise copy may be missing, and so may what only a cast writes. Reads no element, so it
    takes fake tensors and tensors on the meta device.
    """
    expected = buffers(fmt, matrix, dtype)
    if fmt.columnwise is Columnwise.SHARED:
        # a host may keep these codes twice
        expected["columnwise_data"] = expected["rowwise_data"]
    unknown = [name for name, tensor in held.items() if tensor is not None and name not in BUFFERS]
    if unknown:
        raise ValueError(f"a weight has no buffer {unknown[0]!r}, its buffers are {', '.join(BUFFERS)}")
    needed = (*_NEEDED, "amax") if fmt.scale_rule is ScaleRule.TWO_LEVEL else _NEEDED
    device = None
    for name, buffer in expected.items():
        tensor = held.get(name)
        if tensor is not None:
            device = check_tensor(name, tensor, buffer, fmt, device).device
        elif buffer is not None and name in needed:
            raise ValueError(f"{name} is missing, a {fmt} weight of {_by(matrix)} needs {_described(buffer)}")
    _check_pair(fmt, held)


def check_tensor(
    name: str, tensor: object, buffer: Buffer | None, fmt: FormatSpec, device: torch.device | None = None
) -> Tensor:
    """The tensor. TypeError or ValueError unless it is contiguous, has the shape and dtype of a
    buffer, is on `device` if one is given, and has memory for all its elements.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, a tensor is needed")
    if buffer is None:
        raise ValueError(f"a {fmt} weight has no {name}, got {tensor.dtype} {tuple(tensor.shape)}")
    kind = type(tensor).__name__
    found = tuple(tensor.shape), tensor.dtype, tensor.layout
    if found != (buffer.shape, buffer.dtype, torch.strided) or not tensor.is_contiguous():
        lies = f"strides {tensor.stride()}" if tensor.layout is torch.strided else f"{tensor.layout}"
        raise ValueError(
            f"{name} needs contiguous {_described(buffer)}, for this {fmt} weight; got {tensor.dtype} {tuple(tensor.shape)}, "
            f"{tensor.numel() * tensor.element_size():,} bytes, {lies}"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} needs contiguous {_described(buffer)} on {device}; got one on {tensor.device}")
    has_parts: bool = is_traceable_wrapper_subclass(tensor)
    if has_parts:
        raise TypeError(f"{name} of a {fmt} weight is a {kind}, a plain tensor is needed")
    check_storage(name, tensor)
    return tensor


def check_storage(name: str, tensor: Tensor) -> None:
    """ValueError for a contiguous tensor whose storage ends before its last element."""
    size, there = tensor.element_size(), tensor.untyped_storage().nbytes()
    needed = (tensor.storage_offset() + tensor.numel()) * size
    if tensor.numel() and needed > there:
        raise ValueError(
            f"{name} ends at byte {needed:,} of a storage that has {there:,}: it was freed or made smaller "
            "(untyped_storage().resize_), so give it memory, or build the weight again"
        )


def _check_pair(fmt: FormatSpec, held: Mapping[str, object]) -> None:
    """A columnwise copy is codes and scales; a scale a tensor serves both directions."""
    codes, scales = (held.get(f"columnwise_{what}") is not None for what in ("data", "scale_inv"))
    if codes and not scales and fmt.columnwise is not Columnwise.NONE and fmt.block:
        raise ValueError(f"columnwise_scale_inv is missing, and a {fmt} weight with columnwise_data needs it")


def _by(matrix: Block) -> str:
    return f"{matrix[0]}x{matrix[1]}"


def _described(buffer: Buffer) -> str:
    return f"{buffer.dtype} {buffer.shape}, {math.prod(buffer.shape) * buffer.dtype.itemsize:,} bytes"
