"""CastDriver: casts the masters of a training framework (a host). Host: what the driver knows about
that framework.

A CastDriver casts after a step, or from masters that were written by hand, gathers, finds masters
that were moved, and shows the masters to `zerocast.verify`. ZeroAdamW, Megatron, Apex and the
callers of TransformerEngine own FP32 masters and the buffers that are gathered. Each of them is a
Host, which says who writes the weights, which part of its weight each master is, which ranks share
masters, and how bytes are gathered. FSDP2 shards and gathers parameters itself, so its casts have a
plan and a manager of their own (`zerocast.fsdp2.manager`).
"""

import abc
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from zerocast.cast.cpu_masters import write_rounded
from zerocast.cast.partition import ShardData
from zerocast.cast.plan import CastPlan
from zerocast.distributed.group import Group
from zerocast.formats import get_format
from zerocast.formats.layout import Span
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight import QuantizedWeight
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.owners import Claim
from zerocast.weight.validity import Validity


class Gather(abc.ABC):
    """The all-gathers of a host, and the storage in which they send and receive bytes."""

    def prepare(self) -> None:  # noqa: B027 (most hosts have nothing to do)
        """Called before every cast. Completes gathers in flight, and moves weights that were given
        different storage back to the buffers of the host.

        Raises RuntimeError if the weights hold values that the cast would lose.
        """

    def reclaim(self) -> None:
        """Called in place of `prepare` before a cast of masters that were loaded or written by
        hand, which replaces the values of the weights on purpose.
        """
        self.prepare()

    @abc.abstractmethod
    def start(self, plan: CastPlan) -> None:
        """All-gather the bytes of the last cast, and make their columnwise copies, together by
        `plan.post_all_gather` or in parts by `ColumnwiseCopies.make`. Collective.

        A gather may still be in flight when this returns. Then `plan.validity.before_read`
        completes it.
        """

    def complete(self) -> None:  # noqa: B027
        """Called before the bytes of all weights are read. Gathers the bytes of the last cast where
        neither `start` nor a read of the weight does. Collective.
        """


class GatheredByCaller(Gather):
    """The gathers of a host that makes them itself."""

    def start(self, plan: CastPlan) -> None:
        """Leave the gather to the host, which makes it after the call that casts."""


def identity_weight(parameter: Tensor) -> QuantizedWeight:
    """Return a plain parameter as an identity weight over its memory."""
    shape = tuple(parameter.shape) or (1,)
    matrix = parameter.detach().reshape(-1, shape[-1])
    return QuantizedWeight.of_buffers(shape, get_format("identity"), parameter.dtype, {"rowwise_data": matrix})


@dataclass(frozen=True)
class PlainShard:
    """The part of an unquantized parameter that this rank owns.

    Attributes:
        name, parameter: the full parameter.
        master: the contiguous FP32 master of the owned elements; None where this rank owns none.
        start: the row-major position of the master's first element.
        rounded: the same elements in the host's buffer, of the master's shape, in the parameter's
            dtype; None where it owns none.
    """

    name: str
    parameter: Tensor
    master: Tensor | None = None
    start: int = 0
    rounded: Tensor | None = None

    def view(self) -> MasterView:
        """Return the parameter as `zerocast.verify` compares it."""
        master = None if self.master is None else self.master.detach().view(-1)
        numel = 0 if master is None else master.numel()
        return MasterView(self.name, identity_weight(self.parameter), master, Span(self.start, self.start + numel))


