"""Moments8bit: AdamW's moments in 8 bits (docs/formats/moments_8bit.md) of this rank's parts of
weights.

Groups of elements that share scales are defined on the full weight. The largest values of a group
that straddles a shard boundary are reduced over the ranks, and only then are its moments rounded.
So codes and scales equal the result of an unsharded step.
"""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends.descriptor import Piece
from zerocast.backends.reference.moments import dequantize_moments, quantize_moments
from zerocast.cast.adam_update import MomentGroups
from zerocast.distributed.group import Group
from zerocast.formats.layout import MOMENT_GROUP, Span, moment_group, moment_groups


@dataclass(frozen=True)
class OwnedPart:
    """The part of a weight that this rank has.

    Attributes:
        name: the weight's name, the key of its random numbers.
        columns: the columns of the weight's matrix.
        spans: runs of elements of the full weight, none of them empty.
        offset: the offset of the first element in the flat tensors. The others follow it.
        param_group: the row of Adam's scalars.
        cut: the index among all shared groups of each group that other ranks also have parts of.
    """

    name: str
    columns: int
    spans: Sequence[Span]
    offset: int
    param_group: int
    cut: Mapping[int, int]


class CutGroups:
    """The groups that several ranks have parts of, with the same indices on all ranks.

    Attributes:
        largest: f32 `[2, groups]`, the largest |m| and v of each in the current step.

    Args:
        count: how many there are.
        groups: the process groups over which values are reduced, one at a time.
        device: the device of the moments.
        wire: the type of the device that the groups reduce on, by default the type of `device`.
            Moments of masters in CPU memory are on the CPU, while NCCL reduces on a GPU.
    """

    def __init__(self, count: int, groups: Sequence[Group], device: torch.device, wire: str | None = None) -> None:
        self._groups = groups
        # None if the values are on it.
        self._wire = None if wire in (None, device.type) else wire
        self.largest = torch.zeros(2, count, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return self.largest.shape[1]

    def grow(self, count: int) -> int:
        """Add `count` groups. Returns the index of the first one."""
        first = len(self)
        self.largest = self.largest.new_zeros(2, first + count)
        return first

    def begin(self) -> None:
        """Forget the values of the last step."""
        self.largest.zero_()

    def reduce(self) -> None:
        """Reduce the largest values over the ranks. Collective if there are any."""
        if len(self):
            on_wire = self.largest if self._wire is None else self.largest.to(self._wire)
            for group in self._groups:
                group.all_reduce_max(on_wire, "the largest moments of shared groups")
            if on_wire is not self.largest:
                self.largest.copy_(on_wire)

    def join_collectives(self) -> None:
        """Take part in the reduction of a step that this rank cannot make."""
        self.begin()
        self.reduce()


class Moments8bit:
    """Both moments of parts of weights, in flat tensors.

    Attributes:
        exp_avg, exp_avg_sq: codes, i8 and u8.
        scales: f32 `[2, groups]`, a row per moment, for all groups that this rank has elements of.
        rows: the rows (`Piece`) that describe the parts to the stage adam_8bit. Their base is 0.
        cut_groups: holds the largest values of shared groups. A caller begins them before a step or
            load, and reduces them before the second call of a load.

    Args:
        numel: the number of elements of the flat tensors.
    """

    def __init__(self, parts: Sequence[OwnedPart], numel: int, cut_groups: CutGroups) -> None:
        device = cut_groups.largest.device
        self.cut_groups = cut_groups
        self.exp_avg = torch.zeros(numel, dtype=torch.int8, device=device)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.uint8, device=device)
        # A row for each span of a part, keyed by name.
        self._pieces: dict[str, list[list[int]]] = {}
        counts = [sum(moment_groups(span.start, span.numel, part.columns) for span in part.spans) for part in parts]
        self.scales = torch.zeros(2, sum(counts), dtype=torch.float32, device=device)
        for part, first in zip(parts, itertools.accumulate(counts, initial=0), strict=False):
            self._pieces[part.name] = _pieces(part, first, first + sum(counts))
        self.rows = [row for pieces in self._pieces.values() for row in pieces]

    def groups(self, steps: Tensor) -> MomentGroups:
        """Return the groups for an AdamUpdate of flat masters. `steps` are the numbers of the step
        for each parameter group, i64.
        """
        return MomentGroups([self.scales], self.rows, steps, self.cut_groups.largest, self.cut_groups.reduce)

    def values(self, name: str) -> dict[str, Tensor]:
        """Return both moments of this rank's elements of a parameter, flat f32 copies, keyed by
        name.
        """
        state = self.exp_avg, self.exp_avg_sq, self.scales
        none = torch.zeros(0, dtype=torch.float32, device=self.scales.device)
        pairs = [dequantize_moments(*state, piece) for piece in self._pieces.get(name, ())]
        first, second = zip((none, none), *pairs, strict=True)
        return {"exp_avg": torch.cat(first), "exp_avg_sq": torch.cat(second)}

    def compact(self, name: str) -> tuple[Span, dict[str, Tensor]]:
        """Return (the groups of a parameter that begin among this rank's elements, views of their
        scales keyed by name). A caller may fill the scales of all parameters, and the codes, and
        then calls `share_scales`.
        """
        first = stop = place = 0
        if name in self._pieces:
            (piece,) = self._pieces[name]
            first, stop, place = _groups_that_begin(piece)
        places = slice(place, place + stop - first)
        return Span(first, stop), {"exp_avg_scale": self.scales[0, places], "exp_avg_sq_scale": self.scales[1, places]}

    def share_scales(self) -> None:
        """Copy the scales of shared groups from the ranks on which they begin. Collective."""
        ends: list[tuple[int, int, bool]] = []
        for piece in itertools.chain(*self._pieces.values()):
            first, stop, place = _groups_that_begin(piece)
            last = piece[Piece.SCALE] + moment_groups(piece[Piece.START], piece[Piece.NUMEL], piece[Piece.COLUMNS]) - 1
            ends += [(piece[Piece.CUT_FIRST], piece[Piece.SCALE], place == piece[Piece.SCALE])]
            ends += [(piece[Piece.CUT_LAST], last, stop > first)]
        self.cut_groups.begin()
        for cut, place, begins in ends:
            if cut >= 0 and begins:
                self.cut_groups.largest[:, cut] = self.scales[:, place]
        self.cut_groups.reduce()
        for cut, place, _ in ends:
            if cut >= 0:
                self.scales[:, place] = self.cut_groups.largest[:, cut]

    def load(self, values: Mapping[str, Mapping[str, Tensor]], counts: Sequence[int], finishes: bool) -> None:
        """Store results of `values`, of all parameters. `counts` are the steps of each parameter
        group. A second call `finishes` shared groups, after their largest values were reduced.
        """
        state = self.exp_avg, self.exp_avg_sq, self.scales
        for name, pieces in self._pieces.items():
            m, v = values[name]["exp_avg"], values[name]["exp_avg_sq"]
            sizes = [piece[Piece.NUMEL] for piece in pieces]
            for piece, own_m, own_v in zip(pieces, m.split(sizes), v.split(sizes), strict=True):
                count = counts[piece[Piece.SCALARS]]
                quantize_moments(own_m, own_v, *state, piece, count, self.cut_groups.largest, finishes)


