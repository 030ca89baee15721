"""AdamUpdate: an AdamW step that a cast takes on its masters, so that they are updated and
measured in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MomentGroups:
    """The groups of moments in 8 bits (docs/formats/moments_8bit.md) that a step works on.

    Attributes:
        scales: f32 `[2, groups]`, of either moment, written in place.
        pieces: a row for each part of a weight (`Piece` of `zerocast/backends/descriptor.py`), at
            offsets of the masters. The same list in all steps.
        step: i64[1], the number of the step.
        cut_largest: f32 `[2, groups]`, the largest values of groups that several ranks have parts
            of; zeros before the step.
        reduce: reduces `cut_largest` over the ranks. Collective.
    """

    scales: Tensor
    pieces: Sequence[list[int]]
    step: Tensor
    cut_largest: Tensor
    reduce: Callable[[], None]


@dataclass(frozen=True)
class AdamUpdate:
    """One step for the masters of a plan that take it, which are views of one flat FP32 tensor.

    Attributes:
        grad: flat, an element for each of that tensor as far as masters take the step, FP32 or
            bf16; what lies behind is not read.
        exp_avg, exp_avg_sq: the moments, likewise, written in place; i8 and u8 codes if they are in
            8 bits.
        scalars: f32 `[g, 8]`, a row a parameter group, in the order of
            `zerocast/backends/README.md`.
        clip: f32[1], what gradients are multiplied by.
        groups: those of moments in 8 bits; None if they are of another dtype.
    """

    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scalars: Tensor
    clip: Tensor
    groups: MomentGroups | None = None

    def reduce(self) -> None:
        """Reduce what ranks must know of each other before they keep moments. Collective if there
        is anything.
        """
        if self.groups is not None:
            self.groups.reduce()
