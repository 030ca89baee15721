"""Gradients: from backward hooks through bucketed reduce-scatters into this rank's flat FP32 shard.

Every backward pass outside `no_sync` is a round: each bucket is reduced exactly once, in bucket order, on every rank, whatever
parameters got a gradient there; what did not counts as zero. Hooks start a bucket as soon as it and all before it are complete, the
end of the backward pass starts the rest. Two buffers alternate: one fills while the other is being reduced.

A backward pass that dies takes its end with it. That is noticed, and refused until `zero_grad` of the optimizer has cleared
it away.
"""

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerocast.agreement import roll_call
from zerocast.group import Group
from zerocast.optim.bucket import Bucket, Slot, flat_numel

DIED = "a backward pass raised an exception half-way: call zero_grad() of the optimizer before the next one"
TWICE = "its bucket is on its way already. Reentrant checkpointing of shared weights does this, use_reentrant=False not"

ROUND = "reduces the gradients of a backward pass"


class _Reduction:
    """One bucket on its way: the filled buffer, and this rank's part of the result."""

    def __init__(
        self, bucket: Bucket, group: Group, full: Tensor, result: Tensor, deterministic: bool, adds: bool
    ) -> None:
        self.bucket, self.full, self.result, self.adds = bucket, full, result, adds
        self._ranks, self._deterministic = group.size, deterministic
        collective = group.all_to_all if deterministic else group.reduce_scatter_mean
        self._work: dist.Work | None = collective(result, full, async_op=True)

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """The mean over the ranks; deterministic: added in rank order in FP32."""
        if self._work is not None:
            self._work.wait()
        if not self._deterministic:
            return self.result
        first, *others = self.result.view(self._ranks, -1).unbind()
        total = first.float()
        for part in others:
            total = total + part.float()
        return total / self._ranks


