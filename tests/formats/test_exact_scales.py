"""nvfp4:exact_in_fp8: what its scales allow, counted, and what a decoder makes of them."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts, strategies
from tests.formats import model
from zerocast import get_format
from zerocast.backends.reference.scales import amax_of_stored, decode_scales, stored_amax, stored_scales

EXACT = "nvfp4:exact_in_fp8"
E4M3 = {Fraction(value) for value in model.VALUES["e4m3"]}
CODES = [Fraction(value) for value in model.VALUES["e2m1"]]
FLT_MAX = torch.finfo(torch.float32).max
BF16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()  # all that are positive and finite


def is_exact(scale: Fraction) -> bool:
    return all(code * scale in E4M3 for code in CODES)


def test_every_product_is_an_e4m3_number() -> None:
    """36 scales give 288 products. An eighth brings the largest, 384 * 6, to 288."""
    assert len(model.EXACT_SCALES) == 36
    assert all(is_exact(Fraction(scale) / 8) for scale in model.EXACT_SCALES)
    # No other scale of E4M3 from the smallest one on would do, whatever power of two it is divided by.
    others = E4M3 - {Fraction(scale) for scale in model.EXACT_SCALES}
    between = [scale for scale in others if Fraction(1, 8) <= scale <= 384]
    assert not any(is_exact(scale / 2**shift) for scale in between for shift in range(-4, 9))


def test_a_cast_stores_no_other_scales() -> None:
    """Any amax of a tile, under some amaxes of the tensor, gives one of the 36 scales. A tile of zeros gives 0."""
    for g in (1e-38, 1.0, 3.4375, 1e30):
        tiles = BF16[g >= BF16]
        amax = stored_amax(get_format(EXACT), torch.tensor([g]))
        stored = stored_scales(get_format(EXACT), tiles, amax, None)
        assert set(stored.tolist()) <= set(model.EXACT_CODES.tolist())
        assert stored_scales(get_format(EXACT), torch.zeros(1), amax, None).item() == 0


def test_the_tensor_scale_has_eight_bits() -> None:
    """The stored amax is 2688 times a bf16 number for every bf16 amax, and the largest tile comes near 384."""
    fmt = get_format(EXACT)
    amax = stored_amax(fmt, BF16)
    scale = amax.double() / 2688
    held = amax < FLT_MAX  # beyond, the amax saturates
    assert torch.equal(scale.bfloat16().double()[held], scale[held])
    ordinary = (BF16 > 2304 * 2.0**-126) & held
    v = BF16.double() * 2688 / amax.double() / 6
    assert v[ordinary].min() > 382.4 and v[ordinary].max() < 385.6
    assert (stored_scales(fmt, BF16, amax, None) == 0x7C)[ordinary].all()


def test_a_stored_amax_gives_itself() -> None:
    """Verifying a weight by what another of its group has stored is exact for zero, Inf and every bf16 amax."""
    fmt = get_format(EXACT)
    stored = stored_amax(fmt, torch.cat([torch.tensor([0.0, FLT_MAX, float("inf")]), BF16]))
    assert torch.equal(stored_amax(fmt, amax_of_stored(fmt, stored)), stored)


def test_the_decode_is_scale_times_tensor_scale() -> None:
    """`(f32(sd) * a) * f32(1/2688)` is `sd * t` to the bit for all 36 scales and every bf16 amax below where f32 overflows."""
    fmt = get_format(EXACT)
    amax = stored_amax(fmt, BF16)
    codes, scales = torch.from_numpy(model.EXACT_CODES), torch.tensor(model.EXACT_SCALES, dtype=torch.float64)
    held = amax.double() * 384 < FLT_MAX
    found = decode_scales(fmt, codes[:, None].expand(-1, len(amax)), amax)[:, held]
    tensor_scale = (amax.double() / 2688)[held]
    assert torch.equal(found.double(), scales[:, None] * tensor_scale)


@pytest.mark.long_interpreted
def test_hostile_tiles(backend_anywhere: str) -> None:
    """Backends cast tiles of zeros, subnormals, one huge element or Inf, and tiles below the floor, like the model."""

    @strategies.examples(backend_anywhere)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
        kinds = data.draw(st.lists(st.sampled_from(["zero", "subnormal", "floor", "normal"]), min_size=6, max_size=6))
        factors = {"zero": 0.0, "subnormal": 1e-39, "floor": 2.0**-13, "normal": 1.0}
        tiles = [np.float32(factors[kind]) * rng.standard_normal((16, 16), np.float32) for kind in kinds]
        extreme = data.draw(st.sampled_from([None, 1e-45, 1e20, 3e38, 3.4028235e38, np.inf, -np.inf, np.nan]))
        if extreme is not None:
            tiles[data.draw(st.integers(0, 5))][3, 5] = extreme
        x = np.concatenate([np.concatenate(tiles[:3], 1), np.concatenate(tiles[3:], 1)])
        nominal = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
        expected = model.Cast("nvfp4", nominal, model.Settings(exact_in_fp8=True)).of(x)
        weight = casts.cast_whole(EXACT, torch.from_numpy(x), getattr(torch, nominal), backend_anywhere)
        wanted = {key: np.ascontiguousarray(value).reshape(-1).view(np.uint8) for key, value in expected.items()}
        casts.assert_same_bytes(casts.bytes_of(weight), wanted, f"{kinds} {extreme} {nominal}")

    check()
