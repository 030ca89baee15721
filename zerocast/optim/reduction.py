"""Reductions of buckets: gradients that have arrived, the collective in flight, and its result.

A gradient stays where autograd put it until its bucket is complete. A gradient that fills a bucket
by itself is sent from there; others are packed into a buffer that lives as long as the collective,
or, if gradients are sent as FP8, until they are quantized. While buckets fill, `IdleParameters`
counts which parameters get no gradient.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.distributed.bucket import Bucket, Slot
from zerocast.distributed.gradient_wire import QuantizedReduceScatter
from zerocast.distributed.group import Flight, Group
from zerocast.optim.config import ZeroConfig
from zerocast.optim.reduced_gradient import GradientPart

logger = logging.getLogger(__name__)
PATIENCE = 100  # backward passes without a gradient, until a parameter is called idle


class Filling:
    """The gradients of a bucket that have arrived, by their offset in it.

    The earlier sums of `forgotten` parts are dropped: the reduction replaces them instead of adding
    to them.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.gradients: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self.forgotten: list[GradientPart] = []

    @property
    def is_complete(self) -> bool:
        """True if every parameter of the bucket has a gradient."""
        return len(self.gradients) == len(self.bucket.slots)

    def put(self, part: GradientPart, gradient: Tensor, more: bool) -> None:
        """Store a gradient; with `more` it is added to the gradient of a nested backward pass."""
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {part.name} is sparse, which is not supported: use dense gradients (Embedding(sparse=False))"
            )
        gradient = gradient.detach()
        before, dtype = self.gradients.get(part.offset), self.bucket.storage.grad_dtype
        if more and before is not None:
            gradient = (before.to(dtype) + gradient).to(dtype)
        self.gradients[part.offset], self._versions[part.offset] = gradient, gradient._version

    def packed(self, allow_view: bool) -> Tensor:
        """Return the gradients end to end, `[bucket.numel]`, zero where there is none; with
        `allow_view` a gradient that fills the bucket by itself is returned without a copy.

        Raises RuntimeError for a gradient that was changed in place since it arrived.
        """
        for slot in self.bucket.slots:
            gradient = self.gradients.get(slot.offset)
            if gradient is not None:
                _check_unchanged(slot, gradient, self._versions[slot.offset])
        bucket, dtype = self.bucket, self.bucket.storage.grad_dtype
        alone = self.gradients.get(0)
        if bucket.is_one_gradient and allow_view and alone is not None and _is_plain(alone, dtype):
            return alone.view(-1)
        full = torch.empty(bucket.numel, dtype=dtype, device=bucket.slots[0].parameter.device)
        gaps, targets, start = [], [], 0
        for slot in bucket.slots:
            if slot.offset in self.gradients:
                gaps.append(full[start : slot.offset])
                start = slot.offset + slot.numel
                targets.append(full[slot.offset : start])
        gaps = [gap for gap in (*gaps, full[start:]) if gap.numel()]
        if gaps:
            torch._foreach_zero_(gaps)
        if targets:
            torch._foreach_copy_(targets, [self.gradients[slot].reshape(-1) for slot in sorted(self.gradients)])
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
    """The reduction of one bucket into `target`, this rank's part of the flat shard.

    With a `stream` the result is written on that stream, in parallel to the backward pass, and
    takes no time of the stream that computes gradients. Without a stream `finish` writes it.

    Args:
        config: how gradients are sent and added (`grad_wire`, `deterministic`).
        stream: a CUDA stream; None on a CPU, for a single rank, and without `direct`.
        direct: `finish` is called before the next pass begins, so the reduction may read a gradient
            in place and write its result into `target`.
        adds: the mean is added to the content of `target`.
    """

    def __init__(
        self,
        filling: Filling,
        group: Group,
        target: Tensor,
        config: ZeroConfig,
        stream: torch.cuda.Stream | None,
        direct: bool,
        adds: bool,
        what: str,
    ) -> None:
        self._bucket, self._forgotten = filling.bucket, filling.forgotten
        self._target, self._adds, self._ranks = target, adds, group.size
        self._deterministic = deterministic = config.deterministic
        self._quantized: QuantizedReduceScatter | None = None
        self._work: Flight | None = None
        self._landed: torch.cuda.Event | None = None
        full = filling.packed(direct or config.grad_wire is not None)
        filling.gradients.clear()
        if config.grad_wire:
            self._quantized = QuantizedReduceScatter(full, group, config.backend, what)
        else:
            self._full, self._version, self._result = full, full._version, full
            if deterministic and group.size > 1:
                self._result = torch.empty_like(full)
                self._work = group.all_to_all(self._result, full, async_op=True, what=what)
            elif group.size > 1:
                in_place = direct and not adds and full.dtype is target.dtype
                self._result = target if in_place else full.new_empty(target.numel())
                self._work = group.reduce_scatter_mean(self._result, full, async_op=True, what=what)
        if stream is not None:
            with torch.cuda.stream(stream):
                self._land()
                self._landed = stream.record_event()

    @property
    def numel(self) -> int:
        """The elements of the gradients whose memory is held until `finish` or `release`."""
        return self._bucket.numel

    def is_complete(self) -> bool:
        """Return True if `finish` would not wait."""
        if self._landed is not None:
            return bool(self._landed.query())
        if self._quantized:
            return self._quantized.is_complete()
        return self._work is None or self._work.is_completed()

    def release(self) -> None:
        """Let the current stream wait for the work that uses the memory of this reduction, which
        may be freed afterwards.
        """
        if self._landed is not None:
            torch.cuda.current_stream(self._target.device).wait_event(self._landed)

    def finish(self) -> None:
        """Let the current stream, or on a CPU this thread, wait until the result is in `target`.
        Raises RuntimeError if a gradient that was sent in place was changed during the collective.
        """
        self.release()
        if self._landed is None:
            self._land()
        if not self._quantized:
            _check_unchanged(self._bucket.slots[0], self._full, self._version)

    def _land(self) -> None:
        """Write the mean over the ranks to `target`, or add it."""
        if self._quantized:
            self._quantized.wait()
        elif self._work is not None:
            self._work.wait()
        if self._adds:
            self._zero_forgotten()
        if self._quantized:
            self._quantized.land(self._target, self._ranks, self._adds)
        elif self._deterministic:
            self._land_in_rank_order()
        elif self._adds:
            self._target.add_(self._result)
        elif self._result is not self._target:
            # torch's kernel for lists loads vectors where two dtypes meet, its copy_ does not.
            torch._foreach_copy_([self._target], [self._result])

    def _land_in_rank_order(self) -> None:
        """Add the messages in rank order, in FP32."""
        total = torch.empty_like(self._target) if self._adds else self._target
        first, *others = self._result.view(self._ranks, -1).unbind()
        total.copy_(first)
        for part in others:
            total.add_(part)
        total.div_(self._ranks)
        if self._adds:
            self._target.add_(total)

    def _zero_forgotten(self) -> None:
        for part in self._forgotten:
            start = part.start - self._bucket.start
            self._target[start : start + part.span.numel].zero_()


