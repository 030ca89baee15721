"""How the gradients of a group get into the memory that FSDP2 reduces.

FSDP2 lays them out by rank, in the dtype of the reduction, by the op `fsdp::chunk_cat`. On a GPU
that makes a table of thread blocks and copies it to the device. With the gradients of a block of
Llama 3 8B and two ranks that takes the CPU 0.9 ms, and the kernel 1.7 times as long as a copy of
the same number of bytes. So the backend `cuda` does it in a launch that needs no table, with the
same bits.

FSDP2 adds the gradients of micro-batches up in the dtype of the reduction. Torch's kernel for an
FP32 and a bf16 operand takes 1.7 times as long as a copy of the same number of bytes, so the kernel
of the backend does this too (`accumulate`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocast import backends

# torch 2.15 calls the second one, which also takes gradients of several dtypes.
CHUNK_CATS = ("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")


class ReductionInput(Tensor):
    """Memory that `fsdp::chunk_cat` fills by `lay_out`. To all other ops it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op. FSDP2 asks for a view by ranks, which is of this class as well."""
        kwargs = kwargs or {}
        with torch._C._DisableTorchDispatch():
            if func.name() in CHUNK_CATS and lay_out(*args, **kwargs):
                return None
            result = func(*args, **kwargs)
        return result.as_subclass(cls) if func is torch.ops.aten.view.default else result


def lay_out(gradients: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> bool:
    """Lay out gradients as the op does with these arguments, if the backend can.
    Otherwise return False: where rows are left over, for which the op adds zeros, for gradients of
    several dtypes, and for dtypes other than FP32 and bf16.
    """
    dtype = gradients[0].dtype
    if dim or dtype not in (torch.bfloat16, torch.float32) or out.dtype not in (dtype, torch.float32):
        return False
    if any(gradient.dtype != dtype for gradient in gradients):
        return False
    kernel = getattr(backends.load(backends.choose(out.device)), "lay_out", None)
    if kernel is None or any(gradient.shape[0] % num_chunks for gradient in gradients):
        return False
    kernel([gradient.contiguous() for gradient in gradients], num_chunks, out)
    return True


def accumulate(gradient: Tensor, total: Tensor | None) -> Tensor | None:
    """Add a gradient to `total` in place, or return it in FP32 if there is no total yet. Return
    None and do nothing if that is left to FSDP2: for other operands than a bf16 gradient and an
    FP32 total that are contiguous, for a gradient that can be differentiated, and on devices whose
    backend has no kernel for it.
    """
    if type(gradient) is not Tensor or gradient.dtype is not torch.bfloat16 or not gradient.is_contiguous():
        return None
    if gradient.requires_grad:
        return None
    kernel = getattr(backends.load(backends.choose(gradient.device)), "lay_out", None)
    if kernel is None:
        return None
    if total is None:
        total = torch.empty_like(gradient, dtype=torch.float32)
        kernel([gradient], 1, total)
        return total
    if type(total) is not Tensor or total.dtype is not torch.float32 or not total.is_contiguous():
        return None
    kernel([gradient], 1, total, adds=True)
    return total


class LaidOutReduceScatter:
    """A reduce-scatter of FSDP2, `inner`, whose input is a ReductionInput. It serves one reduction.

    That allocates its input first and then its result, which stays a plain tensor: all of it is
    read by views. In a different order the op would run, with the same result.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._first: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory of the reduction."""
        memory: Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        if self._first is not None:
            return memory
        self._first = memory
        return memory.as_subclass(ReductionInput)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce and scatter the gradients."""
        # Such an input is the first allocation, as it came from `inner`.
        source = self._first if type(input_tensor) is ReductionInput else input_tensor
        return self._inner(output_tensor=output_tensor, input_tensor=source, group=group, op=op, async_op=async_op)
