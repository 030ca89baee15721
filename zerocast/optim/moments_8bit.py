"""Moments8bit: AdamW's moments in 8 bits (docs/formats/moments_8bit.md) over this rank's flat
masters.

Groups of elements that share scales are those of the whole weight. The largest values of a group
that a boundary between ranks cuts are reduced over the ranks, and only then are its moments
rounded. So codes and scales are those of one unsharded step.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.backends import checks, ops
from zerocast.backends.descriptor import Piece
from zerocast.backends.reference.moments import dequantize_moments, quantize_moments
from zerocast.distributed.group import Group
from zerocast.formats.layout import moment_group, moment_groups
from zerocast.optim.bucket import Bucket, Slot


class Moments8bit:
    """Both moments of this rank's elements. The step reads and writes them by one stage.

    Attributes:
        exp_avg, exp_avg_sq: codes, i8 and u8, in the places of the masters.
        scales: f32 `[2, groups]`, those of either moment, of all groups that this rank has any of.

    Args:
        buckets: those that are cut evenly.
        master: the flat masters; moments may end before them.
        numel: the number of elements with moments.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Group, master: Tensor, numel: int) -> None:
        self._group, self._master = group, master
        self.exp_avg = torch.zeros(numel, dtype=torch.int8, device=master.device)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.uint8, device=master.device)
        # A row for each parameter that this rank has elements of, by name.
        self._pieces: dict[str, list[int]] = {}
        scales = cuts = 0
        for bucket in buckets:
            for slot in bucket.slots:
                cut = {number: cuts + place for place, number in enumerate(_cut_groups(bucket, slot))}
                cuts += len(cut)
                span, offset = bucket.owned(slot, group.rank)
                if not span.numel:
                    continue
                columns = slot.matrix_shape[1]
                row = [0] * len(Piece)
                row[Piece.OFFSET], row[Piece.NUMEL], row[Piece.SCALARS] = offset, span.numel, slot.param_group
                row[Piece.START], row[Piece.COLUMNS], row[Piece.SCALE] = span.start, columns, scales
                row[Piece.CUT_FIRST] = cut.get(moment_group(span.start, columns), -1)
                row[Piece.CUT_LAST] = cut.get(moment_group(span.stop - 1, columns), -1)
                row[Piece.KEY] = zlib.crc32(slot.name.encode())
                self._pieces[slot.name] = row
                scales += moment_groups(span.start, span.numel, columns)
        self.scales = torch.zeros(2, scales, dtype=torch.float32, device=master.device)
        self._cut_largest = torch.zeros(2, cuts, dtype=torch.float32, device=master.device)
        rows = torch.tensor([*self._pieces.values()], dtype=torch.int64).view(-1, len(Piece))
        self._rows = rows.to(master.device)
        checks.know(self._rows, {"masters": [master]})

    def step(
        self, backend: str, grad: Tensor, scalars: Tensor, clip: Tensor, count: Tensor, skip: Tensor, finishes: bool
    ) -> None:
        """Take the step `count`, i64[1], with the arguments of an AdamUpdate. The moments of cut
        groups are left for a second call, which `finishes` and is collective if any group is cut.
        """
        if finishes and not self._cut_largest.numel():
            return
        if finishes:
            self.reduce()
        else:
            self._cut_largest.zero_()
        ops.adam_8bit(
            backend,
            master=self._master,
            grad=grad,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            scales=self.scales,
            pieces=self._rows,
            scalars=scalars,
            clip=clip,
            step=count,
            cut_largest=self._cut_largest,
            finishes=finishes,
            skip=skip,
        )

    def reduce(self) -> None:
        """Reduce the largest values of cut groups over the ranks. Collective if there are any."""
        if self._cut_largest.numel():
            self._group.all_reduce_max(self._cut_largest, "the largest moments of cut groups")

    def values(self, name: str) -> dict[str, Tensor]:
        """Both moments of this rank's elements of a parameter, flat f32 copies, by name."""
        piece = self._pieces.get(name)
        if piece is None:
            none = torch.zeros(0, dtype=torch.float32, device=self.scales.device)
            return {"exp_avg": none, "exp_avg_sq": none.clone()}
        m, v = dequantize_moments(self.exp_avg, self.exp_avg_sq, self.scales, piece)
        return {"exp_avg": m, "exp_avg_sq": v}

    def load(self, values: Mapping[str, Mapping[str, Tensor]], count: int) -> None:
        """Take over results of `values`, of all parameters, after so many steps. Collective."""
        self._cut_largest.zero_()
        for finishes in (False, True):
            for name, piece in self._pieces.items():
                moments = values[name]["exp_avg"], values[name]["exp_avg_sq"]
                state = self.exp_avg, self.exp_avg_sq, self.scales
                quantize_moments(*moments, *state, piece, count, self._cut_largest, finishes)
            if not finishes:
                self.reduce()


def _cut_groups(bucket: Bucket, slot: Slot) -> list[int]:
    """The groups of a parameter that several ranks have parts of, alike on all ranks."""
    columns = slot.matrix_shape[1]
    spans = (bucket.owned(slot, rank)[0] for rank in range(bucket.ranks))
    starts = [span.start for span in spans if span.numel and span.start]
    cut = {
        moment_group(start, columns)
        for start in starts
        if moment_group(start - 1, columns) == moment_group(start, columns)
    }
    return sorted(cut)
