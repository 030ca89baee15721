"""SwitchedBytes: notices a caller of a plan who goes on gathering into the buffers that weights had
before a switch of formats.

Nothing tells a plan where somebody else gathers. But a gather leaves the same bytes on every rank,
and not those of the cast before. So the first casts after a switch begin with one more collective,
which compares what the gathers have left, until a gather has changed it on all ranks alike.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast.distributed.agreement import largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.weight import QuantizedWeight

CASTS = 16  # of masters that do not change any byte, or without a gather; then nothing is compared


class SwitchedBytes:
    """The codes of `weights`, by name, which are the same on all ranks of `group` now.

    Rowwise ones alone: who computes no gradients need not gather others.
    """

    def __init__(self, group: Group, weights: Mapping[str, QuantizedWeight]) -> None:
        self._group, self._weights, self._casts = group, weights, 0
        self._switched = self._sums()
        self._gathered: list[int] | None = None

    def note_gathered(self) -> None:
        """The caller says that the bytes of the last cast are gathered. Waits for the device."""
        self._gathered = self._sums()

    def check(self) -> bool:
        """Before a cast: whether there is nothing left to notice. A collective call.

        RuntimeError on every rank for weights that were gathered and differ between ranks.
        """
        found, self._gathered = self._gathered, None
        sums = self._switched if found is None else found
        largest = largest_of_ranks(
            self._group, [found is None, *sums, *(-one for one in sums)], "bytes of switched weights"
        )
        self._casts += 1
        highest, negated = largest[1 : len(sums) + 1], largest[len(sums) + 1 :]
        if largest[0]:
            return self._casts == CASTS
        differing = [name for name, high, low in zip(self._weights, highest, negated, strict=True) if high != -low]
        if differing:
            raise RuntimeError(
                f"{len(differing)} weights hold other bytes on other ranks after their all-gather, the first is {differing[0]}: "
                "zerocast.switch gave them new buffers, so gather into what weight.rowwise_data is now, and forget what it was"
            )
        return highest != self._switched or self._casts == CASTS

    def _sums(self) -> list[int]:
        codes = [_bytes(weight.rowwise_data) for weight in self._weights.values()]
        sums: list[int] = torch.stack([one.sum(dtype=torch.int64) for one in codes]).tolist()
        return sums


def _bytes(codes: Tensor) -> Tensor:
    return codes.detach().view(-1).view(torch.uint8)
