"""Moments in 8 bits: codes and scales of docs/formats/moments_8bit.md by the reference, and what they do to updates."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from zerocast.backends.reference import adam

# From the smallest scale to the largest one, by exponent, with the ends of each binade and mantissas between.
MANTISSAS = (0, 1, 2, 0x155555, 0x2AAAAA, 0x400000, 0x5A827A, 0x7FFFFE, 0x7FFFFF)
SCALES = torch.tensor([(e << 23) | m for e in range(27, 255) for m in MANTISSAS], dtype=torch.int32).view(torch.float32)


def quantized(m: Tensor, v: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes of m, codes of v, both scales) of groups [groups, n]."""
    largest = torch.stack([torch.where(x > 0, x, 0).amax(1) for x in (m.abs(), v)])
    scale = adam.group_scale(largest)
    random = torch.zeros_like(v) if random is None else random
    return adam.quantize_first(m, scale[0]), adam.quantize_second(v, scale[1], random), scale


def test_values_are_rounded_once() -> None:
    first = adam.first_values(torch.device("cpu")).tolist()
    assert first == [float(np.float32(np.float64(c) / (254 - c))) for c in range(128)]
    second = adam.second_values(torch.device("cpu")).tolist()
    for code in range(1, 256):
        exact, value = Fraction(code + 4, 259) ** 4, np.float32(second[code])
        for neighbour in (np.nextafter(value, np.float32(0)), np.nextafter(value, np.float32(2))):
            assert abs(Fraction(float(value)) - exact) <= abs(Fraction(float(neighbour)) - exact)
    assert second[0] == 0
    assert second[255] == first[127] == 1


@pytest.mark.parametrize("random", [0.0, 0.5, 1 - 2.0**-24])
def test_a_value_that_is_a_code_stays_it(random: float) -> None:
    """Every code is tried, at scales of every exponent from 2**-100 on."""
    # A scale is the largest value of its group, so each group has the last code; zeros keep scale 0.
    scales = torch.cat([SCALES, torch.zeros(1)]).unsqueeze(1)
    first, second = torch.arange(-127, 128, dtype=torch.int8), torch.arange(256).to(torch.uint8)
    m = adam.dequantize_first(first.expand(len(scales), -1), scales)
    v = adam.dequantize_second(second.expand(len(scales), -1), scales)
    m_codes, v_codes, found = quantized(m, v, torch.full_like(v, random))
    assert torch.equal(found, scales.view(1, -1).expand(2, -1))
    assert (m_codes[:-1] == first).all()
    assert (v_codes[:-1] == second).all()
    assert not m_codes[-1].any()
    assert not v_codes[-1].any()


def test_small_groups_stay_what_they_are() -> None:
    """Below 2**-100 the scale is 2**-100; what was kept once is kept again, and no positive v is lost."""
    size = 2.0 ** -torch.arange(90, 150, dtype=torch.float64).float().unsqueeze(1).repeat(1, 8)
    m_codes, v_codes, scale = quantized(size, size)
    assert (v_codes > 0).all()
    assert scale.min() == 2.0**-100
    columns = scale.unsqueeze(2)
    m, v = adam.dequantize_first(m_codes, columns[0]), adam.dequantize_second(v_codes, columns[1])
    again = quantized(m, v)
    assert torch.equal(again[1], v_codes)
    assert torch.equal(again[2][1], scale[1])
    kept = m_codes[:, 0] != 0
    assert torch.equal(again[0], m_codes)
    assert torch.equal(again[2][0][kept], scale[0][kept])


def test_rounding() -> None:
    """m is rounded to the nearest value, v so that its root is right on average."""
    m = torch.rand(64, 128, generator=torch.Generator().manual_seed(1)) - 0.5
    codes, _, scale = quantized(m, m.square())
    values = adam.dequantize_first(torch.arange(-127, 128, dtype=torch.int8), scale[0].view(-1, 1, 1))
    nearest = (values - m.unsqueeze(2)).abs().amin(2)
    assert torch.equal((adam.dequantize_first(codes, scale[0].unsqueeze(1)) - m).abs(), nearest)
    # One group a step.
    v = torch.full((4000, 128), 0.3)
    v[:, 0] = 1.0
    random = torch.stack([adam.random_numbers(7, step, torch.arange(128)) for step in range(len(v))])
    _, code, scale = quantized(v, v, random)
    mean = adam.dequantize_second(code, scale[1].unsqueeze(1)).double().sqrt().mean(0)
    assert mean[0] == 1
    assert abs(float(mean[1:].mean()) - math.sqrt(0.3)) < 1e-4
    assert (mean[1:] - math.sqrt(0.3)).abs().max() < 1e-3


