"""Hybrid tensors on the ranks of a pool."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from tests.sharded import POISON, Weight
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from tests.transformer_engine.tensors import bytes_of, host_tensors, tensor
from zerocast import get_format


def columnwise_only(case: Weight, device: str = "cpu") -> Any:
    """A tensor as TransformerEngine makes it by columns alone: FP8 in its transpose, other formats as they are."""
    made = tensor(case, device, columnwise=True)
    if hasattr(made, "_data"):
        made._data = None
        made._transpose_invalid = False
    return made


def hybrid(rowwise: Weight | None, columnwise: Weight | None, source: str = "original", device: str = "cpu") -> Any:
    """A Hybrid tensor of two cases of one shape; None for a direction that was dropped."""
    te = host_tensors()
    one = rowwise or columnwise
    assert one is not None
    row = tensor(rowwise or one, device)
    column = columnwise_only(columnwise or one, device)
    made = te.HybridQuantizer(
        rowwise_quantizer=row._quantizer, columnwise_quantizer=column._quantizer, columnwise_source=source
    )
    return te.HybridQuantizedTensor(
        shape=one.shape,
        dtype=one.nominal,
        rowwise_storage=row if rowwise else None,
        columnwise_storage=column if columnwise else None,
        quantizer=made,
        device=torch.device(device),
    )


def codes_of(part: Any) -> casts.Bytes:
    """Codes and scales of a direction; the amax of delayed scaling."""
    held = bytes_of(part)
    if getattr(part, "_data", True) is None:
        held["columnwise_data"] = casts.raw(part._transpose).copy()
    return held


def cast(weight: Any, master: Tensor | None, start: int | None, **options: Any) -> list[casts.Bytes]:
    """One call of one weight; the bytes of its directions."""
    integration().quantize_master_weights([weight], [master], [start], None, **options)
    parts = (weight._rowwise_storage, weight._columnwise_storage)
    return [{} if part is None else codes_of(part) for part in parts]


def by_columns(case: Weight) -> tuple[casts.Bytes, int]:
    """A weight whose codes are in its transpose alone, cast from a part of its master on every rank; how many are no poison."""
    with host_on_cpu():
        rank = dist.get_rank()
        weight = hybrid(None, case)
        _, found = cast(weight, *case.shard(rank), manual_post_all_gather_processing=rank == 0)
        written = int((found["columnwise_data"] != POISON).sum())
        integration().post_all_gather_processing([weight])
        assert codes_of(weight._columnwise_storage)["columnwise_data"].tolist() == found["columnwise_data"].tolist()
        assert get_format(case.fmt).elements_per_byte == 1
        return found, written
