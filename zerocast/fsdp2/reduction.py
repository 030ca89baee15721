"""Faster kernels for two steps of FSDP2's gradient reduction, with the same bits.

`lay_out` replaces the op `fsdp::chunk_cat`, by which FSDP2 copies the gradients of a group into the
input of the reduce-scatter, ordered by rank and in the dtype of the reduction. On a GPU that op
makes a table of thread blocks and copies it to the device. With the gradients of a block of Llama 3
8B and two ranks that takes the CPU 0.9 ms, and the kernel takes 1.7 times as long as a copy of the
same number of bytes. The backend `cuda` has a kernel that needs no table.

`accumulate` adds the gradients of micro-batches in the dtype of the reduction. Torch's kernel for
an FP32 and a bf16 operand takes 1.7 times as long as a copy of the same number of bytes, so the
stage `add_gradients` does this.
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
    """Fill `out` as the op does with these arguments, and return True, if the backend can.

    Return False if the rows of a gradient do not divide into equal chunks (the op adds zeros), for
    gradients of several dtypes, and for dtypes other than FP32 and bf16.
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
    """Add a gradient to `total` in place and return it, or return the gradient in FP32 if there is
    no total yet.

    Return None, with nothing done, if FSDP2 must do it: for operands other than a contiguous bf16
    gradient and a contiguous FP32 total, and for a gradient that can be differentiated.
    """
    if type(gradient) is not Tensor or gradient.dtype is not torch.bfloat16 or not gradient.is_contiguous():
        return None
    if gradient.requires_grad:
        return None
    adds = total is not None
    if total is None:
        total = torch.empty_like(gradient, dtype=torch.float32)
    elif type(total) is not Tensor or total.dtype is not torch.float32 or not total.is_contiguous():
        return None
    # The backend's function takes 6 µs, and the stage 25. It is called for each parameter.
    backend = backends.load(backends.choose(gradient.device))
    backend.add_gradients(gradient.view(-1), 1, 1, adds, total.view(-1))
    return total


class LaidOutReduceScatter:
    """Wraps FSDP2's reduce-scatter `inner` for one reduction, whose input becomes a ReductionInput.

    FSDP2 allocates the input first and the output second. The output stays a plain tensor, since
    FSDP2 takes views of it. If FSDP2 allocated the output first, `fsdp::chunk_cat` would run, with
    the same result.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # The plain tensor of the input. None until it is allocated.
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input of the reduction in the first call, and its output in the second."""
        memory: Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        if self._input is not None:
            return memory
        self._input = memory
        return memory.as_subclass(ReductionInput)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce and scatter the gradients."""
        # `inner` gets the tensor that it has allocated, without the subclass.
        source = self._input if type(input_tensor) is ReductionInput else input_tensor
        return self._inner(output_tensor=output_tensor, input_tensor=source, group=group, op=op, async_op=async_op)