def test_not_finite_and_short() -> None:
    """NaN counts for nothing and becomes 0, Inf the largest number; a group may be one element."""
    m = torch.tensor([[1.0, math.nan, -2.0, 0.0], [math.inf, 1.0, -math.inf, math.nan]])
    m_codes, v_codes, scale = quantized(m, m.abs())
    assert scale[:, 0].tolist() == [2.0, 2.0]
    assert scale[:, 1].tolist() == [torch.finfo(torch.float32).max] * 2
    assert m_codes.tolist() == [[85, 0, -127, 0], [127, 0, -127, 0]]
    assert v_codes[1].tolist() == [255, 1, 255, 0]
    single = quantized(torch.tensor([[-3.0]]), torch.tensor([[9.0]]))
    assert (single[0].item(), single[1].item(), single[2].tolist()) == (-127, 255, [[3.0], [9.0]])


def test_random_numbers_are_those_of_the_definition() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    elements = [0, 1, 127, 2**31, 2**32 - 1, 2**32, 5 * 2**32 + 3]
    for key, step in ((0, 0), (2**32 - 1, 1), (12345, 2**31 + 5)):
        of_step = mix((key + step * 0x9E3779B9) % 2**32)
        expected = [mix((mix((of_step + (e >> 32)) % 2**32) + e) % 2**32) >> 8 for e in elements]
        found = adam.random_numbers(key, step, torch.tensor(elements))
        assert (found * 2**24).tolist() == expected
    many = adam.random_numbers(3, 9, torch.arange(100_000))
    assert abs(float(many.double().mean()) - 0.5) < 0.005


def test_updates_after_a_spike() -> None:
    """One gradient of 1e6 in a group: the other elements' updates stay below three times those of FP32 moments."""
    generator = torch.Generator().manual_seed(6)
    sizes = (0.7 * torch.randn(8, 128, generator=generator)).exp()
    m, v, kept_m, kept_v = (torch.zeros(8, 128) for _ in range(4))
    element, worst = torch.arange(8 * 128), 0.0
    for step in range(1, 501):
        g = sizes * torch.randn(8, 128, generator=generator)
        if step == 150:
            g[:, 0] = 1e6
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        fresh_m, fresh_v = 0.9 * kept_m + 0.1 * g, 0.999 * kept_v + 0.001 * g * g
        update, theirs = fresh_m / (fresh_v.sqrt() + 1e-8), m / (v.sqrt() + 1e-8)
        if step >= 150:
            worst = max(worst, float((update.abs() / theirs.abs().clamp(min=0.1)).max()))
        codes = quantized(fresh_m, fresh_v, adam.random_numbers(1, step, element).view(8, 128))
        kept_m = adam.dequantize_first(codes[0], codes[2][0].unsqueeze(1))
        kept_v = adam.dequantize_second(codes[1], codes[2][1].unsqueeze(1))
    assert worst < 3


@pytest.mark.parametrize("columns", [128, 200, 40])
def test_momentum_of_rows(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """The codes of groups of rows, a part of the rows at a time; those of an AdamW's first moments of the same matrix."""
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(7, columns, generator=generator) * torch.randn(7, columns, generator=generator).exp()
    momentum[2] = 0
    groups = -(-columns // 128)
    codes, scales = torch.zeros(7, columns, dtype=torch.int8), torch.zeros(7, groups)
    monkeypatch.setattr(adam, "ELEMENTS_AT_ONCE", 3 * columns)
    adam.quantize_rows(momentum, codes, scales)
    whole = [0, 0, 7 * columns, 0, 0, columns, 0, 7 * groups, -1, -1, 5]
    state = (
        torch.zeros(7 * columns, dtype=torch.int8),
        torch.zeros(7 * columns, dtype=torch.uint8),
        torch.zeros(2, 7 * groups),
    )
    flat = momentum.view(-1)
    adam.quantize_moments(flat, flat, *state, whole, 1, torch.zeros(2, 0), finishes=False)
    assert torch.equal(codes.view(-1), state[0]) and torch.equal(scales.view(-1), state[2][0])
    kept = adam.dequantize_rows(codes, scales)
    assert not kept[2].any() and torch.equal(kept.view(-1), adam.dequantize_moments(*state, whole)[0])
    again, of_again = torch.zeros_like(codes), torch.zeros_like(scales)
    adam.quantize_rows(kept, again, of_again)
    assert torch.equal(again, codes) and torch.equal(of_again, scales)
