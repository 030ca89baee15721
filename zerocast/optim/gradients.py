"""Gradients: from backward hooks through bucketed reduce-scatters into this rank's flat shard.

Every backward pass outside `no_sync` is a round: each bucket is reduced exactly once, in bucket
order, on every rank, whatever parameters got a gradient there; what did not counts as zero. Hooks
start a bucket as soon as it and all before it are complete, the end of the backward pass starts the
rest. On GPUs buckets land in the shard on a stream of their own, and the stream that computes
gradients waits for none of them before the end of the pass, unless `IN_FLIGHT` are on their way: a
compiled block gives all its gradients at once, and the next block is computed while they travel.
Afterwards the gradient of every parameter is a `ReducedGradient`, whether it took part or not, so
that all ranks find the same.

A backward pass that dies takes its end with it. That is noticed, and refused until `zero_grad` of
the optimizer has cleared it away.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerocast.distributed.agreement import check_same_call
from zerocast.distributed.group import Group
from zerocast.optim.bucket import Bucket
from zerocast.optim.config import ZeroConfig
from zerocast.optim.gradient_shard import GradientShard
from zerocast.optim.norm import ParameterNorms
from zerocast.optim.reduced_gradient import GradientPart
from zerocast.optim.reduction import Filling, IdleParameters, Reduction
from zerocast.optim.validate import TAKEN_OVER

DIED = "a backward pass raised an exception half-way: call zero_grad() of the optimizer before the next one"
THREADS = (
    "two threads run backward passes of one optimizer's parameters at the same time, and gradients are reduced in one order: let "
    "one begin when the other has ended, after zero_grad() of the optimizer"
)
TWICE = "its bucket is on its way already. Reentrant checkpointing of shared weights does this, use_reentrant=False not"
ACCUMULATING = (
    "a recipe is switched in the middle of an accumulation, whose backward passes would read two formats: call switch after step() "
    "or zero_grad() of the optimizer, and before the next backward pass"
)
RUNNING = "gradients are being reduced: read them, or change them, after the backward pass"
INSIDE = (
    "inside no_sync() gradients are those of this rank alone: clip and read them after the backward pass that follows it, or let "
    "clip_grad_norm_ of the optimizer reduce them"
)
USED_UP = (
    "this gradient was used up by step(), or forgotten by zero_grad(): it is there from a backward pass to the step; call "
    "zero_grad() after each step"
)

# How many buckets of the usual size (`ZeroConfig.bucket_size`) may be on their way at once, or one
# that is larger. They hold their gradients and, on a rank, its part of the mean, in the dtype that
# gradients are reduced in.
IN_FLIGHT = 8

ROUND = "reduces the gradients of a backward pass"


class _End:
    """The callback for the end of a backward pass; autograd keeps it as long as the pass."""

    def __init__(self, reducer: "GradientReducer") -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.end_pass(self)


class GradientReducer:
    """Reduces gradients of `buckets`; `gradients` holds this rank's sums of means since `reset`.

    With `stage` 2 a gradient is freed as soon as its bucket is reduced and every round adds to what
    was reduced. With stage 1 the gradients of this rank are kept, each backward pass adds to them
    in their own dtype, and a round reduces the sum anew; once what was reduced has been changed
    (clipped, for one), it stays as it was changed, and later rounds add to it as with stage 2.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        stage: int,
        config: ZeroConfig,
        device: torch.device,
        norms: ParameterNorms,
        dtype: torch.dtype,
    ) -> None:
        self.synchronise = True
        self.refusal = ""  # why gradients are not wanted now
        self.gradients = GradientShard(buckets, group, norms, device, dtype, self)
        self._buckets, self._group, self._config = list(buckets), group, config
        self._stage = self._adds_from = stage  # 2 once rounds add to what was reduced
        parts = iter(self.gradients.parts)
        self._parts = [[next(parts) for _ in bucket.slots] for bucket in buckets]
        self._place = {
            id(slot.parameter): (index, part)
            for index, bucket in enumerate(buckets)
            for slot, part in zip(bucket.slots, self._parts[index], strict=True)
        }
        self._flying: list[Reduction] = []
        # where reductions land; None on a CPU and for a single rank
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and group.size > 1 else None
        self._filling: dict[int, Filling] = {}
        self._launched: int | None = None  # buckets started in this round; None between rounds
        # the end of the backward pass that this round belongs to
        self._end: weakref.ref[_End] | None = None
        self._thread = 0  # that runs the backward pass of this round
        self._reduced = False  # a round has run since `reset`
        # no_sync has been entered since the last round; set so, it is the same on every rank
        self._unreduced = False
        self._idle = IdleParameters(f"a {group.caller.name}" if group.caller else "an optimizer")
        self._hooks: list[RemovableHandle] = []
        self._taken_over = False
        self._company: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
        for other in list(reducers):
            other.meet(self)
        reducers.add(self)
        me = weakref.ref(self)  # hooks live as long as the parameters do
        for bucket in buckets:
            for slot in bucket.slots:
                hook = slot.parameter.register_post_accumulate_grad_hook(lambda parameter: _arrived(me, parameter))
                self._hooks.append(hook)
        weakref.finalize(self, _leave, self._hooks, self._flying).atexit = False

    def meet(self, other: "GradientReducer") -> None:
        """Give way to a new reducer of any of the same parameters: a gradient can be freed once
        only.

        Beside one of other parameters, neither waits during a backward pass: with unused parameters
        the two take turns in another order on another rank, and each rank would wait for what the
        other has not started.
        """
        if self._place.keys() & other._place.keys():
            self._taken_over = True
            _remove(self._hooks)
            self.gradients.leave()
        elif not self._taken_over and self._group.size > 1 and other._group.size > 1:
            self._company.add(other)
            other._company.add(self)

    def stands_beside(self, group: Group, parameters: Iterable[Tensor]) -> bool:
        """True if this reduces other parameters over the same group."""
        others = self._place.keys().isdisjoint(id(parameter) for parameter in parameters)
        return others and not self._taken_over and self._group.handle is group.handle

    def hold(self, synchronise: bool) -> bool:
        """Let backward passes be rounds from now on, or not; returns what held before."""
        before, self.synchronise = self.synchronise, synchronise
        self._unreduced |= not (synchronise and before)
        self._look()
        if synchronise and not before:
            # from here on gradients are read as reduced ones, of the same parameters on every rank
            self.gradients.collect_all(self._reduced)
        return before

    def reset(self) -> None:
        """Forget what was reduced; the next round starts from zero. A backward pass that died
        half-way is forgotten too.
        """
        if self._stage == 1 or self._unreduced or self._launched is not None:
            self.gradients.drop_local()
        self._reduced = self._unreduced = False
        self.gradients.changes = 0
        self._filling.clear()
        self._launched, self._adds_from = None, self._stage
        self._look()

    @property
    def _adds(self) -> bool:
        """True if rounds add to what was reduced; else they reduce the sum of all backward
        passes anew.
        """
        return self._adds_from == 2

    def _look(self) -> None:
        self.gradients.keeps_local = not (self.synchronise and self._adds)

    def changed_by_hand(self) -> None:
        """Note that reduced gradients were changed since, so that another reduction would not give
        them: later rounds add to them.
        """
        if not self._adds:
            self._adds_from = 2
            self.gradients.drop_local()
            self._look()

    def complete(self) -> None:
        """Reduce what no round has covered; RuntimeError where there is no reduced gradient."""
        self._check_open()
        if not self.synchronise:
            raise RuntimeError(INSIDE)
        if not (self._reduced or self._unreduced):
            raise RuntimeError(USED_UP)
        self._reduce()

    def finish(self) -> None:
        """The same before a step or a norm, which take a gradient that is not there for zero."""
        self._check_open()
        self._reduce()
        self.gradients.zero_removed()

    def check_used_up(self) -> None:
        """RuntimeError if there are gradients that no step has used, or within `no_sync`."""
        self._check_open()
        is_kept = any(part.local is not None for part in self.gradients.parts)
        if is_kept or self._reduced or self._unreduced or not self.synchronise:
            raise RuntimeError(ACCUMULATING)

    def land(self) -> None:
        """Wait for the reductions that were started."""
        self._check_open()
        self._land(wait=True)

    def check_in_charge(self) -> None:
        """RuntimeError once another optimizer was built over any of the parameters."""
        if self._taken_over:
            raise RuntimeError(TAKEN_OVER)

    def _check_open(self) -> None:
        self.check_in_charge()
        if self._launched is not None:
            running = self._end is not None and self._end() is not None
            raise RuntimeError(RUNNING if running else DIED)

    def _reduce(self) -> None:
        if not self._reduced or self._unreduced:
            found, without_any = self._idle.found, not (self._reduced or self._unreduced)
            self._begin()
            self.end_round()
            if without_any and self._idle.found == found:
                self._idle.note_none()
        self._land(wait=True)

    def _begin(self) -> None:
        """A round: gradients are added to what a clip so far has left."""
        self.check_same_call(ROUND)
        self.gradients.apply_clip()
        self._launched = 0

    def check_same_call(self, what: str) -> None:
        """In debug mode: RuntimeError on every rank unless all of them are here."""
        check_same_call(self._group, what)

    def arrived(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete for this backward pass."""
        if self.refusal:
            # the next backward pass is refused until `zero_grad`
            self._launched, self._end = 0, None
            raise RuntimeError(self.refusal)
        index, part = self._place[id(parameter)]
        self.gradients.collect(part, self._reduced)
        if not self.synchronise:
            return
        if self._launched is None:
            self._begin()
            end = _End(self)
            self._end, self._thread = weakref.ref(end), threading.get_ident()
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif self._end is None or self._end() is None:
            raise RuntimeError(DIED)
        elif self._thread != threading.get_ident():
            # what the other thread has reduced is half of two passes: it is refused too
            self._launched, self._end = 0, None
            raise RuntimeError(THREADS)
        assert self._launched is not None
        if index < self._launched:
            raise RuntimeError(f"a second gradient of {part.name} in one backward pass: {TWICE}")
        self._fill(index, part)
        self._launch_complete()

    def _fill(self, index: int, part: GradientPart) -> None:
        filling = self._filling.setdefault(index, Filling(self._buckets[index]))
        if part.forgotten:
            filling.forgotten.append(part)
            part.forgotten = False
        gradient = part.local
        self._idle.note(part.name, gradient is not None)
        if gradient is None and self.gradients.is_frozen(part):
            self._idle.note_frozen(part.name)
        if gradient is not None:
            filling.put(part, gradient, more=self._adds)
            if self._adds:
                part.local = None

    def _launch_complete(self) -> None:
        assert self._launched is not None
        while self._launched < len(self._buckets):
            filling = self._filling.get(self._launched)
            if filling is None or not filling.is_complete:
                return
            self._launch(filling)

    def _launch(self, filling: Filling) -> None:
        assert self._launched is not None
        index, self._launched = self._launched, self._launched + 1
        del self._filling[index]
        self._land(wait=False)
        bucket = self._buckets[index]
        adds = self._reduced and self._adds
        if adds and self.gradients.flat.dtype is not torch.float32:
            self._land(wait=True)
            self.gradients.widen()
        target = self.gradients.flat[bucket.start : bucket.start + bucket.shard_numel]
        direct = not self._company  # beside another optimizer reductions outlive the pass
        if direct:
            self._make_room(bucket.numel)
        stream = self._stream if direct else None
        what = f"gradient bucket {index + 1} of {len(self._buckets)}"
        self._flying.append(Reduction(filling, self._group, target, self._config, stream, direct, adds, what))

    def _make_room(self, numel: int) -> None:
        """Finish the oldest reductions, until `numel` more elements may be on their way."""
        most = IN_FLIGHT * self._config.bucket_size
        while self._flying and numel + sum(reduction.numel for reduction in self._flying) > most:
            self._flying.pop(0).finish()

    def end_pass(self, end: _End) -> None:
        """The end of the backward pass that began this round; no other's, nor that of a pass which
        another thread's has spoiled.
        """
        if self._end is not None and self._end() is end:
            self.end_round()

    def end_round(self) -> None:
        """Start every bucket that is not on its way yet, even if gradients are missing in it."""
        assert self._launched is not None
        for index in range(self._launched, len(self._buckets)):
            present = self._filling[index].gradients if index in self._filling else ()
            for part in self._parts[index]:
                if part.offset not in present:
                    self.gradients.collect(part, self._reduced)
                    self._fill(index, part)
            self._launch(self._filling[index])
        self._land(wait=not self._company)
        self._launched, self._unreduced = None, not self.synchronise
        self._reduced = True
        self.gradients.everything_changed()

    def _land(self, wait: bool) -> None:
        while self._flying and (wait or self._flying[0].is_complete()):
            self._flying.pop(0).finish()


reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()  # all that are alive


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _leave(hooks: list[RemovableHandle], flying: list[Reduction]) -> None:
    """Called when a reducer is gone. What a backward pass that died has started still travels."""
    _remove(hooks)
    for reduction in flying:
        reduction.release()


def _arrived(reducer: "weakref.ref[GradientReducer]", parameter: Any) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(parameter)
