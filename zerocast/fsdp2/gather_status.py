"""GatherStatus: how ranks learn that bytes are of different casts, or of masters written to since.

Every rank begins its bytes with a header: a `DirtyStatus` and the number of its cast. A CPU reads
the headers of all ranks at once. On a GPU the host never waits for what it has just issued: headers
are kept on the device, travel to pinned memory when a forward pass ends and before a cast, and are
read before the next cast. So ranks that disagree raise up to a step later than on a CPU, and all of
them at the same place of the program: before a cast that none of them takes part in. A forward pass
without gradients, a state dict and `zerocast.verify` read what is unread, and wait for it.

No gather comes for weights that a forward pass left gathered. Before the next forward pass the
ranks exchange their statuses by themselves then (`StatusExchange`).
"""

import atexit
import contextlib
import enum
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.distributed.group import Group
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_layout import JointFill, JointLayout, RowFill, ScaleFill, fill_scales, header_of
from zerocast.weight.write_guard import WriteGuard

logger = logging.getLogger(__name__)

# passes and gathers of one step, or of a loop that takes none, before the host reads the oldest
MOST_PASSES = 16
MOST_GATHERS = 1024
EXIT_SECONDS = 1.0  # for headers that are on their way when the process ends


class DirtyStatus(enum.IntEnum):
    """A rank's shard since its last cast. A rank without rows is EMPTY and agrees with every
    other.
    """

    CLEAN = 0
    WRITTEN = 1
    EMPTY = 2
    PARTIAL = 3  # a step or a load raised half-way


