"""TransformerEngine's names, arguments, defaults and habits; on its own tensor classes."""

import contextlib
import inspect
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests import casts
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.transformer_engine.tensors import NUMEL, SHAPE, TILES, Casting, buffers, bytes_of, weights_of
from tests.workers import on_ranks

pytestmark = needs_te

COPIES = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
FORMATS = (
    "fp8_delayed",
    "fp8_current",
    "fp8_current:element=e5m2",
    "fp8_block",
    "fp8_block:element=e5m2",
    "mxfp8",
    "nvfp4",
)


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize(
    "name", ["quantize_master_weights", "post_all_gather_processing", "cast_master_weights_to_fp8", "replace_raw_data"]
)
def test_arguments_are_those_of_transformer_engine(name: str) -> None:
    import transformer_engine.pytorch.tensor.utils as theirs

    found, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        for module in (integration(), theirs)
    )
    assert found == expected


@pytest.mark.usefixtures("te")
def test_by_default_columnwise_copies_are_dropped() -> None:
    """TransformerEngine's next forward pass makes them, as after its own cast; the older name is the same call."""
    here = Casting(weights_of(*FORMATS, "identity"), columnwise=True)
    transposes = [one._transpose.data_ptr() for one in here.tensors[:3]]
    own = [one.clone() for one in buffers(here.tensors[5]).values()]
    integration().cast_master_weights_to_fp8(here.tensors, *here.masters(), None)
    assert [one._transpose_invalid for one in here.tensors[:3]] == [True] * 3
    assert [one._transpose.data_ptr() for one in here.tensors[:3]] == transposes
    for one in (here.tensors[3], here.tensors[4], here.tensors[6]):
        assert [getattr(one, name, None) for name in COPIES] == [None] * 3
    assert [one.shape for one in buffers(here.tensors[5]).values()] == [one.shape for one in own]
    integration().post_all_gather_processing(here.tensors)
    assert [one._transpose_invalid for one in here.tensors[:3]] == [False] * 3


@pytest.mark.usefixtures("te")
def test_no_transpose_where_products_read_none() -> None:
    """A Blackwell GPU's FP8 products read the rowwise codes in both directions; the other formats keep two copies."""
    here = Casting(weights_of(*FORMATS))
    here.cast()
    import transformer_engine.pytorch.utils as theirs

    with mock.patch.object(theirs, "is_non_tn_fp8_gemm_supported", return_value=True):
        integration().post_all_gather_processing(here.tensors)
    assert [one._transpose for one in here.tensors[:3]] == [None] * 3
    assert all(one._columnwise_data is not None for one in here.tensors[3:7])