class IdleParameters:
    """Counts the backward passes since each parameter's last gradient on this rank.

    Experts without tokens are legitimately idle, so this only warns, and only once. A parameter
    that was replaced in the model is idle too. A frozen parameter is named immediately, since a
    zero gradient still changes it. `owner` is the optimizer, in messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._passes: dict[str, int] = {}  # of parameters without a gradient in the last pass
        self._warned = self._warned_of_frozen = self._warned_of_none = self._warned_of_removed = False
        self.found = 0  # gradients so far

    def warn_no_gradients(self) -> None:
        """Warn that a step had no gradient at all on this rank."""
        if not self._warned_of_none:
            self._warned_of_none = True
            logger.warning(
                "%s had no gradient on this rank for a step, so all of them count as zero on this rank: its moments and "
                "weight decay still change parameters, which torch's AdamW would not. Skip such a step on all ranks (logged "
                "once)",
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
        if not self._warned_of_frozen:
            self._warned_of_frozen = True
            logger.warning(
                "%s is frozen (requires_grad is False) and one of %s, whose moments and weight decay still change it: "
                "set lr=0 for its parameter group, or build the optimizer without it and load the state of this one (logged "
                "once, for the first)",
                name,
                self._owner,
            )

    def warn_removed(self, names: Sequence[str]) -> None:
        """Warn that gradients were removed from these parameters after they were reduced."""
        if not self._warned_of_removed:
            self._warned_of_removed = True
            logger.warning(
                "%d gradients were removed (p.grad = None, model.zero_grad()) between a backward pass and the step of %s, "
                "the first is that of %s: they count as zero, and moments and weight decay still change these parameters, "
                "which torch's AdamW would skip. Set lr=0 for their parameter group in such a step (logged once)",
                len(names),
                self._owner,
                names[0],
            )

    def count(self, name: str, has_gradient: bool) -> None:
        """Count a reduced backward pass, in which this parameter had a gradient or not."""
        if has_gradient:
            self.found += 1
            if self._passes:
                self._passes.pop(name, None)
            return
        self._passes[name] = self._passes.get(name, 0) + 1
        if self._passes[name] > PATIENCE and not self._warned:
            self._warned = True
            idle = [other for other, passes in self._passes.items() if passes >= PATIENCE]
            logger.warning(
                "%d parameters of %s got no gradient on this rank in %d backward passes, the first is %s: they are "
                "unused, frozen or no longer parameters of the model (logged once)",
                len(idle),
                self._owner,
                PATIENCE,
                idle[0],
            )
