"""Encoders, decoders and scale rules of every backend, through its own stages, against the numpy model."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import devices
from tests.backends import stages, test_adam_8bit
from tests.casts import F32, bit_patterns, matrix
from tests.formats import model
from tests.strategies import is_interpreted
from zerocast import get_format
from zerocast.backends import extension

ELEMENTS = ("e4m3", "e5m2", "e2m1", "int4")
ALL_BF16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
BF16_AMAXES = ALL_BF16[: 0x7F80 + 1]  # not negative, Inf included


def around(x: NDArray[np.floating]) -> F32:
    """The values with their two neighbours, of both signs."""
    near = x.astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))])
    return np.concatenate([near, -near])


def assert_same(found: Tensor, expected: NDArray[np.generic], x: F32) -> None:
    array = found.numpy().view(expected.dtype)
    (wrong,) = np.nonzero(array != expected)
    some = [f"{x[i]!r}: {array[i]}, not {expected[i]}" for i in wrong[:5]]
    assert not some, f"{len(wrong)} of {len(x)} differ: {some}"


@pytest.mark.parametrize("element", ELEMENTS)
def test_all_bf16_inputs(any_backend: str, element: str) -> None:
    found = stages.encode(any_backend, element, torch.from_numpy(ALL_BF16))
    assert_same(found, model.encode(element, ALL_BF16), ALL_BF16)


@pytest.mark.long_interpreted
@pytest.mark.parametrize("element", ELEMENTS)
def test_inputs_by_bit_pattern(any_backend: str, element: str, seed: int) -> None:
    x = bit_patterns(200_003, seed)
    assert_same(stages.encode(any_backend, element, torch.from_numpy(x)), model.encode(element, x), x)


@pytest.mark.parametrize("element", ELEMENTS)
def test_ties_and_their_neighbours(any_backend: str, element: str) -> None:
    values = model.VALUES[element]
    x = around(np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 1.0625, 1e30, np.inf]]))
    assert_same(stages.encode(any_backend, element, torch.from_numpy(x)), model.encode(element, x), x)


@pytest.mark.parametrize("element", ELEMENTS)
def test_decoders(any_backend: str, element: str) -> None:
    codes = np.arange(2 ** (4 if element in stages.OF_4_BITS else 8), dtype=np.uint8)
    infinity = {"e5m2": [np.inf]}.get(element, [])
    positive = np.concatenate([model.VALUES[element], infinity])
    positive = np.append(positive, np.full(len(codes) // 2 - len(positive), np.nan))
    expected = np.concatenate([positive, -positive]).astype(np.float32)
    if element == "int4":
        expected = np.arange(-8, 8, dtype=np.float32)
    found = stages.decode(any_backend, element, torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found)[~np.isnan(expected)], np.signbit(expected)[~np.isnan(expected)])


@pytest.mark.parametrize("nominal", [torch.bfloat16, torch.float16])
def test_rounding_to_nominal(any_backend: str, nominal: torch.dtype, seed: int) -> None:
    name = str(nominal).removeprefix("torch.")
    halfway = (ALL_BF16.view(np.uint32) | 0x8000).view(np.float32)
    fp16 = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    near = around((fp16[1:] + fp16[:-1]) / 2)
    x = np.concatenate([ALL_BF16, halfway, near, bit_patterns(100_000, seed)])
    assert_same(stages.to_nominal(any_backend, nominal, torch.from_numpy(x)), model.to_16_bits(x, name), x)


def amaxes(seed: int) -> F32:
    """Every amax that a bf16 weight can have, and others by bit pattern."""
    drawn = np.abs(bit_patterns(20_000, seed))
    return np.concatenate([BF16_AMAXES, drawn[~np.isnan(drawn)]])


def test_e8m0_of_amax(any_backend: str, seed: int) -> None:
    powers = 448 * 2.0 ** np.arange(-130, 120)
    near = around(powers)
    subnormal = np.arange(2000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([amaxes(seed), near[near >= 0], subnormal])
    assert_same(stages.scales(any_backend, "mxfp8", torch.from_numpy(x))[0], model.e8m0(x), x)


def test_e8m0_is_the_exact_ceiling_for_bf16_amaxes() -> None:
    """docs/formats/mxfp8.md: for every bf16 amax the f32 product loses nothing."""
    finite = BF16_AMAXES[1:-1].astype(np.float64)
    mantissa, exponent = np.frexp(finite / 7)  # 448 is 7 * 2**6
    exact = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent) - 6 + 127, 0, 254)
    np.testing.assert_array_equal(model.e8m0(BF16_AMAXES[1:-1]), exact)


def test_bf16_scale_of_amax(any_backend: str, seed: int) -> None:
    x = np.concatenate([amaxes(seed), np.arange(2000, dtype=np.uint32).view(np.float32)])
    stored, _ = stages.scales(any_backend, "int4", torch.from_numpy(x))
    assert_same(stored.view(torch.int16), model.to_16_bits(model.bf16_scale(x), "bfloat16"), x)


def test_int4_keeps_the_scales_of_bf16_weights() -> None:
    """docs/formats/int4.md: the product with 1/7 loses nothing, and weights that were decoded from a cast have its scales."""
    normal = BF16_AMAXES[2**10 : -2]
    scale = model.bf16_scale(normal)
    np.testing.assert_array_equal(
        scale, model.round_nominal((normal.astype(np.float64) / 7).astype(np.float32), "bfloat16")
    )
    np.testing.assert_array_equal(model.bf16_scale(model.round_nominal(7 * scale, "bfloat16")), scale)


def test_int4_of_decoded_weights_is_what_they_were_decoded_from(seed: int) -> None:
    cast = model.Cast("int4", "bfloat16")
    once = cast.of(matrix("wide", 96, 1024, seed))
    again = cast.of(cast.dequantized(once, columnwise=False))
    assert {name: data.tobytes() for name, data in again.items()} == {n: data.tobytes() for n, data in once.items()}


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-37, 0.25])
def test_fp32_scale_of_amax(any_backend: str, element: str, pow2: bool, epsilon: float, seed: int) -> None:
    x = amaxes(seed)
    fmt = f"fp8_block:amax_epsilon={epsilon},element={element},power_of_2_scale={pow2}"
    stored, _ = stages.scales(any_backend, fmt, torch.from_numpy(x))
    expected = np.float32(1) / model.scale_from_amax(x, model.MAX[element], pow2, epsilon)
    assert_same(stored, expected, x)


@pytest.mark.long_interpreted
def test_two_level_scales(any_backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = 4 if is_interpreted(any_backend) else 40
    limits = np.float32([1e-45, 4, 3e38, np.inf])
    for g in (*np.abs(bit_patterns(drawn, seed)), *limits):
        if np.isnan(g):
            continue
        with np.errstate(invalid="ignore"):
            blocks = np.append((g * rng.random(999, np.float32)).astype(np.float32), g)
        blocks = np.where(np.isnan(blocks), np.float32(1), blocks)
        stored, amax = stages.scales(any_backend, "nvfp4", torch.from_numpy(blocks))
        assert amax.item() == g
        assert_same(stored, model.nvfp4_scales(blocks, g)[0], blocks)
        stored, amax = stages.scales(any_backend, "nvfp4:exact_in_fp8", torch.from_numpy(blocks))
        assert amax.item() == model.exact_amax(g)
        assert_same(stored, model.nvfp4_scales(blocks, model.exact_amax(g), exact=True)[0], blocks)


TINY = np.float32(2.0**-130)  # subnormal, as are its products with codes of 8 bits


def adam_amax() -> Callable[[], Tensor]:
    state = [torch.full((64,), value) for value in (1e-20, 1e-20, 1e-20, 0.0)]
    scalars, one = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.5, 1e-20, 1.0, 1e-8]]), torch.ones(1)
    where = {"rows": 1, "columns": 64, "start": 0, "numel": 64, "master_base": 0, "master_offset": 0, "row_amax": 0}
    rows, group = stages.table(stages.row(**where)), torch.tensor([0])
    given = *([flat] for flat in state), rows, group, scalars, one, torch.zeros(1)

    def run() -> Tensor:
        devices.stage("cpu", "adam_amax")(get_format("fp8_current"), torch.float32, *given, None)
        return torch.stack(state)

    return run


def roll_history() -> Callable[[], Tensor]:
    amax, scale, history = torch.full((1,), float(TINY)), torch.ones(1), torch.zeros(4)
    columns = ("amax_base", "amax_offset", "scale_base", "scale_offset", "history_base", "history_offset")
    rows = stages.table(stages.row(rows=1, columns=1, **dict.fromkeys(columns, 0)))
    fmt = get_format("fp8_delayed", amax_history_len=4)

    def run() -> Tensor:
        devices.stage("cpu", "roll_history")(fmt, rows, [amax], [scale], [history], None)
        return torch.cat((scale, history))

    return run


def dequantize() -> Callable[[], Tensor]:
    codes, values = torch.arange(64, dtype=torch.uint8).view(8, 8), torch.empty(8, 8)
    inputs = codes, torch.full((1,), float(TINY)), torch.ones(1), 8, 8, False, values

    def run() -> Tensor:
        devices.stage("cpu", "dequantize")(get_format("fp8_delayed"), *inputs)
        return values

    return run


def partial_cast() -> Callable[[], Tensor]:
    """To words of bf16, which have subnormals of their own."""
    x = torch.from_numpy(around(np.arange(64, dtype=np.uint32).view(np.float32) * 2**16))
    return lambda: stages.to_nominal("cpu", torch.bfloat16, x)


def compute_scales() -> Callable[[], Tensor]:
    amaxes = torch.full((8,), float(TINY))
    return lambda: stages.scales("cpu", "nvfp4", amaxes)[1]


def adam_8bit() -> Callable[[], Tensor]:
    """With a group that a boundary cuts, whose moments are rounded in a second call."""
    cuts = [[columns // 2] for _, columns in test_adam_8bit.SHAPES]
    grads = [weight * 2.0**-140 for weight in test_adam_8bit.weights(1)]
    shard = test_adam_8bit.Shard([weight * 2.0**-130 for weight in test_adam_8bit.weights(0)], cuts, 0)

    def run() -> Tensor:
        for finishes in (False, True):
            shard.call("cpu", grads, 1, finishes)
        state = shard.master, shard.exp_avg, shard.exp_avg_sq, shard.scales.flatten()
        return torch.cat([one.view(torch.uint8) for one in state])

    return run


# each with inputs that are made before anything is flushed
FLUSHED = {one.__name__: one for one in (adam_amax, adam_8bit, roll_history, dequantize, partial_cast, compute_scales)}


@pytest.fixture
def flush() -> Iterator[Callable[[bool], None]]:
    """Sets what the processor does with subnormals, as a caller may."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush subnormals")
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("stage", FLUSHED)
@pytest.mark.parametrize("level", extension.load().simd_levels())
def test_subnormals_survive_a_caller_that_flushes_them(flush: Callable[[bool], None], level: str, stage: str) -> None:
    """The bits are those without flushing, and the caller goes on to flush."""
    _C = extension.load()
    before = _C.simd_level()
    _C.set_simd_level(level)
    plain, flushing, tiny = FLUSHED[stage](), FLUSHED[stage](), torch.full((1,), 2.0**-126)
    expected = plain()
    try:
        flush(True)
        assert tiny.mul(0.5).item() == 0
        found = flushing()
        assert tiny.mul(0.5).item() == 0, "the caller's setting is gone"
    finally:
        flush(False)
        _C.set_simd_level(before)
    assert torch.equal(found, expected)
