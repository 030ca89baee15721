"""TransformerEngine's names, arguments, defaults and habits; on its own tensor classes."""

import inspect
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts, sharded
from tests.sharded import POISON, Weight
from tests.strategies import models
from tests.transformer_engine import casting, tensors
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import integration, needs_te
from tests.transformer_engine.tensors import HELD, buffers, bytes_of
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


@pytest.mark.usefixtures("te")
def test_copies_are_written_where_they_lie() -> None:
    """And made where there are none, one tensor or a list, plain tensors passed over."""
    kept, made = Casting(cases(1), columnwise=True), Casting(cases(1))
    places = [[b.data_ptr() for b in buffers(one).values()] for one in kept.tensors]
    for here in (kept, made):
        here.cast(manual_post_all_gather_processing=True)
    integration().post_all_gather_processing([torch.zeros(3), *kept.tensors])
    assert [[b.data_ptr() for b in buffers(one).values()] for one in kept.tensors] == places
    for one in made.tensors:
        integration().post_all_gather_processing(one)
    for case, *both in zip(kept.cases, kept.tensors, made.tensors, strict=True):
        expected = sharded.expected(case)
        for one in both:
            found = bytes_of(one)
            casts.assert_same_bytes(found, {name: expected[name] for name in found if name in expected}, str(case))
            assert getattr(one, "_transpose_invalid", False) is False
        assert [b.shape for b in buffers(both[0]).values()] == [b.shape for b in buffers(both[1]).values()]
    assert torch.equal(made.tensors[-2]._amax_columnwise, made.tensors[-2]._amax_rowwise)


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
@pytest.mark.parametrize("fmt", [fmt for fmt in (*FORMATS, TILES, "identity") if fmt != "mxfp8"])
def test_raw_data_moves_and_is_cast_where_it_is(fmt: str) -> None:
    (case,) = cases(1, formats=(fmt,))
    here = Casting((case,))
    (weight,) = here.tensors
    here.cast()
    before, old = bytes_of(weight), buffers(weight)["rowwise_data"]
    flat = torch.zeros(old.numel() + 64, dtype=old.dtype)
    integration().replace_raw_data(weight, flat[32:-32].view(old.shape))
    casts.assert_same_bytes(bytes_of(weight), before)
    assert fmt != TILES or weight._columnwise_data is weight._rowwise_data
    here.cast(1)
    expected = sharded.expected(case, step=1)
    casts.assert_same_bytes({"rowwise_data": casts.raw(flat[32:-32])}, {"rowwise_data": expected["rowwise_data"]}, fmt)
    casts.assert_same_bytes(
        {"rowwise_data": casts.raw(old)}, {"rowwise_data": before["rowwise_data"]}, "the old storage"
    )
    assert not flat[:32].any() and not flat[-32:].any()


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


@given(data=st.data())
def test_shards_in_storage_of_their_own(ranks: Ranks, data: st.DataObject) -> None:
    """Nothing but the shard's codes is written: not the bytes around it, not the weight's own codes."""
    drawn = data.draw(models(2, HELD))
    for rank, found in enumerate(ranks(2)(casting.cast_into_shards, drawn)):
        for case, (first, storages, before, after) in zip(drawn, found, strict=True):
            expected = sharded.expected(case)
            for name, storage in zip(("rowwise_data", "columnwise_data"), storages, strict=False):
                part = {name: storage[8:-8]}
                casts.assert_same_bytes(
                    part, {name: expected[name][first : first + storage.size - 16]}, f"{rank}: {case}"
                )
                assert (storage[:8] == POISON).all() and (storage[-8:] == POISON).all()
                casts.assert_same_bytes(after, {name: before[name]}, f"{rank}: the weight of {case}")


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
    with pytest.raises(TypeError, match=r"its shard is a MXFP8Tensor of tiles, .*: give its codes alone"):
        here.cast(0, shards.tensors)


@pytest.mark.usefixtures("te")
def test_the_high_precision_init_value_is_cleared() -> None:
    here, cleared = Casting(cases(1, formats=("fp8_current",))), []
    here.tensors[0].clear_high_precision_init_val = lambda: cleared.append(True)
    here.cast()
    assert cleared == [True]


@pytest.mark.usefixtures("te")
def test_nothing_is_kept_alive() -> None:
    """A model that goes takes its plans, twins and masters along; `release` does that for one that stays."""
    import gc
    import weakref

    here = Casting(cases(1, formats=("fp8_block", "nvfp4")))  # per-tensor FP8 keeps its transposes, marked invalid
    here.cast(manual_post_all_gather_processing=True)
    integration().post_all_gather_processing(here.tensors)
    copies = [weakref.ref(one._columnwise_data.untyped_storage()) for one in here.tensors]
    assert all(copy() is not None for copy in copies)
    here.cast()
    assert not any(copy() is not None for copy in copies)  # dropped by default, and nobody else holds them
    here = Casting(cases(1))
    masters, starts = here.masters()
    integration().quantize_master_weights(here.tensors, masters, starts, None)
    codes = [weakref.ref(b) for one in here.tensors for b in buffers(one).values()]
    held: list[Any] = [weakref.ref(m) for m in masters if m is not None]
    masters.clear()
    assert all(master() is not None for master in held)
    integration().release(here.tensors)
    assert not any(master() is not None for master in held)
    here.cast()
    del here
    gc.collect()
    assert not any(buffer() is not None for buffer in codes)


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
