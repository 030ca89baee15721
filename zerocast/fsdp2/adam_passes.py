"""AdamPass: Adam over the shards of one kind, in one launch of a FusedAdamW. Adam8bitPass: the same
for moments in 8 bits.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.backends.checks import FLOATS, check_plain
from zerocast.backends.descriptor import Piece
from zerocast.cast.adam_update import AdamInputs, MomentGroups
from zerocast.cast.tables import TableKey, WeightTable
from zerocast.formats.layout import Span
from zerocast.fsdp2.moments_8bit import ShardedMoments
from zerocast.fsdp2.parameter import flat_local
from zerocast.optim.moments_8bit import CutGroups


@dataclass(frozen=True)
class SteppedShard:
    """The shard of a parameter on this rank, as a step reads and writes it.

    Attributes:
        parameter: the parameter, whose gradient is read at each step.
        master: its flat local part, f32.
        state: its moments and step count by torch's names.
        row: its row of the scalars of the step.
        shape, span: `master` is the elements `span` of a weight of `shape`.
        amaxes: the offsets of its amaxes in the packed buffer: rowwise, and of a columnwise grid.
        flag: the offset where the step writes 1 if the master becomes NaN or Inf. -1 for none.
        codes: its kept codes, for a pass that casts. None if the pass writes no codes.
    """

    parameter: Any
    master: Tensor
    state: Mapping[str, Any]
    row: int
    shape: tuple[int, ...]
    span: Span
    amaxes: tuple[int, int]
    flag: int = -1
    codes: Tensor | None = None


class AdamPass:
    """Adam over shards of one kind, and the amaxes of the updated masters, in one launch. If all
    weights have one set of codes, the pass can cast them too (`casts_in_one_pass`).

    FSDP2 gives every parameter, gradient and moment a separate tensor, so each shard is a separate
    base in the table.
    """

    def __init__(self, key: TableKey, device: torch.device, casts_in_one_pass: bool = False) -> None:
        self._table = WeightTable(key, device)
        self.casts_in_one_pass = casts_in_one_pass
        self._parameters: list[Any] = []
        self._exp_avgs: list[Tensor] = []
        self._exp_avg_sqs: list[Tensor] = []
        # Finishes a step with moments in 8 bits. None except from its `run` until `finish`.
        self._finish: Callable[[], None] | None = None

    def add(self, shard: SteppedShard) -> None:
        """Append a shard. Called before `freeze`."""
        master = shard.master
        self._parameters.append(shard.parameter)
        for name, moments in (("exp_avg", self._exp_avgs), ("exp_avg_sq", self._exp_avg_sqs)):
            moments.append(flat_local(shard.state[name]))
            check_plain(name, moments[-1], FLOATS, master.numel(), master.device)
        self._table.add_master(master, shard.shape, shard.span, shard.amaxes, shard.row, shard.flag, shard.codes)

    def __len__(self) -> int:
        return len(self._parameters)

    def freeze(self) -> None:
        """Put the table on the device."""
        self._table.freeze()

    def written(self) -> list[Tensor]:
        """Return the tensors that a step writes: the masters and their moments."""
        return [*self._table.masters.tensors, *self._exp_avgs, *self._exp_avg_sqs]

    def gradients(self) -> list[Tensor]:
        """Return the gradients as they are now, flat."""
        return [flat_local(parameter.grad) for parameter in self._parameters]

    def run(
        self, grads: list[Tensor], scalars: Tensor, steps: Tensor, clip: Tensor, packed: Tensor, casts: bool = False
    ) -> None:
        """Step all shards, except for 8-bit moments of groups that ranks share.

        Args:
            grads: the gradients of the shards, flat.
            scalars: f32 `[rows, 8]`, Adam's scalars.
            steps: i64 `[rows]`, the number of the step for each row of scalars.
            clip: f32[1], the factor of the gradients.
            packed: takes the amaxes of the masters. It holds zeros there.
            casts: True to write the codes of complete block rows too.
        """
        groups = self._moment_groups(steps)
        inputs = AdamInputs(grads, self._exp_avgs, self._exp_avg_sqs, scalars, clip, groups)
        self._table.adam_each(inputs, packed, casts=casts)
        if groups is not None:
            self._finish = functools.partial(self._table.finish_moments, inputs, packed)

    def _moment_groups(self, steps: Tensor) -> MomentGroups | None:
        """Return the groups of moments in 8 bits; None for other moments."""
        return None

    def finish(self) -> None:
        """Round the 8-bit moments of groups that ranks share. Their largest values have been
        reduced by now.
        """
        if self._finish is not None:
            self._finish()
            self._finish = None


class Adam8bitPass(AdamPass):
    """An AdamPass over shards whose moments are in 8 bits.

    Args:
        eight_bit: the moments.
        cut_groups: the cut groups of these shards. None if there are none.
    """

    def __init__(
        self,
        key: TableKey,
        device: torch.device,
        casts_in_one_pass: bool,
        eight_bit: ShardedMoments,
        cut_groups: CutGroups | None,
    ) -> None:
        super().__init__(key, device, casts_in_one_pass)
        self._eight_bit = eight_bit
        self._cut_groups = CutGroups(0, [], device) if cut_groups is None else cut_groups
        # The gradients of all shards. Like the lists of moments they live as long as the pass.
        self._pieces: list[list[int]] = []
        self._scales: list[Tensor] = []

    def add(self, shard: SteppedShard) -> None:
        """Append a shard. Raises RuntimeError if the codes in its state are not the codes of its
        moments.
        """
        master, moments = shard.master, self._eight_bit.get(shard.parameter)
        self._parameters.append(shard.parameter)
        check_plain("master", master, [torch.float32], moments.exp_avg.numel(), master.device)
        for name, codes_of_all in (("exp_avg", self._exp_avgs), ("exp_avg_sq", self._exp_avg_sqs)):
            own_codes = getattr(moments, name)
            if flat_local(shard.state[name]).data_ptr() != own_codes.data_ptr():
                raise RuntimeError(f"{name} of an optimizer with moments in 8 bits was replaced: call load_state_dict")
            check_plain(name, own_codes, [own_codes.dtype], master.numel(), master.device)
            codes_of_all.append(own_codes)
        self._scales.append(moments.scales)
        base, _ = self._table.masters.add_base(master)
        stored = None if shard.codes is None else self._table.buffers["rowwise_data"].add(shard.codes)
        for row in moments.rows:
            piece = row.copy()
            piece[Piece.BASE], piece[Piece.SCALARS] = base, shard.row
            self._pieces.append(piece)
            shape, span, columns = shard.shape, shard.span, piece[Piece.COLUMNS]
            if shape[-1] != columns or len(moments.rows) > 1:
                # The amax is not read, so any rows of the full parameter will do.
                span = Span(piece[Piece.START], piece[Piece.START] + piece[Piece.NUMEL])
                shape = -(-span.stop // columns), columns
            place = shard.amaxes, shard.flag, base, piece[Piece.OFFSET]
            self._table.add_span(shape, span, *place, shard.row, stored)

    def _moment_groups(self, steps: Tensor) -> MomentGroups:
        cut = self._cut_groups
        return MomentGroups(self._scales, self._pieces, steps, cut.largest, cut.reduce)
