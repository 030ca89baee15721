"""A master that is NaN or Inf, on any rank: every rank raises at the call after the cast, and names the weight."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests import casts, devices
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, ZeroAdamW, ZeroMuon
from zerocast.cast.adam_update import AdamUpdate, Hyperparameters

TOLD = r"the masters of 1 of 3 weights were NaN or Inf in the last cast: weight 1\."
VALUES = [float("nan"), float("inf"), -float("inf")]
MEASURED = [fmt for fmt in casts.FORMATS if fmt != "identity"]
SHAPE = (64, 96)


def adam(master: Tensor) -> AdamUpdate:
    """Return a step of Adam that hardly changes the masters."""
    hyperparameters = Hyperparameters(1, master.device)
    hyperparameters.refresh([{"lr": 1e-6, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}])
    count, one = torch.ones(1, dtype=torch.int64, device=master.device), torch.ones(1, device=master.device)
    grad, exp_avg, exp_avg_sq = (torch.zeros_like(master) for _ in range(3))
    return AdamUpdate(grad, exp_avg, exp_avg_sq, hyperparameters.scalars(count), one)


@pytest.mark.long_interpreted
@pytest.mark.parametrize("stepped", [False, True], ids=["cast", "fused step"])
@pytest.mark.parametrize("fmt", MEASURED)
@pytest.mark.notices(
    "a master is NaN or Inf",
    where=("CastPlan", "ZeroAdamW", "Megatron", "Apex", "TransformerEngine"),
    answer="the call after the cast raises on all ranks",
)
def test_one_element_of_any_weight(backend_anywhere: str, fmt: str, stepped: bool) -> None:
    """Any element of an uneven span is found, the first and last included. Repaired masters are cast as before."""
    device, numel = devices.of(backend_anywhere), SHAPE[0] * SHAPE[1]
    weights = [QuantizedWeight.empty(SHAPE, fmt, torch.bfloat16, device) for _ in range(3)]
    flat = torch.randn(3 * numel, generator=torch.Generator().manual_seed(0)).to(device)
    masters = [master[1:] for master in flat.split(numel)]
    plan = CastPlan(weights, masters, [1, 1, 1], backend=backend_anywhere)

    def cast() -> None:
        plan.cast(update=adam(flat) if stepped else None)

    cast()
    for value, place in zip(VALUES, (0, 4321, numel - 2), strict=True):
        before = masters[1][place].clone()
        masters[1][place] = value
        cast()
        masters[1][place] = before
        with pytest.raises(RuntimeError, match=TOLD):
            cast()
        cast()


OPTIMIZERS = {
    "ZeroAdamW": lambda net: ZeroAdamW(net.named_parameters(), lr=1e-3),
    "ZeroMuon": lambda net: ZeroMuon(
        [
            {
                "params": [(name, p) for name, p in net.named_parameters() if (p.dim() == 2) == is_matrix],
                "use_muon": is_matrix,
            }
            for is_matrix in (True, False)
        ]
    ),
}
KINDS = {"0.weight": "a quantized matrix", "1.weight": "a plain matrix", "0.bias": "a bias"}


def all_gathered(value: int) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.notices(
    "a master of a plain parameter is NaN or Inf",
    where="ZeroAdamW",
    answer="the next step or `state_dict` raises on all ranks",
)
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@on_ranks(2)
def test_plain_parameters_too(kind):
    """A step, or a state, tells of each parameter and value on all ranks."""
    net: Any = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32, bias=False)).bfloat16()
    zerocast.quantize_(net, {"0.weight": "nvfp4"})
    optimizer = OPTIMIZERS[kind](net)

    def step() -> None:
        net(torch.ones(4, 32).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for (name, value), then in zip(itertools.product(KINDS, VALUES), itertools.cycle((step, optimizer.state_dict))):
        master = optimizer.state_dict()["model"][name].flat
        owners = [rank for rank, numel in enumerate(all_gathered(master.numel())) if numel]
        if dist.get_rank() == owners[1 % len(owners)]:
            master[-1] = value
        optimizer.step()  # with gradients of zero
        said = error_of(then)
        optimizer._masters.master.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())  # weights are finite again
        step()
        assert f"1 of 3 weights were NaN or Inf in the last cast: {name}." in said
