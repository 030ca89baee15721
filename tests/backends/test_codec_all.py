"""All 2**32 inputs. Encoding is monotone, so the numpy model states the whole function by its steps."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backends import stages
from tests.formats import model
from tests.strategies import is_interpreted

CHUNK = 2**22
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def chunks(backend: str) -> Iterator[tuple[int, Tensor]]:
    """(first bit pattern, values) of consecutive pieces of all f32 values; of every 128th where kernels are interpreted."""
    step = CHUNK * (128 if is_interpreted(backend) else 1)
    for first in range(step // 2 // CHUNK * CHUNK, 2**32, step):
        yield first, torch.from_numpy(np.arange(first, first + CHUNK, dtype=np.uint32).view(np.float32))


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_every_input_of_the_encoders(any_backend: str, element: str) -> None:
    for first, x in chunks(any_backend):
        expected = model.encode_patterns(element, first, first + CHUNK)
        assert np.array_equal(stages.encode(any_backend, element, x).numpy(), expected), f"from {first:#x} on"


@pytest.mark.parametrize("nominal", [torch.bfloat16, torch.float16])
def test_every_input_of_the_rounding(any_backend: str, nominal: torch.dtype) -> None:
    name = str(nominal).removeprefix("torch.")
    for first, x in chunks(any_backend):
        words = stages.to_nominal(any_backend, nominal, x).numpy().view(np.uint16)
        assert np.array_equal(words, model.to_16_bits(x.numpy(), name)), f"from {first:#x} on"


def test_every_e8m0_code(any_backend: str) -> None:
    for first, x in chunks(any_backend):
        if first >= 0x7F000000:
            x = x[: 0x7F800001 - first]
        if first > 0x7F800000:
            break
        codes, _ = stages.scales(any_backend, "mxfp8", x[:: 2**4])  # every sixteenth: scale buffers are large
        assert np.array_equal(codes.numpy(), model.e8m0(x[:: 2**4].numpy())), f"from {first:#x} on"
