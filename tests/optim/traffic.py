"""Collectives as they happen: what was called, on how many bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

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
def recorded() -> Iterator[list[Any]]:
    """Within, every collective of torch.distributed is appended to what this gives, as (kind, bytes of its first tensor)."""
    log: list[Any] = []

    def logged(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            log.append((CALLS[name], args[0].nbytes if args and isinstance(args[0], Tensor) else 0))
            return collective(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: logged(name) for name in CALLS if hasattr(dist, name)}):
        yield log


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

    with mock.patch.object(dist, "all_to_all_single", call):
        yield log
