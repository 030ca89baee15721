"""AdamPass: Adam over shards that lie anywhere, and in the same pass the amaxes of what they become: one launch a format.

FSDP2 gives every parameter, gradient and moment a tensor of its own, so each shard is a base tensor of its own in the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.formats import FormatSpec
from zerocast.formats.layout import Span


@dataclass(frozen=True)
class AdamShard:
    """What a rank holds of one parameter: flat f32 tensors of the elements `span` of a matrix `shape`.

    `grad` gives the gradient of now, `row` is the parameter's row of the scalars, `place` where its amaxes go, rowwise and of an
    own columnwise grid.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Callable[[], Tensor]
    row: int
    shape: tuple[int, int]
    span: Span
    place: tuple[int, int]


class AdamPass:
    """The shards of weights of one format and nominal dtype, none of them empty."""

    def __init__(self, backend: str, fmt: FormatSpec, nominal: torch.dtype, shards: Sequence[AdamShard]) -> None:
        self._head, self._nominal = (backend, str(fmt)), nominal
        self._grads = [shard.grad for shard in shards]
        self._masters = [shard.master for shard in shards]
        self._exp_avgs, self._exp_avg_sqs = [s.exp_avg for s in shards], [s.exp_avg_sq for s in shards]
        device = shards[0].master.device
        rows = [_row(index, shard) for index, shard in enumerate(shards)]
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        self._groups = torch.tensor([shard.row for shard in shards], dtype=torch.int64).to(device)

    def run(self, scalars: Tensor, clip: Tensor, packed: Tensor) -> None:
        """One step of all shards; their amaxes go into `packed`, which holds zeros there."""
        ops.adam_amax(
            *self._head,
            nominal=self._nominal,
            masters=self._masters,
            grads=[grad() for grad in self._grads],
            exp_avgs=self._exp_avgs,
            exp_avg_sqs=self._exp_avg_sqs,
            table=self._table,
            groups=self._groups,
            scalars=scalars,
            clip=clip,
            packed=packed,
            skip=None,
        )


def _row(index: int, shard: AdamShard) -> list[int]:
    row = [-1] * WIDTH
    row[Column.ROWS], row[Column.COLUMNS] = shard.shape
    row[Column.START], row[Column.NUMEL] = shard.span.start, shard.span.numel
    row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = index, 0
    row[Column.ROW_AMAX], row[Column.COLUMN_AMAX] = shard.place
    return row
