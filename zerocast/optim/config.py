"""ZeroConfig: the choices of an optimizer that are not hyperparameters of its update."""

from dataclasses import dataclass
from typing import Literal

import torch

from zerocast.distributed.bucket import BUCKET_SIZE
from zerocast.distributed.gradient_wire import check_grad_wire


@dataclass(frozen=True)
class ZeroConfig:
    """The communication, storage and checks of a ZeroAdamW or a ZeroMuon.

    Attributes:
        bucket_size: the number of elements of a bucket, before padding; a larger parameter gets a
            separate bucket. For matrices that each belong to one rank (ZeroMuon) it is the minimum
            size of a bucket of masters and bytes, which has about one matrix per rank. Their
            gradients are sharded like all others, and a rank is sent this many elements at a time.
        overlap_all_gather: let the all-gather of quantized bytes overlap with the next forward
            pass. Changes no bit.
        deterministic: add gradients in rank order and take the norm in logical order, so that a run
            with the same number of ranks repeats bit for bit with any communication library. Each
            reduce-scatter becomes an all-to-all, which costs more.
        grad_wire: the wire format of gradients: None for the dtype in which they are reduced, or
            "fp8_1x128", E4M3 codes with one FP32 scale for 128 elements
            (docs/formats/fp8_1x128.md), 1.03 bytes per element. The scale is 448 / amax of the
            group, and codes are rounded to nearest even. The owner adds `code * (1 / scale)` of all
            ranks in FP32 in rank order, so this sum repeats without `deterministic`, which then
            only orders the norm. Every contribution is rounded, including the owner's, also with a
            single rank. A group with a value that is not finite arrives as NaN and skips the step
            on all ranks. Each backward pass outside `no_sync()` rounds the gradients that it sends.
        grad_dtype: the dtype in which gradients are reduced; None for each parameter's own dtype.
            With FP32, weight gradients of quantized weights are computed in FP32, too. If all are
            reduced in bf16, a rank keeps 2 bytes per element of them where that rounds nothing.
        backend: a name from `zerocast.backends`; None for an automatic choice.
        moment_dtype: the dtype in which both moments of AdamW are stored. With bf16, which saves 4
            bytes per element, an update computes in FP32 and rounds moments to nearest even when it
            stores them. "8bit" stores one byte and 1/32 byte of scale each, which saves 5.9 bytes
            an element (docs/formats/moments_8bit.md); the bits do not depend on the number of
            ranks. States hold its moments in FP32.
        state: "compact" lets states and checkpoints hold moments in 8 bits as they are, codes and
            scales, 2.06 bytes per element in place of 8. Only optimizers with such moments load
            them, on any number of ranks; they load FP32 moments as well.
        keep_columnwise: keep the columnwise copies of quantized weights, 0.5 to 1 byte per element,
            and make them once per step. Otherwise each product that reads a copy makes it and drops
            it, in every micro-batch. Changes no bit.
        verify_every: compare all live bytes with an unsharded cast of the masters
            (`zerocast.verify`) after every this many steps, and raise VerificationError on every
            rank if any differ. None for never. The masters are gathered for it, and cast by the
            slow reference.
    """

    bucket_size: int = BUCKET_SIZE
    overlap_all_gather: bool = False
    deterministic: bool = False
    grad_wire: str | None = None
    grad_dtype: torch.dtype | None = None
    backend: str | None = None
    moment_dtype: torch.dtype | Literal["8bit"] = torch.float32
    state: Literal["fp32", "compact"] = "fp32"
    keep_columnwise: bool = False
    verify_every: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values, before any rank communicates."""
        if self.bucket_size < 1:
            raise ValueError(f"bucket_size must be positive, got {self.bucket_size}")
        if self.verify_every is not None and self.verify_every < 1:
            raise ValueError(f"verify_every is None or at least 1, got {self.verify_every}")
        check_grad_wire(self.grad_wire)
        if self.grad_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"grad_dtype is None, torch.float32 or torch.bfloat16, got {self.grad_dtype}")
        if self.moment_dtype not in (torch.float32, torch.bfloat16, "8bit"):
            raise ValueError(f"moment_dtype is torch.float32, torch.bfloat16 or '8bit', got {self.moment_dtype}")
        if self.state != "fp32" and (self.state, self.moment_dtype) != ("compact", "8bit"):
            raise ValueError(f"state is 'fp32', or 'compact' with moments in 8 bits, got {self.state!r}")
