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
from tests.workers import Ranks

OVERRIDE = "param_dtype_override_fn"
POLICY_FIELDS = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}


def of_fsdp(method: str) -> Any:
    """A mark that skips where FSDP modules lack a method."""
    return pytest.mark.skipif(
        not hasattr(FSDPModule, method), reason=f"FSDP2 of torch {torch.__version__} lacks {method}"
    )


def kept_storage() -> tuple[list[str], list[list[int]]]:
    """Complaints of steps of a model whose gathered memory FSDP2 keeps, and where it lay after each."""
    model = models.sharded(Net(FEW, 64, 96), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    complaints, addresses = [], []
    for step in range(3):
        models.train(model, optimizer, range(step, step + 1), 64)
        complaints += models.complaints(model, f"step {step}")
        addresses.append([weight.rowwise_data.data_ptr() for _, weight in models.unsharded(model)])
    return complaints, addresses


@of_fsdp("set_keep_unsharded_storage")
def test_gathered_memory_that_is_kept_is_filled_again(ranks: Ranks) -> None:
    for complaints, addresses in ranks(2)(kept_storage):
        assert complaints == []
        assert addresses == [addresses[0]] * 3


def switched_in_kept_storage() -> list[str]:
    """Complaints after formats changed, whose bytes need other memory."""
    model = models.sharded(Net(("nvfp4",), 64, 96), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(1), 64)
    zerocast.switch(model, zerocast.Recipe({"blocks.*.weight": "mxfp8"}))
    models.train(model, optimizer, range(1, 2), 64)
    return models.complaints(model, "switched")


@of_fsdp("set_keep_unsharded_storage")
def test_a_switch_takes_other_memory(ranks: Ranks) -> None:
    assert ranks(2)(switched_in_kept_storage) == [[]] * 2


def finalized(by_hand: bool) -> tuple[list[str], list[torch.Tensor]]:
    """Complaints after two steps whose backward passes end by themselves or by hand, and the masters then."""
    model = models.sharded(Net(FEW, 64, 96), reshard_after_forward=True)
    model.set_manual_backward_finalization(by_hand)
    optimizer = zerocast.fsdp2.FusedAdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(models.batch(step, 64)).float().square().mean().backward()
        if by_hand:
            model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
    found = models.complaints(model, "finalized")
    return found, [parameter.full_tensor().cpu() for parameter in models.held(model)]


@of_fsdp("set_manual_backward_finalization")
def test_backward_passes_that_end_by_hand(ranks: Ranks) -> None:
    for (none, expected), (found, masters) in zip(ranks(2)(finalized, False), ranks(2)(finalized, True), strict=True):
        assert none == found == []
        assert all(map(torch.equal, expected, masters))


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


def overridden() -> tuple[list[str], list[torch.dtype]]:
    """Complaints, and the nominal dtypes, of weights of which one keeps its own dtype, gathered together."""
    model: Any = Wide()
    wide = model.blocks[1].weight.shape
    keep = {OVERRIDE: lambda parameter: torch.float32 if parameter.shape == wide else None}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **keep)
    zerocast.fsdp2.prepare(model, {"blocks.*.weight": "fp8_current"})
    torch.distributed.fsdp.fully_shard(model, mesh=models.mesh(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(2), 64)
    return models.complaints(model, "overridden"), [weight.dtype for _, weight in models.unsharded(model)]


@pytest.mark.skipif(OVERRIDE not in POLICY_FIELDS, reason=f"policies of torch {torch.__version__} have no {OVERRIDE}")
def test_a_weight_that_keeps_its_dtype(ranks: Ranks) -> None:
    assert ranks(2)(overridden) == [([], [torch.bfloat16, torch.float32])] * 2