def _groups_that_begin(piece: list[int]) -> tuple[int, int, int]:
    """Return (the first group that begins within a piece, the end of such groups, the index of the
    scales of the first one).
    """
    start, columns = piece[Piece.START], piece[Piece.COLUMNS]
    first, stop = moment_group(start, columns), moment_group(start + piece[Piece.NUMEL] - 1, columns) + 1
    is_inside = start % columns % MOMENT_GROUP > 0
    return first + is_inside, stop, piece[Piece.SCALE] + is_inside


def _pieces(part: OwnedPart, scale: int, second_scale: int) -> list[list[int]]:
    """Return the rows that describe a part to the stage adam_8bit. The scales of its moments begin
    at `scale` and at `second_scale`.
    """
    rows, offset = [], part.offset
    for span in part.spans:
        row = [0] * len(Piece)
        row[Piece.OFFSET], row[Piece.NUMEL], row[Piece.SCALARS] = offset, span.numel, part.param_group
        row[Piece.START], row[Piece.COLUMNS], row[Piece.SCALE] = span.start, part.columns, scale
        row[Piece.SECOND_SCALE] = second_scale
        row[Piece.CUT_FIRST] = part.cut.get(moment_group(span.start, part.columns), -1)
        row[Piece.CUT_LAST] = part.cut.get(moment_group(span.stop - 1, part.columns), -1)
        row[Piece.KEY] = zlib.crc32(part.name.encode())
        rows.append(row)
        offset += span.numel
        groups = moment_groups(span.start, span.numel, part.columns)
        scale += groups
        second_scale += groups
    return rows
