"""Master: one prepared weight: its format, its shard on this rank, what it sends and what it makes of what arrives."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerocast.distributed.group import Group
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gathered import Gathered
from zerocast.fsdp2.headers import Gather
from zerocast.fsdp2.master_memory import MasterMemory
from zerocast.fsdp2.shard_weight import CLEAN, EMPTY, TORN, WRITTEN, ShardWeight
from zerocast.weight.freshness import Freshness
from zerocast.weight.write_guard import WriteGuard

ADVICE = "call zerocast.fsdp2.refresh(model) on all ranks after parameters were changed outside of an optimizer"


class Casting(Protocol):
    """What a weight needs of the casts of its model."""

    generation: int
    memory: MasterMemory
    guard: WriteGuard
    written: list["Master"]
    rewrapped: bool

    def before_gather(self) -> None:
        """Cast if that is due."""

    def is_written(self, master: "Master") -> bool:
        """Whether a write was counted since the last cast that no operator has told of."""

    def forget_measured(self) -> None:
        """A master is written to, whose amaxes may have been taken."""

    def cast_again(self) -> None:
        """Cast because all ranks were written to."""


class Master:
    """A weight of a prepared model by its parameter `name`; every MasterParameter made of it points here.

    `sliced` says that tensor parallelism gives a rank a slice of it, which FSDP2 shards; `one_direction` that of a weight with
    codes of its own in each direction only those are sent that the pass reads.
    """

    def __init__(self, name: str, fmt: FormatSpec, casts: Casting, sliced: bool, one_direction: bool) -> None:
        self.name, self.format, self.casts, self.sliced = name, fmt, casts, sliced
        self.one_direction = one_direction and fmt.columnwise is Columnwise.OWN_GRID
        self.is_backward: Callable[[], bool] = bool  # whether FSDP2 gathers for a backward pass
        self.delayed: dict[str, Tensor] = {}
        self.received = 0  # gathers
        self.written_to = False
        self.place = 0  # among the masters that were bound
        self._shard: ShardWeight | None = None
        self._addresses = range(0)  # of the shard
        self._gathered: Gathered | None = None
        self.gather: Gather  # of the weights that FSDP2 gathers with it, once it has sharded the model
        self._header = -1, CLEAN  # of which cast, and what it says
        self.freshness = Freshness(owner=weakref.ref(casts), has_masters=True, advice=ADVICE)

    def __deepcopy__(self, memo: Any) -> "Master":
        """Itself: `async_save` copies shards with what they point to, and the copy is a state of the same weight."""
        return self

    @property
    def is_cast(self) -> bool:
        """Whether there is a shard."""
        return self._shard is not None

    @property
    def shard(self) -> ShardWeight:
        """What this rank holds and sends, once FSDP2 has sharded the model."""
        assert self._shard is not None, self.name
        return self._shard

    @shard.setter
    def shard(self, shard: ShardWeight) -> None:
        self._shard, self._header = shard, (-1, CLEAN)
        self.freshness.watch([shard.master], sharded=False)
        first = shard.master.data_ptr()
        self._addresses = range(first, first + shard.master.nbytes)

    def delayed_on(self, device: torch.device) -> dict[str, Tensor]:
        """The state of delayed scaling: scale and amax_history of the next cast, `cast_scale` of the last; else empty."""
        if self.format.amax_policy is AmaxPolicy.DELAYED and not self.delayed:
            scale, history = torch.ones(1, device=device), torch.zeros(self.format.amax_history_len, device=device)
            self.delayed = {"scale": scale, "amax_history": history, "cast_scale": scale.clone()}
        self.delayed = {name: tensor.to(device) for name, tensor in self.delayed.items()}
        return self.delayed

    def wrapped(self) -> None:
        """FSDP2 may have replaced the parameter: the next cast looks where masters lie."""
        self.casts.rewrapped = True

    def memory(self, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Where FSDP2's shard is to lie, beside the others; None leaves it to torch."""
        return self.casts.memory.take(self.name, size, device)

    def written(self, data: Tensor) -> None:
        """Note a write, if it went to the memory that is cast: FSDP2 and optimizers make other tensors of the same class."""
        if torch._guards.TracingContext.try_get() is not None:
            return  # compiled: what runs later is not seen here, the optimizer's hook is
        if data.data_ptr() not in self._addresses:
            return  # also of a view of no elements
        self.casts.forget_measured()
        self.mark_written()

    def mark_written(self) -> None:
        """Say so at the next gather, unless a cast comes before."""
        if not self.written_to:
            self.written_to = True
            self.casts.written.append(self)
            self.freshness.finish = self._refuse

    def _refuse(self, weight: Any) -> None:
        raise RuntimeError(
            f"{self.name}: its master was changed after the forward pass that left it gathered: call the prepared model, not a "
            "module in it, or zerocast.fsdp2.refresh(model) on all ranks before"
        )

    def send(self, master: Tensor, mesh: DeviceMesh) -> tuple[Tensor, ...]:
        """The bytes of this rank for a gather over `mesh`, on the device of `master`; casts first if that is due."""
        self.casts.before_gather()
        shard = self.shard
        offloaded = master.device != shard.master.device  # then it is FSDP2's copy
        if not offloaded and master.data_ptr() != self._addresses.start:
            self.casts.rewrapped = True  # the cast looks for it
            self.mark_written()
        self._columnwise = self.is_backward()
        outputs = self._outputs(master.device)
        self._mesh, self._sent = mesh, self.casts.generation
        return outputs

    def _outputs(self, device: torch.device) -> tuple[Tensor, ...]:
        self._say()
        outputs = self.shard.outputs(self._columnwise)
        if device == self.shard.master.device:
            return outputs
        return tuple(part.to(device, non_blocking=True) for part in outputs)

    @property
    def says(self) -> int:
        """What this rank says of its shard."""
        if self.casts.guard.is_partial:
            return TORN
        if self.casts.is_written(self):
            self.mark_written()
        return WRITTEN if self.written_to and self.shard.says == CLEAN else self.shard.says

    def _say(self) -> None:
        """Write into the header what differs from what it says since the last cast."""
        cast, before = self._header
        if cast != self.casts.generation:
            before = self.shard.says
        self._said = self.says
        if self._said != before:
            self.shard.say(self._said)
        self._header = self.casts.generation, self._said

    def receive(self, outputs: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None) -> Any:
        """(weight, buffers that FSDP2 allocates and frees with it), refilled in place where `out` is given."""
        if dtype != self.shard.nominal:
            raise RuntimeError(f"{self.name} was cast for {self.shard.nominal} and is gathered as {dtype}")
        if out is None or self._gathered is None:
            self._gathered = Gathered(self.shard, outputs, dtype)
            self._gathered.weight.state.freshness = self.freshness
        if self._is_stale(self._gathered):
            self._gather(outputs)
        self.freshness.finish = None
        self.received += 1
        self._gathered.fill(self._columnwise)
        return self._gathered.weight, self._gathered.inner

    def _is_stale(self, gathered: Gathered) -> bool:
        """Whether all ranks must send again; RuntimeError on all of them where only some were written to.

        Reading the headers makes the host wait for a GPU: only a rank that was written to does, since all may have been. If not
        all were, it learns of it with the others, later.
        """
        headers = gathered.headers()
        if not headers.is_cuda:
            everywhere = self._all_written(headers)
        else:
            self.gather.note(self, headers)
            changed = WRITTEN, EMPTY
            everywhere = self._said in changed and all(said in changed for said, _ in headers.tolist())
        if everywhere and self._sent == self.casts.generation:
            self.casts.cast_again()
        return self._sent != self.casts.generation

    def check(self, headers: Tensor) -> None:
        """RuntimeError if headers that were read late say that ranks disagree."""
        self._all_written(headers)

    def _all_written(self, headers: Tensor) -> bool:
        """Whether every rank that has rows was written to since it last cast; RuntimeError where only some were, or are torn."""
        self.casts.guard.check_complete()
        said = headers.tolist()
        torn = [rank for rank, (flag, _) in enumerate(said) if flag == TORN]
        if torn:
            raise RuntimeError(
                f"{self.name}: an optimizer step or a load raised half-way on ranks {torn} of its shard group, which have masters "
                "of different steps: load a checkpoint on all ranks"
            )
        if len({generation for _, generation in said}) > 1:
            raise RuntimeError(
                f"{self.name}: the ranks of a shard group sent bytes of different casts, numbers {[n for _, n in said]} by "
                "rank: optimizer steps and zerocast.fsdp2.refresh must happen on all of them"
            )
        written = [rank for rank, (flag, _) in enumerate(said) if flag == WRITTEN]
        clean = [rank for rank, (flag, _) in enumerate(said) if flag == CLEAN]
        if written and clean:
            raise RuntimeError(
                f"{self.name}: the master was changed on ranks {written} of its shard group and not on ranks {clean} since "
                "the last cast: change it on all, or call zerocast.fsdp2.refresh(model) on all after changing some"
            )
        return bool(written)

    def _gather(self, outputs: Sequence[Tensor]) -> None:
        """Once more, in place of what FSDP2 gathered."""
        group = Group.of(self._mesh)
        for output, part in zip(outputs, self._outputs(outputs[0].device), strict=True):
            with torch_fsdp.unversioned([output]):
                group.all_gather_into(output.view(-1), part, what=f"the bytes of {self.name}, which was written to")
        self._sent = self.casts.generation
