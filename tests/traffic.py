"""Collectives as they happen: what was called, on how many bytes."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

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


class Traffic:
    """While the context is open, every collective of torch.distributed is noted, those that a
    subclass of Tensor makes in its operators too.

    Attributes:
        log: (kind, bytes of its first tensor), in their order.
        sent: by kind, the bytes that this rank puts in.
        exchanged: of all-to-alls of unequal parts, the bytes that this rank sends to others.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.exchanged: list[int] = []
        noted: dict[str, Any] = {
            name: self._noted(kind, getattr(dist, name)) for name, kind in CALLS.items() if hasattr(dist, name)
        }
        self._patches = mock.patch.multiple(dist, **noted)

    def __enter__(self) -> "Traffic":
        self._patches.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.stop()

    def _noted(self, kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)] or [0]
            self.log.append((kind, sizes[0]))
            self.sent[kind].append(sizes[-1])
            if kind == "all-to-all" and len(args) > 3 and args[3] is not None:
                full, parts = args[1], args[3]
                kept = parts[dist.get_rank(kwargs["group"])]
                self.exchanged.append((full.numel() - kept) * full.itemsize)
            return collective(*args, **kwargs)

        return call
