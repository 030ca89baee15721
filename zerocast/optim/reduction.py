"""The reduction of one bucket of gradients. A PendingBucket collects the gradients as they arrive,
and a Reduction is their collective in flight.

A gradient stays where autograd put it until its bucket is complete. A gradient that is a bucket by
itself is sent from there. Others are packed into a buffer that lives as long as the collective, or,
if gradients are sent as FP8, until they are quantized. IdleParameters detects parameters that get
no gradient.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.distributed.bucket import Bucket, Slot
from zerocast.distributed.gradient_wire import RankOrderReduceScatter
from zerocast.distributed.group import Flight, Group
from zerocast.optim.config import ZeroConfig
from zerocast.optim.reduced_gradient import GradientPart

logger = logging.getLogger(__name__)
# A parameter counts as idle after this number of backward passes without a gradient.
PATIENCE = 100


class PendingBucket:
    """A bucket whose reduction has not begun.

    Attributes:
        bucket: the parameters and their offsets in the bucket. Fixed.
        gradients: the gradients that have arrived, keyed by offset. Cleared when the reduction
            begins.
        replaced: parts whose earlier sum the reduction replaces instead of adding to it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.gradients: dict[int, Tensor] = {}
        # The version counters of the gradients on arrival, keyed by offset.
        self._versions: dict[int, int] = {}
        self.replaced: list[GradientPart] = []

    @property
    def is_complete(self) -> bool:
        """True if every parameter of the bucket has a gradient."""
        return len(self.gradients) == len(self.bucket.slots)

    def take(self, part: GradientPart, adds: bool) -> None:
        """Take the local gradient of a part, if it has one. With `adds`, add it to one that a
        nested backward pass has left. Otherwise it is a total, which the part keeps.
        """
        if part.replaces_sum:
            self.replaced.append(part)
            part.replaces_sum = False
        gradient = part.local
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {part.name} is sparse, which is not supported: use dense gradients (Embedding(sparse=False))"
            )
        gradient = gradient.detach()
        earlier = self.gradients.get(part.offset)
        if adds and earlier is not None:
            dtype = self.bucket.storage.grad_dtype
            gradient = (earlier.to(dtype) + gradient).to(dtype)
        self.gradients[part.offset] = gradient
        self._versions[part.offset] = gradient._version
        if adds:
            part.local = None

    def packed(self, allow_view: bool) -> Tensor:
        """Return the gradients of the bucket in one tensor, `[bucket.numel]`, with zeros for
        missing ones. With `allow_view`, a gradient that is the bucket by itself is not copied.

        Raises RuntimeError for a gradient that was changed in place since it arrived.
        """
        for slot in self.bucket.slots:
            gradient = self.gradients.get(slot.offset)
            if gradient is not None:
                _check_unchanged(slot, gradient, self._versions[slot.offset])
        bucket, dtype = self.bucket, self.bucket.storage.grad_dtype
        first_gradient = self.gradients.get(0)
        if allow_view and bucket.is_one_gradient and first_gradient is not None and _is_plain(first_gradient, dtype):
            return first_gradient.view(-1)
        full = torch.empty(bucket.numel, dtype=dtype, device=bucket.slots[0].parameter.device)
        targets: list[Tensor] = []
        gaps: list[Tensor] = []
        end_of_last = 0
        for slot in bucket.slots:
            if slot.offset in self.gradients:
                gaps.append(full[end_of_last : slot.offset])
                end_of_last = slot.offset + slot.numel
                targets.append(full[slot.offset : end_of_last])
        gaps.append(full[end_of_last:])
        gaps = [gap for gap in gaps if gap.numel()]
        if gaps:
            torch._foreach_zero_(gaps)
        if targets:
            torch._foreach_copy_(targets, [self.gradients[offset].reshape(-1) for offset in sorted(self.gradients)])
        return full


