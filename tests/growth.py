"""Counts of what a process holds, to find leaks: threads, files, memory, objects, tensors, process groups, hooks."""

import gc
import os
import resource
import threading
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

PAGE = resource.getpagesize()


def held() -> Counter[str]:
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


def resident() -> int:
    """Return the bytes of this process in physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def grown(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    """Return what there is more of, as (before, after)."""
    return {name: (before[name], after[name]) for name in after if after[name] > before[name]}
