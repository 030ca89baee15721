"""Saving, loading and copying quantized weights: the bytes travel, and nothing but the weight's own bytes."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zerocast
from tests import casts
from zerocast import QuantizedWeight

FORMATS = casts.FORMATS
SHAPE = (32, 64)


def through_torch(value: object, new: bool = True) -> object:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=new)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[QuantizedWeight], object]] = {
    "torch.save": through_torch,
    "torch.save, old format": lambda w: through_torch(w, new=False),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "deepcopy": copy.deepcopy,
    "clone": lambda w: w.clone(),
    "to device": lambda w: w.to("cpu", copy=True),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_copy_has_the_same_bytes_and_its_own_storage(how: str, fmt: str) -> None:
    weight = casts.example(fmt)
    twin = COPIES[how](weight)
    assert type(twin) is QuantizedWeight
    assert (twin.shape, twin.dtype, twin.format, str(twin.format)) == (weight.shape, weight.dtype, weight.format, fmt)
    casts.assert_same_bytes(casts.bytes_of(twin), casts.bytes_of(weight))
    assert casts.bytes_of(twin).keys() == casts.bytes_of(weight).keys()
    before = casts.bytes_of(twin)
    weight.rowwise_data.view(torch.uint8).fill_(0)
    casts.assert_same_bytes(casts.bytes_of(twin), before)
    if twin.format.element:
        twin.read(columnwise=True, dtype=torch.float32)


@pytest.mark.parametrize("how", ["torch.save", "pickle", "deepcopy"])
def test_a_parameter_stays_one(how: str) -> None:
    for requires_grad in (True, False):
        twin = COPIES[how](nn.Parameter(casts.example("nvfp4"), requires_grad=requires_grad))
        assert isinstance(twin, nn.Parameter)
        assert isinstance(twin, QuantizedWeight)
        assert twin.requires_grad is requires_grad


@pytest.mark.parametrize("how", ["torch.save", "pickle", "deepcopy", "clone"])
def test_a_view_of_a_flat_buffer_takes_only_its_own_bytes(how: str, tmp_path: Path) -> None:
    """torch.save and deepcopy of a view copy the whole storage behind it."""
    weight = casts.example("fp8_block")
    flat = torch.zeros(10_000_000, dtype=torch.uint8)
    weight.rebind(rowwise_data=flat[1000 : 1000 + weight.numel()].view(SHAPE))
    twin = COPIES[how](weight)
    assert isinstance(twin, QuantizedWeight)
    assert twin.rowwise_data.untyped_storage().nbytes() == weight.numel()
    casts.assert_same_bytes(casts.bytes_of(twin), casts.bytes_of(weight))
    torch.save({"weight": weight}, tmp_path / "file.pt")
    assert (tmp_path / "file.pt").stat().st_size < 2 * weight.numel() + 4096


def test_loading_copies_into_the_storage_that_is_there() -> None:
    """A plan keeps casting into a weight after load_state_dict."""
    weight, master = QuantizedWeight.empty(SHAPE, "nvfp4"), torch.randn(32 * 64)
    plan = zerocast.CastPlan([weight], [master], [0])
    plan.cast()
    plan.post_all_gather()
    place = weight.rowwise_data.data_ptr()
    weight.copy_(casts.example("nvfp4", seed=5))
    casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(casts.example("nvfp4", seed=5)))
    assert weight.rowwise_data.data_ptr() == place
    plan.cast()
    plan.post_all_gather()
    casts.assert_same_bytes(casts.bytes_of(weight), casts.unsharded("nvfp4", master.view(SHAPE), torch.bfloat16))


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4"])
def test_loading_a_weight_without_columnwise_copy_leaves_no_stale_one(fmt: str) -> None:
    weight, source = casts.example(fmt), QuantizedWeight.empty(SHAPE, fmt)
    zerocast.quantize_master_weights([source], [torch.randn(32 * 64)], [0])
    weight.copy_(source)
    assert torch.equal(weight.rowwise_data, source.rowwise_data)
    with pytest.raises(RuntimeError, match="older than its last cast"):
        weight.read(columnwise=True, dtype=torch.float32)
    zerocast.post_all_gather_processing([weight])
    zerocast.post_all_gather_processing([source])
    casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(source))


def test_a_stale_columnwise_copy_is_not_saved() -> None:
    weight, master = QuantizedWeight.empty(SHAPE, "nvfp4"), torch.randn(32 * 64)
    plan = zerocast.CastPlan([weight], [master], [0])
    plan.cast()
    plan.post_all_gather()
    plan.cast()
    twin = copy.deepcopy(weight)
    assert twin.columnwise_data is None
    with pytest.raises(RuntimeError, match="older than its last cast"):
        twin.read(columnwise=True, dtype=torch.float32)


def test_deepcopy_keeps_tied_weights_tied() -> None:
    layers = zerocast.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), {"*.weight": "nvfp4"})
    layers[1].weight = layers[0].weight
    twin = copy.deepcopy(layers)
    assert twin[0].weight is twin[1].weight


def test_a_transposed_reading_is_not_copied() -> None:
    for copied in (copy.deepcopy, pickle.dumps, lambda w: w.clone()):
        with pytest.raises(RuntimeError, match="transposed"):
            copied(casts.example("nvfp4").t())
