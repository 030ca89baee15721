"""Stages quantize_gradient and add_gradients: on every backend the bytes of the numpy model, padding included."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import devices
from tests.casts import F32, bit_patterns
from tests.formats import model
from zerocast.backends import ops
from zerocast.formats.layout import GradientMessage

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# parts and elements of each: whole groups, tiles of them and more, short groups, odd addresses, hardly anything
SHAPES = ((1, 128), (3, 2048 + 128), (2, 16384 + 4096), (4, 130), (2, 1001), (5, 1), (3, 16))
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-126, 1e-36, 1.5e-36, 3.0e38, 448.0, -448.0)


def gradients(numel: int, seed: int, content: str) -> F32:
    """Elements whose groups differ in size; special values, one a group, beside small ones; any bits."""
    if content == "bits":
        return bit_patterns(numel, seed)
    rng = np.random.default_rng(seed)
    values = (
        rng.standard_normal(numel, np.float32)
        * np.float32(2.0) ** rng.integers(-20, 3, numel // 128 + 1).repeat(128)[:numel]
    )
    if content == "special":
        values[rng.random(numel) < 0.3] = 0.0
        values[numel // 256 * 128 :][:128] = 0.0  # a group of zeros
        places = np.arange(0, numel, 128)
        values[places] = np.resize(np.array(SPECIAL, np.float32), len(places))
    return values.astype(np.float32)


def messages_of(backend: str, grad: Tensor, parts: int) -> NDArray[np.uint8]:
    made = torch.full((parts * GradientMessage(grad.numel() // parts).nbytes,), 0xA5, dtype=torch.uint8)
    devices.stage(backend, "quantize_gradient")(grad, parts, made)
    return made.numpy().reshape(parts, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", ["ordinary", "special", "bits"])
def test_messages(any_backend: str, dtype: torch.dtype, content: str, seed: int) -> None:
    for parts, numel in SHAPES:
        grad = torch.from_numpy(gradients(parts * numel, seed, content)).to(dtype)
        expected = [model.gradient_message(part) for part in grad.float().view(parts, numel).numpy()]
        assert np.array_equal(messages_of(any_backend, grad, parts), np.stack(expected)), (parts, numel)


def test_a_gradient_may_begin_anywhere(any_backend: str, seed: int) -> None:
    whole = torch.from_numpy(gradients(1025, seed, "ordinary"))
    expected = [model.gradient_message(part) for part in whole[1:].view(2, 512).numpy()]
    assert np.array_equal(messages_of(any_backend, whole[1:], 2), np.stack(expected))


@pytest.mark.parametrize("adds", [False, True])
def test_sums(any_backend: str, adds: bool, seed: int) -> None:
    """In the order of the senders, in f32, divided once; NaN of a sender is NaN of the whole group."""
    for ranks, numel in ((1, 256), (2, 4096 + 128), (9, 384), (3, 130), (2, 8), (17, 1001)):
        parts = [gradients(numel, seed + rank, "special" if rank == 1 else "ordinary") for rank in range(ranks)]
        messages = [model.gradient_message(part) for part in parts]
        before = gradients(numel, seed - 1, "ordinary")
        for divisor in (ranks, 1):
            mean = model.gradient_mean(messages, numel, divisor)
            out = torch.from_numpy(before.copy())
            sent = torch.from_numpy(np.concatenate(messages))
            devices.stage(any_backend, "add_gradients")(sent, ranks, divisor, adds, out)
            expected = before + mean if adds else mean
            assert np.array_equal(out.numpy(), expected, equal_nan=True), (ranks, numel, divisor)
            if ranks > 1 and numel > 128:
                assert np.isnan(out.numpy()[256:384]).all(), "a group with an infinity"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_plain_gradients(any_backend: str, dtype: torch.dtype, adds: bool, seed: int) -> None:
    """In the order of the ranks, in f32, divided once; whole thread blocks, rests, and addresses of single elements."""
    for ranks, numel, offset in ((1, 8192 + 4, 0), (2, 8192, 1), (3, 130, 0), (17, 1000, 0), (2, 7, 3), (2, 0, 0)):
        for divisor in (ranks, 1):
            sent = torch.from_numpy(gradients(ranks * numel + offset, seed, "special")).to(dtype)[offset:]
            before = torch.from_numpy(gradients(numel + offset, seed - 1, "ordinary"))[offset:]
            total = torch.zeros(numel)
            for rank, part in enumerate(sent.view(ranks, numel)):
                total = part.float() if rank == 0 else total + part.float()
            mean = total / torch.full_like(total, divisor)
            out = before.clone()
            devices.stage(any_backend, "add_gradients")(sent, ranks, divisor, adds, out)
            torch.testing.assert_close(
                out,
                before + mean if adds else mean,
                rtol=0,
                atol=0,
                equal_nan=True,
                msg=f"{ranks} x {numel}, {divisor}",
            )
            assert torch.equal(out.signbit() | out.isnan(), (before + mean if adds else mean).signbit() | out.isnan())


def test_the_layout() -> None:
    """1.03 bytes an element; scales and messages begin at multiples of 16 bytes."""
    assert GradientMessage(2**20).nbytes == 2**20 + 2**20 // 32
    for numel in (0, 1, 16, 127, 128, 129, 1000):
        layout = GradientMessage(numel)
        assert numel <= layout.scales_at == layout.scales_at // 16 * 16
        assert layout.scales_at + 4 * layout.groups <= layout.nbytes == layout.nbytes // 16 * 16


def test_no_elements(any_backend: str) -> None:
    """A part without elements has an empty message, and nothing is written."""
    assert messages_of(any_backend, torch.empty(0), 3).size == 0
    devices.stage(any_backend, "add_gradients")(torch.empty(0, dtype=torch.uint8), 3, 3, True, torch.empty(0))


@pytest.mark.parametrize("stage", ["quantize_gradient", "add_gradients"])
def test_what_is_no_gradient_or_no_message_is_refused(stage: str) -> None:
    """On every backend alike, before a kernel reads or writes it."""
    grad = torch.ones(256)
    sent = torch.zeros(2 * GradientMessage(128).nbytes, dtype=torch.uint8)
    bad: list[tuple[Tensor, Tensor, type[Exception]]] = [
        (grad.int(), sent, TypeError),
        (torch.ones(512)[::2], sent, ValueError),
        (grad, sent.view(torch.int8), TypeError),
        (grad, sent.repeat_interleave(2)[::2], ValueError),
        (grad, sent[:-16], ValueError),
    ]
    for flat, messages, error in bad:
        arguments = (
            {"grad": flat, "parts": 2, "messages": messages}
            if stage == "quantize_gradient"
            else {"messages": messages, "parts": 2, "divisor": 2, "adds": False, "out": flat[: len(flat) // 2]}
        )
        with pytest.raises(error):
            getattr(ops, stage)("reference", **arguments)


def test_plain_gradients_of_another_size_or_kind_are_refused() -> None:
    """On every backend alike, before a kernel reads or writes them."""
    sent, out = torch.ones(256), torch.ones(128)
    bad: list[tuple[Tensor, int, Tensor, type[Exception]]] = [
        (sent[:-1], 2, out, ValueError),
        (sent, 1, out, ValueError),
        (sent, 0, out, ValueError),
        (sent.double(), 2, out, TypeError),
        (sent, 2, out.bfloat16(), TypeError),
        (torch.ones(512)[::2], 2, out, ValueError),
    ]
    for messages, parts, target, error in bad:
        with pytest.raises(error):
            ops.add_gradients("reference", messages=messages, parts=parts, divisor=2, adds=False, out=target)
