"""Collectives as they happen: what was called, on how many bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

CALLS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "all_gather_object": "objects",
    "all_gather": "other",
    "reduce_scatter": "other",
    "barrier": "other",
    "send": "other",
    "recv": "other",
}


@contextlib.contextmanager
def recorded(log: list[Any] | None = None) -> Iterator[list[Any]]:
    """Within, every collective of torch.distributed is appended to the log as (kind, bytes of its first tensor)."""
    log = [] if log is None else log
    originals = {name: getattr(dist, name) for name in CALLS if hasattr(dist, name)}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append((CALLS[name], args[0].nbytes if args and isinstance(args[0], Tensor) else 0))
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in originals:
            setattr(dist, name, wrap(name))
        yield log
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextlib.contextmanager
def sent_in_exchanges() -> Iterator[list[int]]:
    """Within, the bytes that this rank sends to others are appended for every all-to-all of unequal parts."""
    log: list[int] = []
    original = dist.all_to_all_single

    def call(
        out: Tensor, full: Tensor, arriving: Any = None, sent: Any = None, group: Any = None, **kwargs: Any
    ) -> Any:
        if sent is not None:
            assert sum(sent) == full.numel() and sum(arriving) == out.numel()
            log.append((full.numel() - sent[dist.get_rank(group)]) * full.itemsize)
        return original(out, full, arriving, sent, group=group, **kwargs)

    dist.all_to_all_single = call
    try:
        yield log
    finally:
        dist.all_to_all_single = original
