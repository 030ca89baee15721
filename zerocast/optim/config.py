"""ZeroConfig: the choices of an optimizer that are not hyper-parameters of its update."""

from dataclasses import dataclass

import torch

from zerocast.distributed.gradient_wire import check_grad_wire


@dataclass(frozen=True)
class ZeroConfig:
    """How a ZeroAdamW or a ZeroMuon communicates.

    Attributes:
        bucket_size: elements a bucket, before padding; a larger parameter gets a bucket of its own.
            Of the masters and bytes of matrices that ZeroMuon's ranks own in whole it is the least,
            and a bucket holds about one for each rank; their gradients are cut as all others, and
            a rank is sent as many elements at a time.
        overlap_all_gather: let the all-gather of quantized bytes run into the next forward pass.
            Changes no bit.
        deterministic: add gradients in rank order and take the norm in logical order, so that a run
            repeats bit for bit at the same rank count whatever the communication library does.
            Costs an all-to-all in place of each reduce-scatter.
        grad_wire: how gradients travel to their owner: as they are added, or "fp8_1x128", as E4M3
            codes with one FP32 scale for 128 elements (docs/formats/fp8_1x128.md), 1.03 bytes an
            element. The scale is 448 / amax of the group, codes are rounded to nearest even, the
            owner adds `code * (1 / scale)` of all ranks in FP32 in rank order, so this sum repeats
            without `deterministic`, which then orders the norm alone. Every contribution is
            rounded, the owner's own and that of a single rank too. A group with a value that is
            not finite arrives as NaN and skips the step on all ranks. Each backward pass outside
            `no_sync()` rounds what it sends.
        grad_dtype: dtype that gradients are reduced in; None is each parameter's own. With FP32,
            weight gradients of quantized weights are computed in FP32 too.
        backend: a name from `zerocast.backends`; None chooses.
        moment_dtype: dtype that both moments of AdamW are stored in; with bf16 an update computes
            with FP32 values, and what it keeps of them is rounded to nearest even. 4 bytes an
            element less.
        keep_columnwise: keep the columnwise copies of quantized weights, 0.5 to 1 byte an element,
            and make them once a step. Else each product that reads a copy makes it and drops it,
            in every micro-batch. Changes no bit.
        verify_every: after every so many steps compare all live bytes with an unsharded cast of the
            masters (`zerocast.verify`) and raise VerificationError on every rank if any differ.
            None never does. The masters are gathered for it, and cast by the slow reference.
    """

    bucket_size: int = 32 * 1024 * 1024
    overlap_all_gather: bool = False
    deterministic: bool = False
    grad_wire: str | None = None
    grad_dtype: torch.dtype | None = None
    backend: str | None = None
    moment_dtype: torch.dtype = torch.float32
    keep_columnwise: bool = False
    verify_every: int | None = None

    def __post_init__(self) -> None:
        """Reject what cannot work, before any rank communicates."""
        if self.bucket_size < 1:
            raise ValueError(f"bucket_size must be positive, got {self.bucket_size}")
        if self.verify_every is not None and self.verify_every < 1:
            raise ValueError(f"verify_every is None or at least 1, got {self.verify_every}")
        check_grad_wire(self.grad_wire)
        if self.grad_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"grad_dtype is None, torch.float32 or torch.bfloat16, got {self.grad_dtype}")
        if self.moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is torch.float32 or torch.bfloat16, got {self.moment_dtype}")
