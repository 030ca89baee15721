"""A call of the operator behind `torch.nn.functional.scaled_mm`, the matrix multiply that takes the
kind of scaling of each operand as an argument, the GPUs that have it, and the order of the scales
that it reads.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.formats import Columnwise
from zerocast.gemm.case import Case
from zerocast.gemm.scaling import is_traced


def hopper(case: Case) -> Iterator[str]:
    """Yield a reason unless the device is a Hopper GPU."""
    yield from _other_hardware(case, major=9, name="Hopper")


def blackwell(case: Case) -> Iterator[str]:
    """Yield a reason unless the device is a data-centre Blackwell GPU."""
    yield from _other_hardware(case, major=10, name="Blackwell")


def _other_hardware(case: Case, major: int, name: str) -> Iterator[str]:
    """Yield a reason for every device except an NVIDIA GPU of compute capability `major`.x."""
    if case.capability is None:
        yield f"runs on {name} GPUs (compute capability {major}.x), not on {case.device} tensors"
    elif case.capability[0] != major:
        yield f"runs on {name} GPUs (compute capability {major}.x), this device has {case.capability_text}"


def scaled_mm(
    a: Tensor,
    a_scale: Tensor | list[Tensor],
    b: Tensor,
    b_scale: Tensor | list[Tensor],
    a_scaling: Sequence[str],
    b_scaling: Sequence[str],
    bias: Tensor | None,
    dtype: torch.dtype,
    swizzle: Sequence[str] = (),
) -> Tensor:
    """Return `a [rows, k] @ b [k, n] + bias` as `dtype`. The scalings are names of members of
    `ScalingType`, `swizzle` is the name of a member of `SwizzleType`, for both operands.
    """
    if is_traced(a):
        # The operator itself must not be a node of a graph. The compiler of torch 2.13 turns it
        # into `_scaled_mm`, which does not get the scalings' names and multiplies by padded scales
        # wrongly (pytorch/pytorch#166752).
        (a_name,), (b_name,) = a_scaling, b_scaling
        of_graph: Tensor = torch.ops.zerocast.scaled_mm(a, a_scale, b, b_scale, a_name, b_name, bias, dtype)
        return of_graph
    recipes = _numbers("ScalingType", *a_scaling), _numbers("ScalingType", *b_scaling)
    swizzles = _numbers("SwizzleType", *swizzle)
    scales = [list(scale) if isinstance(scale, (list, tuple)) else [scale] for scale in (a_scale, b_scale)]
    # The operator that torch's function calls. The function itself takes the host twice as long,
    # for its lists of members.
    made: Tensor = torch._scaled_mm_v2(
        a, b, scales[0], recipes[0], swizzles, scales[1], recipes[1], swizzles, bias, dtype
    )
    return made


@functools.cache
def _numbers(kind: str, *names: str) -> list[int]:
    """Return the values of members of an enum, which the operator takes."""
    members: Any = getattr(torch.nn.functional, kind)
    return [getattr(members, name).value for name in names]


def swizzled(scales: Tensor) -> Tensor:
    """Return block scales `[R, C]`, padded to R % 128 == 0 and C % 4 == 0, as a flat tensor in the
    order in which Blackwell's tensor cores read them (cuBLAS documentation, "1D Block Scaling
    Factors Layout").

    Element (i, j) goes to `((i/128)*(C/4) + j/4)*512 + (i%32)*16 + ((i%128)/32)*4 + j%4`. So tiles
    of 128x4 follow each other, and in a tile the 4 scales of row i are followed by those of rows
    i+32, i+64 and i+96.
    """
    rows, columns = scales.shape
    tiles = scales.view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def swizzled_scales(weight: Any, columnwise: bool) -> Tensor:
    """Return the swizzled scales of one direction of a weight, made at its first product after a
    cast and kept until the next cast.
    """
    _, scale_inv = weight.direction(columnwise)
    # Columnwise codes that are not a transpose keep the layout [M, K], and so do their scales. The
    # product reads the scales along its inner dimension, so they are transposed here.
    needs_transpose = columnwise and weight.format.columnwise is not Columnwise.TRANSPOSE
    scales: Tensor = weight.cached_per_cast(
        ("swizzled", columnwise), lambda: swizzled(scale_inv.t().contiguous() if needs_transpose else scale_inv)
    )
    return scales


ops.define(
    "scaled_mm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str a_scaling, str b_scaling, Tensor? bias, ScalarType dtype) -> Tensor",
    lambda a, a_scale, b, b_scale, a_name, b_name, bias, dtype: scaled_mm(
        a, a_scale, b, b_scale, (a_name,), (b_name,), bias, dtype
    ),
    lambda a, a_scale, b, b_scale, a_name, b_name, bias, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
)
