"""HostAdapter: a training host as a table of facts, and what follows from them for every host.

A host owns the optimizer and the gathers. It says where its masters and weights lie, what gathers
their bytes, and which of its methods are replaced. The rest follows from that, here once for all
hosts: one plan, the cast after a step and the one from masters that were written by hand, the
masters as `zerocast.verify` compares them, and the way back to the host as it was.
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
    """A master as a plan takes it: itself, or a flat view that shares its version counter."""
    return master if master is None or master.dim() == 1 else master.detach().view(-1)


def _place(master: Tensor | None) -> int:
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
        before_cast: what precedes every cast, such as a look at where the host has moved its
            buffers.
        before_reading: what precedes a look at all bytes: gathers those of the last cast, if the
            host gathers later. Collective.
        plain: the parameters that are not quantized, if a cast is to round them to their dtype.
        validity: of all that the host writes together: give all adapters of one host the same.
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

    Building it is collective: what is wrong on any rank raises on all of them.
    """

    def __init__(self, host: HostAdapter) -> None:
        self.host = host
        delayed = [weight for weight in host.weights if weight.amax_history is not None]
        for name in ("scale", "amax_history"):
            into_flat_buffer(delayed, name)  # so that what is done to all of them is one launch
        self._flat = [_flat(master) for master in host.masters]
        self.plan = CastPlan(
            host.weights, self._flat, host.starts, host.group, names=host.names, validity=host.validity.part()
        )
        self.plan.validity.owner = weakref.ref(self)
        self.claim = self.plan.claim(host.owner)
        plain = [(one.rounded, one.master) for one in host.plain if one.rounded is not None and one.master is not None]
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
        """Look for masters that the host has given other memory (`.data =`), where views of them
        stay behind.
        """
        pairs = zip(self.host.masters, self._flat, strict=True)
        if any(flat is not master and _place(flat) != _place(master) for master, flat in pairs):
            self._flat = [_flat(master) for master in self.host.masters]
            self.plan.move_masters(self._flat)
            self._watch_masters()

    def _watch_masters(self) -> None:
        """Let debug mode notice writes to masters of plain parameters, too: a cast rounds them."""
        of_plain = [master for _, master in (*self._plain, *self._plain_of_host)]
        quantized = [master for master in self._flat if master is not None]
        self.plan.validity.watch([*quantized, *of_plain], sharded=self.plan.group.size > 1)

    def leave_memory(self) -> None:
        """Keep no memory in use that the host has moved masters out of. Local."""
        self._follow_masters()
        self.plan.forget_places()

    def after_step(self) -> None:
        """Cast and gather, for a host that does not gather by itself. Collective."""
        self._write(repeat=False)

    def refresh(self) -> None:
        """Cast and gather masters that were loaded or written by hand. Collective.

        This completes what a cast or a gather left partial, and not what a step did: its masters
        are not worth a cast, so a host checks for that first.
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

    Leaving the context gives everything back as it was, in reverse order.
    """

    def apply(self, patches: Iterable[Patch]) -> None:
        """Replace one attribute after the other; a later patch may wrap an earlier one."""
        for owner, name, value in patches:
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(delattr, owner, name)
            setattr(owner, name, value)

    def remove(self, owner: Any, name: str) -> None:
        """Delete an attribute of an instance, below which its class may have another."""
        self.callback(setattr, owner, name, vars(owner)[name])
        delattr(owner, name)
