"""Options that FSDP2 has as of torch 2.15, each on prepared weights; skipped where torch lacks it."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net
from tests.workers import on_ranks

OVERRIDE = "param_dtype_override_fn"
POLICY_FIELDS = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}


def of_fsdp(method: str) -> Any:
    """A mark that skips where FSDP modules lack a method."""
    return pytest.mark.skipif(
        not hasattr(FSDPModule, method), reason=f"FSDP2 of torch {torch.__version__} lacks {method}"
    )


@of_fsdp("set_keep_unsharded_storage")
@on_ranks(2)
def test_gathered_memory_that_is_kept_is_filled_again() -> None:
    model = models.sharded(Net(FEW, 64, 96), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    addresses = []
    for step in range(3):
        models.train(model, optimizer, range(step, step + 1), 64)
        models.check(model, f"step {step}")
        addresses.append([weight.rowwise_data.data_ptr() for _, weight in models.unsharded(model)])
    assert addresses == [addresses[0]] * 3


@of_fsdp("set_keep_unsharded_storage")
@on_ranks(2)
def test_a_switch_takes_other_memory() -> None:
    model = models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(1), 64)
    zerocast.switch(model, zerocast.Recipe({"blocks.*.weight": "mxfp8"}))
    models.train(model, optimizer, range(1, 2), 64)
    models.check(model, "switched")


@of_fsdp("set_manual_backward_finalization")
@on_ranks(2)
def test_backward_passes_that_end_by_hand() -> None:
    masters = []
    for by_hand in (False, True):
        model = models.sharded(Net(FEW, 64, 96), reshard_after_forward=True)
        model.set_manual_backward_finalization(by_hand)
        optimizer = zerocast.fsdp2.FusedAdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            model(models.batch(step, 64)).float().square().mean().backward()
            if by_hand:
                model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
        models.check(model, "finalized")
        masters.append([parameter.full_tensor().cpu() for parameter in models.held(model)])
    assert all(map(torch.equal, *masters))


class Wide(nn.Module):
    """Two layers, of which one computes in FP32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other, each in the dtype of its weight."""
        for block in self.blocks:
            x = block(x.to(block.weight.dtype))
        return x


@pytest.mark.skipif(OVERRIDE not in POLICY_FIELDS, reason=f"policies of torch {torch.__version__} have no {OVERRIDE}")
@on_ranks(2)
def test_a_weight_that_keeps_its_dtype() -> None:
    model: Any = Wide()
    wide = model.blocks[1].weight.shape
    keep = {OVERRIDE: lambda parameter: torch.float32 if parameter.shape == wide else None}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **keep)
    zerocast.fsdp2.prepare(model, {"blocks.*.weight": "fp8_current"})
    torch.distributed.fsdp.fully_shard(model, mesh=models.mesh(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(2), 64)
    models.check(model, "overridden")
    assert [weight.dtype for _, weight in models.unsharded(model)] == [torch.bfloat16, torch.float32]
