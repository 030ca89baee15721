"""An all-gather in flight is seen by nobody: whatever reads a weight first waits, and gets the bytes that it would get without."""

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import casts
from tests.optim.probe import BF16, MIXED, Probe
from tests.optim.runs import DETERMINISTIC, OVERLAP, Run, Trainer, weight_bytes
from tests.optim.slow_gathers import slow_gathers
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig

KEPT = dataclasses.replace(OVERLAP, keep_columnwise=True)
QUANTIZED = ("nv", "block", "mx", "delayed", "current")
Found = dict[str, Any]


def data(probe: Probe) -> Found:
    return {name: casts.raw(probe.get_parameter(name).rowwise_data).copy() for name in QUANTIZED}


def columnwise(probe: Probe) -> Found:
    return {name: values["columnwise_data"] for name, values in weight_bytes(probe).items() if name in QUANTIZED}


def scales(probe: Probe) -> Found:
    return {name: casts.raw(probe.get_parameter(name).rowwise_scale_inv).copy() for name in QUANTIZED}


def saved(probe: Probe) -> Found:
    file = io.BytesIO()
    torch.save(probe.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return {name: casts.raw(loaded[name].dequantize()) for name in QUANTIZED}


def deep_copy(probe: Probe) -> Found:
    return {name: values["rowwise_data"] for name, values in weight_bytes(copy.deepcopy(probe)).items()}


def tied_head(probe: Probe) -> Found:
    """A functional read, in training mode."""
    x = torch.ones(3, 112, dtype=BF16)
    return {"out": casts.raw(nn.functional.linear(x, probe.get_parameter("nv")))}


def transposed(probe: Probe) -> Found:
    x = torch.ones(3, 48, dtype=BF16)
    return {"out": casts.raw(x @ probe.get_parameter("nv").t().t())}


def inference(probe: Probe) -> Found:
    with torch.inference_mode():
        return tied_head(probe.eval())


def input_gradient(probe: Probe) -> Found:
    x = torch.ones(3, 96, dtype=BF16, requires_grad=True)
    nn.functional.linear(x, probe.get_parameter("mx")).sum().backward()
    y = torch.ones(3, 33, dtype=BF16, requires_grad=True)
    nn.functional.linear(y, probe.get_parameter("block")).sum().backward()
    return {"mx": casts.raw(x.grad), "block": casts.raw(y.grad)}


def moved(probe: Probe) -> Found:
    weight = probe.get_parameter("nv")
    weight.rebind(torch.zeros_like(weight.rowwise_data))
    return data(probe)


def loaded_over(probe: Probe) -> Found:
    """`load_state_dict` writes into a weight whose gather is in flight: what was loaded stays."""
    probe.load_state_dict(Probe(MIXED).state_dict())
    return data(probe)


def second_optimizer(probe: Probe) -> Found:
    """Its masters start from the gathered weights."""
    ZeroAdamW(probe.named_parameters())
    return data(probe)


READS = (
    *(data, columnwise, scales, saved, deep_copy, tied_head, transposed, inference, input_gradient, moved),
    *(loaded_over, second_optimizer),
)


def read_in_flight(config: ZeroConfig, read: Callable[[Probe], Found], steps: int) -> Found:
    """What a first read after the last step sees; then one more step, so that the read has broken nothing."""
    with slow_gathers() as landed:
        trainer = Trainer(Run(config=config))
        trainer.train(range(steps))
        before = len(landed)
        found = read(trainer.probe)
        assert len(landed) > before or not config.overlap_all_gather, "nothing was in flight"
        if read is loaded_over:  # else the step says what it would undo
            trainer.optimizer.load_state_dict(trainer.optimizer.state_to_overwrite())
        if read is not second_optimizer:
            trainer.step(steps)
        after = {f"{n} {b}": v for n, held in weight_bytes(trainer.probe).items() for b, v in held.items()}
    return {key: np.asarray(value) for key, value in {**found, **after}.items()}


@pytest.mark.parametrize(
    ("read", "config"),
    [*((read, OVERLAP) for read in READS), (columnwise, KEPT), (input_gradient, KEPT)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@on_ranks(2)
def test_a_read_waits(read, config):
    for steps in (0, 2) if read is data else (2,):
        eager, overlapped = (read_in_flight(how, read, steps) for how in (DETERMINISTIC, config))
        casts.assert_same_bytes(overlapped, eager, f"after {steps} steps")