@on_ranks(2)
@pytest.mark.parametrize("offset", [0, 3])
@host_on_cpu()
def test_one_all_reduce_a_call(offset: int) -> None:
    """All formats take part in it, with masters in new tensors at every call; the first call of a list builds a plan, and asks
    more. An odd offset cuts NVFP4 bytes in two.
    """
    casting = Casting(weights_of(*FORMATS, "identity", cuts=(NUMEL // 2 + offset,)))

    def collectives(call: Any, *arguments: Any) -> dict[str, int]:
        with CommDebugMode() as mode:
            call(*arguments)
        return {str(op): n for op, n in mode.get_comm_counts().items()}

    first = collectives(casting.cast)
    assert first.pop("c10d.allreduce_") >= 1
    assert all("gather" in name for name in first)
    assert [collectives(casting.cast, step) for step in (1, 2)] == [{"c10d.allreduce_": 1}] * 2
    assert collectives(integration().post_all_gather_processing, casting.tensors) == {}


@pytest.mark.usefixtures("te")
def test_raw_data_of_tiles_moves_for_both_directions() -> None:
    here = Casting(weights_of(TILES))
    (weight,) = here.tensors
    here.cast()
    before, old = bytes_of(weight), buffers(weight)["rowwise_data"]
    integration().replace_raw_data(weight, torch.zeros_like(old))
    casts.assert_same_bytes(bytes_of(weight), before)
    assert weight._columnwise_data is weight._rowwise_data is not old


@pytest.mark.usefixtures("te")
def test_raw_data_of_another_shape_and_of_mxfp8() -> None:
    here, replace = Casting(weights_of("fp8_block", "mxfp8")), integration().replace_raw_data
    with pytest.raises(ValueError, match=r"new raw data is torch.uint8 \(3,\) .* torch.uint8 \(64, 96\) .* is needed"):
        replace(here.tensors[0], torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(NotImplementedError, match="codes by rows and by columns"):
        replace(here.tensors[1], torch.zeros(SHAPE, dtype=torch.uint8))


@pytest.mark.usefixtures("te")
def test_dropped_copies_are_not_kept_alive() -> None:
    here = Casting(weights_of("fp8_block", "nvfp4"))
    here.cast_both_ways()
    copies = [weakref.ref(one._columnwise_data.untyped_storage()) for one in here.tensors]
    assert all(copy() is not None for copy in copies)
    here.cast()
    assert not any(copy() is not None for copy in copies)


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("columnwise", [True, False], ids=["two", "one"])
def test_tiles_have_one_set_of_codes(columnwise: bool) -> None:
    """Two that TransformerEngine made are one from the first call on; scales by columns that it dropped are there again, and those
    that it never made. In its layouts of scales both directions have the same values.
    """
    (case,) = weights_of(TILES)
    here = Casting((case,), columnwise=columnwise)
    (weight,) = here.tensors
    for step in range(2):
        master, expected = case.master(step), tensors.expected(case, step=step)
        here.cast_both_ways(step)
        casts.assert_same_bytes(bytes_of(weight), expected)
        assert weight._columnwise_data.data_ptr() == weight._rowwise_data.data_ptr()
        rows, columns = tensors.dequantized(weight, False), tensors.dequantized(weight, True)
        assert torch.equal(rows, columns)
        assert 0 < (rows - master).abs().max() < master.abs().max() / 14
        weight.update_usage(rowwise_usage=True, columnwise_usage=False)
        integration().post_all_gather_processing(here.tensors)
        casts.assert_same_bytes(bytes_of(weight), expected)
        weight.update_usage(rowwise_usage=True, columnwise_usage=False)


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize(
    ("option", "without", "with_it"),
    [
        ("with_2d_quantization", "mxfp8", TILES),
        ("force_pow_2_scales", "fp8_block:power_of_2_scale=False", "fp8_block:power_of_2_scale=True"),
    ],
)
def test_an_option_that_decides_the_format_is_set_between_calls(option: str, without: str, with_it: str) -> None:
    """What is cast is what the quantizer says at a call."""
    before, after = weights_of(without, with_it)
    here = Casting((before,), columnwise=True)
    (weight,) = here.tensors
    for step, (case, is_set) in enumerate([(before, False), (after, True), (after, True)]):
        setattr(weight._quantizer, option, is_set)
        here.cast_both_ways(step)
        wanted = tensors.expected(case, step=step)
        casts.assert_same_bytes(bytes_of(weight), {name: wanted[name] for name in wanted if name != "amax"})


@on_ranks(2)
@pytest.mark.parametrize("before", [(0.0, 0.0), (0.25, 300.0)])
@host_on_cpu()
def test_delayed_scaling_is_left_to_the_host(before: tuple[float, float]) -> None:
    """The amax grows, on every rank to the largest of any, its history and the scale stay; codes are of the scale there was."""
    casting = Casting(weights_of("fp8_delayed", cuts=(NUMEL // 2,)))
    (weight,), (case,) = casting.tensors, casting.cases
    history = torch.full((4, 3), -1.0)  # as TransformerEngine keeps it: [length, tensors], row 0 is this step's
    history[0, 1] = before[casting.rank]
    around = history.clone()
    around[0, 1] = max(float(case.master().bfloat16().abs().max()), *before)
    weight._quantizer.amax, weight._quantizer.scale = history[0, 1], torch.tensor(4.0)
    casting.cast()
    casting.gather()
    assert np.array_equal(history, around) and float(weight._quantizer.scale) == 4.0
    wanted = casts.expected_of_shards(case, scale=4.0)
    casts.assert_same_bytes(bytes_of(weight), {name: wanted[name] for name in ("rowwise_data", "rowwise_scale_inv")})


@pytest.mark.usefixtures("te")
def test_shards_may_be_tensors_of_transformer_engine() -> None:
    """A Float8Tensor, an MXFP8Tensor with both directions, an IdentityTensor."""
    cases = weights_of("fp8_current", "mxfp8", "identity")
    here, shards = Casting(cases), Casting(cases)
    here.cast(0, shards.tensors)
    for case, found in zip(cases, shards.bytes(), strict=True):
        expected = casts.expected_of_shards(case)
        names = [name for name in ("rowwise_data", "columnwise_data") if name in found]
        casts.assert_same_bytes(found, {name: expected[name] for name in names}, str(case))
    here, shards = Casting(weights_of(TILES)), Casting(weights_of(TILES))
    with pytest.raises(TypeError, match=r"its shard is a MXFP8Tensor of tiles, .*: pass its codes only"):
        here.cast(0, shards.tensors)


@pytest.mark.usefixtures("te")
def test_the_high_precision_init_value_is_cleared() -> None:
    here, cleared = Casting(weights_of("fp8_current")), mock.Mock()
    here.tensors[0].clear_high_precision_init_val = cleared
    here.cast()
    assert cleared.call_count == 1


@pytest.mark.usefixtures("te")
def test_redirected_names_lead_here_and_back() -> None:
    """TransformerEngine's names lead to zerocast inside of `redirect`, and back after it, also if an exception ends it."""
    import transformer_engine.pytorch.tensor as classes
    import transformer_engine.pytorch.tensor.utils as theirs

    before = [vars(classes).copy(), vars(theirs).copy()]
    here = Casting(weights_of("nvfp4"))
    with contextlib.suppress(KeyError), integration().redirect():
        theirs.quantize_master_weights(here.tensors, *here.masters(), None, manual_post_all_gather_processing=True)
        theirs.post_all_gather_processing(here.tensors)
        assert classes.cast_master_weights_to_fp8 is integration().cast_master_weights_to_fp8
        assert classes.replace_raw_data is theirs.replace_raw_data is integration().replace_raw_data
        raise KeyError
    casts.assert_same_bytes(bytes_of(here.tensors[0]), casts.expected_of_shards(here.cases[0]))
    assert [vars(classes), vars(theirs)] == before