@dataclass(frozen=True)
class Host:
    """The masters and weights of one group of ranks in a host, and how the host moves them.

    Attributes:
        owner: who casts the weights, for errors: "an attachment to Megatron-Core". None for a host
            that may hand its weights over to any other.
        group: the ranks that share the masters.
        weights: the quantized weights, the same list on every rank.
        masters: for each weight, the contiguous FP32 master of the elements that this rank owns;
            None where it owns none. These are the host's own tensors, on the weights' device or in
            CPU memory. The host may move them to different storage.
        starts: for each weight, the row-major position of the master's first element; None where
            this rank owns none.
        gather: all-gathers the bytes of a cast.
        names: the names of the weights in states and reports. None for numbers.
        plain: the parameters that are not quantized, if a cast is to round them to their dtype.
        shard_data, scale_cuts, param_groups, backend: as CastPlan takes them.
        validity: the validity of the weights. Several Hosts of weights that are written together
            get parts of one.
        claim: the owner's claim on the weights; None to let the driver take it.
        live_weight: returns the weight at an index as the model reads it now, if that may be a
            different object from the one in `weights`. None otherwise.
        raises_together: as CastPlan takes it. A host that starts its gathers itself sets it in
            debug mode, so that no rank raises alone and is missing from the next gather.
        is_saved_by_autograd: True if autograd functions of the host save weights for a backward
            pass. The version counter of a weight then shows them that it was cast since.
    """

    owner: str | None
    group: Group
    weights: Sequence[QuantizedWeight]
    masters: Sequence[Tensor | None]
    starts: Sequence[int | None]
    gather: Gather = field(default_factory=GatheredByCaller)
    names: Sequence[str] | None = None
    plain: Sequence[PlainShard] = ()
    shard_data: Sequence[ShardData | None] | None = None
    scale_cuts: Sequence[range | None] | None = None
    param_groups: Sequence[int | None] | None = None
    backend: str | None = None
    validity: Validity = field(default_factory=Validity)
    claim: Claim | None = None
    live_weight: Callable[[int], QuantizedWeight] | None = None
    raises_together: bool = False
    is_saved_by_autograd: bool = True


