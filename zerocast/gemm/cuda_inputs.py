"""The FP8 quantizers of `inputs.py` as CUDA kernels (`csrc/cuda/quantize_input.cu`): the same bytes
with less CPU work.

Quantizing in groups is one launch, for one direction or for both. Quantizing per tensor is two
launches, the first for the amax, after a clear of one word.
"""

import torch
from torch import Tensor

from zerocast.backends.cuda.launch import kernels, stream_of
from zerocast.backends.extension import memory, why_no_kernels
from zerocast.formats import Element
from zerocast.formats.layout import OPERAND_ALIGNMENT_BYTES
from zerocast.gemm import scaling

GROUP = kernels.INPUT_GROUP


def serves(device: torch.device) -> bool:
    """Return True if the kernels were built for this GPU."""
    return why_no_kernels(kernels.targets(), device) is None


def per_tensor(x: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Quantize `x` to the same bytes as `inputs.per_tensor`, in two launches."""
    x = _aligned(x)
    codes = torch.empty(x.shape, dtype=element.dtype, device=x.device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    results = codes.data_ptr(), scale_inv.data_ptr(), _amax(x).data_ptr()
    kernels.quantize_tensor(memory(x), x.numel(), element.name, *results, stream_of(x))
    return codes, scale_inv


def tensor_both_ways(x: Tensor, amax: Tensor | None, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `x` to the same bytes as `inputs.per_tensor_both_ways`.

    `amax` is f32[1], or None if it is not known.

    An f32 input, or an input whose number of columns is not a multiple of 16, needs one more
    launch.
    """
    x = _aligned(x)
    amax = _amax(x) if amax is None else amax
    made = codes, scale_inv, turned = scaling.tensor_both_ways_like(x, element)
    results = codes.data_ptr(), scale_inv.data_ptr()
    if x.dtype is torch.float32 or x.shape[1] % OPERAND_ALIGNMENT_BYTES:
        kernels.quantize_tensor(memory(x), x.numel(), element.name, *results, amax.data_ptr(), stream_of(x))
        return codes, scale_inv, scaling.turned(codes)
    # (rows, codes, scale_inv) of each direction. The kernel pads the rows with zeros. Both
    # directions have the same scale, which is written once.
    rowwise = x.shape[0], *results
    columnwise = turned.shape[1], turned.data_ptr(), 0
    kernels.quantize_tensor_both_ways(
        memory(x), *x.shape, element.name, rowwise, columnwise, amax.data_ptr(), stream_of(x)
    )
    return made


def _amax(x: Tensor) -> Tensor:
    amax = torch.empty(1, dtype=torch.float32, device=x.device)
    kernels.tensor_amax(memory(x), x.numel(), amax.data_ptr(), stream_of(x))
    return amax


def groups(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize `x` to the same bytes as `inputs.groups`, for a `width` of `GROUP`. The scales are
    stored column by column.
    """
    assert width == GROUP, width
    x = _aligned(x)
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=element.dtype, device=x.device)
    scale_inv = torch.empty(columns // width, rows, dtype=torch.float32, device=x.device)
    results = codes.data_ptr(), scale_inv.data_ptr()
    kernels.quantize_groups(memory(x), rows, columns, element.name, power_of_2, *results, stream_of(x))
    return codes, scale_inv.t()


def groups_both_ways(x: Tensor, width: int, element: Element, power_of_2: bool, is_square: bool) -> scaling.BothWays:
    """Quantize `x` to the same bytes as `inputs.groups_both_ways`, for a `width` of `GROUP`. An f32
    input takes one launch per direction.
    """
    assert width == GROUP, width
    if x.dtype is torch.float32:
        return scaling.both_ways_by(groups, x, width, element, power_of_2, is_square)
    x = _aligned(x)
    made = codes, scale_inv, turned, turned_scale_inv = scaling.both_ways_like(x, width, element, is_square)
    rowwise = codes.shape[0], codes.data_ptr(), scale_inv.data_ptr()
    columnwise = turned.shape[1], turned.data_ptr(), turned_scale_inv.data_ptr()
    kernels.quantize_groups_both_ways(
        memory(x), *x.shape, element.name, power_of_2, is_square, rowwise, columnwise, stream_of(x)
    )
    return made


def _aligned(x: Tensor) -> Tensor:
    """Return `x`, contiguous, at an address that the kernels' loads of 16 bytes can take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % OPERAND_ALIGNMENT_BYTES else x
