"""Memory of this process's tensors: what lives, and what a piece of code allocates."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerocast import QuantizedWeight


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
