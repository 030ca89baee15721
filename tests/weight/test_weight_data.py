"""Every way by which torch gives a tensor other contents: a QuantizedWeight takes the right bytes or raises, and never neither."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests import casts
from tests.matrices import lcg_matrix
from zerocast.weight.weight import _HANDLERS

SHAPE = (32, 64)
OTHERWISE = {"copy_", "requires_grad_", "detach_"}  # takes bytes, changes none


def cast(seed: int, fmt: str = "nvfp4") -> nn.Parameter:
    """A parameter with a high-precision value, as `quantize_` makes it."""
    value = torch.from_numpy(lcg_matrix(*SHAPE, seed))
    weight = nn.Parameter(casts.cast_whole(fmt, value))
    weight.high_precision_init_val = value
    return weight


@pytest.mark.filterwarnings("ignore:This overload:UserWarning")  # of arguments that torch calls deprecated
def test_every_in_place_method_raises() -> None:
    """Whatever torch has: without arguments that fit it raises for those, with them for what it is."""
    weight, other = cast(0), cast(1)
    before = casts.bytes_of(weight)
    index = torch.zeros(SHAPE, dtype=torch.int64)
    plain, mask = torch.ones(SHAPE, dtype=weight.dtype), torch.ones(SHAPE, dtype=torch.bool)
    arguments: list[tuple[Any, ...]] = [
        (),
        (1.0,),
        (1,),
        (0, 1),
        (mask, 1.0),
        (0, index, plain),
        (0, index[0, :1], 1.0),
    ]
    arguments += [*itertools.product((other, plain)), (other, 0.5), (plain, plain), (other, other)]
    silent: list[str] = []
    names = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
    assert len(names) > 150
    with torch.no_grad():
        for name, given in itertools.product(sorted(set(names) - OTHERWISE), arguments):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                getattr(weight, name)(*given)
                silent.append(name)
    assert not silent
    casts.assert_same_bytes(casts.bytes_of(weight), before)


def test_of_the_operators_that_write_only_copy_is_defined() -> None:
    """The dispatcher asks for each of them by name, so that a new one of torch raises."""
    writing = {op for op in _HANDLERS if any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments)}
    assert writing == {torch.ops.aten.copy_.default}


def test_the_usual_swap_swaps() -> None:
    a, b = cast(0), cast(1)
    first, second = casts.bytes_of(a), casts.bytes_of(b)
    initial = a.high_precision_init_val, b.high_precision_init_val
    a.data, b.data = b.data, a.data
    casts.assert_same_bytes(casts.bytes_of(a), second)
    casts.assert_same_bytes(casts.bytes_of(b), first)
    assert (b.high_precision_init_val is initial[0], a.high_precision_init_val is initial[1]) == (True, True)
    torch.utils.swap_tensors(a, b)
    casts.assert_same_bytes(casts.bytes_of(a), first)
    torch.Tensor.data.__set__(a, b)  # type: ignore[attr-defined]
    casts.assert_same_bytes(casts.bytes_of(a), second)
    x = torch.ones(2, SHAPE[1], dtype=a.dtype)
    assert torch.equal(nn.functional.linear(x, a), nn.functional.linear(x, b))


VALUES: dict[str, torch.Tensor] = {
    "plain tensor": torch.zeros(SHAPE, dtype=torch.bfloat16),
    "other format": casts.example("mxfp8"),
    "other options": casts.example("fp8_current:element=e5m2"),
    "other nominal dtype": casts.example("fp8_current", nominal=torch.float16),
    "other shape": casts.example("fp8_current", SHAPE[::-1]),
}


def load(weight: nn.Parameter, value: torch.Tensor) -> None:
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = weight
    linear.load_state_dict({"weight": value})


@pytest.mark.parametrize("wrong", VALUES)
def test_data_of_another_kind_is_refused(wrong: str) -> None:
    weight, value = cast(0, "fp8_current"), VALUES[wrong]
    before = casts.bytes_of(weight)
    for call in (
        lambda: setattr(weight, "data", value),
        lambda: setattr(weight.t(), "data", value),
        lambda: weight.data.copy_(value),
        lambda: weight.detach().copy_(value),
        lambda: load(weight, value),
    ):
        with pytest.raises(RuntimeError, match=r"cannot (set the data of|copy)|size mismatch"):
            call()
    with pytest.raises(RuntimeError):
        torch.nn.utils.vector_to_parameters(torch.zeros(weight.numel()), [weight])
    casts.assert_same_bytes(casts.bytes_of(weight), before)
