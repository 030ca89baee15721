"""The bytes of a plan's weights after a switch of formats: `share_cast_bytes` gathers those of the
switch itself; `SwitchedBytes` notices a caller who goes on gathering into the buffers of before.

Nothing tells a plan where its caller gathers. But a gather leaves the same bytes on every rank,
and not those of the cast before. So the first casts after a switch begin with one more collective,
which compares what the gathers have left, until a gather has changed it on all ranks alike.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.distributed.rank_report import RankReport, ShardStatus, compare_each
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import InvalidWeights

CASTS = 16  # of masters that do not change any byte, or without a gather; then nothing is compared


def share_cast_bytes(group: Group, weights: Sequence[QuantizedWeight]) -> None:
    """Give all ranks the codes that each of them has cast into zeros. Collective."""
    for weight in weights:
        names = ("rowwise_data", "columnwise_data") if weight.format.casts_columnwise else ("rowwise_data",)
        for name in names:
            codes = weight.state.buffers[name]
            assert codes is not None, name
            # a rank has zeros where others cast, so the largest byte is the one that was cast
            group.all_reduce_max(_bytes(codes), "the bytes of a switched weight")


class SwitchedBytes:
    """The codes of `weights`, by name, which are the same on all ranks of `group` now.

    Only rowwise codes are compared, since a caller that computes no gradients need not gather
    others.
    """

    def __init__(self, group: Group, weights: Mapping[str, QuantizedWeight]) -> None:
        self._group, self._weights, self._casts = group, weights, 0
        self._switched = self._sums()
        self._gathered: list[int] | None = None

    def note_gathered(self) -> None:
        """Note that the caller has gathered the bytes of the last cast. Waits for the device."""
        self._gathered = self._sums()

    def check(self) -> bool:
        """Return True if there is nothing left to compare. Called before each cast. Collective.

        RuntimeError on every rank for weights that were gathered and differ between ranks.
        """
        gathered, self._gathered = self._gathered, None
        sums = self._switched if gathered is None else gathered
        status = ShardStatus.EMPTY if gathered is None else ShardStatus.CLEAN
        # The reports beside the amaxes have one digest for all, and come when masters are written.
        reports = [RankReport(status, total) for total in sums]
        comparisons = compare_each(self._group, reports, "bytes of switched weights")
        self._casts += 1
        if any(comparison.ranks(ShardStatus.EMPTY) for comparison in comparisons):
            return self._casts == CASTS
        by_name = zip(self._weights, comparisons, strict=True)
        differing = [name for name, comparison in by_name if not comparison.is_same_call]
        if differing:
            raise InvalidWeights(
                f"{len(differing)} weights hold other bytes on other ranks after their all-gather, the first is {differing[0]}",
                "since zerocast.switch gave them new buffers",
                "gather into what weight.rowwise_data is now, and forget what it was",
            )
        return sums != self._switched or self._casts == CASTS

    def _sums(self) -> list[int]:
        codes = [_bytes(weight.rowwise_data) for weight in self._weights.values()]
        sums: list[int] = torch.stack([data.sum(dtype=torch.int64) for data in codes]).tolist()
        return sums


def _bytes(codes: Tensor) -> Tensor:
    return codes.detach().view(-1).view(torch.uint8)
