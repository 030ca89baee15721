"""GradientReducer: reduces gradients in buckets, by reduce-scatters that backward hooks start, into
this rank's flat shard.

Every backward pass outside `no_sync` is a round. A round reduces each bucket exactly once, in
bucket order, on every rank. A parameter without a gradient counts as zero. A hook launches a bucket
once all its gradients have arrived and all earlier buckets were launched. The end of the backward
pass launches the rest. After a round every parameter has a `ReducedGradient`, even if it had no
gradient, so that all ranks see the same gradients.

On GPUs a separate stream writes the results into the shard, so the next block is computed while
gradients are sent. The stream that computes gradients waits for that one at the end of the pass, or
earlier if more than `most_in_flight` elements would be in flight, since a compiled block produces
all its gradients at once.

A rank that has no gradient at all in a pass begins no round, so its next round is the one that
other ranks have begun in that pass. When `no_sync` first begins in a step, ranks start an exchange
of the number of rounds that they have run. They do so once per step, since they may enter `no_sync`
a different number of times. `_reduce` reads the largest number and runs the rounds that this rank
lacks. Until then neither the CPU nor the GPU waits for the exchange. A rank that does not enter
`no_sync` in such a step would have to know that others did, so every rank enters it.

The callback at the end of a backward pass does not run if the pass raises. The next pass detects
this, and raises until `zero_grad` of the optimizer is called.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zerocast.distributed.agreement import check_same_call
from zerocast.distributed.bucket import Bucket, most_in_flight
from zerocast.distributed.group import Flight, Group
from zerocast.optim.config import TAKEN_OVER, ZeroConfig
from zerocast.optim.gradient_shard import GradientShard
from zerocast.optim.norm import GradientNorms
from zerocast.optim.reduced_gradient import GradientPart
from zerocast.optim.reduction import IdleParameters, PendingBucket, Reduction
from zerocast.weight.validity import Use

DIED = "a backward pass was interrupted by an exception: call zero_grad() of the optimizer before the next one"
THREADS = (
    "two threads run backward passes of one optimizer's parameters at the same time, but gradients are reduced in one order: run "
    "them one at a time, after zero_grad() of the optimizer"
)
TWICE = "its bucket is already being reduced. Reentrant checkpointing of shared weights causes this: pass use_reentrant=False"
RUNNING = "gradients are being reduced: read them, or change them, after the backward pass"
INSIDE = (
    "inside no_sync() gradients are not reduced over the ranks: clip and read them after the backward pass that follows it, or "
    "let clip_grad_norm_ of the optimizer reduce them"
)
USED_UP = (
    "this gradient no longer exists: step() has consumed it, or zero_grad() has dropped it. Read gradients after a backward pass "
    "and before step(), and call zero_grad() after each step"
)

EXCHANGED = (
    "this parameter is another one than its optimizer has masters of: torch.utils.swap_tensors has exchanged them. Exchange them "
    "before the optimizer is built, or build a new one"
)

RETURNED = (
    "a hook of register_post_accumulate_grad_hook that was registered before the optimizer was built returned a tensor, which the "
    "hook of the optimizer got in place of the parameter: such a hook returns None"
)

ROUND = "reduces the gradients of a backward pass"
ROUNDS_BEGUN = "the number of reductions before no_sync (every rank enters it in a step in which any rank does)"


class _EndOfPass:
    """The callback at the end of a backward pass. Only autograd keeps it alive, until the pass has
    ended or raised.
    """

    def __init__(self, reducer: "GradientReducer") -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.end_pass(self)


class GradientReducer:
    """Reduces the gradients of `buckets` over `group`.

    The result is the sum over rounds, since `reset`, of the mean over ranks. With `stage` 2 a
    gradient is freed as soon as its bucket is reduced, and each round adds to the sum. With stage 1
    the gradients of this rank are kept: each backward pass adds to them in their dtype, and a round
    reduces their total again. If reduced gradients are changed, for example clipped, the next round
    would lose the change. So stage 1 then works like stage 2 until `reset`.

    Args:
        buckets: the buckets in the order of reductions.
        group: the ranks.
        stage: 1 or 2.
        config: the bucket size, and how gradients are sent and added.
        device: the device of the shard.
        norms: the norms of the reduced gradients, which are told of changes.
        dtype: the dtype of the shard at first (`shard_dtype`).
        before_round: called before the collectives of a round. It raises on all ranks or on none.

    Attributes:
        gradients: this rank's shard of the result. Fixed.
        synchronise: False inside `no_sync`, where backward passes are no rounds.
        refusal: the error for gradients that arrive now. Empty if they may arrive.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        stage: int,
        config: ZeroConfig,
        device: torch.device,
        norms: GradientNorms,
        dtype: torch.dtype,
        before_round: Callable[[], None],
    ) -> None:
        self.synchronise = True
        self.refusal = ""
        self._before_round = before_round
        self.gradients = GradientShard(buckets, group, norms, device, dtype, self)
        self._buckets, self._group, self._config = list(buckets), group, config
        self._stage = stage
        # True if a round reduces the gradients since the last one, and adds the result to the sum.
        # False if it reduces the total since `reset` again, for which parts keep their gradients.
        # With stage 1 a change of gradients sets it, until `reset`.
        self._adds = stage == 2
        # The parts of each bucket, and the bucket index and part of each parameter by id. Fixed.
        parts = iter(self.gradients.parts)
        self._parts = [[next(parts) for _ in bucket.slots] for bucket in buckets]
        self._index_and_part: dict[int, tuple[int, GradientPart]] = {}
        for index, bucket in enumerate(buckets):
            for slot, part in zip(bucket.slots, self._parts[index], strict=True):
                self._index_and_part[id(slot.parameter)] = index, part
        # The reductions in flight, oldest first.
        self._in_flight: list[Reduction] = []
        self._most_in_flight = most_in_flight(buckets, config.bucket_size)
        # The stream that writes reductions into the shard. None on a CPU and for a single rank.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and group.size > 1 else None
        # The buckets of this round that were not launched, with the gradients that have arrived,
        # keyed by index.
        self._pending: dict[int, PendingBucket] = {}
        # The number of buckets launched in this round. None between rounds.
        self._launched: int | None = None
        # The callback at the end of this round's backward pass, and the thread of the pass.
        self._end: weakref.ref[_EndOfPass] | None = None
        self._thread = 0
        # The number of rounds that have run since `reset`.
        self._rounds = 0
        # The number of rounds that must have run before a step, as far as this rank knows: one more
        # than had run when no_sync last began. 0 without no_sync.
        self._needed_rounds = 0
        # The exchange of the number of rounds, from the first no_sync after `reset` until `_reduce`
        # reads it: the result, int64[1], which is the largest number of any rank, and the
        # collective. Its group has no order with the reductions, since a rank that lacks a round
        # sends its number before that round, and the others after it.
        self._rounds_exchange: tuple[Tensor, Flight] | None = None
        self._exchange_group = group.cpu_twin()
        # True once the exchange was started, until `reset`.
        self._has_exchanged_rounds = False
        self._idle = IdleParameters(f"a {group.caller.name}" if group.caller else "an optimizer")
        # The gradient hooks of the parameters. Removed when this object is deleted or taken over.
        self._hooks: list[RemovableHandle] = []
        # True once a new reducer has taken over any of the parameters.
        self._taken_over = False
        # The living reducers of other parameters. With any, this one does not wait for reductions
        # during a backward pass (`replace_or_coexist`).
        self._coexisting: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
        for other in list(reducers):
            other.replace_or_coexist(self)
        reducers.add(self)
        # Hooks live as long as the parameters, which may be longer than this object.
        weak_self = weakref.ref(self)
        for bucket in buckets:
            for slot in bucket.slots:
                hook = slot.parameter.register_post_accumulate_grad_hook(
                    lambda parameter: _gradient_arrived(weak_self, parameter)
                )
                self._hooks.append(hook)
        weakref.finalize(self, _clean_up, self._hooks, self._in_flight).atexit = False

    def replace_or_coexist(self, other: "GradientReducer") -> None:
        """Called for each living reducer when `other` is built.

        If `other` has any of the same parameters, this one stops, since a gradient can be freed
        only once. If all parameters differ, neither reducer waits for reductions during a backward
        pass from now on. With unused parameters, each rank may launch the buckets of the two
        reducers in a different order, so a rank that waited for one bucket could wait forever.
        """
        if self._index_and_part.keys() & other._index_and_part.keys():
            if self._has_unused and not self._taken_over:
                self._idle.warn_taken_over()
            self._taken_over = True
            _remove(self._hooks)
            self.gradients.detach()
        elif not self._taken_over and self._group.size > 1 and other._group.size > 1:
            self._coexisting.add(other)
            other._coexisting.add(self)

    def coexists_with(self, group: Group, parameters: Iterable[Tensor]) -> bool:
        """Return True if this reduces only other parameters than these, over the same group."""
        has_other_parameters = self._index_and_part.keys().isdisjoint(id(parameter) for parameter in parameters)
        return has_other_parameters and not self._taken_over and self._group.handle is group.handle

    def set_synchronise(self, synchronise: bool) -> bool:
        """Set whether backward passes are rounds. Return the previous setting."""
        before, self.synchronise = self.synchronise, synchronise
        if not (synchronise and before):
            self._needed_rounds = self._rounds + 1
        if not (synchronise or self._has_exchanged_rounds):
            self._start_rounds_exchange()
        self._update_keeps_local()
        if synchronise and not before:
            # From now on `p.grad` is the reduced gradient, of the same parameters on every rank.
            self.gradients.collect_all(self._rounds > 0)
        return before

    def _start_rounds_exchange(self) -> None:
        """Start to exchange the number of rounds that ranks have run, without waiting."""
        max_rounds = torch.tensor([self._rounds], device="cpu")
        flight = self._exchange_group.all_reduce_max(max_rounds, ROUNDS_BEGUN, async_op=True)
        self._rounds_exchange = None if flight is None else (max_rounds, flight)
        self._has_exchanged_rounds = True

    def reset(self) -> None:
        """Drop the sum, so that the next round starts from zero. Also drops the state of a backward
        pass that failed partway.
        """
        if self._stage == 1 or self._needed_rounds > self._rounds or self._launched is not None:
            self.gradients.drop_local()
        self._rounds = self._needed_rounds = 0
        self._rounds_exchange = None
        self._has_exchanged_rounds = False
        self.gradients.changes = 0
        self._pending.clear()
        self._launched = None
        self._adds = self._stage == 2
        self._update_keeps_local()

    def _update_keeps_local(self) -> None:
        self.gradients.keeps_local = not (self.synchronise and self._adds)

    def mark_modified(self) -> None:
        """Called after reduced gradients were changed. Reducing the local gradients again would
        lose the change, so later rounds add to the reduced ones.
        """
        if not self._adds:
            self._adds = True
            self.gradients.drop_local()
            self._update_keeps_local()

    def complete(self) -> None:
        """Reduce gradients that no round has reduced yet, before they are read. Raises RuntimeError
        if there is none.
        """
        self._check_open()
        if not self.synchronise:
            raise RuntimeError(INSIDE)
        if not (self._rounds or self._needed_rounds):
            raise RuntimeError(USED_UP)
        self._reduce()

    def finish(self) -> None:
        """Reduce gradients before a step or a norm, for which a missing gradient counts as zero."""
        self._check_open()
        self._reduce()
        removed = self.gradients.zero_detached()
        if removed:
            self._idle.warn_removed(removed)

    def check_used_up(self, use: Use) -> None:
        """Raise RuntimeError inside `no_sync`, or if there are gradients that no step has used."""
        self._check_open()
        if self._has_unused or not self.synchronise:
            raise RuntimeError(
                f"{use.value} during gradient accumulation, whose backward passes would then differ: call it after step() or "
                "zero_grad() of the optimizer, and before the next backward pass"
            )

    @property
    def _has_unused(self) -> bool:
        """True if there are gradients that no step has used."""
        return bool(self._rounds or self._needed_rounds) or any(part.local is not None for part in self.gradients.parts)

    def wait(self) -> None:
        """Wait for the reductions in flight."""
        self._check_open()
        self._finish_reductions(wait=True)

    def _check_open(self) -> None:
        """Raise RuntimeError during a backward pass, after one that raised, and after a new
        optimizer has taken over the parameters.
        """
        if self._taken_over:
            raise RuntimeError(TAKEN_OVER)
        if self._launched is not None:
            running = self._end is not None and self._end() is not None
            raise RuntimeError(RUNNING if running else DIED)

    def _reduce(self) -> None:
        """Run the rounds that this rank lacks, and wait for all reductions. Collective."""
        had_no_pass = not (self._rounds or self._needed_rounds)
        gradients_before = self._idle.gradients
        self._run_rounds(max(self._needed_rounds, 1))
        if self._rounds_exchange is not None:
            # Waiting earlier could deadlock: others may reach no_sync, where they send their
            # number, only after the rounds of this rank.
            max_rounds, flight = self._rounds_exchange
            self._rounds_exchange = None
            flight.wait()
            self._run_rounds(int(max_rounds) + 1)
        if had_no_pass and self._idle.gradients == gradients_before:
            self._idle.warn_no_gradients()
        if not self.synchronise:
            self._needed_rounds = self._rounds + 1
        if self._in_flight:
            self._finish_reductions(wait=True)

    def _run_rounds(self, number: int) -> None:
        """Run rounds until `number` have run since `reset`."""
        while self._rounds < number:
            self._begin_round()
            self.end_round()

    def _begin_round(self) -> None:
        self._before_round()
        self.check_same_call(ROUND)
        # This round must not add unclipped gradients to a sum that is still to be clipped.
        self.gradients.apply_clip()
        self._launched = 0

    def check_same_call(self, what: str) -> None:
        """Raise RuntimeError on every rank, in debug mode, unless all ranks make this call."""
        check_same_call(self._group, what)

    def gradient_arrived(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter, which is complete for this backward pass. Called by the
        parameter's hook.
        """
        if self.refusal:
            # The next backward pass raises too, until `zero_grad`.
            self._launched, self._end = 0, None
            raise RuntimeError(self.refusal)
        if id(parameter) not in self._index_and_part:
            # torch passes the result of a hook to the next hook instead of the parameter. That
            # result is usually `p.grad`, which requires no gradient.
            raise RuntimeError(EXCHANGED if parameter.requires_grad else RETURNED)
        index, part = self._index_and_part[id(parameter)]
        self.gradients.collect(part, self._rounds > 0)
        if not self.synchronise:
            return
        if self._launched is None:
            self._begin_round()
            end = _EndOfPass(self)
            self._end, self._thread = weakref.ref(end), threading.get_ident()
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif self._end is None or self._end() is None:
            raise RuntimeError(DIED)
        elif self._thread != threading.get_ident():
            # The buckets of the other thread contain gradients of two passes, so that pass raises
            # too.
            self._launched, self._end = 0, None
            raise RuntimeError(THREADS)
        assert self._launched is not None
        if index < self._launched:
            raise RuntimeError(f"a second gradient of {part.name} in one backward pass: {TWICE}")
        self._put(index, part)
        self._launch_complete()

    def _put(self, index: int, part: GradientPart) -> None:
        """Put the local gradient of a part, if it has one, into the bucket at `index`."""
        self._idle.count(part.name, part.local is not None)
        if part.local is None and self.gradients.is_frozen(part):
            self._idle.warn_frozen(part.name)
        if index not in self._pending:
            self._pending[index] = PendingBucket(self._buckets[index])
        self._pending[index].take(part, adds=self._adds)

    def _launch_complete(self) -> None:
        """Launch the next buckets, in order, as far as all their gradients have arrived."""
        assert self._launched is not None
        while self._launched < len(self._buckets):
            pending = self._pending.get(self._launched)
            if pending is None or not pending.is_complete:
                return
            self._launch(pending)

    def _launch(self, pending: PendingBucket) -> None:
        """Launch the reduction of the next bucket."""
        assert self._launched is not None
        index = self._launched
        self._launched += 1
        del self._pending[index]
        # Completed reductions release their memory here.
        self._finish_reductions(wait=False)
        bucket = self._buckets[index]
        adds = self._rounds > 0 and self._adds
        if adds and self.gradients.flat.dtype is not torch.float32:
            self._finish_reductions(wait=True)
            self.gradients.widen()
        target = self.gradients.flat[bucket.start : bucket.start + bucket.shard_numel]
        # If another reducer works in the same pass, reductions are finished after the pass.
        finishes_in_pass = not self._coexisting
        if finishes_in_pass:
            self._limit_in_flight(bucket.numel)
        stream = self._stream if finishes_in_pass else None
        what = f"gradient bucket {index + 1} of {len(self._buckets)}"
        reduction = Reduction(pending, self._group, target, self._config, stream, finishes_in_pass, adds, what)
        self._in_flight.append(reduction)

    def _limit_in_flight(self, numel: int) -> None:
        """Finish the oldest reductions until `numel` more elements may be in flight."""
        while self._in_flight and numel + sum(reduction.numel for reduction in self._in_flight) > self._most_in_flight:
            self._in_flight.pop(0).finish()

    def end_pass(self, end: _EndOfPass) -> None:
        """End the round if the backward pass that ends has begun it, unless a pass of another
        thread has interfered.
        """
        if self._end is not None and self._end() is end:
            self.end_round()

    def end_round(self) -> None:
        """Launch all remaining buckets, also those in which gradients are missing."""
        assert self._launched is not None
        for index in range(self._launched, len(self._buckets)):
            arrived = self._pending[index].gradients if index in self._pending else ()
            for part in self._parts[index]:
                if part.offset not in arrived:
                    self.gradients.collect(part, self._rounds > 0)
                    self._put(index, part)
            self._launch(self._pending[index])
        self.gradients.mark_all_changed()
        if self._in_flight and not self._coexisting:
            stop = min(reduction.start for reduction in self._in_flight)
            self.gradients.norms.begin_square_sum(self.gradients.flat, stop)
        self._finish_reductions(wait=not self._coexisting)
        self._launched = None
        self._rounds += 1

    def _finish_reductions(self, wait: bool) -> None:
        """Finish the reductions in flight, oldest first: all with `wait`, else those that have
        completed.
        """
        while self._in_flight and (wait or self._in_flight[0].is_complete()):
            self._in_flight.pop(0).finish()


# All living reducers of the process.
reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _clean_up(hooks: list[RemovableHandle], in_flight: list[Reduction]) -> None:
    """Remove the hooks of a deleted reducer, and release the reductions that an interrupted pass
    has launched.
    """
    _remove(hooks)
    for reduction in in_flight:
        reduction.release()


def _gradient_arrived(weak_reducer: "weakref.ref[GradientReducer]", parameter: Any) -> None:
    reducer = weak_reducer()
    if reducer is not None:
        reducer.gradient_arrived(parameter)
