"""The other public calls with arguments of every kind: a result, or an error that says something."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import zerocast
from tests.fuzz.call_limits import LENGTHS, fuzz, refuses
from zerocast import QuantizedWeight, Recipe, ZeroAdamW, ZeroConfig, get_format
from zerocast.footprint.model_files import listed
from zerocast.formats import format_names
from zerocast.quantize import cast_whole

NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.text(max_size=5))
OPTIONS = ("element", "margin", "amax_history_len", "amax_compute_algo", "power_of_2_scale", "amax_epsilon", "x")
TEXT = st.one_of(
    st.sampled_from(format_names()),
    st.text(max_size=12),
    st.builds(lambda n, o, v: f"{n}:{o}={v}", st.sampled_from(format_names()), st.sampled_from(OPTIONS), NUMBERS),
)
FORMAT = st.tuples(TEXT, st.dictionaries(st.sampled_from(OPTIONS), NUMBERS, max_size=2))
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.uint8, None)
SHAPES = st.lists(st.sampled_from((0, 1, 2, 16, 31, 32, 48, 128, 129, -1)), max_size=4)


def is_small(fmt: Any) -> bool:
    return fmt.amax_history_len < 2**20


def formats(drawn: tuple[str, dict[str, Any]]) -> None:
    name, options = drawn
    if refuses(lambda: get_format(name, **options)) is None:
        fmt = get_format(name, **options)
        assert get_format(str(fmt)) == fmt


@pytest.mark.parametrize("seconds", LENGTHS)
def test_formats(seconds: float) -> None:
    fuzz(seconds / 2, FORMAT, formats)


def weights(drawn: tuple[str, list[Any], Any, bool]) -> None:
    name, shape, dtype, inverse = drawn

    def make() -> None:
        fmt = get_format(name)
        if not is_small(fmt):
            return
        weight = QuantizedWeight.empty(shape, fmt, dtype)
        assert tuple(weight.shape) == tuple(shape)
        cast_whole(weight, torch.randn(shape))
        weight.dequantize()
        x = torch.randn(3, shape[-1], dtype=dtype)
        nn.functional.linear(x, weight) if inverse else torch.matmul(x, weight.t())

    refuses(make)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_weights(seconds: float) -> None:
    fuzz(seconds, st.tuples(TEXT, SHAPES, st.sampled_from(DTYPES), st.booleans()), weights)


def optimizers(drawn: dict[str, Any]) -> None:
    """Try options of every kind. An optimizer that takes them makes a step, and a refusal leaves the parameters usable."""
    drawn = dict(drawn)
    model = nn.Sequential(nn.Linear(16, 32, bias=drawn.pop("bias")), nn.Linear(32, 16))
    recipe, config = drawn.pop("recipe"), drawn.pop("config")

    def train() -> None:
        zerocast.quantize_(model, Recipe(recipe), drawn.pop("dtype"))
        optimizer = ZeroAdamW(model.named_parameters(), config=ZeroConfig(**config), **drawn)
        model(torch.ones(2, 16, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
        assert zerocast.verify(optimizer).differences == ()

    refuses(train)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_optimizers(seconds: float) -> None:
    number = st.one_of(
        st.sampled_from((1e-3, 0.9)), st.sampled_from((0.0, 1.0, -1.0, float("nan"), float("inf"), "x", None))
    )
    config = {
        "bucket_size": st.sampled_from((1, 100, 0, -5, 2**40, 1.5, None)),
        "deterministic": st.booleans(),
        "grad_dtype": st.sampled_from((None, torch.float32, torch.bfloat16, torch.int32)),
        "grad_wire": st.sampled_from((None, "fp8_1x128", "fp8", 8)),
        "moment_dtype": st.sampled_from((torch.float32, torch.bfloat16, "8bit", torch.float16, None)),
        "verify_every": st.sampled_from((None, 1, 0, -1)),
    }
    cases = st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "dtype": st.sampled_from((None, torch.bfloat16, torch.float64)),
            "recipe": st.dictionaries(st.sampled_from(("*.weight", "0.*", "1.weight", "[", "")), TEXT, max_size=2),
            "config": st.fixed_dictionaries({}, optional=config),
        },
        optional={
            "lr": number,
            "eps": number,
            "weight_decay": number,
            "betas": st.tuples(number, number),
            "stage": st.sampled_from((1, 2, 3, "2", None)),
        },
    )
    fuzz(seconds * 2, cases, optimizers)


JSON = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)
FIELDS = ("name", "shape", "count", "quantized", "parameters")


def lists(entries: Any) -> None:
    try:
        listed({"parameters": entries})
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # `read_model` says what they mean
        assert str(error)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_lists_of_parameters(seconds: float) -> None:
    small = st.one_of(st.integers(-2, 40), JSON.filter(lambda value: not isinstance(value, int) or abs(value) < 40))
    fuzz(seconds / 2, st.one_of(JSON, st.lists(st.dictionaries(st.sampled_from(FIELDS), small))), lists)
