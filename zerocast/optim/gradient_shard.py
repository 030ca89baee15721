"""GradientShard: this rank's flat shard of the reduced gradients, and each parameter's
`ReducedGradient` over its part.

`p.grad` is inspected when a gradient arrives, at the end of a round and before a step, but never
when a gradient is read. So whether a read or a step communicates depends only on earlier calls,
which are the same on every rank, and not on the state of `p.grad` on one rank.
"""

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerocast.distributed.agreement import check_same_call
from zerocast.distributed.bucket import Bucket, Layout, Slot, flat_numel
from zerocast.distributed.group import Group
from zerocast.optim import gradient_ops  # noqa: F401 (defines what gradients can do)
from zerocast.optim.config import ZeroConfig
from zerocast.optim.norm import GradientNorms
from zerocast.optim.reduced_gradient import GONE, GradientPart, ReducedGradient, remove_reduced_gradient

if TYPE_CHECKING:
    from zerocast.optim.gradients import GradientReducer

_grad = operator.attrgetter("grad")
logger = logging.getLogger(__name__)


def shard_dtype(layout: Layout, config: ZeroConfig) -> torch.dtype:
    """Return the dtype in which reduced gradients are kept until something would round them.

    It is bf16 if a collective adds all of them in bf16, and FP32 otherwise, or if some of them are
    sent to owners of whole matrices.
    """
    return torch.bfloat16 if layout.adds_in_bf16(config.deterministic, config.grad_wire) else torch.float32


