"""TransformerEngine's names, arguments, defaults and habits; on its own tensor classes."""

import inspect
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests import casts, sharded
from tests.sharded import Weight
from tests.transformer_engine import casting, tensors
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import integration, needs_te
from tests.transformer_engine.tensors import buffers, bytes_of
from tests.workers import Ranks

pytestmark = needs_te

SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
TILES = "mxfp8:block=32x32"
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


def cases(world: int, offset: int = 0, formats: tuple[str, ...] = (*FORMATS, "identity")) -> tuple[Weight, ...]:
    """A weight of each format on `world` ranks; an odd `offset` cuts NVFP4 bytes in two."""
    inner = [NUMEL * rank // world + offset for rank in range(1, world)]
    spans = tuple(zip([0, *inner], [*inner, NUMEL], strict=True))
    return tuple(Weight(fmt, SHAPE, spans) for fmt in formats)


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
    """As TransformerEngine does, whose next forward pass makes them; the older name is the same call."""
    here = Casting(cases(1), columnwise=True)
    transposes = [one._transpose.data_ptr() for one in here.tensors[:3]]
    own = [one.clone() for one in buffers(here.tensors[5]).values()]
    masters, starts = here.masters()
    integration().cast_master_weights_to_fp8(here.tensors, masters, starts, None)
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
    here = Casting(cases(1))
    here.cast()
    import transformer_engine.pytorch.utils as theirs

    with mock.patch.object(theirs, "is_non_tn_fp8_gemm_supported", return_value=True):
        integration().post_all_gather_processing(here.tensors)
    assert [one._transpose for one in here.tensors[:3]] == [None] * 3
    assert all(one._columnwise_data is not None for one in here.tensors[3:7])


@pytest.mark.parametrize("offset", [0, 3])
def test_one_all_reduce_a_call(ranks: Ranks, offset: int) -> None:
    """All formats together, masters in new tensors at every call; only the first call of a list, which builds a plan, asks more."""
    for first, *later, processing in ranks(2)(casting.count_collectives, cases(2, offset)):
        assert first.pop("c10d.allreduce_") >= 1
        assert all("gather" in name for name in first)
        assert later == [{"c10d.allreduce_": 1}] * 2
        assert processing == {}


@pytest.mark.usefixtures("te")
def test_raw_data_of_tiles_moves_for_both_directions() -> None:
    (case,) = cases(1, formats=(TILES,))
    here = Casting((case,))
    (weight,) = here.tensors
    here.cast()
    before, old = bytes_of(weight), buffers(weight)["rowwise_data"]
    integration().replace_raw_data(weight, torch.zeros_like(old))
    casts.assert_same_bytes(bytes_of(weight), before)
    assert weight._columnwise_data is weight._rowwise_data is not old


@pytest.mark.usefixtures("te")
def test_dropped_copies_are_not_kept_alive() -> None:
    here = Casting(cases(1, formats=("fp8_block", "nvfp4")))
    here.cast(manual_post_all_gather_processing=True)
    integration().post_all_gather_processing(here.tensors)
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
    (case,) = cases(1, formats=(TILES,))
    here = Casting((case,), columnwise=columnwise)
    (weight,) = here.tensors
    for step in range(2):
        here.cast(step, manual_post_all_gather_processing=True)
        integration().post_all_gather_processing(here.tensors)
        casts.assert_same_bytes(bytes_of(weight), tensors.expected(case, step=step))
        assert weight._columnwise_data.data_ptr() == weight._rowwise_data.data_ptr()
        rows, columns = tensors.dequantized(weight, False), tensors.dequantized(weight, True)
        assert (
            torch.equal(rows, columns)
            and 0 < (rows - case.master(step)).abs().max() < case.master(step).abs().max() / 14
        )
        weight.update_usage(rowwise_usage=True, columnwise_usage=False)
        integration().post_all_gather_processing(here.tensors)
        casts.assert_same_bytes(bytes_of(weight), tensors.expected(case, step=step))
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
    before, after = cases(1, formats=(without, with_it))
    here = Casting((before,), columnwise=True)
    (weight,) = here.tensors
    for step, (case, is_set) in enumerate([(before, False), (after, True), (after, True)]):
        setattr(weight._quantizer, option, is_set)
        here.cast(step, manual_post_all_gather_processing=True)
        integration().post_all_gather_processing(here.tensors)
        wanted = tensors.expected(case, step=step)
        casts.assert_same_bytes(bytes_of(weight), {name: wanted[name] for name in wanted if name != "amax"})


@pytest.mark.usefixtures("te")
def test_raw_data_of_another_shape_and_of_mxfp8() -> None:
    here = Casting(cases(1, formats=("fp8_block", "mxfp8")))
    with pytest.raises(
        ValueError, match=r"new raw data is torch.uint8 \(3,\) on cpu, torch.uint8 \(64, 96\) on cpu is needed"
    ):
        integration().replace_raw_data(here.tensors[0], torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(NotImplementedError, match="codes by rows and by columns"):
        integration().replace_raw_data(here.tensors[1], torch.zeros(SHAPE, dtype=torch.uint8))


def test_delayed_scaling_is_left_to_the_host(ranks: Ranks) -> None:
    """The amax grows, on every rank to the largest of any, its history and the scale stay; codes are of the scale there was."""
    (case,) = cases(2, formats=("fp8_delayed",))
    amax = float(case.master().bfloat16().abs().max())
    for before, expected in (((0.0, 0.0), amax), ((0.25, 300.0), 300.0)):
        for history, scale, found in ranks(2)(casting.grow_amax, (case,), before):
            around = np.full((4, 3), -1.0, np.float32)
            around[0, 1] = expected
            assert np.array_equal(history, around)
            assert scale == 4.0
            wanted = sharded.expected(case, scale=4.0)
            casts.assert_same_bytes(found, {name: wanted[name] for name in ("rowwise_data", "rowwise_scale_inv")})


@pytest.mark.usefixtures("te")
def test_shards_may_be_tensors_of_transformer_engine() -> None:
    """A Float8Tensor, an MXFP8Tensor with both directions, an IdentityTensor."""
    formats = ("fp8_current", "mxfp8", "identity")
    here, shards = Casting(cases(1, formats=formats)), Casting(cases(1, formats=formats))
    here.cast(0, shards.tensors)
    for case, shard in zip(here.cases, shards.tensors, strict=True):
        expected, found = sharded.expected(case), bytes_of(shard)
        names = [name for name in ("rowwise_data", "columnwise_data") if name in found]
        casts.assert_same_bytes(found, {name: expected[name] for name in names}, str(case))
    here, shards = Casting(cases(1, formats=(TILES,))), Casting(cases(1, formats=(TILES,)))
    with pytest.raises(TypeError, match=r"its shard is a MXFP8Tensor of tiles, .*: pass its codes only"):
        here.cast(0, shards.tensors)


@pytest.mark.usefixtures("te")
def test_the_high_precision_init_value_is_cleared() -> None:
    here, cleared = Casting(cases(1, formats=("fp8_current",))), []
    here.tensors[0].clear_high_precision_init_val = lambda: cleared.append(True)
    here.cast()
    assert cleared == [True]


@pytest.mark.usefixtures("te")
def test_redirected_names_lead_here_and_back() -> None:
    """For who looks up inside, and through whatever raises."""
    import transformer_engine.pytorch.tensor as classes
    import transformer_engine.pytorch.tensor.utils as theirs

    def names() -> list[Any]:
        return [vars(classes).copy(), vars(theirs).copy()]

    before, here = names(), Casting(cases(1, formats=("nvfp4",)))

    def call_and_raise() -> None:
        with integration().redirect():
            theirs.quantize_master_weights(here.tensors, *here.masters(), None, manual_post_all_gather_processing=True)
            theirs.post_all_gather_processing(here.tensors)
            assert classes.cast_master_weights_to_fp8 is integration().cast_master_weights_to_fp8
            assert classes.replace_raw_data is theirs.replace_raw_data is integration().replace_raw_data
            raise KeyError

    with pytest.raises(KeyError):
        call_and_raise()
    casts.assert_same_bytes(bytes_of(here.tensors[0]), sharded.expected(here.cases[0]))
    assert names() == before
