"""GradientReducer: gradients go from backward hooks through bucketed reduce-scatters into this
rank's flat shard.

Every backward pass outside `no_sync` is a round. A round reduces each bucket exactly once, in
bucket order, on every rank. A parameter without a gradient counts as zero. Hooks start a bucket
once it and all before it are complete, and the end of the backward pass starts the rest. On GPUs
reductions are written into the shard on a separate stream. The stream that computes gradients waits
for them at the end of the pass, or earlier if `most_in_flight` elements are in flight: a compiled
block produces all its gradients together, and the next block is computed while they are sent. After
a round every parameter has a `ReducedGradient`, even if it had no gradient, so that all ranks see
the same gradients.

A rank without any gradient in a pass begins no round, and its next round is the one that others
have begun in that pass. When `no_sync` first begins in a step, ranks start to exchange how many
rounds they have run: once, since ranks may enter `no_sync` a different number of times. `_reduce`
reads the largest number and runs the rounds that this rank lacks. Nothing waits for it before, nor
for the GPU.

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
from zerocast.optim.config import ZeroConfig
from zerocast.optim.gradient_shard import GradientShard
from zerocast.optim.norm import ParameterNorms
from zerocast.optim.reduced_gradient import GradientPart
from zerocast.optim.reduction import Filling, IdleParameters, Reduction
from zerocast.optim.validate import TAKEN_OVER
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
ROUNDS_BEGUN = "the number of times that gradients were reduced before no_sync"


class _End:
    """The callback for the end of a backward pass. Autograd keeps it alive during the pass."""

    def __init__(self, reducer: "GradientReducer") -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.end_pass(self)


class GradientReducer:
    """Reduces the gradients of `buckets` into `gradients`, which holds this rank's part of the sum
    of means since `reset`.

    With `stage` 2 a gradient is freed as soon as its bucket is reduced, and every round adds to the
    sum. With stage 1 the gradients of this rank are kept: each backward pass adds to them in their
    dtype, and a round reduces their total again. If reduced gradients were changed, by clipping for
    example, a stage 1 round would lose the change. So later rounds then add, as with stage 2.

    `before_round` is called before the collectives of a round, and raises on all ranks or on none.
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
        before_round: Callable[[], None],
    ) -> None:
        self.synchronise = True
        self._before_round = before_round
        # The error for gradients that arrive now; empty if they may arrive.
        self.refusal = ""
        self.gradients = GradientShard(buckets, group, norms, device, dtype, self)
        self._buckets, self._group, self._config = list(buckets), group, config
        self._stage = stage
        # True if rounds add to the sum, False if they reduce the total of all backward passes
        # again. With stage 1 it becomes True if gradients change, until `reset`.
        self._adds = stage == 2
        parts = iter(self.gradients.parts)
        self._parts = [[next(parts) for _ in bucket.slots] for bucket in buckets]
        self._place = {
            id(slot.parameter): (index, part)
            for index, bucket in enumerate(buckets)
            for slot, part in zip(bucket.slots, self._parts[index], strict=True)
        }
        self._flying: list[Reduction] = []
        self._most_in_flight = most_in_flight(buckets, config.bucket_size)
        # The stream that writes reductions into the shard. None on a CPU and for a single rank.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and group.size > 1 else None
        self._filling: dict[int, Filling] = {}
        # The number of buckets started in this round; None between rounds.
        self._launched: int | None = None
        # The end of the backward pass of this round, and the thread that runs the pass.
        self._end: weakref.ref[_End] | None = None
        self._thread = 0
        # The number of rounds that have run since `reset`.
        self._rounds = 0
        # The number of rounds that must have run before a step, as far as this rank knows: one more
        # than had run when no_sync last began, 0 without no_sync.
        self._needed = 0
        # The largest number of rounds of any rank when no_sync first began, int64[1]. It is
        # exchanged in a separate group, which has no order with the reductions: a rank that lacks a
        # round sends its number before that round, and the others after it.
        self._question: tuple[Tensor, Flight] | None = None
        # True once ranks have started that exchange, since `reset`.
        self._has_asked = False
        self._asking_group = group.cpu_twin()
        self._idle = IdleParameters(f"a {group.caller.name}" if group.caller else "an optimizer")
        self._hooks: list[RemovableHandle] = []
        self._taken_over = False
        self._company: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
        for other in list(reducers):
            other.replace_or_coexist(self)
        reducers.add(self)
        # Hooks live as long as the parameters, which may be longer than this object.
        me = weakref.ref(self)
        for bucket in buckets:
            for slot in bucket.slots:
                hook = slot.parameter.register_post_accumulate_grad_hook(lambda parameter: _arrived(me, parameter))
                self._hooks.append(hook)
        weakref.finalize(self, _leave, self._hooks, self._flying).atexit = False

    def replace_or_coexist(self, other: "GradientReducer") -> None:
        """Yield to a new reducer if it has any of the same parameters, since a gradient can be
        freed only once.

        If all of its parameters are different, neither of the two waits during a backward pass any
        more. With unused parameters their buckets may start in a different order on each rank, and
        ranks would wait for buckets that others have not started.
        """
        if self._place.keys() & other._place.keys():
            if self._has_unused and not self._taken_over:
                self._idle.warn_taken_over()
            self._taken_over = True
            _remove(self._hooks)
            self.gradients.detach()
        elif not self._taken_over and self._group.size > 1 and other._group.size > 1:
            self._company.add(other)
            other._company.add(self)

    def coexists_with(self, group: Group, parameters: Iterable[Tensor]) -> bool:
        """Return True if this reduces different parameters over the same group."""
        others = self._place.keys().isdisjoint(id(parameter) for parameter in parameters)
        return others and not self._taken_over and self._group.handle is group.handle

    def set_synchronise(self, synchronise: bool) -> bool:
        """Set whether backward passes are rounds. Return the previous setting."""
        before, self.synchronise = self.synchronise, synchronise
        if not (synchronise and before):
            self._needed = self._rounds + 1
        if not (synchronise or self._has_asked):
            self._ask()
        self._update_keeps_local()
        if synchronise and not before:
            # Gradients are now read as reduced ones, of the same parameters on every rank.
            self.gradients.collect_all(self._rounds > 0)
        return before

    def _ask(self) -> None:
        """Start to exchange how many rounds ranks have begun. Waits for nothing."""
        most = torch.tensor([self._rounds], device="cpu")
        flight = self._asking_group.all_reduce_max(most, ROUNDS_BEGUN, async_op=True)
        self._question = None if flight is None else (most, flight)
        self._has_asked = True

    def reset(self) -> None:
        """Drop the sum, so that the next round starts from zero, and the state of a backward pass
        that failed partway.
        """
        if self._stage == 1 or self._needed > self._rounds or self._launched is not None:
            self.gradients.drop_local()
        self._rounds = self._needed = 0
        self._question, self._has_asked = None, False
        self.gradients.changes = 0
        self._filling.clear()
        self._launched, self._adds = None, self._stage == 2
        self._update_keeps_local()

    def _update_keeps_local(self) -> None:
        self.gradients.keeps_local = not (self.synchronise and self._adds)

    def mark_modified(self) -> None:
        """Record that reduced gradients were changed. Reducing the local gradients again would lose
        the change, so later rounds add to them.
        """
        if not self._adds:
            self._adds = True
            self.gradients.drop_local()
            self._update_keeps_local()

    def complete(self) -> None:
        """Reduce gradients that no round has reduced. Raises RuntimeError if there is no
        gradient.
        """
        self._check_open()
        if not self.synchronise:
            raise RuntimeError(INSIDE)
        if not (self._rounds or self._needed):
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
        """Raise RuntimeError if there are gradients that no step has used, or within `no_sync`."""
        self._check_open()
        if self._has_unused or not self.synchronise:
            raise RuntimeError(
                f"{use.value} during gradient accumulation, whose backward passes would then differ: call it after step() or "
                "zero_grad() of the optimizer, and before the next backward pass"
            )

    @property
    def _has_unused(self) -> bool:
        """True if there are gradients that no step has used."""
        return bool(self._rounds or self._needed) or any(part.local is not None for part in self.gradients.parts)

    def land(self) -> None:
        """Wait for the reductions in flight."""
        self._check_open()
        self._land(wait=True)

    def _check_open(self) -> None:
        if self._taken_over:
            raise RuntimeError(TAKEN_OVER)
        if self._launched is not None:
            running = self._end is not None and self._end() is not None
            raise RuntimeError(RUNNING if running else DIED)

    def _reduce(self) -> None:
        found, had_no_pass = self._idle.found, not (self._rounds or self._needed)
        self._run_rounds(max(self._needed, 1))
        if self._question is not None:
            # Read after this rank's rounds: others may be able to begin no_sync only after these.
            (most, flight), self._question = self._question, None
            flight.wait()
            self._run_rounds(int(most) + 1)
        if had_no_pass and self._idle.found == found:
            self._idle.warn_no_gradients()
        if not self.synchronise:
            self._needed = self._rounds + 1
        if self._flying:
            self._land(wait=True)

    def _run_rounds(self, number: int) -> None:
        """Run rounds until there were `number` since `reset`."""
        while self._rounds < number:
            self._begin()
            self.end_round()

    def _begin(self) -> None:
        """Begin a round. Its gradients are added to those that were clipped before."""
        self._before_round()
        self.check_same_call(ROUND)
        self.gradients.apply_clip()
        self._launched = 0

    def check_same_call(self, what: str) -> None:
        """Raise RuntimeError on every rank, in debug mode, unless all ranks make this call."""
        check_same_call(self._group, what)

    def arrived(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter, which is complete for this backward pass."""
        if self.refusal:
            # The next backward pass raises too, until `zero_grad`.
            self._launched, self._end = 0, None
            raise RuntimeError(self.refusal)
        if id(parameter) not in self._place:
            # torch passes the result of a hook to the next one. It is mostly `p.grad`.
            raise RuntimeError(EXCHANGED if parameter.requires_grad else RETURNED)
        index, part = self._place[id(parameter)]
        self.gradients.collect(part, self._rounds > 0)
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
            # The other thread's buckets have gradients of two passes, so its pass raises too.
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
        self._idle.count(part.name, gradient is not None)
        if gradient is None and self.gradients.is_frozen(part):
            self._idle.warn_frozen(part.name)
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
        adds = self._rounds > 0 and self._adds
        if adds and self.gradients.flat.dtype is not torch.float32:
            self._land(wait=True)
            self.gradients.widen()
        target = self.gradients.flat[bucket.start : bucket.start + bucket.shard_numel]
        # If another optimizer reduces in the same pass, reductions are finished after the pass.
        direct = not self._company
        if direct:
            self._make_room(bucket.numel)
        stream = self._stream if direct else None
        what = f"gradient bucket {index + 1} of {len(self._buckets)}"
        self._flying.append(Reduction(filling, self._group, target, self._config, stream, direct, adds, what))

    def _make_room(self, numel: int) -> None:
        """Finish the oldest reductions until `numel` more elements may be in flight."""
        while self._flying and numel + sum(reduction.numel for reduction in self._flying) > self._most_in_flight:
            self._flying.pop(0).finish()

    def end_pass(self, end: _End) -> None:
        """End the round, if this is the end of the backward pass that began it, and no other thread
        has started a pass since.
        """
        if self._end is not None and self._end() is end:
            self.end_round()

    def end_round(self) -> None:
        """Start all buckets that were not started, also those in which gradients are missing."""
        assert self._launched is not None
        for index in range(self._launched, len(self._buckets)):
            present = self._filling[index].gradients if index in self._filling else ()
            for part in self._parts[index]:
                if part.offset not in present:
                    self.gradients.collect(part, self._rounds > 0)
                    self._fill(index, part)
            self._launch(self._filling[index])
        self._land(wait=not self._company)
        self._launched = None
        self._rounds += 1
        self.gradients.mark_all_changed()

    def _land(self, wait: bool) -> None:
        while self._flying and (wait or self._flying[0].is_complete()):
            self._flying.pop(0).finish()


# All reducers that are alive.
reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _leave(hooks: list[RemovableHandle], flying: list[Reduction]) -> None:
    """Remove the hooks of a deleted reducer, and release reductions that an interrupted pass has
    started.
    """
    _remove(hooks)
    for reduction in flying:
        reduction.release()


def _arrived(reducer: "weakref.ref[GradientReducer]", parameter: Any) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(parameter)