class GradientShard:
    """The reduced gradients of this rank's shard, in the layout of the masters.

    The elements are f32, or bf16 until something would round them (`shard_dtype`). `widen` is
    called before gradients are added to them or changed in place, and they stay f32 afterwards.

    Args:
        reducer: the reducer that fills the shard. It is not kept alive.

    Attributes:
        flat: the elements, a flat tensor. `widen` replaces it.
        parts: the part of each parameter, in the order of buckets. Fixed.
        norms: their norms, global and of single parameters. Fixed.
        version: the number of changes of the elements so far.
        changes: the number of gradients that the user has written to, or removed from their
            parameters, since the last step.
        keeps_local: True while the unreduced gradients of this rank are kept after their arrival:
            inside no_sync, and with stage 1 until reduced gradients change.
        apply_clip: multiplies the elements by the factor of a clip that was not applied yet, and
            returns True if there was one. Set by the optimizer.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        norms: GradientNorms,
        device: torch.device,
        dtype: torch.dtype,
        reducer: "GradientReducer",
    ) -> None:
        self.flat = torch.zeros(flat_numel(list(buckets)), dtype=dtype, device=device)
        self.norms = norms
        self.version = 0
        self.changes = 0
        self.keeps_local = False
        self.apply_clip: Callable[[], bool] = bool
        self._owner = weakref.ref(reducer)
        self._buckets, self._group = list(buckets), group
        # Gradients live as long as the parameters, which may be longer than this object.
        weak_self = weakref.ref(self)
        self.parts: list[GradientPart] = []
        self._bucket_and_slot: dict[GradientPart, tuple[Bucket, Slot]] = {}
        # The tensor that is `p.grad` after a reduction, by part. Fixed.
        self._reduced: dict[GradientPart, ReducedGradient] = {}
        for bucket in buckets:
            for slot in bucket.slots:
                span, start = bucket.owned(slot, group.rank)
                part = GradientPart(slot.name, slot.offset, slot.numel, span, start, weak_self)
                self.parts.append(part)
                self._bucket_and_slot[part] = bucket, slot
                self._reduced[part] = ReducedGradient.of(part, slot.parameter)
        self._parameters = [slot.parameter for _, slot in self._bucket_and_slot.values()]

    def widen(self) -> None:
        """Convert the elements to FP32, in which they stay. No reduction may be in flight."""
        if self.flat.dtype is torch.float32:
            return
        self.flat = self.flat.float()
        if self._group.rank == 0:
            logger.info(
                "reduced gradients of a rank now need 4 bytes per element, not 2: they are added over several backward "
                "passes, or changed in place, which bf16 would round"
            )

    def collect(self, part: GradientPart, was_reduced: bool) -> None:
        """Move the gradient of this rank from `p.grad` to the part, and put the reduced one there
        (`GradientPart.collect`).
        """
        with torch._C.DisableTorchFunctionSubclass():
            part.collect(self._bucket_and_slot[part][1].parameter, self._reduced[part], was_reduced)

    def is_frozen(self, part: GradientPart) -> bool:
        """Return True if the parameter no longer requires a gradient."""
        return not self._bucket_and_slot[part][1].parameter.requires_grad

    def collect_all(self, was_reduced: bool) -> None:
        """Call `collect` for every parameter whose `p.grad` is not its reduced gradient. Afterwards
        every parameter has one.
        """
        for part in self._displaced_parts():
            self.collect(part, was_reduced)

    def zero_detached(self) -> list[str]:
        """Zero the gradients that were removed from their parameters since they were reduced, and
        return the names of these parameters. Raises RuntimeError if `p.grad` was replaced by a
        different gradient.

        This does not count as a change of the norms: another rank may not have removed them.
        """
        removed = []
        for part in self._displaced_parts():
            if self._bucket_and_slot[part][1].parameter.grad is not None:
                raise RuntimeError(
                    f"p.grad of {part.name} was replaced after it was reduced, and this would not be averaged over the ranks: "
                    "p.grad.copy_(...) sets the reduced gradient, zero_grad() of the optimizer lets a new one be accumulated"
                )
            self._elements(part).zero_()
            self.norms.drop_begun()
            self.changes += 1
            removed.append(part.name)
        return removed

    def _displaced_parts(self) -> list[GradientPart]:
        """Return the parts whose reduced gradient is no longer `p.grad` of the parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            is_displaced = map(operator.is_not, map(_grad, self._parameters), self._reduced.values())
            return list(compress(self.parts, is_displaced))

    def drop_local(self) -> None:
        """Drop the unreduced gradients of this rank."""
        for part in self.parts:
            part.drop()

    def detach(self) -> None:
        """Remove the reduced gradients from their parameters."""
        for part, parameter in zip(self.parts, self._parameters, strict=True):
            if isinstance(parameter.grad, ReducedGradient) and parameter.grad.part is part:
                remove_reduced_gradient(parameter)

    def mark_all_changed(self) -> None:
        """Record that all elements have changed: advance `version` and drop cached norms."""
        self.version += 1
        self.norms.changed()

    def _elements(self, part: GradientPart) -> Tensor:
        return self.flat[part.start : part.start + part.span.numel]

    def _reducer(self) -> "GradientReducer":
        reducer = self._owner()
        if reducer is None:
            raise RuntimeError(GONE)
        return reducer

    def _make_ready(self) -> None:
        self._reducer().complete()
        if self.apply_clip():
            self.mark_all_changed()

    def view(self, part: GradientPart) -> Tensor:
        """Return the elements of a gradient on this rank, reduced and clipped, as FP32."""
        self._make_ready()
        self.widen()
        return self._elements(part)

    def mark_changed(self, part: GradientPart) -> None:
        """Record that the caller has written to `view(part)`. Called on all ranks, also on those
        that own no element of it.
        """
        self._mark_part_changed(part)
        self.changes += 1
        self._reducer().mark_modified()

    def zero(self, part: GradientPart) -> None:
        """Zero the gradient, reduced or not. Not a collective: a rank without gradients of a
        backward pass has nothing to zero.
        """
        self._reducer().wait()
        part.drop()
        self._elements(part).zero_()
        self._mark_part_changed(part)

    def _mark_part_changed(self, part: GradientPart) -> None:
        self.version += 1
        self.norms.changed(part.name)

    def norm(self, part: GradientPart, norm_type: float) -> Tensor:
        """Return the norm of the full gradient, f32[]. The first read is a collective call, which
        computes the norms of all parameters.
        """
        self._make_ready()
        check_same_call(self._group, f"reads norms of gradients, of type {norm_type}")
        return self.norms.read(self.flat, part.name, norm_type)

    def gathered(self, part: GradientPart) -> Tensor:
        """Return the full gradient, f32, flat. Collective."""
        self._make_ready()
        check_same_call(self._group, f"gathers the gradient of {part.name}")
        bucket, slot = self._bucket_and_slot[part]
        lengths = [bucket.owned(slot, rank)[0].numel for rank in range(self._group.size)]
        # Ranks own different numbers of elements, so each sends as many as the largest part has.
        padded = torch.zeros(max(lengths), dtype=torch.float32, device=self.flat.device)
        padded[: part.span.numel].copy_(self._elements(part))
        gathered = padded.new_empty(self._group.size * max(lengths))
        self._group.all_gather_into(gathered, padded)
        by_rank = gathered.view(self._group.size, -1).unbind()
        return torch.cat([elements[:length] for elements, length in zip(by_rank, lengths, strict=True)])

    def finite_everywhere(self, found_inf: Tensor) -> None:
        """Set a flag on all ranks if it is set on any. Collective."""
        check_same_call(self._group, "looks for gradients that are not finite")
        self._group.all_reduce_max(found_inf)
