"""Observers of a piece of code: its operators, collectives and values that cross to the host, memory, what a
process holds, what it logs, debug mode, and whether results are the same on all ranks.
"""

import contextlib
import gc
import logging
import os
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerocast
from zerocast import QuantizedWeight


@contextlib.contextmanager
def debug_mode() -> Iterator[None]:
    """While the context is open, zerocast is in debug mode."""
    zerocast.set_debug(True)
    try:
        yield
    finally:
        zerocast.set_debug(False)


def same_on_all(value: Any) -> Any:
    """Assert that the value is the same on all ranks, and return it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values
    return value


@contextlib.contextmanager
def logged(name: str = "zerocast") -> Iterator[list[str]]:
    """Collect the warnings of a logger and of those below it. Lesser messages that a process logs once, such
    as the path of its products, would depend on the tests before.
    """
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def operators(namespace: str = "") -> Iterator[Any]:
    """Yield every operator of this torch that Python can name, which are those that it can be dispatched to, without ours."""
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        found_in, _, name = qualified.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, found_in), name, None)
        found = getattr(packet, overload or "default", None)
        if found is not None and found_in != "zerocast" and found_in.startswith(namespace):
            yield found


class Dispatched(TorchDispatchMode):
    """A mode that records the names of operators in order, such as `aten::copy_` and `zerocast::partial_cast`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counter[str]:
        """The number of calls of each operator."""
        return Counter(self.names)

    @property
    def stages(self) -> list[str]:
        """The operators of zerocast in call order, without their namespace."""
        return [name.removeprefix("zerocast::") for name in self.names if name.startswith("zerocast::")]


CROSSING = {
    "_local_scalar_dense",  # item(), float(), bool()
    "lift_fresh",  # torch.tensor of Python values
    "scalar_tensor",  # a Python value among tensors, as in torch.where
    "nonzero",
    "masked_select",
    "unique_dim",
    "equal",
}


class HostTraffic(TorchDispatchMode):
    """A mode that records operators, except our own ops, that read a value on the host or bring one from it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        masks = [t for t in tree_leaves(args[1:]) if isinstance(t, Tensor) and t.dtype is torch.bool]
        if name in CROSSING or (name.startswith("index") and masks):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


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


PAGE = resource.getpagesize()


def process_counts() -> Counter[str]:
    """Count what is held by kind, after a garbage collection. Resident memory is apart, since allocators keep some."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if str(getattr(kind, "__module__", "")).startswith("zerocast"):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
        elif isinstance(thing, torch.Tensor):
            found["tensors"] += 1
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    found["Python's threads"] = threading.active_count()
    found["files"] = len(os.listdir("/proc/self/fd"))
    found["process groups"] = len(dist.distributed_c10d._world.pg_map)
    for name, owner in (("modules", modules), ("optimizers", optimizers)):
        hooks = [value for key, value in vars(owner).items() if key.startswith("_global_") and isinstance(value, dict)]
        found[f"hooks of all {name}"] = sum(map(len, hooks))
    return found


def resident_bytes() -> int:
    """Return the bytes of this process in physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def grown(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    """Return what there is more of, as (before, after)."""
    return {name: (before[name], after[name]) for name in after if after[name] > before[name]}


def live_bytes(known: frozenset[int] = frozenset()) -> int:
    """Return the bytes of all storages that a tensor refers to, each counted once, without those at `known` addresses."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif type(thing) is QuantizedWeight:
            for buffer in thing.state.buffers.values():
                if type(buffer) is Tensor:  # a compiler's stand-ins have no memory
                    storages[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage().nbytes()
    return sum(nbytes for address, nbytes in storages.items() if address not in known)


def settled_bytes(known: frozenset[int]) -> int:
    """Return the live bytes after gloo's threads have freed what they sent, a moment after it arrived."""
    levels = []
    for _ in range(4):
        levels.append(live_bytes(known))
        time.sleep(0.002)
    return min(levels)


@dataclass(frozen=True)
class Allocations:
    """The sizes of all allocations, and the peak above the start."""

    sizes: list[int]
    peak: int


class NewStorages(TorchDispatchMode):
    """The storages that operators bring, without what the communication library allocates inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]
        self._made: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is Tensor and tensor.untyped_storage()._cdata not in known:
                self.sizes.append(tensor.untyped_storage().nbytes())
                self._made.append((str(func), StorageWeakRef(tensor.untyped_storage())))
        return result

    def kept(self) -> list[str]:
        """Return the names of the operators whose results are still in memory."""
        return [name for name, storage in self._made if not storage.expired()]


def allocations(work: Callable[[], object]) -> Allocations:
    """Run, and watch the CPU allocator through torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    level, peak, sizes = 0, 0, []
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
        if event.nbytes() > 0:
            sizes.append(event.nbytes())
    return Allocations(sizes, peak)
