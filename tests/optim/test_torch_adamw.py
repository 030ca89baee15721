"""torch.optim.AdamW as the oracle, within a bound: its builds and variants differ among themselves by a few ulp."""

import pytest
import torch
from torch import Tensor, nn

from tests.optim.probe import FP32, Spec
from tests.optim.runs import ADAM, Run, Trainer, boxes
from tests.optim.undistributed import mean
from tests.workers import on_ranks

SPECS = (Spec("a", (300, 70), dtype=FP32), Spec("b", (64, 128), "nvfp4", FP32), Spec("c", (999,), dtype=FP32, group=1))
OPTIONS = (ADAM, {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0})
ULP = 2.0**-23  # relative to the larger of a parameter and the learning rate
FIRST, EACH = 3, 2  # ulp that the first update may differ by, and on average each of 20
STEPS = 20


def distance(found: Tensor, wanted: Tensor, lr: float) -> float:
    """The largest difference in ulp of an element, elements below the learning rate measured by the learning rate."""
    return float(((found - wanted).abs() / (wanted.abs().clamp(min=lr) * ULP)).max())


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(1, 2)
def test_within_ulps_of_torch(world, fused, max_norm):
    """Distances from torch's AdamW of masters after a first step, and after 20."""
    trainer = Trainer(Run(SPECS, options=OPTIONS, max_norm=max_norm))
    twins = {spec.name: nn.Parameter(spec.initial()) for spec in SPECS}
    groups = [{"params": [twins[s.name] for s in SPECS if s.group == i], **o} for i, o in enumerate(OPTIONS)]
    oracle = torch.optim.AdamW(groups, fused=fused, foreach=False)
    distances = []
    for step in range(STEPS):
        trainer.step(step)
        for spec in SPECS:
            gradient = mean([spec.gradient(step, rank) for rank in range(world)], spec)
            twins[spec.name].grad = torch.from_numpy(gradient)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(twins.values(), max_norm)
        oracle.step()
        state = trainer.optimizer.state_dict()["model"]
        distances.append(
            max(
                distance(part, twins[spec.name].detach()[where], OPTIONS[spec.group]["lr"])
                for spec in SPECS
                for where, part in boxes(state[spec.name])
                if part.numel()
            )
        )
    first, last = distances[0], distances[-1]
    assert first <= FIRST
    assert last <= STEPS * EACH
