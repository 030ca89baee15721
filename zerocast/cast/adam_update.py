"""AdamUpdate: an AdamW step that a cast takes on its masters, so that they are updated and
measured in one pass.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamUpdate:
    """One step for the masters of a plan that take it, which are views of one flat FP32 tensor.

    Attributes:
        grad: flat, an element for each of that tensor as far as masters take the step, FP32 or
            bf16; what lies behind is not read.
        exp_avg, exp_avg_sq: the moments, likewise, written in place.
        scalars: f32 `[g, 8]`, a row a parameter group, in the order of
            `zerocast/backends/README.md`.
        clip: f32[1], what gradients are multiplied by.
    """

    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scalars: Tensor
    clip: Tensor
