"""HostAdapter: a training host as a table of facts, and what follows from them for every host.

A host (Megatron-Core, Apex) owns the optimizer and the gathers. Its integration fills in a
HostAdapter: the masters, the weights, and the function that gathers their bytes. HostPlan does the
rest for all hosts: the plan, the cast after a step or of masters that were written by hand, and the
masters for `zerocast.verify`. Patches replace methods of the host, and give them back.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast import CastPlan, QuantizedWeight, get_format
from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.cast.host_masters import write_rounded
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight.validity import Validity

_IDENTITY = get_format("identity")


def _nothing() -> None:
    pass


def _flat(master: Tensor | None) -> Tensor | None:
    """A master in the shape that a plan needs: itself, or a flat view with its version counter."""
    return master if master is None or master.dim() == 1 else master.detach().view(-1)


def _address(master: Tensor | None) -> int:
    return 0 if master is None else master.data_ptr()


@dataclass(frozen=True)
class PlainShard:
    """The part of an unquantized parameter that this rank owns.

    Attributes:
        name, parameter: the whole parameter.
        master: the contiguous FP32 master of the owned elements; None where this rank owns none.
        start: the row-major position of the master's first element.
        rounded: the same elements in the host's buffer, of the master's shape, in the parameter's
            dtype; None likewise.
    """

    name: str
    parameter: Tensor
    master: Tensor | None = None
    start: int = 0
    rounded: Tensor | None = None

    def view(self) -> MasterView:
        """The parameter as `zerocast.verify` compares it: an identity weight over its bytes."""
        shape = tuple(self.parameter.shape) or (1,)
        live = {"rowwise_data": self.parameter.detach().view(-1, shape[-1])}
        weight = QuantizedWeight.of_buffers(shape, _IDENTITY, self.parameter.dtype, live)
        master = None if self.master is None else self.master.detach().view(-1)
        numel = 0 if master is None else master.numel()
        return MasterView(self.name, weight, master, Span(self.start, self.start + numel))


@dataclass(frozen=True)
class HostAdapter:
    """The masters and weights of one group of ranks in a host, and how the host moves them.

    Attributes:
        owner: who casts the weights, for errors: "an attachment to Megatron-Core".
        group: the ranks that share the masters.
        names, weights: the quantized weights, the same list on every rank.
        masters: for each weight, the contiguous FP32 master of the elements that this rank owns,
            on the weights' device or in host memory, the host's own tensor, which is followed to
            other memory; None where it owns none.
        starts: for each weight, the row-major position of the master's first element; None where
            this rank owns none.
        gather: all-gathers the bytes of the last cast and makes the columnwise copies
            (`plan.post_all_gather` makes all of them). Collective.
        before_cast: is called before every cast, for example to find buffers that the host has
            moved.
        before_reading: is called before all bytes are read. It gathers those of the last cast, if
            the host gathers later. Collective.
        plain: the parameters that are not quantized, if a cast is to round them to their dtype.
        validity: the validity of all weights that the host writes together. All adapters of one
            host get the same object.
    """

    owner: str
    group: Group
    names: Sequence[str]
    weights: Sequence[QuantizedWeight]
    masters: Sequence[Tensor | None]
    starts: Sequence[int | None]
    gather: Callable[[CastPlan], None]
    before_cast: Callable[[], None] = _nothing
    before_reading: Callable[[], None] = _nothing
    plain: Sequence[PlainShard] = ()
    validity: Validity = field(default_factory=Validity)


class HostPlan:
    """The casts of one HostAdapter.

    Building it is collective: an error on one rank raises on all.

    Attributes:
        host: the adapter.
        plan: the CastPlan over its weights and masters.
        claim: the host's claim on the weights, for as long as this object lives.
    """

    def __init__(self, host: HostAdapter) -> None:
        self.host = host
        delayed = [weight for weight in host.weights if weight.amax_history is not None]
        # One buffer for all scales and one for all histories, so that an update of all weights is
        # one launch.
        for name in ("scale", "amax_history"):
            into_flat_buffer(delayed, name)
        # The flat masters that the plan has. `_follow_masters` compares them with the host's.
        self._flat = [_flat(master) for master in host.masters]
        self.plan = CastPlan(
            host.weights, self._flat, host.starts, host.group, names=host.names, validity=host.validity.part()
        )
        self.plan.validity.owner = weakref.ref(self)
        self.claim = self.plan.claim(host.owner)
        plain = [
            (shard.rounded, shard.master)
            for shard in host.plain
            if shard.rounded is not None and shard.master is not None
        ]
        # Pairs on one device are copied by one foreach launch, masters in host memory one by one.
        self._plain = [pair for pair in plain if pair[0].device == pair[1].device]
        self._plain_of_host = [pair for pair in plain if pair[0].device != pair[1].device]
        self._watch_masters()

    @torch.no_grad()
    def cast(self, *, repeat: bool = False) -> None:
        """Cast the masters as they are now; the host gathers the bytes.

        With `repeat` delayed scaling does not move on.
        """
        self.host.before_cast()
        self._follow_masters()
        self.plan.cast(repeat=repeat)
        # The optimizers of a host step together, so all weights have changed. Autograd functions of
        # the host that have saved a weight for a backward pass notice it by its version.
        self.plan.validity.changed()
        torch.autograd.graph.increment_version(self.host.weights)
        if self._plain:
            rounded, masters = map(list, zip(*self._plain, strict=True))
            torch._foreach_copy_(rounded, masters)
        for on_device, master in self._plain_of_host:
            write_rounded(master, on_device)

    def _follow_masters(self) -> None:
        """Give the plan the present memory of the masters.

        A host may set `master.data`. A flat view of the master then still has the old memory.
        """
        pairs = zip(self.host.masters, self._flat, strict=True)
        if any(flat is not master and _address(flat) != _address(master) for master, flat in pairs):
            self._flat = [_flat(master) for master in self.host.masters]
            self.plan.move_masters(self._flat)
            self._watch_masters()

    def _watch_masters(self) -> None:
        """Let debug mode notice writes to masters of plain parameters, too: a cast rounds them."""
        of_plain = [master for _, master in (*self._plain, *self._plain_of_host)]
        quantized = [master for master in self._flat if master is not None]
        self.plan.validity.watch([*quantized, *of_plain], sharded=self.plan.group.size > 1)

    def leave_memory(self) -> None:
        """Drop the references to memory that the host has moved masters out of. Local."""
        self._follow_masters()
        self.plan.forget_places()

    def after_step(self) -> None:
        """Cast and gather, for a host that does not gather by itself. Collective."""
        self._write(repeat=False)

    def refresh(self) -> None:
        """Cast and gather masters that were loaded or written by hand. Collective.

        This completes weights that a cast or a gather left partial. It does not help after a step
        that broke off, whose masters are partly old: a host checks for that first.
        """
        self._write(repeat=True)

    def _write(self, repeat: bool) -> None:
        with self.host.validity.transaction("a cast", masters=False):
            self.cast(repeat=repeat)
            self.host.gather(self.plan)

    def master_views(self) -> Iterator[MasterViews]:
        """The masters of all parameters, for `zerocast.verify`. Collective.

        Bytes that the host still has to gather are gathered first.
        """
        self.host.before_reading()
        self._follow_masters()
        (source,) = self.plan.master_views()
        yield dataclasses.replace(source, masters=(*source.masters, *(shard.view() for shard in self.host.plain)))


class Patch(NamedTuple):
    """A new value of an attribute of a module, a class or an instance."""

    owner: Any
    name: str
    value: Any


class Patches(contextlib.ExitStack):
    """The attributes that are replaced in a host.

    Leaving the context restores them in reverse order, so that several patches of one attribute
    come off like layers.
    """

    def apply(self, patches: Iterable[Patch]) -> None:
        """Replace one attribute after the other; a later patch may wrap an earlier one."""
        for owner, name, value in patches:
            # A method that an instance has from its class is restored by deleting the attribute.
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(delattr, owner, name)
            setattr(owner, name, value)

    def remove(self, owner: Any, name: str) -> None:
        """Delete an attribute of an instance, so that the one of its class is used."""
        self.callback(setattr, owner, name, vars(owner)[name])
        delattr(owner, name)
