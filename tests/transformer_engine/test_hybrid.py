"""Hybrid tensors: each direction in the bytes of its own format, from one master; what would go stale is refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests import casts
from tests.casts import POISON, Weight
from tests.strategies import cuts
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.workers import Ranks

pytestmark = needs_te

SHAPE = (32, 96)
NUMEL = SHAPE[0] * SHAPE[1]
BY_ROWS = ("fp8_current", "fp8_delayed", "identity", "fp8_current:element=e5m2,power_of_2_scale=True")


def case(fmt: str, seed: int = 0) -> Weight:
    return Weight(fmt, SHAPE, ((0, NUMEL),), torch.bfloat16, "normal", seed)


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("columnwise", BY_ROWS)
@pytest.mark.parametrize("rowwise", BY_ROWS)
def test_both_directions_from_a_whole_master(rowwise: str, columnwise: str) -> None:
    """The column direction is cast into a transpose, which stays valid; post-processing changes none of its codes."""
    both = case(rowwise), case(columnwise)
    weight = tensors.hybrid(*both)
    found = tensors.cast(weight, both[0].master().view(-1), 0)
    integration().post_all_gather_processing(weight)
    for one, held, transposed in zip(both, found, (False, True), strict=True):
        expected = casts.expected_of_shards(one)
        names = ["rowwise_scale_inv"] if one.fmt != "identity" else []
        names.append("columnwise_data" if transposed and one.fmt != "identity" else "rowwise_data")
        casts.assert_same_bytes(held, {name: expected[name] for name in names}, f"{rowwise} | {columnwise}")
    column = weight._columnwise_storage
    assert getattr(column, "_transpose_invalid", False) is False


def by_columns(one: Weight) -> casts.Bytes:
    """The bytes of a weight whose codes are in its transpose alone, cast from a part of its master on every rank."""
    with host_on_cpu():
        rank = dist.get_rank()
        weight = tensors.hybrid(None, one)
        _, found = tensors.cast(weight, *one.shard(rank), manual_post_all_gather_processing=rank == 0)
        integration().post_all_gather_processing([weight])
        casts.assert_same_bytes(tensors.codes_of(weight._columnwise_storage), found)
        return found


@given(world=st.sampled_from([1, 2, 3]), data=st.data())
def test_codes_in_a_transpose_from_masters_cut_anywhere(ranks: Ranks, world: int, data: st.DataObject) -> None:
    """Exactly the transposed places of the owned elements are written."""
    shape = data.draw(st.sampled_from([(5, 7), (32, 96), (1, 9), (9, 1), (3, 4, 5)]))
    fmt = data.draw(st.sampled_from(["fp8_current", "fp8_delayed"]))
    one = Weight(fmt, shape, data.draw(cuts(shape, world)), torch.bfloat16, "normal")
    whole = casts.expected_of_shards(one)["columnwise_data"]
    rows = np.arange(whole.size).reshape(-1, shape[-1])
    for rank, found in enumerate(ranks(world)(by_columns, one)):
        start, stop = one.spans[rank]
        owned = ((rows >= start) & (rows < stop)).T.reshape(-1)
        expected = np.where(owned, whole, POISON).astype(np.uint8)
        casts.assert_same_bytes(found, {"columnwise_data": expected}, f"rank {rank}, {one}")


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "nvfp4"])
def test_formats_that_are_no_direction(fmt: str) -> None:
    master, refusal = case(fmt).master().view(-1), r"model weight 0: \w+Quantizer is not cast as the {} direction"
    with pytest.raises(ValueError, match=refusal.format("rowwise")):
        tensors.cast(tensors.hybrid(case(fmt), case("identity")), master, 0)
    with pytest.raises(ValueError, match=refusal.format("columnwise")):
        tensors.cast(tensors.hybrid(case("identity"), case(fmt)), master, 0)


@pytest.mark.usefixtures("te")
def test_what_would_go_stale() -> None:
    one = case("fp8_current")
    master = one.master().view(-1)
    with pytest.raises(ValueError, match=r"99 of 3072 elements are on this rank, .* one direction's codes"):
        tensors.cast(tensors.hybrid(one, one), master[:99].clone(), 0)
    with pytest.raises(ValueError, match=r"made from the rowwise one, .* only after the all-gather"):
        tensors.cast(tensors.hybrid(one, one, source="rowwise_dequantized"), master, 0)
    dropped = tensors.hybrid(one, one)
    dropped._rowwise_storage = dropped._columnwise_storage = None
    with pytest.raises(ValueError, match="both directions of the Hybrid tensor were dropped"):
        tensors.cast(dropped, master, 0)


@pytest.mark.usefixtures("te")
def test_shards() -> None:
    """A Hybrid shard takes both directions of a part; codes of a shard do not lie side by side in a transpose."""
    weight, part = (tensors.hybrid(case("fp8_current"), case("identity")) for _ in range(2))
    expected = [casts.expected_of_shards(case(fmt))["rowwise_data"] for fmt in ("fp8_current", "identity")]
    tensors.cast(weight, case("fp8_current").master().view(-1), 0, fsdp_shard_model_weights=[part])
    for direction, wanted in zip((part._rowwise_storage, part._columnwise_storage), expected, strict=True):
        casts.assert_same_bytes(tensors.codes_of(direction), {"rowwise_data": wanted})
    by_columns = tensors.hybrid(None, case("fp8_current"))
    shard = torch.zeros(NUMEL, dtype=torch.uint8)
    with pytest.raises(ValueError, match="its codes are in its transpose only"):
        tensors.cast(by_columns, case("fp8_current").master().view(-1), 0, fsdp_shard_model_weights=[shard])


@pytest.mark.usefixtures("te")
def test_raw_data_is_that_of_the_rows() -> None:
    weight = tensors.hybrid(case("fp8_current"), case("identity"))
    new = torch.zeros(SHAPE, dtype=torch.uint8)
    integration().replace_raw_data(weight, new)
    assert weight._rowwise_storage._data is new and (new == POISON).all()
    with pytest.raises(NotImplementedError, match="no rowwise direction"):
        integration().replace_raw_data(tensors.hybrid(None, case("fp8_current")), new)