class _Filling:
    """A bucket that backward hooks are filling."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.arrived: set[int] = set()


class _End:
    """What autograd calls when a backward pass is over; lives as long as the pass."""

    def __init__(self, reducer: "GradientReducer") -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.end_round()


class GradientReducer:
    """Reduces gradients of `buckets`; `shard` holds this rank's sums of means since `reset`, f32 in the layout of the masters.

    With `stage` 2 a gradient is freed as soon as it is in a bucket and every round adds to the shard. With stage 1
    gradients stay on their parameters, accumulated by autograd, and a round replaces the shard.
    """

    def __init__(
        self, buckets: Sequence[Bucket], group: Group, stage: int, deterministic: bool, device: torch.device
    ) -> None:
        self.synchronise = True
        self.shard = torch.zeros(flat_numel(list(buckets)), dtype=torch.float32, device=device)
        self._buckets, self._group, self._stage, self._deterministic = list(buckets), group, stage, deterministic
        self._place = {id(slot.parameter): (b, slot) for b, bucket in enumerate(buckets) for slot in bucket.slots}
        self._spare: list[Tensor] = []
        self._results: list[Tensor] = []
        self._flying: list[_Reduction] = []
        self._filling: dict[int, _Filling] = {}
        self._launched: int | None = None  # buckets started in this round; None between rounds
        self._end: weakref.ref[_End] | None = None  # of the backward pass that this round belongs to
        self._reduced = False  # a round has run since `reset`
        self._unreduced = False  # no_sync has been entered since the last round; set so, it is the same on every rank
        self._changed = False
        self._hooks: list[RemovableHandle] = []
        self._taken_over = False
        self._company: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
        for other in list(_alive):
            other.meet(self)
        _alive.add(self)
        me = weakref.ref(self)  # hooks live as long as the parameters do
        for bucket in buckets:
            for slot in bucket.slots:
                hook = slot.parameter.register_post_accumulate_grad_hook(lambda parameter: _arrived(me, parameter))
                self._hooks.append(hook)

    def meet(self, other: "GradientReducer") -> None:
        """Give way to a new reducer of any of the same parameters: a gradient can be freed once only.

        Beside one of other parameters, neither waits during a backward pass: with unused parameters the two take turns in
        another order on another rank, and each rank would wait for what the other has not started.
        """
        if self._place.keys() & other._place.keys():
            self._taken_over = True
            for hook in self._hooks:
                hook.remove()
        elif not self._taken_over and self._group.size > 1 and other._group.size > 1:
            self._company.add(other)
            other._company.add(self)

    def stands_beside(self, group: Group, parameters: Iterable[Tensor]) -> bool:
        """Whether this reduces other parameters over the same group."""
        others = self._place.keys().isdisjoint(id(parameter) for parameter in parameters)
        return others and not self._taken_over and self._group.handle is group.handle

    def hold(self, synchronise: bool) -> bool:
        """Whether backward passes are rounds from now on; returns what held before."""
        before, self.synchronise = self.synchronise, synchronise
        self._unreduced |= not synchronise
        return before

    def reset(self) -> None:
        """Forget what was reduced; the next round starts from zero. A backward pass that died half-way is forgotten too."""
        self._reduced = self._unreduced = False
        self._spare += [filling.buffer for filling in self._filling.values()]
        self._filling.clear()
        self._launched = None

    def finish(self) -> bool:
        """Make `shard` complete: reduce what no round has covered. Whether it may have changed since the last call."""
        if self._taken_over:
            raise RuntimeError("another optimizer was built over these parameters: this one gets no gradients any more")
        if self._launched is not None:
            raise RuntimeError(DIED)
        if not self._reduced or self._unreduced:
            self.roll_call(ROUND)
            self._launched = 0
            self.end_round()
        self._land(wait=True)
        changed, self._changed = self._changed, False
        return changed

    def roll_call(self, what: str) -> None:
        """In debug mode: RuntimeError on every rank unless all of them are here."""
        roll_call(self._group, what)

    def arrived(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete for this backward pass."""
        if not self.synchronise:
            return
        if self._launched is None:
            self.roll_call(ROUND)
            self._launched, end = 0, _End(self)
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif self._end is None or self._end() is None:
            raise RuntimeError(DIED)
        index, slot = self._place[id(parameter)]
        if index < self._launched:
            raise RuntimeError(f"a second gradient of {slot.name} in one backward pass: {TWICE}")
        self._fill(index, slot)
        self._launch_complete()

    def _fill(self, index: int, slot: Slot) -> None:
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = _Filling(
                self._take(self._spare, self._buckets[index], self._buckets[index].numel).zero_()
            )
        gradient = slot.parameter.grad
        if gradient is not None:
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of {slot.name} is sparse: buckets hold dense ones (Embedding(sparse=False))"
                )
            target = filling.buffer[slot.offset : slot.offset + slot.numel]
            more = self._stage == 2 and slot.offset in filling.arrived  # a nested backward pass brought the first part
            target.add_(gradient.detach().reshape(-1)) if more else target.copy_(gradient.detach().reshape(-1))
            filling.arrived.add(slot.offset)
            if self._stage == 2:
                slot.parameter.grad = None

    def _launch_complete(self) -> None:
        assert self._launched is not None
        while self._launched < len(self._buckets):
            filling = self._filling.get(self._launched)
            if filling is None or len(filling.arrived) < len(self._buckets[self._launched].slots):
                return
            self._launch(filling)

    def _launch(self, filling: _Filling) -> None:
        assert self._launched is not None
        index, self._launched = self._launched, self._launched + 1
        del self._filling[index]
        self._land(wait=not self._company)
        bucket = self._buckets[index]
        result = filling.buffer
        if self._group.size > 1:
            parts = self._group.size if self._deterministic else 1
            result = self._take(self._results, bucket, parts * bucket.shard_numel)
        adds = self._reduced and self._stage == 2
        self._flying.append(_Reduction(bucket, self._group, filling.buffer, result, self._deterministic, adds))

    def end_round(self) -> None:
        """Start every bucket that is not on its way yet, whatever is missing in it."""
        assert self._launched is not None
        for index in range(self._launched, len(self._buckets)):
            bucket = self._buckets[index]
            present = self._filling[index].arrived if index in self._filling else set()
            for slot in bucket.slots:
                if slot.offset not in present:
                    self._fill(index, slot)
            self._launch(self._filling[index])
        self._land(wait=not self._company)
        self._launched, self._unreduced = None, False
        self._reduced = self._changed = True

    def _land(self, wait: bool) -> None:
        while self._flying and (wait or self._flying[0].is_complete()):
            reduction = self._flying.pop(0)
            bucket, mean = reduction.bucket, reduction.wait()
            target = self.shard[bucket.start : bucket.start + bucket.shard_numel]
            target.add_(mean) if reduction.adds else target.copy_(mean)
            self._spare.append(reduction.full)
            if reduction.result is not reduction.full:
                self._results.append(reduction.result)

    def _take(self, spare: list[Tensor], bucket: Bucket, numel: int) -> Tensor:
        """The first `numel` elements of a spare buffer; a new one has room for any bucket of the dtype, so that all are alike."""
        dtype = bucket.storage.grad_dtype
        largest = (
            max(b.shard_numel for b in self._buckets if b.storage.grad_dtype == dtype) * numel // bucket.shard_numel
        )
        for index, buffer in enumerate(spare):
            if buffer.dtype == dtype:
                return spare.pop(index)._base[:numel]  # type: ignore[index]
        return torch.empty(largest, dtype=dtype, device=self.shard.device)[:numel]


_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def has_company(group: Group, parameters: Sequence[Tensor]) -> bool:
    """Whether another optimizer of other parameters reduces over this group; one that nobody holds any more is collected first."""
    if _alive:
        gc.collect()
    return group.size > 1 and any(reducer.stands_beside(group, parameters) for reducer in list(_alive))


def group_of_its_own(group: Group) -> Group:
    """The same ranks in a new process group; all of them call it.

    Each optimizer starts its buckets in one order on every rank, but two of them take turns as gradients arrive, and with unused
    parameters that differs between ranks: on one group they would exchange each other's gradients.
    """
    return group.duplicate()


def _arrived(reducer: "weakref.ref[GradientReducer]", parameter: Any) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(parameter)
