"""torch.optim.AdamW as the oracle, within a bound: its builds and variants differ among themselves by a few ulp."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.optim.probe import FP32, Spec
from tests.optim.runs import ADAM, Run, Trainer, boxes
from tests.optim.undistributed import mean
from zerocast import ZeroConfig

SPECS = (Spec("a", (300, 70), dtype=FP32), Spec("b", (64, 128), "nvfp4", FP32), Spec("c", (999,), dtype=FP32, group=1))
OPTIONS = (ADAM, {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0})
ULP = 2.0**-23  # relative to the larger of a parameter and the learning rate
FIRST, EACH = 3, 2  # ulp that the first update may differ by, and on average each of 20
STEPS = 20


def distance(found: Tensor, wanted: Tensor, lr: float) -> float:
    """The largest difference in ulp of an element, elements below the learning rate measured by the learning rate."""
    return float(((found - wanted).abs() / (wanted.abs().clamp(min=lr) * ULP)).max())


def compare(fused: bool, max_norm: float | None) -> tuple[float, float]:
    """Distances from torch's AdamW of masters after a first step, and after 20."""
    run = Run(SPECS, options=OPTIONS, config=ZeroConfig(bucket_size=4096, deterministic=True), max_norm=max_norm)
    trainer, ranks = Trainer(run), dist.get_world_size() if dist.is_initialized() else 1
    twins = {spec.name: nn.Parameter(spec.initial()) for spec in SPECS}
    groups = [{"params": [twins[s.name] for s in SPECS if s.group == i], **o} for i, o in enumerate(OPTIONS)]
    oracle = torch.optim.AdamW(groups, fused=fused, foreach=False)
    distances = []
    for step in range(STEPS):
        trainer.step(step)
        for spec in SPECS:
            gradient = mean([spec.gradient(step, rank) for rank in range(ranks)], spec)
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
    return distances[0], distances[-1]


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_within_ulps_of_torch(ranks, world, fused, max_norm):
    for first, last in ranks(world)(compare, fused, max_norm):
        assert first <= FIRST
        assert last <= STEPS * EACH
