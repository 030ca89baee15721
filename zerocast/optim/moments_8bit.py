"""Moments8bit: the 8-bit moments of AdamW (docs/formats/moments_8bit.md) for this rank's parts of
weights.

The groups of elements that share a scale are defined on the full weight. A group that a shard
boundary splits is a *cut group*: the ranks reduce its largest values before they round its moments.
So codes and scales equal the result of an unsharded step.
"""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends.descriptor import Piece
from zerocast.backends.reference.adam import dequantize_moments, quantize_moments
from zerocast.cast.adam_update import MomentGroups
from zerocast.distributed.group import Group
from zerocast.formats.layout import MOMENT_GROUP, Span, moment_group, moment_groups


@dataclass(frozen=True)
class OwnedPart:
    """The part of a weight that this rank owns.

    Attributes:
        name: the weight's name, the key of its random numbers.
        columns: the columns of the weight's matrix.
        spans: the runs of elements of the full weight, none of them empty.
        offset: the offset of the first element in the flat tensors. The others follow it.
        param_group: the row of Adam's scalars.
        cut: the cut groups among its groups, with their index in CutGroups.
    """

    name: str
    columns: int
    spans: Sequence[Span]
    offset: int
    param_group: int
    cut: Mapping[int, int]


class CutGroups:
    """The cut groups of some weights, with the same indices on all ranks.

    Attributes:
        largest: f32 `[2, groups]`, the largest |m| and v of each in the current step.

    Args:
        count: the number of groups.
        groups: the process groups over which values are reduced, one at a time.
        device: the device of the moments.
        comm_device_type: the type of the device that the groups reduce on, by default the type of
            `device`.
            Moments of masters in CPU memory are on the CPU, while NCCL reduces on a GPU.
    """

    def __init__(
        self, count: int, groups: Sequence[Group], device: torch.device, comm_device_type: str | None = None
    ) -> None:
        self._groups = groups
        # The type of the device to copy the values to for a reduction. None if they are on it.
        self._comm_device_type = None if comm_device_type in (None, device.type) else comm_device_type
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
            to_reduce = self.largest if self._comm_device_type is None else self.largest.to(self._comm_device_type)
            for group in self._groups:
                group.all_reduce_max(to_reduce, "the largest moments of cut groups")
            if to_reduce is not self.largest:
                self.largest.copy_(to_reduce)

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
        cut_groups: the cut groups. A caller calls `begin` before a step or a load, and `reduce`
            between the two calls of `load`.

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
        first = stop = scale_index = 0
        if name in self._pieces:
            (piece,) = self._pieces[name]
            first, stop, scale_index = _groups_that_begin(piece)
        begun = slice(scale_index, scale_index + stop - first)
        return Span(first, stop), {"exp_avg_scale": self.scales[0, begun], "exp_avg_sq_scale": self.scales[1, begun]}

    def share_scales(self) -> None:
        """Copy the scales of cut groups from the ranks on which these groups begin. Collective."""
        # For the first and the last group of each piece: (index in `cut_groups`, or -1; index of
        # its scales; True if the group begins in the piece).
        end_groups: list[tuple[int, int, bool]] = []
        for piece in itertools.chain(*self._pieces.values()):
            first, stop, scale_index = _groups_that_begin(piece)
            first_scale = piece[Piece.SCALE]
            last_scale = first_scale + moment_groups(piece[Piece.START], piece[Piece.NUMEL], piece[Piece.COLUMNS]) - 1
            end_groups.append((piece[Piece.CUT_FIRST], first_scale, scale_index == first_scale))
            end_groups.append((piece[Piece.CUT_LAST], last_scale, stop > first))
        # Only the rank on which a group begins contributes its scales, so the maximum copies them.
        self.cut_groups.begin()
        for cut_index, scale_index, begins in end_groups:
            if cut_index >= 0 and begins:
                self.cut_groups.largest[:, cut_index] = self.scales[:, scale_index]
        self.cut_groups.reduce()
        for cut_index, scale_index, _ in end_groups:
            if cut_index >= 0:
                self.scales[:, scale_index] = self.cut_groups.largest[:, cut_index]

    def load(self, values: Mapping[str, Mapping[str, Tensor]], counts: Sequence[int], finishes: bool) -> None:
        """Quantize and store f32 moments of all parameters, in the form that `values` returns. Call
        it twice: first with `finishes=False`, then, after `cut_groups.reduce`, with True for the
        moments of cut groups. `counts` are the steps of each parameter group.
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