class SentHeaders:
    """Headers of some gathers on their way from a GPU to pinned memory.

    `gathers` are the names of the weights of each gather with their headers `[rows, 2]`, of which
    each weight has as many as there are ranks.
    """

    def __init__(self, gathers: Sequence[tuple[tuple[str, ...], Tensor]]) -> None:
        # all kept until the copy is done, which another stream than theirs may make
        self._gathers = gathers
        self._here = torch.cat([headers for _, headers in gathers])
        self._pinned = torch.empty(self._here.shape, dtype=self._here.dtype, pin_memory=self._here.is_cuda)
        self._pinned.copy_(self._here, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        """True once reading them waits for nothing."""
        return bool(self._arrived.query())

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight's name and headers `[ranks, 2]`, on the host."""
        self._arrived.synchronize()
        by_gather = self._pinned.split([len(headers) for _, headers in self._gathers])
        for (names, _), headers in zip(self._gathers, by_gather, strict=True):
            yield from zip(names, headers.chunk(len(names)), strict=True)


class GatherStatus:
    """Status headers of a model's gathers: those of a CPU are compared at once, those of a GPU
    later, in the order in which they were issued.

    `guard` is that of the model's masters: this rank raises its own words where they are partial.
    """

    def __init__(self, guard: WriteGuard) -> None:
        self._guard = guard
        self._unsent: list[tuple[tuple[str, ...], Tensor]] = []
        self._sent: deque[SentHeaders] = deque()

    def all_written(self, name: str, headers: Tensor) -> bool:
        """True if every rank with rows of a weight was written to since it last cast, by int32
        headers `[ranks, 2]`.

        RuntimeError where only some were, where some are partial, and for bytes of different casts.
        """
        by_rank = headers.tolist()
        partial = [rank for rank, (status, _) in enumerate(by_rank) if status == DirtyStatus.PARTIAL]
        if partial:
            self._guard.check_complete()
            raise RuntimeError(
                f"{name}: an optimizer step or a load raised half-way on ranks {partial} of its shard group, which have masters "
                "of different steps: load a checkpoint on all ranks"
            )
        if len({generation for _, generation in by_rank}) > 1:
            raise RuntimeError(
                f"{name}: the ranks of a shard group sent bytes of different casts, numbers {[n for _, n in by_rank]} by "
                "rank: optimizer steps and zerocast.fsdp2.refresh must happen on all of them"
            )
        written = [rank for rank, (status, _) in enumerate(by_rank) if status == DirtyStatus.WRITTEN]
        clean = [rank for rank, (status, _) in enumerate(by_rank) if status == DirtyStatus.CLEAN]
        if written and clean:
            raise RuntimeError(
                f"{name}: the master was changed on ranks {written} of its shard group and not on ranks {clean} since "
                "the last cast: change it on all, or call zerocast.fsdp2.refresh(model) on all after changing some"
            )
        return bool(written)

    @staticmethod
    def reads_late(headers: Tensor) -> bool:
        """True if the host would have to wait for these headers."""
        return headers.is_cuda

    def note(self, names: tuple[str, ...], headers: Sequence[Tensor]) -> None:
        """Keep the headers `[ranks, 2]` of these weights, to be read later."""
        # FSDP2 may free them before they are read
        self._unsent.append((names, torch.cat(list(headers))))
        _unread.add(self)
        if len(self._unsent) > MOST_GATHERS:
            self.end_pass()

    def end_pass(self) -> None:
        """Let the headers of a forward pass travel to the host."""
        self._send()
        while len(self._sent) > MOST_PASSES:
            self._read_oldest()

    def next_step(self) -> None:
        """RuntimeError, on every rank, where ranks disagree in any headers that were sent in the
        step that ends; what it has gathered since is sent.
        """
        while self._sent:
            self._read_oldest()
        self._send()

    def check(self) -> None:
        """RuntimeError where ranks disagree in any headers. Waits for the device."""
        self._send()
        while self._sent:
            self._read_oldest()

    def forget(self) -> None:
        """Drop what is unread: masters are about to be overwritten on all ranks."""
        self._unsent.clear()
        self._sent.clear()

    @contextlib.contextmanager
    def overlooked(self) -> Iterator[None]:
        """Inside, nothing is said of what is unread so far: for a reader that may overwrite masters
        on all ranks, and calls `forget` when it does. Afterwards it is unread again.
        """
        sent, unsent = list(self._sent), self._unsent
        self._sent, self._unsent = deque(), []
        try:
            yield
        finally:
            self._sent.extendleft(reversed(sent))
            self._unsent = [*unsent, *self._unsent]

    def report_at_exit(self) -> None:
        """Log a disagreement that nobody has read; headers that do not arrive are left."""
        self._send()
        until = time.monotonic() + EXIT_SECONDS
        while self._sent and (self._sent[0].has_arrived or time.monotonic() < until):
            if self._sent[0].has_arrived:
                self._read_oldest()

    def _send(self) -> None:
        if self._unsent:
            self._sent.append(SentHeaders(self._unsent))
            self._unsent = []

    def _read_oldest(self) -> None:
        try:
            for name, headers in self._sent.popleft().read():
                self.all_written(name, headers)
        except RuntimeError:
            self.forget()  # the others tell of the same disagreement
            raise


_unread: "weakref.WeakSet[GatherStatus]" = weakref.WeakSet()


@atexit.register
def _report_unread() -> None:
    for status in list(_unread):
        try:
            status.report_at_exit()
        except RuntimeError as error:
            logger.error("found as the process ended: %s", error)


class StatusExchange:
    """The statuses of the weights `names` on all ranks of a `group`: int32 `headers`
    `[ranks, weights, 2]`, by one all-gather.
    """

    def __init__(
        self, names: Sequence[str], statuses: Sequence[DirtyStatus], generation: int, group: Group, device: str
    ) -> None:
        self._names, self._statuses = tuple(names), statuses
        here = torch.tensor([(status, generation) for status in statuses], dtype=torch.int32)
        if device == "cuda":
            here = here.pin_memory().to("cuda", non_blocking=True)
        self.headers = torch.empty((group.size, *here.shape), dtype=here.dtype, device=here.device)
        group.all_gather_into(self.headers.view(-1), here.view(-1), what="writes to weights that are gathered")

    def check(self, status: GatherStatus) -> None:
        """RuntimeError on every rank where they disagree about a weight; on a GPU a step later."""
        by_weight = self.headers.unbind(1)
        if status.reads_late(self.headers):
            status.note(self._names, by_weight)
            return
        for name, headers in zip(self._names, by_weight, strict=True):
            status.all_written(name, headers)

    def any_written(self) -> bool:
        """True if all ranks that have rows of some weight were written to. Waits for a GPU only
        if they may have been.
        """
        changed = DirtyStatus.WRITTEN, DirtyStatus.EMPTY
        here = [index for index, status in enumerate(self._statuses) if status in changed]
        if not here:
            return False
        return any(all(status in changed for status in ranks) for ranks in self.headers[:, here, 0].t().tolist())


class ParamGroup:
    """One of FSDP2's parameter groups (an FSDPParamGroup), whose weights `names` are gathered
    together, in this order.

    Groups know their modules and are known to every prepared weight. They are referred to weakly:
    the garbage collector does not look into all tensors, so it would never free a model.
    """

    fill: JointFill  # of the scales, from joint side channels

    def __init__(self, group: Any, weights: Sequence[Any], status: GatherStatus) -> None:
        self._group: Callable[[], Any] = weakref.ref(group)
        self.weights, self._status = tuple(weights), status
        self.names = tuple(weight.name for weight in weights)
        self._noted: list[Tensor] = []
        self._fills: list[ScaleFill | RowFill] = []
        # of each weight in joint side channels: these `[world, bytes]`, and the headers in them,
        # int32 `[world, 2]`
        self.sides: tuple[Tensor, ...] = ()
        self.headers: list[Tensor] = []
        self.received = 0  # weights, over all gathers

    @property
    def is_unsharded(self) -> bool:
        """True while its weights are gathered."""
        return bool(self._group().is_unsharded)

    @property
    def is_backward(self) -> bool:
        """True if a gather of now is for a backward pass."""
        return torch_fsdp.gathers_for_backward(self._group())

    def problem(self, one_direction: bool) -> str | None:
        """Why quantized weights cannot be gathered by it, if so."""
        if self._group()._use_post_forward_mesh:
            return (
                "reshard_after_forward=<int> does not work with quantized weights (FSDP2 reshards plain tensors alone): "
                "give True or False"
            )
        if one_direction and not torch_fsdp.reshards_after_forward(self._group()):
            return (
                "one_direction needs a gather for each pass: give fully_shard reshard_after_forward=True for this module, "
                "which the outermost one has not by itself"
            )
        return None

    def gather_again(self) -> None:
        """Gather in the same memory."""
        torch_fsdp.gather_again(self._group())

    def unshard(self, joint: JointLayout, side: Tensor) -> None:
        """The joint side channels lie in `side` from now on, at every gather."""
        self.sides = joint.gathered(side)
        self.headers = list(map(header_of, self.sides))
        self.fill = JointFill(joint.layouts, side.view(len(self.sides[0]), -1))

    def note(self, names: Sequence[str], headers: Sequence[Tensor]) -> None:
        """Weights were received, whose headers are read later: with those of the whole group."""
        if names[0] == self.names[0]:
            self._noted.clear()  # left by a gather that broke off
        self._noted += headers
        if names[-1] == self.names[-1]:
            self._status.note(self.names, self._noted)

    def put_scales(self, name: str, fills: Iterable[ScaleFill | RowFill]) -> None:
        """A weight was received; after the last one the scales of all are put where products read
        them.
        """
        if name == self.names[0]:
            self._fills.clear()
        self._fills += fills
        if name == self.names[-1] and self._fills:
            with torch.no_grad(), torch_fsdp.unversioned([fill.buffer for fill in self._fills]):
                fill_scales(self._fills)
            self._fills.clear()


class ParamGroups:
    """FSDP2's parameter groups in a prepared model, and what optimizer steps do to what they
    have gathered.
    """

    def __init__(self, status: GatherStatus) -> None:
        self._status = status
        self._groups: list[weakref.ref[Any]] = []
        self._prepared: list[ParamGroup] = []
        # gathered after a forward pass, and what it had received
        self._left: list[tuple[ParamGroup, int]] = []
        # the backward pass within which an optimizer stepped, by a gradient's hook
        self._stepped_in: int | None = None

    def find(self, model: nn.Module, weights: Collection[Any]) -> list[tuple[ParamGroup, list[tuple[Any, Any]]]]:
        """The groups that gather any of `weights`, each with (weight, FSDPParam) in the order of
        its gather.
        """
        self._groups = [weakref.ref(group) for group in torch_fsdp.groups(model)]
        found = []
        for group in torch_fsdp.groups(model):
            members = prepared_params(group, weights)
            if members:
                found.append((ParamGroup(group, [weight for weight, _ in members], self._status), members))
        self._prepared = [group for group, _ in found]
        return found

    def note_left_gathered(self) -> None:
        """A forward pass ends, and leaves some groups gathered."""
        self._left = [(group, group.received) for group in self._prepared if group.is_unsharded]

    def left_gathered(self) -> list[ParamGroup]:
        """The groups that nothing has gathered since the last forward pass left them so; alike
        on all ranks.
        """
        return [group for group, received in self._left if group.is_unsharded and group.received == received]

    def free(self) -> None:
        """Let the next forward pass gather what is left gathered."""
        torch_fsdp.reshard(group() for group in self._groups)

    def discard(self) -> None:
        """The same, and forget gathers that a pass which broke off has left."""
        self._discard()
        self.free()
        self._stepped_in = None

    def after_step(self) -> None:
        """Let there be a gather before the next forward pass.

        Optimizers that step within a backward pass, each a few parameters, take one step together:
        what is gathered for the rest of that pass are the weights of its forward pass.
        """
        backward = torch_fsdp.backward_pass()
        if backward is None:
            self.discard()
        elif backward != self._stepped_in:
            torch_fsdp.at_end_of_backward(self._free_idle)
        self._stepped_in = backward

    @property
    def is_in_pass(self) -> bool:
        """True while a module is in its forward or backward pass."""
        groups = (group() for group in self._groups)
        return any(group is not None and not torch_fsdp.is_idle(group) for group in groups)

    @property
    def step_goes_on(self) -> bool:
        """True while the backward pass runs within which optimizers step."""
        return self._stepped_in is not None and torch_fsdp.backward_pass() is not None

    def before_cast(self) -> None:
        """A backward pass within which optimizers stepped may have raised, and left gathers of
        the weights before.
        """
        if self._stepped_in is not None:
            self._discard()

    def after_cast(self) -> None:
        """A step that follows is another one."""
        self._stepped_in = None

    def _discard(self) -> None:
        torch_fsdp.discard_gathers(group() for group in self._groups)

    def _free_idle(self) -> None:
        """At the end of a backward pass, which may be one of recomputed modules within another."""
        torch_fsdp.reshard(group for group in (group() for group in self._groups) if torch_fsdp.is_idle(group))


def prepared_params(group: Any, weights: Collection[Any]) -> list[tuple[Any, Any]]:
    """(weight, FSDPParam) of the parameters of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    params = [(getattr(param._sharded_local_tensor, "weight", None), param) for param in group.fsdp_params]
    return [(weight, param) for weight, param in params if weight in weights]