def _check_unchanged(slot: Slot, gradient: Tensor, version: int) -> None:
    if gradient._version != version:
        raise RuntimeError(
            f"the gradient of {slot.name} was changed in place after it had arrived, by a backward function or a hook "
            "that writes into the gradient it is given; another parameter's gradient may share that memory, so let it "
            "return a new tensor"
        )


def _is_plain(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a collective can read the memory of a gradient without a copy."""
    return gradient.dtype is dtype and gradient.is_contiguous() and not gradient.is_neg()


class Reduction:
    """The reduction of one bucket, in flight from the constructor until `finish`.

    With a `stream` the result is written on that stream, in parallel to the backward pass. The
    stream that computes gradients does nothing for it. Without a stream, `finish` writes the
    result.

    Args:
        pending: the bucket with its gradients, which are cleared.
        group: the ranks.
        target: this rank's part of the bucket in the flat shard, which gets the mean.
        config: how gradients are sent and added (`grad_wire`, `deterministic`).
        stream: a CUDA stream. None on a CPU, for a single rank, and unless `finishes_in_pass`.
        finishes_in_pass: True if `finish` is called before the backward pass ends. The collective
            may then read a gradient in place and write its result directly into `target`.
        adds: True to add the mean to the content of `target`.
        what: the name of the bucket, for errors.
    """

    def __init__(
        self,
        pending: PendingBucket,
        group: Group,
        target: Tensor,
        config: ZeroConfig,
        stream: torch.cuda.Stream | None,
        finishes_in_pass: bool,
        adds: bool,
        what: str,
    ) -> None:
        self._bucket = pending.bucket
        self._replaced = pending.replaced
        self._target = target
        self._adds = adds
        self._ranks = group.size
        self._backend = config.backend
        # The reduction if gradients are added in rank order. Otherwise `_work` is the collective,
        # None for a single rank, and `_result` its output.
        self._ordered: RankOrderReduceScatter | None = None
        self._work: Flight | None = None
        # The event after which `target` has the result, if a stream writes it.
        self._written: torch.cuda.Event | None = None
        # Quantizing copies a gradient at once, so it may always read it in place.
        allow_view = finishes_in_pass or config.grad_wire is not None
        full = pending.packed(allow_view)
        pending.gradients.clear()
        # The input of the collective, which must not change during it. None if it was quantized.
        self._full = None if config.grad_wire else full
        self._version = full._version
        if config.grad_wire or config.deterministic:
            self._ordered = RankOrderReduceScatter(full, group, config.grad_wire, config.backend, what)
        else:
            self._result = full
            if group.size > 1:
                writes_to_target = finishes_in_pass and not adds and full.dtype is target.dtype
                self._result = target if writes_to_target else full.new_empty(target.numel())
                self._work = group.reduce_scatter_mean(self._result, full, async_op=True, what=what)
        if stream is not None:
            with torch.cuda.stream(stream):
                self._write_result()
                self._written = stream.record_event()

    @property
    def start(self) -> int:
        """The first element of `target` in the flat shard."""
        return self._bucket.start

    @property
    def numel(self) -> int:
        """The number of elements of the bucket, whose memory is held until `finish`."""
        return self._bucket.numel

    def is_complete(self) -> bool:
        """Return True if `finish` would not wait."""
        if self._written is not None:
            return bool(self._written.query())
        if self._ordered:
            return self._ordered.is_complete()
        return self._work is None or self._work.is_completed()

    def release(self) -> None:
        """Let the current stream wait for the work on the other stream, so that the memory of this
        reduction can be freed.
        """
        if self._written is not None:
            torch.cuda.current_stream(self._target.device).wait_event(self._written)

    def finish(self) -> None:
        """Let the current stream, or on a CPU this thread, wait until the result is in `target`.
        Raises RuntimeError if a gradient that was sent in place was changed during the collective.
        """
        self.release()
        if self._written is None:
            self._write_result()
        if self._full is not None:
            _check_unchanged(self._bucket.slots[0], self._full, self._version)

    def _write_result(self) -> None:
        """Wait for the collective and write the mean over the ranks to `target`, or add it."""
        if self._ordered:
            self._ordered.wait()
        elif self._work is not None:
            self._work.wait()
        if self._adds:
            self._zero_replaced()
        if self._ordered:
            self._ordered.land(self._target, self._ranks, self._adds)
        elif self._adds:
            # Torch's kernel for an FP32 and a bf16 operand takes 1.7 times as long.
            backend = backends.choose(self._target.device, self._backend)
            ops.add_gradients(backend, messages=self._result, parts=1, divisor=1, adds=True, out=self._target)
        elif self._result is not self._target:
            # Between two dtypes torch's kernel for lists uses vector loads, and `copy_` does not.
            torch._foreach_copy_([self._target], [self._result])

    def _zero_replaced(self) -> None:
        for part in self._replaced:
            start = part.start - self._bucket.start
            self._target[start : start + part.span.numel].zero_()


class IdleParameters:
    """Warns about parameters that get no gradient on this rank, each kind of warning once.

    An expert without tokens is legitimately idle, so this raises nothing. A parameter that was
    replaced in the model is idle too. A warning of a frozen parameter is immediate, since a zero
    gradient still changes it (weight decay and moments).

    Args:
        owner: the optimizer, for messages.

    Attributes:
        gradients: the number of gradients so far.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # The number of passes since the last gradient, keyed by name, of the parameters that had
        # none in the last pass.
        self._idle_passes: dict[str, int] = {}
        # The texts of the warnings so far.
        self._warned: set[str] = set()
        self.gradients = 0

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)

    def warn_no_gradients(self) -> None:
        """Warn that a step had no gradient at all on this rank."""
        self._warn_once(
            "%s had no gradient on this rank for a step, so all of them count as zero on this rank: its moments and weight decay "
            "still change parameters, which torch's AdamW would not. Skip such a step on all ranks (logged once)",
            self._owner,
        )

    def warn_taken_over(self) -> None:
        """Warn that a new optimizer replaces one whose gradients no step has used."""
        logger.warning(
            "a new optimizer over the same parameters replaces %s, and the gradients that no step of it has used are dropped: call "
            "its step() or zero_grad() before another one is built",
            self._owner,
        )

    def warn_frozen(self, name: str) -> None:
        """Warn that a parameter without a gradient in a reduced backward pass is frozen."""
        self._warn_once(
            "%s is frozen (requires_grad is False) and one of %s, whose moments and weight decay still change it: set lr=0 for its "
            "parameter group, or build the optimizer without it and load the state of this one (logged once, for the first)",
            name,
            self._owner,
        )

    def warn_removed(self, names: Sequence[str]) -> None:
        """Warn that gradients were removed from these parameters after they were reduced."""
        self._warn_once(
            "%d gradients were removed (p.grad = None, model.zero_grad()) between a backward pass and the step of %s, the first is "
            "that of %s: they count as zero. torch's AdamW would skip these parameters; here moments and weight decay still change "
            "them. Set lr=0 for their parameter group in such a step (logged once)",
            len(names),
            self._owner,
            names[0],
        )

    def count(self, name: str, has_gradient: bool) -> None:
        """Count a reduced backward pass, in which this parameter had a gradient or not."""
        if has_gradient:
            self.gradients += 1
            if self._idle_passes:
                self._idle_passes.pop(name, None)
            return
        self._idle_passes[name] = self._idle_passes.get(name, 0) + 1
        if self._idle_passes[name] > PATIENCE:
            idle = [other for other, passes in self._idle_passes.items() if passes >= PATIENCE]
            self._warn_once(
                "%d parameters of %s got no gradient on this rank in %d backward passes, the first is %s: they are "
                "unused, frozen or no longer parameters of the model (logged once)",
                len(idle),
                self._owner,
                PATIENCE,
                idle[0],
            )