class CastDriver:
    """The casts of one Host.

    Building it is collective: an error on one rank raises on all.

    Attributes:
        plan: the plan of the casts, for as long as this object lives.
        host: the facts. A switch of formats replaces them (`rebuild`).
        gather: all-gathers the bytes of a cast. Replaced with the facts.
        claim: the host's claim on the weights, for as long as this object lives. None for a host
            without an owner.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._flatten_delayed_scaling()
        flat = [_flat(master) for master in host.masters]
        self.plan = CastPlan(
            host.weights,
            flat,
            host.starts,
            host.group,
            fsdp_shard_model_weights=host.shard_data,
            backend=host.backend,
            param_groups=host.param_groups,
            names=host.names,
            scale_cuts=host.scale_cuts,
            validity=host.validity,
            claim=host.claim,
            raises_together=host.raises_together,
        )
        # True if the last cast has raised, which it does on all ranks.
        self._has_raised = False
        self.gather = host.gather
        self.plan.validity.owner = weakref.ref(self)
        self.claim = host.claim
        if host.claim is None and host.owner is not None:
            self.claim = self.plan.claim(host.owner)
        plain = [
            (shard.rounded, shard.master)
            for shard in host.plain
            if shard.rounded is not None and shard.master is not None
        ]
        # Pairs on one device are copied by one foreach launch, masters in CPU memory one at a time.
        self._plain = [pair for pair in plain if pair[0].device == pair[1].device]
        self._plain_on_cpu = [pair for pair in plain if pair[0].device != pair[1].device]
        self._watch(flat)

    @torch.no_grad()
    def cast(self, *, repeat: bool = False) -> None:
        """Cast the masters as they are now; the host gathers the bytes. Collective.

        With `repeat` delayed scaling does not move on.
        """
        self._cast(self.gather.prepare, repeat)

    def after_step(self) -> None:
        """Cast and gather, for a host that does not gather by itself. Collective."""
        self._cast_and_gather(self.gather.prepare, repeat=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast and gather masters that were loaded or written by hand. Collective.

        This completes weights that a cast or a gather left partial. It does not help after a step
        that failed partway, whose masters are partly old: a host checks for that first.
        """
        self._cast_and_gather(self.gather.reclaim, repeat=True)

    def ready(self, detail: str = "", problem: Exception | None = None) -> None:
        """Prepare a cast: find weights and masters where they are now. If this fails on this rank,
        or the caller passes a `problem`, the cast raises that error on every rank (`Plan.ready`).
        """
        self.plan.ready(detail, functools.partial(self._find, self.gather.prepare), problem)

    def refuse(self, problem: Exception) -> None:
        """Take part in a cast that the other ranks make, so that they raise the problem of this
        rank. Does nothing if the cast itself has raised here, which it does on all ranks.
        """
        if not self._has_raised:
            # The caller raises the problem.
            with contextlib.suppress(Exception):
                self._has_raised = True
                self.ready(problem=problem)
                self.plan.run()

    def step(self, launch: Callable[[], None], step_collectives: "StepCollectives", finish: Callable[[], None]) -> None:
        """Take an optimizer step after `ready`: call `launch`, which steps and casts on the device
        (`plan.launch`), gather, and call `finish`, the caller's CPU part. Collective.

        All ranks raise the problem that `ready` has found on any. For that, a rank that cannot call
        `launch` takes part in its `step_collectives`. Any exception leaves masters and weights
        partial, unless no rank was ready.
        """
        if self.plan.problem is not None:
            self.join_collectives("an optimizer step", step_collectives, masters=True)
        with self.plan.validity.transaction("an optimizer step"):
            restore = self.plan.delayed.saved()
            try:
                launch()
                self.plan.done()
            except BaseException:
                restore()
                raise
            self.gather.start(self.plan)
            finish()

    def join_collectives(self, what: str, step_collectives: "StepCollectives", *, masters: bool = False) -> NoReturn:
        """Make all collectives of a write that this rank is not ready for, and raise its problem.

        `what` names the write in errors. `masters` is True if it leaves masters partly written, not
        only weights.
        """

        def gather() -> None:
            step_collectives.after_cast()
            self.gather.start(self.plan)

        step_collectives.before_cast()
        self.plan.join_collectives(gather, what, masters)

    def move_masters(
        self, masters: Sequence[Tensor | None], shard_data: Sequence[ShardData | None] | None = None
    ) -> None:
        """Cast different master tensors of the same elements in later casts. Local
        (`CastPlan.move_masters`).
        """
        flat = [_flat(master) for master in masters]
        data = self.host.shard_data if shard_data is None else shard_data
        self.plan.move_masters(flat, data)
        self.host = dataclasses.replace(self.host, masters=masters, shard_data=data)
        self._watch(flat)

    def leave_memory(self) -> None:
        """Drop the references to memory that the host has moved masters out of. Local."""
        self.follow_masters()
        self.plan.release_old_memory()

    def rebuild(self, host: Host, changed: Collection[str]) -> None:
        """Continue with new facts of the same masters, after the weights `changed` were given other
        formats. Casts and gathers. Collective.
        """
        self.host = host
        self.gather = host.gather
        self._flatten_delayed_scaling()
        self.plan.rebuild(changed, host.weights, host.scale_cuts)
        self.refresh()

    def master_views(self) -> Iterator[MasterViews]:
        """Yield the masters of all parameters, those that are not quantized too. Collective.

        Bytes that the host still has to gather are gathered first.
        """
        self.gather.complete()
        self.follow_masters()
        (source,) = self.plan.master_views()
        live_weight = self.host.live_weight
        masters, problem = source.masters, source.problem
        try:
            if live_weight is not None:
                masters = tuple(dataclasses.replace(v, weight=live_weight(index)) for index, v in enumerate(masters))
            masters = (*masters, *(shard.view() for shard in self.host.plain))
        except (TypeError, ValueError) as error:
            # A parameter has another dtype, perhaps on this rank only.
            problem = problem or error
        yield dataclasses.replace(source, masters=masters, problem=problem)

    def _cast_and_gather(self, prepare: Callable[[], None], repeat: bool) -> None:
        with self.plan.validity.transaction("a cast", masters=False):
            self._cast(prepare, repeat, functools.partial(self.gather.start, self.plan))
            self.gather.start(self.plan)

    def _cast(self, prepare: Callable[[], None], repeat: bool, gather: Callable[[], None] | None = None) -> None:
        """Cast, notify autograd of the changed weights, and round the masters of plain
        parameters.
        """
        self._has_raised = True
        self.plan.ready(find=functools.partial(self._find, prepare))
        self.plan.run(repeat=repeat, gather=gather)
        self._has_raised = False
        # The optimizers of a host step together, so all weights have changed.
        self.plan.validity.changed()
        if self.host.is_saved_by_autograd:
            torch.autograd.graph.increment_version(self.host.weights)
        if self._plain:
            rounded, masters = map(list, zip(*self._plain, strict=True))
            torch._foreach_copy_(rounded, masters)
        for on_device, master in self._plain_on_cpu:
            write_rounded(master, on_device)

    def _find(self, prepare: Callable[[], None]) -> None:
        """Find weights and masters where they are now. `prepare` prepares the gather."""
        prepare()
        self.follow_masters()

    def _flatten_delayed_scaling(self) -> None:
        """Move all scales into one buffer and all histories into another, so that an update of all
        weights is one launch.
        """
        delayed = [weight for weight in self.host.weights if weight.amax_history is not None]
        for name in ("scale", "amax_history"):
            into_flat_buffer(delayed, name)

    def follow_masters(self) -> None:
        """Give the plan the current memory of the masters.

        If a host sets `master.data`, a flat view of the master still has the old memory.
        """
        has_moved = False
        for master, view in self._views:
            has_moved = has_moved or view.data_ptr() != master.data_ptr()
        if has_moved:
            self.move_masters(self.host.masters)

    def _watch(self, flat: Sequence[Tensor | None]) -> None:
        """Record which of the plan's `flat` masters are views of the host's masters, so that
        `follow_masters` finds moved ones. Also let debug mode see writes to all masters, including
        those of plain parameters, which a cast rounds.
        """
        # A plan follows masters by itself that are flat already.
        self._views: list[tuple[Tensor, Tensor]] = []
        for master, view in zip(self.host.masters, flat, strict=True):
            if master is not None and view is not None and view is not master:
                self._views.append((master, view))
        own = [master for master in flat if master is not None]
        of_plain = [master for _, master in (*self._plain, *self._plain_on_cpu)]
        self.plan.validity.watch([*own, *of_plain], sharded=self.plan.group.size > 1)


