"""Group: the ranks of a cast or an optimizer step, and every collective among them.

All collectives of the package go through here. An error of the transport keeps its class and names
its tensor, step and optimizer. gloo may abort the process instead (SIGABRT, if sizes differ between
ranks), and so may NCCL's watchdog; then only their own logs remain.
"""

import contextlib
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

# The largest number of groups that `_counting_alike` has shown to torch so far. It starts above any
# number of groups that a program makes, so that no other group has a name with this number.
_most_groups = 1_000
# The CPU twin of each group that has one.
_twins: "weakref.WeakKeyDictionary[dist.ProcessGroup, Group]" = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Caller:
    """The caller of a group's collectives, for messages.

    Attributes:
        name: the optimizer or plan.
        unit: the unit of `number`, "step" or "cast".
        number: the current step or cast. 0 while the caller is being built.
    """

    name: str
    unit: str = "step"
    number: int = 0

    def __str__(self) -> str:
        return f"in {self.unit} {self.number} of {self.name}" if self.number else f"while {self.name} is built"


class Flight:
    """A collective in flight, which `wait` completes.

    Args:
        work: torch's handle.
        failing: a context that names the collective in errors (`Group.failing`).
    """

    def __init__(self, work: dist.Work, failing: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._work = work
        self._failing = failing

    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise without waiting."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait until it is complete. On a GPU only the current stream waits. Errors name the
        collective.
        """
        with self._failing():
            self._work.wait()


@dataclass(frozen=True)
class Group:
    """A process group, or a single process without one. Collectives over one rank only copy their
    input.

    Attributes:
        handle: torch's process group; None for a single process.
        rank: the rank of this process in the group.
        size: the number of ranks.
        caller: the optimizer or plan that errors name, or None.
    """

    handle: dist.ProcessGroup | None
    rank: int
    size: int
    caller: Caller | None = field(default=None, compare=False, kw_only=True)

    @staticmethod
    def of(group: "GroupLike") -> "Group":
        """Return a Group from a ProcessGroup, a one-dimensional DeviceMesh or None.

        None gives the default group if there is one, else a group of this process only.

        Raises ValueError for a mesh of more dimensions and TypeError for anything else.
        """
        if isinstance(group, Group):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"the mesh of a cast has one dimension, got {group.ndim}: pass mesh['name']")
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

    @property
    def device(self) -> torch.device:
        """The device for tensors that are made on the CPU to be sent: the CPU if a backend of the
        group serves it, else this process's GPU.
        """
        kinds = [device.type for device in getattr(self.handle, "_device_types", ())]
        return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])

    def duplicate(self, backend: str | None = None, patience: int = 1) -> "Group":
        """Return a new process group of the same ranks. Collective.

        It has the same backends, unless `backend` names another, and `patience` times the timeout.
        """
        if self.handle is None:
            return self
        ranks = dist.get_process_group_ranks(self.handle)
        # Without these arguments torch would use the backend of the default group, and the timeout
        # of the backend.
        backend = backend or dist.get_backend_config(self.handle)
        timeout = _timeout(self.handle)
        timeout = timeout and patience * timeout
        # Local synchronization lets the ranks of this group call new_group alone. Without it all
        # ranks of the job would have to.
        with self._counting_alike():
            return Group.of(dist.new_group(ranks, timeout, backend, use_local_synchronization=True))

    def cpu_twin(self) -> "Group":
        """Return a gloo group of the same ranks, for messages between CPUs. Collective, since the
        first call makes it.

        Its collectives have no order with those of this group, and no GPU takes part in them. With
        NCCL the first communication of the twin would wait for what this group has in flight.
        """
        if self.handle is None or self.size == 1:
            return self
        if self.handle not in _twins:
            _twins[self.handle] = self.duplicate("gloo")
        twin = _twins[self.handle]
        return twin.called_by(self.caller) if self.caller else twin

    @contextlib.contextmanager
    def _counting_alike(self) -> Iterator[None]:
        """While the context is open, torch counts the same number of groups on every rank, and more
        than ever before.

        torch names a new group by its ranks and by the number of groups that the process is in, or
        from 2.14 on by the number that it has made. Ranks find each other by this name, so they
        would fail to if one rank is in more groups or has made more. Also, after a group was
        destroyed, a new group could get its name, and with it the addresses that the store still
        has.
        """
        global _most_groups  # noqa: PLW0603
        world = dist.distributed_c10d._world
        names, made = world.pg_names, world.group_count
        most_groups = torch.tensor([max(len(names), made, _most_groups + 1)], device=self.device)
        self.all_reduce_max(most_groups, "the number of process groups")
        _most_groups = int(most_groups)
        # torch counts the entries of this dict, so placeholders fill it up.
        stand_ins: Any = [object() for _ in range(_most_groups - len(names))]
        names.update(dict.fromkeys(stand_ins, ""))
        world.group_count = _most_groups
        try:
            yield
        finally:
            # The user's own calls of new_group name groups by this count as well.
            world.group_count = made
            for stand_in in stand_ins:
                del names[stand_in]

    def called_by(self, caller: Caller) -> "Group":
        """Return a group of these ranks whose errors name the caller, unless they name one
        already.
        """
        return self if self.caller else replace(self, caller=caller)

    @contextlib.contextmanager
    def failing(self, kind: str, what: str) -> Iterator[None]:
        """Re-raise an error of the transport in the body, in the same class, with the name of the
        collective.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            # It is a RuntimeError too, but no other rank is to blame.
            raise
        # The last two come from an exchange of objects, if another rank sent something else.
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            caller = f" {self.caller}" if self.caller else ""
            text = (
                f"the {kind} of {what}{caller} failed on rank {self.rank} of {self.size}: {error}. Another rank has died, has "
                "stopped or makes other calls: every rank makes the same calls in the same order, and set_debug(True), which "
                "checks that, is called on all ranks or on none"
            )
            raise _like(error, text) from error

    def all_reduce_max(self, tensor: Tensor, what: str = "", async_op: bool = False) -> Flight | None:
        """Reduce by MAX, in place. Callers never pass NaN, with which results could differ between
        ranks.
        """
        if self.size == 1:
            return None
        what = what or _described(tensor)
        return self._start("all-reduce", what, dist.all_reduce, tensor, dist.ReduceOp.MAX, async_op=async_op)

    def all_reduce_sum(self, tensor: Tensor, what: str = "") -> None:
        """Reduce by SUM, in place. The communication library chooses the order of additions."""
        if self.size > 1:
            with self.failing("all-reduce", what or _described(tensor)):
                dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.handle)

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.failing("exchange", what):
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def broadcast_object(self, value: Any, what: str = "an object", root: int = 0) -> Any:
        """Return the value that rank `root` of this group passes."""
        if self.size == 1:
            return value
        values = [value if self.rank == root else None]
        with self.failing("broadcast", what):
            dist.broadcast_object_list(values, group_src=root, group=self.handle)
        return values[0]

    def all_gather_into(self, out: Tensor, part: Tensor, async_op: bool = False, what: str = "") -> Flight | None:
        """Concatenate every rank's `part` in `out`; `part` may be this rank's part of it."""
        if self.size == 1:
            out.copy_(part)
            return None
        # torch 2.13 has renamed it.
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return self._start("all-gather", what or _described(part), all_gather, out, part, async_op=async_op)

    def reduce_scatter_mean(self, out: Tensor, full: Tensor, async_op: bool = False, what: str = "") -> Flight | None:
        """Write this rank's part of the mean of `full` over all ranks to `out`.

        The communication library chooses the order of additions.
        """
        if self.size == 1:
            out.copy_(full)
            return None
        # torch 2.13 has renamed it.
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        what = what or _described(full)
        return self._start("reduce-scatter", what, reduce_scatter, out, full, dist.ReduceOp.AVG, async_op=async_op)

    def all_to_all(
        self,
        out: Tensor,
        full: Tensor,
        async_op: bool = False,
        what: str = "",
        lengths: tuple[list[int], list[int]] | None = None,
    ) -> Flight | None:
        """Send part r of `full` to rank r. `out` receives the parts for this rank, in the order of
        their senders.

        Parts are of equal length unless `lengths` is given: the numbers of elements of the received
        parts and of the sent parts, by rank, which may be 0. The lengths of all ranks must match.
        This is not checked.
        """
        if self.size == 1:
            out.copy_(full)
            return None
        received, sent = lengths or (None, None)
        what = what or _described(full)
        exchange = dist.all_to_all_single
        return self._start("all-to-all", what, exchange, out, full, received, sent, async_op=async_op)

    def broadcast(self, tensor: Tensor, what: str = "") -> None:
        """Overwrite the tensor on every rank with the tensor of rank 0 of this group."""
        if self.size > 1:
            with self.failing("broadcast", what or _described(tensor)):
                dist.broadcast(tensor, group_src=0, group=self.handle)

    def _start(self, kind: str, what: str, collective: Callable[..., Any], *args: Any, async_op: bool) -> Flight | None:
        with self.failing(kind, what):
            work = collective(*args, group=self.handle, async_op=async_op)
        return None if work is None else Flight(work, lambda: self.failing(kind, what))


def _described(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _like(error: Exception, text: str) -> Exception:
    """Return an error of the same class with a different text, or a RuntimeError if the class
    cannot be made from a text.
    """
    if not isinstance(error, RuntimeError):
        return RuntimeError(text)
    try:
        return type(error)(text)
    except TypeError:
        return RuntimeError(text)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group, the shortest of its backends; None, with a warning, if
    unknown.
    """
    timeouts = []
    # torch has no public function for the timeout, and not every version has these attributes.
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeouts.append(getattr(options, "_timeout", None))
    known = [timeout for timeout in timeouts if isinstance(timeout, timedelta)]
    if not known:
        logger.warning(
            "the timeout of the process group cannot be read: a group made after it has torch's default timeout"
        )
        return None
    return min(known)


GroupLike = Group | dist.ProcessGroup | DeviceMesh | None
ONE_PROCESS = Group(None, 0, 1)
