"""GatherStatus: how ranks learn that bytes are of different casts, or of masters written to since.

Every rank begins its bytes with a header: a `DirtyStatus` and the number of its cast. A CPU reads
the headers of all ranks at once. On a GPU the host does not wait for what it has just issued, or
prefetching would be in vain: headers travel to pinned memory behind the gather. So ranks that
disagree raise later than on a CPU, and all of them at the same place of the program: before a
gather that none of them takes part in.

No gather comes for weights that a forward pass left gathered. Before the next forward pass the
ranks exchange their statuses by themselves then (`StatusExchange`).
"""

import enum
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.distributed.group import Group
from zerocast.fsdp2 import torch_fsdp
from zerocast.weight.write_guard import WriteGuard

UNREAD = 2  # gathers whose headers may still be on their way when the next one is issued


class DirtyStatus(enum.IntEnum):
    """A rank's shard since its last cast. A rank without rows is EMPTY and agrees with every
    other.
    """

    CLEAN = 0
    WRITTEN = 1
    EMPTY = 2
    PARTIAL = 3  # a step or a load raised half-way


class PinnedHeaders:
    """Headers of `sizes` rows, one size a weight, on the GPU, then in pinned memory once they
    arrived.
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.sizes = sizes
        with torch.inference_mode(False):  # memory of an evaluation serves a training step too
            self._here = torch.empty(sum(sizes), 2, dtype=torch.int32, device=device)
            self._pinned = torch.empty(self._here.shape, dtype=self._here.dtype, pin_memory=True)
            self._by_weight: tuple[Tensor, ...] = self._pinned.split(list(sizes))
        self._arrived = torch.cuda.Event()

    def send(self, headers: Sequence[Tensor]) -> None:
        """Copy to the host, behind what the current stream does: FSDP2 may free `headers` before
        they are read.
        """
        torch.cat(list(headers), out=self._here)
        self._pinned.copy_(self._here, non_blocking=True)
        self._arrived.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The headers `[ranks, 2]` of each weight, on the host."""
        self._arrived.synchronize()
        return self._by_weight


class GatherStatus:
    """Status headers of a model's gathers. Those of a GPU are pending until the host reads them, in
    issue order.

    `guard` is that of the model's masters: this rank raises its own words where they are partial.
    """

    def __init__(self, guard: WriteGuard) -> None:
        self._guard = guard
        self._pending: deque[tuple[tuple[str, ...], PinnedHeaders]] = deque()
        self._free: dict[tuple[int, ...], list[PinnedHeaders]] = {}  # by sizes

    def all_written(self, name: str, headers: Tensor) -> bool:
        """True if every rank with rows of a weight was written to since it last cast, by int32
        headers `[ranks, 2]`.

        RuntimeError where only some were, where some are partial, and for bytes of different casts.
        """
        self._guard.check_complete()
        by_rank = headers.tolist()
        partial = [rank for rank, (status, _) in enumerate(by_rank) if status == DirtyStatus.PARTIAL]
        if partial:
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

    def send(self, names: tuple[str, ...], headers: Sequence[Tensor]) -> None:
        """Let the headers `[ranks, 2]` of these weights travel to the host, which reads them in
        a later `check`.
        """
        sizes = tuple(map(len, headers))
        free = self._free.setdefault(sizes, [])
        pinned = free.pop() if free else PinnedHeaders(sizes, headers[0].device)
        pinned.send(headers)
        self._pending.append((names, pinned))

    def check(self, leave: int = 0) -> None:
        """RuntimeError, on every rank, where ranks disagree in any pending headers but the last
        `leave` ones.
        """
        while len(self._pending) > leave:
            names, pinned = self._pending.popleft()
            try:
                for name, headers in zip(names, pinned.wait(), strict=True):
                    self.all_written(name, headers)
            except RuntimeError:
                self._pending.clear()  # they tell of the same disagreement
                raise
            self._free[pinned.sizes].append(pinned)


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
        """RuntimeError on every rank where they disagree about a weight; from a GPU at a later
        check.
        """
        by_weight = self.headers.unbind(1)
        if self.headers.is_cuda:
            status.send(self._names, by_weight)
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

    def __init__(self, group: Any, names: Sequence[str], status: GatherStatus) -> None:
        self._group: Callable[[], Any] = weakref.ref(group)
        self._names, self._status = tuple(names), status
        self._headers: list[Tensor] = []
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

    def note(self, name: str, headers: Tensor) -> None:
        """A weight was received on a GPU; after the last one all headers are sent to the host."""
        if name == self._names[0]:
            self._headers.clear()  # left by a gather that broke off
        self._headers.append(headers)
        if name == self._names[-1]:
            self._status.send(self._names, self._headers)


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
                names = [weight.name for weight, _ in members]
                found.append((ParamGroup(group, names, self._status), members))
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
