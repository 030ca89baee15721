"""Stage adam_cast: the kernels of adam_amax and of partial_cast, one after the other.

Masters are read a second time for their codes. Only the CUDA backend keeps the masters of a block
in a single pass until the amax of the block is known. No all-reduce is needed between the two
kernels, since each rank owns whole blocks.
"""

import torch
from torch import Tensor

from zerocast.backends.descriptor import check_whole_blocks
from zerocast.backends.triton.adam_amax import adam_amax
from zerocast.backends.triton.partial_cast import partial_cast
from zerocast.formats import FormatSpec


def adam_cast(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    table: Tensor,
    groups: Tensor,
    scalars: Tensor,
    clip: Tensor,
    packed: Tensor,
    row_data: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Run Adam over spans of whole rows of blocks, take the partial amaxes, and cast by them."""
    check_whole_blocks_once(fmt, table)
    adam_amax(fmt, nominal, masters, grads, exp_avgs, exp_avg_sqs, table, groups, scalars, clip, packed, skip)
    partial_cast(fmt, nominal, masters, packed, [], [], table, row_data, [], skip)


def check_whole_blocks_once(fmt: FormatSpec, table: Tensor) -> None:
    """Make `check_whole_blocks` of a table, which waits for the device, unless it was made."""
    checked = table.__dict__.setdefault("_zerocast_whole_blocks", set())
    if fmt not in checked:
        check_whole_blocks(fmt, table)
        checked.add(fmt)
