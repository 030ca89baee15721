"""The shard of reduced gradients: bf16 where that rounds nothing, FP32 from the first thing on that bf16 would round."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.optim.probe import BF16, FP32, Spec
from tests.optim.runs import ADAM, EIGHT_BIT_MOMENTS, Run, Trainer, snapshot
from tests.optim.test_moment_dtype import _assert_same_snapshots
from tests.workers import Ranks
from zerocast import ZeroConfig

SPECS = (
    Spec("embedding", (50, 24)),
    Spec("nv", (48, 112), "nvfp4"),
    Spec("block", (130, 40), "fp8_block"),
    Spec("bias", (7,)),
)
CONFIG = ZeroConfig(bucket_size=4096)
RUN = Run(SPECS, steps=3, options=(ADAM,), config=CONFIG)


def by_torch(trainer: Trainer) -> None:
    torch.nn.utils.clip_grad_norm_(trainer.probe.parameters(), 0.01)


def read_after_a_clip(trainer: Trainer) -> None:
    """A clip that waits for the update is applied before gradients are read."""
    trainer.optimizer.clip_grad_norm_(0.01)
    torch.nn.utils.get_total_norm([p.grad for p in trainer.probe.parameters()])


def nothing(trainer: Trainer) -> None:
    pass


# By name: the run, what is done between backward pass and step, and the dtype of the shard after three steps.
CASES: dict[str, tuple[Run, Callable[[Trainer], None], torch.dtype]] = {
    "plain": (RUN, nothing, BF16),
    "clipped by the optimizer": (dataclasses.replace(RUN, max_norm=0.01), nothing, BF16),
    "accumulated in no_sync": (dataclasses.replace(RUN, accumulate=3), nothing, BF16),
    "stage 1": (dataclasses.replace(RUN, accumulate=2, no_sync=False, stage=1), nothing, BF16),
    "8-bit moments": (dataclasses.replace(RUN, config=dataclasses.replace(CONFIG, moment_dtype="8bit")), nothing, BF16),
    "accumulated": (dataclasses.replace(RUN, accumulate=3, no_sync=False), nothing, FP32),
    "clipped by torch": (RUN, by_torch, FP32),
    "read after a clip": (RUN, read_after_a_clip, FP32),
    "deterministic": (dataclasses.replace(RUN, config=EIGHT_BIT_MOMENTS), nothing, FP32),
    "FP8 wire": (dataclasses.replace(RUN, config=ZeroConfig(grad_wire="fp8_1x128")), nothing, FP32),
    "FP32 gradients": (dataclasses.replace(RUN, config=ZeroConfig(grad_dtype=FP32)), nothing, FP32),
}


def trained(name: str) -> tuple[dict[str, Any], torch.dtype]:
    run, between, _ = CASES[name]
    trainer = Trainer(run)
    for step in range(run.steps):
        trainer.backward(step)
        between(trainer)
        if run.max_norm is not None:
            trainer.optimizer.clip_grad_norm_(run.max_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return snapshot(trainer), trainer.optimizer._reducer.gradients.flat.dtype


def compare(name: str) -> torch.dtype:
    """The dtype of the shard; the bits are those that a shard in FP32 gives."""
    found, dtype = trained(name)
    with mock.patch("zerocast.optim.zero_optimizer.shard_dtype", return_value=FP32):
        expected, _ = trained(name)
    _assert_same_snapshots(found, expected)
    return dtype


@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_the_dtype_of_the_shard(ranks: Ranks, name: str) -> None:
    assert ranks(2)(compare, name) == [CASES[name][-1]] * 2


def test_what_widens_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(CASES["accumulated"][0])
    with caplog.at_level(logging.INFO, "zerocast"):
        trainer.train(range(2))
    (record,) = [record for record in caplog.records if "4 bytes an element from now on" in record.getMessage()]
    assert record.levelno == logging.INFO
