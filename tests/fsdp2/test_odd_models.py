"""Models that are more than layers in a row: experts, tied weights, frozen and offloaded ones;
what cannot be, and its words.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, FORMATS, Net
from tests.fsdp2.test_loops import loss
from tests.workers import Ranks, error_of


class Experts(nn.Module):
    """Four, of which two are used: FSDP2 takes for granted that they are the same ones on all ranks."""

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
        """One after another, and the first once more."""
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """Three experts in one weight, so that ranks hold different numbers of them; `share` of the rows for each."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.share = share
        self.up = nn.Parameter(torch.randn(3, 96, 64) / 8)
        self.down = nn.Parameter(torch.randn(3, 64, 96) / 8)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 4, dtype=torch.int32, device=x.device) * self.share
        hidden = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends).relu()
        return x + torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)


class OfExperts(nn.Module):
    """Formats in which blocks lie within an expert, and two in which the last one of an expert is smaller."""

    def __init__(self) -> None:
        super().__init__()
        formats = ("nvfp4", "mxfp8", models.DELAYED, "fp8_block", "mxfp4")
        self.blocks = nn.ModuleList(Grouped(8) for _ in formats)
        self.recipe = {f"blocks.{index}.*": fmt for index, fmt in enumerate(formats)}

    def forward(self, x: Tensor) -> Tensor:
        """Every row thrice, one after another."""
        x = x.repeat(3, 1)
        for block in self.blocks:
            x = block(x)
        return x


class Attentive(nn.Module):
    """A block is torch's own transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0)])
        self.recipe = {"*.in_proj_weight": "nvfp4", "*.linear?.weight": "mxfp8", "*.out_proj.weight": models.DELAYED}

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x[None])  # type: ignore[no-any-return]


def tied_and_in_one_group() -> Any:
    """A weight of two blocks, which FSDP2 takes in one group only."""
    model = Net(("nvfp4", "nvfp4"), 64, 96)
    model.blocks[1][1].weight = model.blocks[0][1].weight
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    fully_shard(list(model.blocks), mesh=models.mesh(), mp_policy=models.BF16)  # type: ignore[call-overload]
    return fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)


def prepared_in_two_calls() -> Any:
    """Two blocks whose weights are of different calls of `prepare`, in one group of FSDP2."""
    model = Net(("nvfp4", "fp8_current"), 64, 96)
    # The names of weights are those in the block that is prepared.
    first, second = model.blocks
    model.blocks = nn.ModuleList([first, models.Block(*second[1:])])
    zerocast.fsdp2.prepare(model.blocks[0], {"1.weight": "nvfp4", "3.weight": "mxfp8"})
    zerocast.fsdp2.prepare(model.blocks[1], {"0.weight": "fp8_current", "2.weight": "nvfp4"})
    fully_shard(list(model.blocks), mesh=models.mesh(), mp_policy=models.BF16)  # type: ignore[call-overload]
    return fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)


def partly_frozen() -> Any:
    """A weight a block does not learn yet."""
    model = Net(FEW, 64, 96)
    for block in model.blocks:
        block[1].weight.requires_grad_(False)
    return models.sharded(model)


def offloaded() -> Any:
    return models.sharded(Net(FORMATS, 64, 96), offload_policy=CPUOffloadPolicy(pin_memory=False))


def in_half_precision() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return models.sharded(Net(FEW, 64, 96), mp_policy=policy)


MODELS: dict[str, Callable[[], Any]] = {
    "routed experts": lambda: models.sharded(Routed()),
    "experts in one weight": lambda: models.sharded(OfExperts()),
    "attention": lambda: models.sharded(Attentive()),
    "tied": tied_and_in_one_group,
    "prepared in two calls": prepared_in_two_calls,
    "frozen at first": partly_frozen,
    "offloaded": offloaded,
    "scaled loss": in_half_precision,
}


def learnt(name: str, moment_dtype: Any) -> list[str]:
    """What verify says over steps with all that a loop may have around them, and weights that never moved."""
    model = MODELS[name]()
    optimizer = zerocast.fsdp2.FusedAdamW(model.named_parameters(), lr=1e-2, moment_dtype=moment_dtype)
    scaler = torch.amp.GradScaler(models.place(), init_scale=2.0**12, enabled=name == "scaled loss")
    before = {key: p.full_tensor().clone() for key, (p, _) in models.masters(model).items()}
    late = {key for key, (p, _) in models.masters(model).items() if not p.requires_grad}
    used = {key for key in before if "experts.1" not in key and "experts.2" not in key}
    found = []
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
        found += [str(difference) for difference in zerocast.verify(model).differences]
        now = models.masters(model)
        moved = {key for key, value in before.items() if not torch.equal(now[key][0].full_tensor(), value)}
        wanted = used - late if step < 2 else used
        found += [f"step {step}: {key} moved or stayed" for key in moved ^ wanted]
    return found


@pytest.mark.parametrize(
    ("name", "moment_dtype"),
    [
        ("tied", torch.float32),
        ("prepared in two calls", torch.float32),
        ("frozen at first", "8bit"),
        *(models.slow(name, torch.float32) for name in MODELS if name not in ("tied", "prepared in two calls")),
        *(models.slow(name, "8bit") for name in MODELS if name != "frozen at first"),
    ],
    ids=str,
)
def test_models(ranks: Ranks, name: str, moment_dtype: Any) -> None:
    assert ranks(2)(learnt, name, moment_dtype) == [[], []]


@pytest.mark.slow
def test_fewer_experts_than_ranks(ranks: Ranks) -> None:
    assert ranks(4)(learnt, "experts in one weight", torch.float32) == [[]] * 4


def parametrized() -> str:
    """What the first forward pass of a weight says that something else is computed of."""
    model = Net(("fp8_current",), 64, 96)
    nn.utils.parametrizations.weight_norm(model.blocks[0][1])
    models.sharded(model, {"*.original1": "fp8_current"})
    return error_of(lambda: loss(model, 0))


def test_a_parametrized_weight_is_refused(ranks: Ranks) -> None:
    assert all("is not defined on a QuantizedWeight" in said for said in ranks(2)(parametrized))
