"""The GPT example trains: Megatron's own model, with attention and MLP weights quantized."""

import sys
from unittest import mock

import pytest
import torch

from tests.megatron.host_on_cpu import WHY_NOT, host_on_cpu, needs_four_bits, needs_megatron
from tests.workers import Ranks

if not WHY_NOT:
    from examples.megatron import pretrain_gpt

pytestmark = needs_megatron


def losses_of(*line: str) -> list[float]:
    with mock.patch.object(sys, "argv", ["pretrain_gpt", *line]), host_on_cpu():
        return pretrain_gpt.train(pretrain_gpt.arguments(), torch.device("cpu"))


@pytest.mark.parametrize(
    "fmt", [pytest.param("nvfp4", marks=needs_four_bits), pytest.param("fp8_block", marks=pytest.mark.slow)]
)
def test_the_loss_falls_as_in_bf16(ranks: Ranks, fmt: str) -> None:
    options = ("--steps", "20", "--layers", "1", "--sequence", "32", "--overlap", "--cpu")
    bf16 = ranks(2)(losses_of, "--format", "bf16", *options)[0]
    first, second = ranks(2)(losses_of, "--format", fmt, *options)
    assert first == second
    assert bf16[-1] < bf16[0] - 0.5
    assert abs(first[-1] - bf16[-1]) < 0.1
