"""FiniteMasters: masters that are NaN or Inf are told of at the call after their cast, on all
ranks.

Formats without a NaN code make a finite weight of a NaN master, and an Inf saturates in others: no
loss would show it. The stage that measures a master notes it beside the amaxes. A plan reduces the
flags with those; FSDP2 sends each in the header of its weight's bytes (`GatherStatus`). So a flag
costs no pass and no collective of its own.
"""

from collections.abc import Sequence

from torch import Tensor

from zerocast.distributed.late_copy import LateCopy

SHOWN = 4


class FiniteMasters:
    """The flags of the weights `names` after a cast's reduction: 1 where a master is not finite on
    any rank.
    """

    def __init__(self, flags: Tensor, names: Sequence[str]) -> None:
        self._names, self._late = names, LateCopy(flags)

    def send(self) -> None:
        """After a cast, let the flags travel to the host."""
        if self._names:
            self._late.send()

    def forget(self) -> None:
        """Say nothing of the casts so far: masters are about to be overwritten on all ranks."""
        self._late.forget()

    def check(self) -> None:
        """RuntimeError, on every rank, if masters of the last cast were not finite; once a cast."""
        late = self._late.take()
        flags = [] if late is None else late.tolist()  # on the host, where a reduction by torch takes longer
        if not any(flags):
            return
        wrong = [name for name, flag in zip(self._names, flags, strict=True) if flag]
        raise not_finite(wrong, f"{len(wrong)} of {len(self._names)} weights")


def not_finite(names: Sequence[str], count: str) -> RuntimeError:
    """Return the error that tells of masters that are not finite, those of the weights `names`."""
    shown = ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN)
    return RuntimeError(
        f"the masters of {count} were NaN or Inf in the last cast: {shown}. What was computed with these is wrong, though "
        "formats without a NaN code do not show it: load a checkpoint, and look at what wrote the masters (a learning rate, "
        "an optimizer of your own, a state that was loaded)"
    )
