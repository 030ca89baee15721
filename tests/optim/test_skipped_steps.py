"""A gradient that is not finite, on any rank: the step is skipped on all of them and nothing has changed."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import casts
from tests.optim.probe import MIXED
from tests.optim.runs import EIGHT_BIT_MOMENTS, Run, Trainer, assert_equals, boxes, weight_bytes
from tests.optim.undistributed import Undistributed
from zerocast import ZeroAdamW, ZeroConfig

OVERLAP = ZeroConfig(bucket_size=4096, deterministic=True, overlap_all_gather=True)
LIBRARY_ORDER = ZeroConfig(bucket_size=4096)
FP8_WIRE = ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128")


def everything(trainer: Trainer) -> dict[str, Any]:
    """All state that a step changes, as bytes."""
    state = trainer.optimizer.state_dict()
    found: dict[str, Any] = {}
    for name, bytes_of_weight in weight_bytes(trainer.probe).items():
        found |= {f"{name} {key}": value for key, value in bytes_of_weight.items()}
        moments = state["optim"]["state"][name]
        for field, tensor in {"master": state["model"][name], **moments}.items():
            parts = [casts.raw(values).copy() for _, values in boxes(tensor)]
            found[f"{name} {field}"] = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    for name, tensors in state["zerocast"].items():
        found |= {f"{name} {key}": casts.raw(tensor).copy() for key, tensor in tensors.items()}
    return found


def poison(trainer: Trainer, step: int, name: str, value: float, culprit: int) -> None:
    """A backward pass in which one element of one gradient of one rank is `value`."""
    gradients = {spec.name: spec.gradient(step, trainer.rank) for spec in MIXED}
    if trainer.rank == culprit:
        (spec,) = (spec for spec in MIXED if spec.name == name)
        gradients[name] = torch.zeros(spec.shape, dtype=spec.dtype)
        gradients[name].view(-1)[-1] = value
    trainer.probe.loss(gradients).backward()


def skip(run: Run, name: str, value: float, culprit: int, clip: bool) -> None:
    """Two good steps, two bad ones, two good ones."""
    trainer, reference = Trainer(run), Undistributed(run.specs, run.config.moment_dtype)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(6):
        if step in (2, 3):
            before = everything(trainer)
            poison(trainer, step, name, value, culprit)
            if clip:
                assert not trainer.optimizer.clip_grad_norm_(1.0).isfinite()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            casts.assert_same_bytes(everything(trainer), before, f"rank {trainer.rank}, skipped step {step}")
            reference.skipped += 1
            continue
        trainer.backward(step)
        if clip:
            trainer.optimizer.clip_grad_norm_(0.1)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        gradients = {spec.name: run.rounds(spec, step, ranks) for spec in run.specs}
        if run.config.deterministic or run.config.grad_wire:
            reference.step(gradients, run.options, 0.1 if clip else None)
            assert_equals(trainer, reference, f"rank {trainer.rank}, step {step}")
    assert trainer.optimizer.skipped_steps == 2
    assert float(trainer.optimizer.state_dict()["optim"]["state"]["norm"]["step"]) == 4


@pytest.mark.parametrize(
    "value", [float("nan"), *(pytest.param(x, marks=pytest.mark.slow) for x in (float("inf"), -float("inf")))]
)
@pytest.mark.parametrize(
    ("run", "name", "clip"),
    [
        (Run(), "delayed", True),
        (Run(), "nv", False),
        (Run(stage=1), "norm", False),
        (Run(config=OVERLAP), "mx", False),
        (Run(config=LIBRARY_ORDER), "block", True),
        (Run(config=FP8_WIRE), "nv", True),
        (Run(config=EIGHT_BIT_MOMENTS), "nv", True),
    ],
    ids=["clip", "plain", "stage 1", "overlap", "library order", "fp8 wire", "8-bit moments"],
)
@pytest.mark.notices(
    "a gradient is not finite on one rank",
    where="ZeroAdamW",
    answer="the step is skipped on all ranks, nothing changed, and counted",
)
def test_nothing_changes(ranks, run, name, clip, value):
    skip(run, name, value, 0, clip)
    ranks(3)(skip, run, name, value, 1, clip)


def test_what_is_new_is_logged_when_read(caplog):
    trainer = Trainer(Run())
    with caplog.at_level(logging.WARNING, "zerocast"):
        assert trainer.optimizer.skipped_steps == 0
        for step in range(2):
            poison(trainer, step, "nv", float("nan"), 0)
            trainer.optimizer.step()
        assert not caplog.records
        assert trainer.optimizer.skipped_steps == 2
        assert trainer.optimizer.skipped_steps == 2
    assert [record.getMessage() for record in caplog.records] == ["2 steps skipped for non-finite gradients, 2 in all"]


def log_on_ranks() -> int:
    """How many warnings of skipped steps a rank writes."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("zerocast").addHandler(handler)
    trainer = Trainer(Run())
    poison(trainer, 0, "nv", float("inf"), 1)
    trainer.optimizer.step()
    assert trainer.optimizer.skipped_steps == 1
    logging.getLogger("zerocast").removeHandler(handler)
    return sum("skipped for non-finite gradients" in record.getMessage() for record in records)


def test_rank_0_speaks(ranks):
    assert ranks(2)(log_on_ranks) == [1, 0]


def warnings_of_rows(rows: list[int], good: tuple[float, ...] = (1.0,)) -> list[str]:
    """What a rank logs unasked where that many steps in a row are skipped, each row followed by good steps."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("zerocast").addHandler(handler)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = ZeroAdamW([("bias", weight)])
    for skipped in rows:
        for value in [float("nan")] * skipped + [*good]:
            weight.grad = torch.full_like(weight, value)
            optimizer.step()
    logging.getLogger("zerocast").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_rows_of_skipped_steps_are_told(ranks):
    assert warnings_of_rows([19, 19]) == []
    (long,) = warnings_of_rows([21])
    # On a CPU the count is there at once.
    assert warnings_of_rows([20], good=()) == [long]
    assert long.startswith("the last 20 steps were all skipped")
    first, rank_1 = ranks(2)(warnings_of_rows, [201])
    assert [text.split(" were")[0] for text in first] == ["the last 20 steps", "the last 200 steps"]
    assert rank_1 == []
