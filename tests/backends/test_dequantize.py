"""Stage dequantize: any bytes of any format, in both directions, into any dtype."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import casts, devices, strategies
from tests.casts import lcg_matrix
from tests.formats import model, own_goldens
from tests.formats.test_model import format_text
from zerocast import get_format
from zerocast.backends import ops
from zerocast.formats import Columnwise, layout
from zerocast.formats.layout import matrix_shape

GUARD = 16


def random_buffers(fmt: str, shape: tuple[int, int], nominal: torch.dtype, seed: int) -> dict[str, Tensor | None]:
    """Every buffer of a weight, full of random bytes: any code and any scale, NaN and Inf included."""
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor | None] = {}
    for name, buffer in layout.buffers(get_format(fmt), shape, nominal).items():
        size = int(np.prod(buffer.shape)) * buffer.dtype.itemsize if buffer else 0
        noise = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
        made[name] = noise.view(buffer.dtype).view(buffer.shape) if buffer else None
    return made


def run(
    backend: str,
    fmt: str,
    buffers: dict[str, Tensor | None],
    shape: tuple[int, int],
    columnwise: bool,
    out: torch.dtype,
    lead: int = GUARD,
) -> Tensor:
    """The whole weight as `out`, `lead` elements into its storage, with the guards around it checked."""
    direction = "columnwise" if columnwise else "rowwise"
    whole = torch.full((lead + shape[0] * shape[1] + GUARD,), 3.5, dtype=out)
    target = whole[lead:-GUARD].view(shape)
    data = buffers.get(f"{direction}_data")  # None where the rowwise codes serve both directions
    data = buffers["rowwise_data"] if data is None else data
    inputs: tuple[Any, ...] = data, buffers[f"{direction}_scale_inv"], buffers["amax"]
    devices.stage(backend, "dequantize")(get_format(fmt), *inputs, *shape, columnwise, target)
    assert (whole[:lead] == 3.5).all() and (whole[-GUARD:] == 3.5).all()
    return target


def words(values: Tensor) -> Any:
    """Bit patterns, with all NaN alike: which NaN a product gives is the processor's affair."""
    return torch.where(values.isnan(), torch.nan, values).contiguous().view(torch.uint8).numpy()


def test_backends_agree(variant: str) -> None:
    @strategies.examples(variant)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        fmt = data.draw(st.sampled_from(casts.FORMATS))
        shape = matrix_shape(data.draw(strategies.shapes(fmt)))
        nominal, out = data.draw(st.sampled_from(casts.NOMINAL)), data.draw(st.sampled_from(casts.NOMINAL))
        columnwise = get_format(fmt).columnwise is not Columnwise.NONE and data.draw(st.booleans())
        buffers = random_buffers(fmt, shape, nominal, data.draw(st.integers(0, 2**31)))
        lead = data.draw(st.sampled_from([GUARD, 3]))
        found, expected = (run(name, fmt, buffers, shape, columnwise, out, lead) for name in (variant, "reference"))
        assert np.array_equal(words(found), words(expected))

    check()


@pytest.mark.long_interpreted
def test_large_weights(variant: str, seed: int) -> None:
    for fmt, (rows, columns) in (
        ("fp8_current", (130, 1500)),
        ("fp8_block", (300, 2100)),
        ("mxfp8", (160, 4128)),
        ("nvfp4", (4128, 144)),
        ("int4", (129, 4128)),
    ):
        shape = (min(rows, 160), min(columns, 288)) if strategies.is_interpreted(variant) else (rows, columns)
        buffers = random_buffers(fmt, shape, torch.bfloat16, seed)
        for columnwise in {False, get_format(fmt).columnwise is not Columnwise.NONE}:
            found, expected = (run(n, fmt, buffers, shape, columnwise, torch.bfloat16) for n in (variant, "reference"))
            assert np.array_equal(words(found), words(expected)), (fmt, columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(("name", "settings"), own_goldens.CASES, ids=lambda case: str(getattr(case, "element", case)))
def test_values_are_those_of_the_model(
    backend_anywhere: str, name: str, settings: model.Settings, columnwise: bool
) -> None:
    fmt = format_text(name, settings)
    columnwise = columnwise and get_format(fmt).columnwise is not Columnwise.NONE
    cast = model.Cast(name, "bfloat16", settings)
    expected = cast.of(lcg_matrix(160, 192, 5))
    buffers = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in expected.items()}
    dtype = get_format(fmt).scale_dtype  # numpy has words for bf16
    buffers |= {key: value.view(dtype) for key, value in buffers.items() if value.dtype is torch.uint16}
    value = run(backend_anywhere, fmt, {"amax": None} | buffers, (160, 192), columnwise, torch.float32)
    np.testing.assert_array_equal(value.numpy(), cast.dequantized(expected, columnwise))


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_op_checks_other_tensors_in_the_same_memory(name: str) -> None:
    """A view of buffers that were decoded before, in another order, dtype or size, is not taken for them."""
    codes, scale = (torch.arange(64 * 64) % 101).to(torch.uint8).view(64, 64), torch.ones(1)
    rest = scale, None, 64, 64, False, torch.float32
    expected = ops.dequantize(name, "fp8_current", codes, *rest)
    for other in (codes.t(), codes.view(torch.int8), codes[:32], codes.view(torch.float32)):
        with pytest.raises((TypeError, ValueError)):
            ops.dequantize(name, "fp8_current", other, *rest)
    assert torch.equal(ops.dequantize(name, "fp8_current", codes, *rest), expected)
