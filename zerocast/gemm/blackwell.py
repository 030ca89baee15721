"""Paths nvfp4, mxfp8 and mxfp4, for data-centre Blackwell GPUs: codes with a scale for 16 or 32
elements along the inner dimension, on both sides.

NEVER RUN: written from torch's documented interface, no Blackwell GPU was at hand. The choice, the
bytes of the input, the swizzle and the operands that the call is handed are tested on any machine.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_nvfp4_nvfp4`,
`_scaled_mxfp8_mxfp8`, `_scaled_mxfp4_mxfp4`): A `[rows, k]`, B `[k, n]`; of 4-bit codes A `[rows,
k/2]` bytes, B `[k/2, n]` bytes column-major, the even element in the low nibble; scales of
`[rup(rows, 128), rup(k/g, 4)]` and `[rup(n, 128), rup(k/g, 4)]` for g elements each, swizzled
(torch_api.py), contiguous. Inputs and gradients round to nearest, with scales rounded up.

* nvfp4: E2M1 with one E4M3 scale per 16 elements and one FP32 factor per tensor, by both of which
  the result is multiplied. k must be a multiple of 16 bytes, which are 32 elements. Stochastic
  rounding and Hadamard transforms of gradients, as in NVIDIA's recipe for pre-training, are left
  out.
* mxfp8: E4M3 with a power-of-two scale for 32 elements. In the forward pass B is the rowwise data
  read as its transpose. In the backward pass it is the columnwise data as stored, `[M, K]`
  row-major. Its blocks run down the columns, so a transpose of the rowwise codes would not give it.
  Data-centre Blackwell (10.x) reads B in either order. GeForce cards (12.x) read only the first
  (pytorch/pytorch#198126), so they are left out. Gradients are E4M3, as everything in this format.
* mxfp4: E2M1 with a power-of-two scale for 32 elements. The kernel is FBGEMM's (MSLK's from torch
  2.12 on), which a build may lack; its results are bf16, and it leaves a bias out, so the bias is
  added here. Hopper has no such product: there block_128 multiplies the same weight in FP8.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import Columnwise, Element, FormatSpec, ScaleRule
from zerocast.formats.element import E2M1, E4M3
from zerocast.gemm import inputs, torch_api
from zerocast.gemm.case import Case

# Options of torch's build. The product of mxfp4 needs one of the two.
MXFP4_KERNELS = ("USE_FBGEMM_GENAI", "USE_MSLK")


@dataclass(frozen=True)
class BlackwellPath:
    """One of the paths.

    Attributes:
        scale_rule, element: the formats of weights that it multiplies.
        quantize_rows: quantizes `[rows, k]`. Returns codes, scales and, for nvfp4, the decode
            factor f32[1] of the tensor.
        codes, scales: the dtypes by which torch knows the bytes of codes and scales.
        scaling, swizzle: the names of the scalings and of the orders of scales, for `scaled_mm`.
        takes_bias: False if the kernel ignores a bias, which is then added to its result.
    """

    scale_rule: ScaleRule
    element: Element
    quantize_rows: Callable[[Tensor], tuple[Tensor, ...]]
    codes: torch.dtype
    scales: torch.dtype
    scaling: tuple[str, ...] = ("BlockWise1x32",)
    swizzle: tuple[str, ...] = ("SWIZZLE_32_4_4",)
    takes_bias: bool = True

    def supports(self, fmt: FormatSpec) -> bool:
        """Return True if this is the path of weights of this format."""
        return fmt.scale_rule is self.scale_rule and fmt.element == self.element

    def hardware(self, case: Case) -> Iterator[str]:
        """Yield a reason unless the device is a data-centre Blackwell GPU."""
        return torch_api.blackwell(case)

    def unsupported_reasons(self, case: Case) -> Iterator[str]:
        """Yield a reason unless extents are multiples of 32."""
        return case.unsupported_reasons(multiple=32)

    def quantize(self, x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
        """Return (codes, swizzled scales, and the decode factor for nvfp4) of an input or an output
        gradient.
        """
        codes, scales, *factor = self.quantize_rows(x.reshape(-1, x.shape[-1]))
        return codes, torch_api.swizzled(scales), *factor

    def multiply(
        self,
        operands: Sequence[Tensor],
        weight: Any,
        columnwise: bool,
        transposed: bool,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the product of quantized rows with one direction of the weight."""
        assert not transposed
        codes, scales, *factor = operands
        data, _ = weight.direction(columnwise)
        a, b = codes.view(self.codes), data.view(self.codes)
        # Both copies of mxfp8 are stored as [M, K]. B is W for the input gradient, W.T forward.
        if not columnwise or weight.format.columnwise is Columnwise.TRANSPOSE:
            b = b.t()
        a_scale: Any = scales.view(self.scales)
        b_scale: Any = torch_api.swizzled_scales(weight, columnwise).view(self.scales)
        if factor:
            a_scale, b_scale = [a_scale, *factor], [b_scale, inputs.decode_factor(weight.amax)]
        scaling, swizzle = list(self.scaling), list(self.swizzle)
        given_bias = bias if self.takes_bias else None
        y = torch_api.scaled_mm(a, a_scale, b, b_scale, scaling, scaling, given_bias, dtype, swizzle)
        return y if bias is None or self.takes_bias else y + bias


class _MXFP4(BlackwellPath):
    def unsupported_reasons(self, case: Case) -> Iterator[str]:
        """Yield a reason unless torch has the kernel, extents are multiples of 32, and inputs are
        bf16.
        """
        if not _has_mxfp4_kernel():
            yield f"this torch was built without {' and '.join(MXFP4_KERNELS)}, one of which has the product"
        if case.dtype is torch.float16:
            yield "results are bfloat16, not float16"
        yield from super().unsupported_reasons(case)


@functools.cache
def _has_mxfp4_kernel() -> bool:
    return any(name in torch.__config__.show() for name in MXFP4_KERNELS)


NVFP4 = BlackwellPath(
    ScaleRule.TWO_LEVEL,
    E2M1,
    inputs.nvfp4,
    torch.float4_e2m1fn_x2,
    torch.float8_e4m3fn,
    ("BlockWise1x16", "TensorWise"),
    ("SWIZZLE_32_4_4", "NO_SWIZZLE"),
)
MXFP8 = BlackwellPath(ScaleRule.E8M0, E4M3, inputs.mxfp8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
MXFP4 = _MXFP4(ScaleRule.E8M0, E2M1, inputs.mxfp4, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, takes_bias=False)