@contextlib.contextmanager
def raising_together(drivers: Sequence[CastDriver]) -> Iterator[None]:
    """Raise an exception before a cast by `drivers`, which cast in this order while the context is
    open, on all ranks of that cast. They would wait for this rank otherwise.
    """
    before = [driver.plan.validity.casts for driver in drivers]
    try:
        yield
    except Exception as error:
        for driver, casts in zip(drivers, before, strict=True):
            if driver.plan.validity.casts == casts and driver.plan.has_peers:
                driver.refuse(error)
                break
        raise


@contextlib.contextmanager
def casting(drivers: Sequence[CastDriver]) -> Iterator[None]:
    """Raise RuntimeError if the context ends without a cast by each of `drivers`. A host that has
    renamed the method which casts would train masters and leave the weights as they are.
    """
    before = [driver.plan.validity.casts for driver in drivers]
    yield
    for driver, casts in zip(drivers, before, strict=True):
        if driver.plan.validity.casts == casts:
            raise RuntimeError(
                f"{driver.host.owner}: an optimizer step returned without a cast of its masters: this host has an API that "
                "zerocast does not support"
            )


class StepCollectives(NamedTuple):
    """The collectives of a step before and after its cast, for a rank that cannot step.

    It must take part in each of them, or the other ranks would wait for it. Gradients and their
    norm are reduced by then, on all ranks. The order (`CastDriver.join_collectives`):

    1. `before_cast`: the collectives before it. ZeroMuon sends gradients to the ranks that own
        whole matrices.
    2. The packed amaxes, with the report that this rank cannot cast (`CastPlan.join_collectives`).
        On a CPU all ranks raise here.
    3. `after_cast`: the reductions after it. Moments in 8 bits have the largest elements of groups
        that a boundary between ranks splits.
    4. The gather of the bytes (`Gather.start`).
    5. The comparison of the ranks' reports, which the others make before their next cast.

    A refresh or a swap has no more than the cast and the gather.
    """

    before_cast: Callable[[], None] = lambda: None
    after_cast: Callable[[], None] = lambda: None


def _flat(master: Tensor | None) -> Tensor | None:
    """Return the master itself if it is flat, else a flat view, which shares its version
    counter.
    """
    return master if master is None or master.dim() == 1 else master.detach().view(-1)
