"""Models that are more than layers in a row: experts, tied weights, frozen and offloaded ones;
what cannot be, and its words.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import EACH, FEW, Net, OfExperts
from tests.fsdp2.test_loops import loss
from tests.workers import error_of, on_ranks


class Experts(nn.Module):
    """Four experts, of which two are used. FSDP2 assumes that these are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[3](self.experts[0](x))  # type: ignore[no-any-return]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.recipe = {"*.weight": "nvfp4"}

    def forward(self, x: Tensor) -> Tensor:
        """Run both blocks, and the first once more."""
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """A model whose block is torch's own transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0)])
        self.recipe = {"*.in_proj_weight": "nvfp4", "*.linear?.weight": "mxfp8", "*.out_proj.weight": models.DELAYED}

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x[None])  # type: ignore[no-any-return]


def tied_and_in_one_group() -> Any:
    """Return a model with a weight of two blocks, which FSDP2 takes in one group only."""
    model = Net(("nvfp4", "nvfp4"), 64, 96)
    model.blocks[1][1].weight = model.blocks[0][1].weight
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    fully_shard(list(model.blocks), mesh=models.mesh(), mp_policy=models.BF16)  # type: ignore[call-overload]
    return fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)


def prepared_in_two_calls() -> Any:
    """Return a model of two blocks from different calls of `prepare`, in one group of FSDP2."""
    model = Net(("nvfp4", "fp8_current"), 64, 96)
    # The names of weights are those in the block that is prepared.
    first, second = model.blocks
    model.blocks = nn.ModuleList([first, models.Block(*second[1:])])
    zerocast.fsdp2.prepare(model.blocks[0], {"1.weight": "nvfp4", "3.weight": "mxfp8"})
    zerocast.fsdp2.prepare(model.blocks[1], {"0.weight": "fp8_current", "2.weight": "nvfp4"})
    fully_shard(list(model.blocks), mesh=models.mesh(), mp_policy=models.BF16)  # type: ignore[call-overload]
    return fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)


def partly_frozen() -> Any:
    """Return a model that trains all but one weight of each block."""
    model = Net(FEW, 64, 96)
    for block in model.blocks:
        block[1].weight.requires_grad_(False)
    return models.sharded(model)


def offloaded() -> Any:
    return models.sharded(Net(EACH, 64, 96), offload_policy=CPUOffloadPolicy(pin_memory=False))


def in_half_precision() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return models.sharded(Net(FEW, 64, 96), mp_policy=policy)


MODELS: dict[str, Callable[[], Any]] = {
    "routed experts": lambda: models.sharded(Routed()),
    # ranks hold different numbers of experts; in two formats the last block of an expert is smaller
    "experts in one weight": lambda: models.sharded(
        OfExperts(("nvfp4", "mxfp8", models.DELAYED, "fp8_block", "mxfp4"), (3, 96, 64))
    ),
    "attention": lambda: models.sharded(Attentive()),
    "tied": tied_and_in_one_group,
    "prepared in two calls": prepared_in_two_calls,
    "frozen at first": partly_frozen,
    "offloaded": offloaded,
    "scaled loss": in_half_precision,
}


@pytest.mark.parametrize(
    ("name", "moment_dtype", "world"),
    [
        ("tied", torch.float32, 2),
        ("prepared in two calls", torch.float32, 2),
        ("frozen at first", "8bit", 2),
        *(models.slow(name, torch.float32, 2) for name in MODELS if name not in ("tied", "prepared in two calls")),
        *(models.slow(name, "8bit", 2) for name in MODELS if name != "frozen at first"),
        models.slow("experts in one weight", torch.float32, 4),  # fewer experts than ranks
    ],
    ids=str,
)
@on_ranks()
def test_models(name: str, moment_dtype: Any) -> None:
    """Weights that learn change and verify after steps with all that a loop may have around them."""
    model = MODELS[name]()
    optimizer = zerocast.fsdp2.FusedAdamW(model.named_parameters(), lr=1e-2, moment_dtype=moment_dtype)
    scaler = torch.amp.GradScaler(models.place(), init_scale=2.0**12, enabled=name == "scaled loss")
    before = {key: p.full_tensor().clone() for key, (p, _) in models.masters(model).items()}
    late = {key for key, (p, _) in models.masters(model).items() if not p.requires_grad}
    used = {key for key in before if "experts.1" not in key and "experts.2" not in key}
    for step in range(4):
        if step == 2:
            for parameter in models.held(model):
                parameter.requires_grad_()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            scaler.scale(loss(model, 2 * step + part)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        zerocast.verify(model).raise_for_differences()
        now = models.masters(model)
        moved = {key for key, value in before.items() if not torch.equal(now[key][0].full_tensor(), value)}
        assert moved == (used - late if step < 2 else used)


@on_ranks(2)
def test_a_parametrized_weight_is_refused() -> None:
    model = Net(("fp8_current",), 64, 96)
    nn.utils.parametrizations.weight_norm(model.blocks[0][1])
    models.sharded(model, {"*.original1": "fp8_current"})
    said = error_of(lambda: loss(model, 0))
    assert "is not defined on a QuantizedWeight" in said


# -- options that FSDP2 has as of torch 2.15, each on prepared weights; skipped where torch lacks it


OVERRIDE = "param_dtype_override_fn"
POLICY_FIELDS = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}


def of_fsdp(method: str) -> Any:
    """Return a mark that skips where FSDP modules lack a method."""
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
        """Run the layers, each in the dtype of its weight."""
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
