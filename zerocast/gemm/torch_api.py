"""`torch.nn.functional.scaled_mm`: the scaled matrix multiply that is told how its operands are
scaled.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.gemm.case import Case


def hardware(case: Case, major: int, name: str) -> Iterator[str]:
    """Anything but an NVIDIA GPU of compute capability `major`.x."""
    if case.capability is None:
        yield f"runs on {name} GPUs (compute capability {major}.x), not on {case.device} tensors"
    elif case.capability[0] != major:
        yield f"runs on {name} GPUs (compute capability {major}.x), this device has {case.capability_text}"


def unsupported_reasons() -> Iterator[str]:
    """A torch without the function."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        yield "this torch has no torch.nn.functional.scaled_mm"


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
    """`a [rows, k] @ b [k, n] + bias` as `dtype`; scalings name members of `ScalingType`,
    `swizzle` of `SwizzleType`.
    """
    functional: Any = torch.nn.functional
    swizzles = [getattr(functional.SwizzleType, name) for name in swizzle] or None
    y: Tensor = functional.scaled_mm(
        a,
        b,
        a_scale,
        [getattr(functional.ScalingType, name) for name in a_scaling],
        b_scale,
        [getattr(functional.ScalingType, name) for name in b_scaling],
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        bias=bias,
        output_dtype=dtype,
    )
    return y
