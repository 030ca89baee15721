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
