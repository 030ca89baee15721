"""Checks that a tensor has the shape, dtype and memory that a layout specifies.

Kernels get plain addresses. Given a tensor that is smaller than its weight, or storage that was
freed or shrunk, they would access memory of other tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerocast.formats import Block, Columnwise, FormatSpec, ScaleRule
from zerocast.formats.layout import BUFFERS, Buffer, buffers, matrix_shape

# Every product reads these buffers, so no weight may lack them.
_NEEDED = ("rowwise_data", "rowwise_scale_inv")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as u8, one-dimensional."""
    return tensor.detach().view(-1).view(torch.uint8)


def check_buffers(fmt: FormatSpec, shape: tuple[int, ...], dtype: torch.dtype, held: Mapping[str, object]) -> None:
    """Check the buffers `held` of a weight of `shape`, keyed by name.

    Raises TypeError or ValueError with the name of the buffer unless each is as the layout
    specifies and all are on one device. A columnwise copy may be missing, and so may buffers that
    only a cast writes. No element is read, so fake and meta tensors can be checked.
    """
    expected = dict(buffers(fmt, shape, dtype))
    if fmt.columnwise is Columnwise.SHARED:
        # The rowwise codes serve both directions, but a host may store them twice.
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
            raise ValueError(
                f"{name} is missing, a {fmt} weight of {_by(matrix_shape(shape))} needs {_described(buffer)}"
            )
    _check_pair(fmt, held)


def check_tensor(
    name: str, tensor: object, buffer: Buffer | None, fmt: FormatSpec, device: torch.device | None = None
) -> Tensor:
    """Check one buffer and return it. Raises TypeError or ValueError unless it is contiguous, has
    the shape and dtype of `buffer`, is on `device` if one is given, and has memory for all its
    elements.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, a tensor is needed")
    if buffer is None:
        raise ValueError(f"a {fmt} weight has no {name}, got {tensor.dtype} {tuple(tensor.shape)}")
    kind = type(tensor).__name__
    actual = tuple(tensor.shape), tensor.dtype, tensor.layout
    if actual != (buffer.shape, buffer.dtype, torch.strided) or not tensor.is_contiguous():
        # A sparse tensor has no strides.
        arrangement = f"strides {tensor.stride()}" if tensor.layout is torch.strided else f"{tensor.layout}"
        raise ValueError(
            f"{name} needs contiguous {_described(buffer)}, for this {fmt} weight; got {tensor.dtype} {tuple(tensor.shape)}, "
            f"{tensor.numel() * tensor.element_size():,} bytes, {arrangement}"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} needs contiguous {_described(buffer)} on {device}; got one on {tensor.device}")
    has_parts: bool = is_traceable_wrapper_subclass(tensor)
    if has_parts:
        raise TypeError(f"{name} of a {fmt} weight is a {kind}, a plain tensor is needed")
    check_storage(name, tensor)
    return tensor


def check_storage(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a contiguous tensor whose storage ends before its last element."""
    available = tensor.untyped_storage().nbytes()
    # A compiler calls this with symbolic sizes, of which `nbytes` cannot be asked.
    numel = tensor.numel()
    needed = (tensor.storage_offset() + numel) * tensor.itemsize
    if numel and needed > available:
        raise ValueError(
            f"{name} ends at byte {needed:,} of a storage that has {available:,}: it was freed or made smaller "
            "(untyped_storage().resize_), so allocate it again, or build the weight again"
        )


def _check_pair(fmt: FormatSpec, held: Mapping[str, object]) -> None:
    """Raise ValueError for columnwise codes without their block scales. One scale per tensor needs
    none, since the rowwise scale serves both directions.
    """
    has_codes = held.get("columnwise_data") is not None
    has_scales = held.get("columnwise_scale_inv") is not None
    if has_codes and not has_scales and fmt.columnwise is not Columnwise.NONE and fmt.block:
        raise ValueError(f"columnwise_scale_inv is missing, and a {fmt} weight with columnwise_data needs it")


def _by(matrix: Block) -> str:
    return f"{matrix[0]}x{matrix[1]}"


def _described(buffer: Buffer) -> str:
    return f"{buffer.dtype} {buffer.shape}, {buffer.nbytes:,} bytes"
