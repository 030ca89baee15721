"""Group: the ranks that a cast or an optimizer step spans, with each collective as one call.

Every collective of the package goes through here, so that an error of the transport says which call it belongs to: what was sent,
in which step of which optimizer. The error keeps its class. gloo may end the process instead (SIGABRT, for sizes that differ
between ranks), and NCCL's watchdog does: nothing can be said then but what they log.
"""

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Caller:
    """Who makes the collectives of a group, for messages; `number` is that of its present step or cast, 0 while it is built."""

    name: str
    unit: str = "step"
    number: int = 0

    def __str__(self) -> str:
        return f"in {self.unit} {self.number} of {self.name}" if self.number else f"while {self.name} is built"


class Flight:
    """A collective on its way, which `wait` completes."""

    def __init__(self, work: dist.Work, failing: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._work, self._failing = work, failing

    def is_completed(self) -> bool:
        """Whether `wait` would return at once, or raise at once."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Until it is complete, for a GPU in the current stream; errors say what was on its way."""
        with self._failing():
            self._work.wait()


@dataclass(frozen=True)
class Group:
    """A process group, or one process without any; collectives over one rank do nothing."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int
    caller: Caller | None = field(default=None, compare=False, kw_only=True)

    @staticmethod
    def of(group: "GroupLike") -> "Group":
        """From a ProcessGroup, a one-dimensional DeviceMesh, or None: the default group if there is one, else one process.

        Raises ValueError for a mesh of more dimensions and TypeError for anything else.
        """
        if isinstance(group, Group):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"the mesh of a cast has one dimension, got {group.ndim}: give mesh['name']")
            group = group.get_group()
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return Group(None, 0, 1)
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the group")
        return Group(group, rank, dist.get_world_size(group))

    def duplicate(self, backend: str | None = None) -> "Group":
        """The same ranks in a new process group, of this one's backends or of `backend`, with its timeout; all of them call it."""
        if self.handle is None:
            return self
        ranks = dist.get_process_group_ranks(self.handle)
        backend = backend or dist.get_backend_config(self.handle)  # not that of the default group
        timeout = _timeout(self.handle)
        return Group.of(dist.new_group(ranks, timeout, backend, use_local_synchronization=True))

    def called_by(self, caller: Caller) -> "Group":
        """The same ranks, whose errors name the caller, unless they name one already."""
        return self if self.caller else replace(self, caller=caller)

    @contextlib.contextmanager
    def failing(self, kind: str, what: str) -> Iterator[None]:
        """Within, a collective runs: an error of the transport is raised again, of its class, with the name of the collective."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            pickle.UnpicklingError,
            EOFError,
        ) as error:  # the last two: other objects than these were sent
            caller = f" {self.caller}" if self.caller else ""
            text = (
                f"the {kind} of {what}{caller} failed on rank {self.rank} of {self.size}: {error}. Another rank has died, has "
                "stopped or makes other calls: every rank makes the same calls in the same order, which set_debug(True) checks"
            )
            raise _like(error, text) from error

    def all_reduce_max(self, tensor: Tensor, what: str = "") -> None:
        """MAX in place. NaN never enters: its result would depend on the rank."""
        if self.size > 1:
            with self.failing("all-reduce", what or _described(tensor)):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)

    def all_reduce_sum(self, tensor: Tensor, what: str = "") -> None:
        """SUM in place, in the order of the communication library."""
        if self.size > 1:
            with self.failing("all-reduce", what or _described(tensor)):
                dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.handle)

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.failing("exchange", what):
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def all_gather_into(self, out: Tensor, part: Tensor, async_op: bool = False, what: str = "") -> Flight | None:
        """Concatenate every rank's `part` in `out`; `part` may be this rank's slice of it."""
        if self.size == 1:
            out.copy_(part)
            return None
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        return self._start("all-gather", what or _described(part), all_gather, out, part, async_op=async_op)

    def reduce_scatter_mean(self, out: Tensor, full: Tensor, async_op: bool = False, what: str = "") -> Flight | None:
        """The mean of `full` over the ranks, this rank's slice, added in the order of the communication library."""
        if self.size == 1:
            out.copy_(full)
            return None
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
        what = what or _described(full)
        return self._start("reduce-scatter", what, reduce_scatter, out, full, dist.ReduceOp.AVG, async_op=async_op)

    def all_to_all(self, out: Tensor, full: Tensor, async_op: bool = False, what: str = "") -> Flight | None:
        """Slice r of `full` to rank r; `out` holds what every rank sent here, by rank."""
        if self.size == 1:
            out.copy_(full)
            return None
        return self._start("all-to-all", what or _described(full), dist.all_to_all_single, out, full, async_op=async_op)

    def broadcast(self, tensor: Tensor, what: str = "", root: int = 0) -> None:
        """The tensor of rank `root` of this group to every rank, in place."""
        if self.size > 1:
            with self.failing("broadcast", what or _described(tensor)):
                dist.broadcast(tensor, group_src=root, group=self.handle)

    def _start(self, kind: str, what: str, collective: Callable[..., Any], *args: Any, async_op: bool) -> Flight | None:
        with self.failing(kind, what):
            work = collective(*args, group=self.handle, async_op=async_op)
        return None if work is None else Flight(work, lambda: self.failing(kind, what))


def _described(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _like(error: Exception, text: str) -> Exception:
    """An error of the same class, so that handlers find it; RuntimeError for one that is none or takes other arguments."""
    if not isinstance(error, RuntimeError):
        return RuntimeError(text)
    try:
        return type(error)(text)
    except TypeError:
        return RuntimeError(text)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long its collectives wait, the least of its backends; torch has no public name for it."""
    found = []
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", None))
    known = [timeout for timeout in found if isinstance(timeout, timedelta)]
    if not known:
        logger.warning(
            "the timeout of the process group cannot be read: a group made after it has torch's default timeout"
        )
        return None
    return min(known)


GroupLike = Group | dist.ProcessGroup | DeviceMesh | None
ONE_PROCESS = Group(None, 0, 1)
