"""The bytes of a plan's weights after a switch of formats: `share_cast_bytes` gathers the bytes of
the switch itself; `SwitchedBytes` detects a caller that still gathers into the old buffers.

A plan cannot see where its caller gathers. But a gather leaves equal bytes on all ranks, which
differ from the bytes of the previous cast. So the first casts after a switch begin with one extra
collective that compares the bytes, until a gather has changed them identically on all ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.distributed.agreement import range_over_ranks
from zerocast.distributed.group import Group
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import InvalidWeights

# The comparison ends after this number of casts that changed no byte or that no gather followed.
CASTS = 16


def share_cast_bytes(group: Group, weights: Sequence[QuantizedWeight]) -> None:
    """Give all ranks the codes that each of them has cast into zeros. Collective."""
    for weight in weights:
        names = ("rowwise_data", "columnwise_data") if weight.format.casts_columnwise else ("rowwise_data",)
        for name in names:
            codes = weight.state.buffers[name]
            assert codes is not None, name
            # A rank has zeros where others cast, so the largest byte is the one that was cast.
            group.all_reduce_max(_bytes(codes), "the bytes of a switched weight")


class SwitchedBytes:
    """Checks that all ranks hold the same codes of `weights`, keyed by name, as they do when this
    is made.

    Only rowwise codes are compared, since a caller that computes no gradients need not gather
    others.
    """

    def __init__(self, group: Group, weights: Mapping[str, QuantizedWeight]) -> None:
        self._group, self._weights = group, weights
        self._casts_compared = 0
        # The sums of the bytes after the switch, and after the last gather. None before a gather.
        self._switched = self._sums()
        self._gathered: list[int] | None = None

    def note_gathered(self) -> None:
        """Note that the caller has gathered the bytes of the last cast. Waits for the device."""
        self._gathered = self._sums()

    def check(self) -> bool:
        """Return True if there is nothing left to compare. Called before each cast. Collective.

        Raises RuntimeError on every rank for weights that were gathered and differ between ranks.
        """
        gathered, self._gathered = self._gathered, None
        sums = self._switched if gathered is None else gathered
        # The reports of casts cannot carry this. They are compared after masters were written, and
        # have one number of 7 bits for all weights.
        values = [int(gathered is None), *sums]
        (_, *smallest), (any_without_gather, *largest) = range_over_ranks(
            self._group, values, "bytes of switched weights"
        )
        self._casts_compared += 1
        if any_without_gather:
            return self._casts_compared == CASTS
        sums_by_name = zip(self._weights, smallest, largest, strict=True)
        differing = [name for name, smallest_sum, largest_sum in sums_by_name if smallest_sum != largest_sum]
        if differing:
            raise InvalidWeights(
                f"{len(differing)} weights differ between ranks after their all-gather, the first is {differing[0]}",
                "since zerocast.switch gave them new buffers",
                "gather into the new weight.rowwise_data, and drop references to the old one",
            )
        return sums != self._switched or self._casts_compared == CASTS

    def _sums(self) -> list[int]:
        codes = [_bytes(weight.rowwise_data) for weight in self._weights.values()]
        sums: list[int] = torch.stack([data.sum(dtype=torch.int64) for data in codes]).tolist()
        return sums


def _bytes(codes: Tensor) -> Tensor:
    return codes.detach().view(-1).view(torch.uint8)
