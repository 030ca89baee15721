"""A reduce-scatter of gradients whose sum does not depend on the communication library.

One all-to-all sends each owner its part of the gradient from every rank. The owner adds these
parts, its own included, in FP32 in rank order, by one kernel.

With the wire "fp8_1x128" contributions are E4M3 codes with one FP32 scale per 128 elements
(docs/formats/fp8_1x128.md), 1.03 bytes per element instead of 2 or 4. A single rank sends nothing
but quantizes as well, so that the rounding of values does not depend on the number of ranks.
"""

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.distributed.group import Group
from zerocast.formats.layout import GradientMessage

GRAD_WIRES = ("fp8_1x128",)


def check_grad_wire(name: str | None) -> None:
    """Raise ValueError unless `name` is None or the name of a wire format."""
    if name is not None and name not in GRAD_WIRES:
        known = " or ".join(map(repr, GRAD_WIRES))
        raise ValueError(f"grad_wire is None or {known}, got {name!r}")


class RankOrderReduceScatter:
    """One reduction in flight.

    Args:
        full: FP32, bf16 or fp16 `[ranks * n]`, the parts of all owners end to end. n need not be a
            multiple of 128. With a wire format the constructor quantizes it, and it may be
            overwritten after that; else it must not change before `wait`.
        group: the ranks.
        wire: the name of a wire format; None sends the values as they are.
        backend: a name from `zerocast.backends`; None chooses.
        what: a name of the tensor that is reduced, for errors.

    Raises TypeError for other dtypes.
    """

    def __init__(self, full: Tensor, group: Group, wire: str | None, backend: str | None, what: str = "") -> None:
        if not full.is_floating_point() or full.itemsize > 4:
            raise TypeError(f"gradients of {full.dtype} cannot be added in FP32: FP32, bf16 and fp16 ones can")
        self._ranks = group.size
        self._backend = backends.choose(full.device, backend)
        self._sent = full
        if wire:
            part = GradientMessage(full.numel() // group.size)
            self._sent = full.new_empty(group.size * part.nbytes, dtype=torch.uint8)
            ops.quantize_gradient(self._backend, grad=full, parts=group.size, messages=self._sent)
        # A single rank adds up its own message.
        self._received = self._sent if group.size == 1 else torch.empty_like(self._sent)
        self._work = None
        if group.size > 1:
            self._work = group.all_to_all(self._received, self._sent, async_op=True, what=what)

    def is_complete(self) -> bool:
        """Return True if `land` would not wait."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait until all messages are received. On a GPU only the current stream waits."""
        if self._work is not None:
            self._work.wait()

    def land(self, out: Tensor, divisor: int, adds: bool) -> None:
        """Write the sum over the ranks, divided by `divisor`, to `out` f32 `[n]`; if `adds`, add it
        to the values of `out`.
        """
        self.wait()
        ops.add_gradients(
            self._backend, messages=self._received, parts=self._ranks, divisor=divisor, adds=adds, out=out
        )
