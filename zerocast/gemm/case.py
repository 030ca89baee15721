"""Case: a hashable record of everything that the choice of a GEMM path depends on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.formats import Block, FormatSpec
from zerocast.formats.layout import OPERAND_ALIGNMENT_BYTES

OPERANDS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A product `x @ W.T` (`x @ W` when `transposed`) for a weight W, or the grouped product of all
    its experts, in both orientations.

    Args:
        format: the format of the weight.
        matrix_shape: (M, K) of the weight, or of each of its experts, as stored.
        dtype: the dtype of the input and of the result.
        device: the type of the device, such as "cuda".
        capability: the CUDA compute capability; None without an NVIDIA GPU.
        cuda: the version of the CUDA toolkit that torch was built with; None without NVIDIA GPU.
        transposed: True for `x @ W`.
        aligned: True if all buffers begin at multiples of `OPERAND_ALIGNMENT_BYTES`.
        experts: the number of experts in a grouped product; 0 for the product of a matrix.
    """

    format: FormatSpec
    matrix_shape: Block
    dtype: torch.dtype
    device: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, ...] | None = None
    transposed: bool = False
    aligned: bool = True
    experts: int = 0

    @staticmethod
    def of(weight: Any, dtype: torch.dtype, transposed: bool) -> "Case":
        """Return the case of a QuantizedWeight with its current storage."""
        device = weight.state.rowwise_data.device
        # torch calls ROCm devices "cuda" as well.
        nvidia = device.type == "cuda" and torch.version.cuda is not None
        experts, shape = (0, weight.matrix_shape) if weight.dim() == 2 else (weight.shape[0], weight.shape[1:])
        return Case(
            format=weight.format,
            matrix_shape=tuple(shape),
            experts=experts,
            dtype=dtype,
            device=device.type,
            capability=torch.cuda.get_device_capability(device) if nvidia else None,
            cuda=tuple(int(part) for part in str(torch.version.cuda).split(".")[:2]) if nvidia else None,
            transposed=transposed,
            aligned=all(_aligned(weight.state.buffers[name]) for name in OPERANDS),
        )

    @property
    def capability_text(self) -> str:
        """The compute capability as text, such as "9.0"."""
        return ".".join(map(str, self.capability or ()))

    def unsupported_reasons(self, multiple: int) -> Iterator[str]:
        """Yield the reasons why no path except dequantize can run, one sentence each.

        Both extents of the weight must be divisible by `multiple`. A path serves the forward
        product and the input gradient, and the inner dimension of one is the outer dimension of the
        other.
        """
        if self.dtype not in SIXTEEN_BITS:
            yield f"results are bfloat16 or float16, not {str(self.dtype).removeprefix('torch.')}"
        if self.matrix_shape[0] % multiple or self.matrix_shape[1] % multiple:
            yield f"both extents must be multiples of {multiple}, the weight is {list(self.matrix_shape)}"
        if self.transposed:
            yield "x @ W needs the operand in its transposed layout: only x @ W.T (linear) runs on tensor cores"
        if not self.aligned:
            yield f"its storage does not begin at a multiple of {OPERAND_ALIGNMENT_BYTES} bytes"


def _aligned(tensor: torch.Tensor | None) -> bool:
    """Return True if the buffer is None, or if it begins at an aligned offset of its storage."""
    # Every allocator aligns a storage to more than OPERAND_ALIGNMENT_BYTES. The address itself
    # would not do: fake tensors of a compiler have none.
    return tensor is None or tensor.storage_offset() * tensor.element_size() % OPERAND_ALIGNMENT_BYTES == 0
