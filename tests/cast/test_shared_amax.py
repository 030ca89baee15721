"""Weights that engines fuse share one tensor amax: the bytes are those of a cast that is given it, for any cuts."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import zerocast
from tests import devices
from tests.workers import on_ranks
from zerocast import CastPlan, QuantizedWeight, Recipe
from zerocast.backends.reference.quantize import quantize
from zerocast.backends.reference.scales import block_amax

ROWS = {"q": 96, "k": 64, "v": 32}
SHARING = ("nvfp4", "nvfp4:exact_in_fp8", "fp8_current")


class Attention(nn.Module):
    """Query, key and value of unlike size and amax, and an output that shares nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number, (name, rows) in enumerate(ROWS.items()):
            self.add_module(f"{name}_proj", nn.Linear(64, rows, bias=False))
            getattr(self, f"{name}_proj").weight.data.mul_(2.0**number)
        self.o_proj = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [getattr(self, f"{name}_proj")(x).mean(-1, keepdim=True) for name in ROWS]
        return self.o_proj(x) + sum(parts)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.blocks[1].v_proj.weight.data.mul_(3.0)  # type: ignore[union-attr,operator]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def recipe(fmt: str, share_amax: Any = "llama") -> Recipe:
    return Recipe({"*_proj.weight": fmt}, share_amax=share_amax)


def expected(masters: dict[str, Tensor], fmt: str, share: bool = True) -> dict[str, Any]:
    """Return the casts by the reference's `quantize` alone."""
    spec, found = zerocast.get_format(fmt), {}
    for name, master in masters.items():
        family = [f"{name.rpartition('.')[0].rpartition('.')[0]}.{part}_proj.weight" for part in ROWS]
        family = [member.removeprefix(".") for member in family]
        amax = None
        if share and name in family:
            amax = torch.stack([block_amax(masters[m].bfloat16().float(), None).view(1) for m in family]).amax(0)
        found[name] = quantize(spec, master, torch.bfloat16, tensor_amax=amax)
    return found


def check(weights: dict[str, QuantizedWeight], wanted: dict[str, Any]) -> None:
    for name, weight in weights.items():
        for buffer in ("rowwise_data", "rowwise_scale_inv", "amax"):
            found, right = getattr(weight, buffer), getattr(wanted[name], buffer)
            assert found is right is None or torch.equal(found.cpu(), right), (name, buffer)


def quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    yield from ((name, p) for name, p in model.named_parameters() if isinstance(p, QuantizedWeight))


@pytest.mark.parametrize("fmt", SHARING)
def test_the_first_cast(fmt: str) -> None:
    model = Net()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    zerocast.quantize_(model, recipe(fmt), dtype=torch.bfloat16)
    weights = dict(quantized(model))
    check(weights, expected(masters, fmt))
    amaxes = {name: weight.amax.item() for name, weight in weights.items()}  # type: ignore[union-attr]
    for block in (0, 1):
        assert len({amaxes[f"blocks.{block}.{part}_proj.weight"] for part in ROWS}) == 1
    assert amaxes["blocks.0.q_proj.weight"] < amaxes["blocks.1.q_proj.weight"]
    assert all(weight.high_precision_init_val is not None for weight in weights.values())
    alone = zerocast.quantize_(Net(), recipe(fmt, ()), dtype=torch.bfloat16)
    check(dict(quantized(alone)), expected(masters, fmt, share=False))


LONG = pytest.mark.long_interpreted
EVERY_BACKEND = [fmt if fmt == "nvfp4" else pytest.param(fmt, marks=LONG) for fmt in (*SHARING, "fp8_block", "mxfp8")]


@pytest.mark.parametrize("fmt", EVERY_BACKEND)
def test_backends_agree(fmt: str, backend_anywhere: str) -> None:
    place = devices.of(backend_anywhere)
    model = zerocast.quantize_(Net().to(place), recipe(fmt), dtype=torch.bfloat16)
    weights = dict(quantized(model))
    masters = {name: torch.randn(weight.shape) * (1 + number) for number, (name, weight) in enumerate(weights.items())}
    flat = [master.view(-1).to(place) for master in masters.values()]
    CastPlan(list(weights.values()), flat, [0] * len(flat), backend=backend_anywhere).cast()
    check(weights, expected(masters, fmt, share=fmt in SHARING))


def trained(fmt: str, device: str) -> None:
    masters = {name: p.detach().clone() for name, p in Net().named_parameters()}
    model = zerocast.quantize_(Net().to(device), recipe(fmt), dtype=torch.bfloat16)
    check(dict(quantized(model)), expected(masters, fmt))
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, 64).to(device, torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        zerocast.verify(optimizer).raise_for_differences()
    weights = dict(quantized(model))
    amaxes = [weights[f"blocks.0.{part}_proj.weight"].amax.item() for part in ROWS]  # type: ignore[union-attr]
    assert len({*amaxes}) == 1, amaxes


def sharded(fmt: str, device: str, apart: bool = False) -> None:
    """Train under FSDP2, which gathers each projection by itself if `apart`, and verify after each step."""
    model = Net().to(device)
    zerocast.fsdp2.prepare(model, recipe(fmt))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        for projection in block.children() if apart else ():
            fully_shard(projection, mp_policy=policy)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, 64).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        zerocast.verify(model).raise_for_differences()


def both(fmt: str, device: str = "cpu") -> None:
    trained(fmt, device)
    sharded(fmt, device)


@pytest.mark.parametrize(
    ("fmt", "world"),
    [("nvfp4", 3), *(pytest.param(fmt, n, marks=pytest.mark.slow) for fmt in SHARING for n in (1, 2, 5))],
)
@on_ranks()
def test_while_it_trains(fmt: str) -> None:
    """ZeroAdamW and FSDP2 share the amax. `verify` knows of the sharing and of no plan."""
    both(fmt)


@pytest.mark.parametrize("fmt", ["nvfp4:exact_in_fp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
@on_ranks(2)
def test_verify_where_each_of_a_group_is_gathered_at_another_time(fmt: str) -> None:
    """`verify` takes the amax of the others from what they have stored, which exact scales store in another form."""
    sharded(fmt, "cpu", apart=True)


@pytest.mark.parametrize("share", [(), "llama"])
@on_ranks(2)
def test_no_further_collective(share: Any) -> None:
    model = zerocast.quantize_(Net(), recipe("nvfp4", share), dtype=torch.bfloat16)
    weights = list(model.parameters())
    plan = CastPlan(weights, [torch.randn(w.numel()) if dist.get_rank() == 0 else None for w in weights], [0] * 8)
    with CommDebugMode() as mode:
        plan.cast()
    assert mode.get_total_counts() == 1


def test_copies_still_share() -> None:
    model = zerocast.quantize_(Net(), recipe("nvfp4"), dtype=torch.bfloat16)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    for name, weight in quantized(copy.deepcopy(model)):
        assert weight.state.shared_amax == model.get_parameter(name).state.shared_amax  # type: ignore[attr-defined]
        assert loaded[name].state.shared_amax == weight.state.shared_amax
    assert weight.state.shared_amax is None or "o_proj" not in name


def _two_formats() -> Any:
    return zerocast.quantize_(Net(), Recipe({"*.q_proj.weight": "nvfp4"}, share_amax="llama"))


def _part_of_a_group() -> Any:
    model = zerocast.quantize_(Net(), recipe("nvfp4"), dtype=torch.bfloat16)
    weights = [model.get_parameter(f"blocks.0.{part}_proj.weight") for part in "qk"]
    return CastPlan(weights, [torch.randn(w.numel()) for w in weights], [0, 0])


def _switched() -> Any:
    model = zerocast.quantize_(Net(), recipe("nvfp4"), dtype=torch.bfloat16)
    optimizer = zerocast.ZeroAdamW(model.named_parameters())
    zerocast.switch(optimizer, recipe("fp8_current"))


REFUSED: dict[str, tuple[Any, str]] = {
    "fused weights of two formats": (_two_formats, "share a tensor amax but have the formats nvfp4 and identity"),
    "plain and exact scales": (
        lambda: zerocast.quantize_(
            Net(), Recipe({"*.q_proj.weight": "nvfp4", "*": "nvfp4:exact_in_fp8"}, share_amax="llama")
        ),
        "share a tensor amax but have the formats nvfp4 and nvfp4:exact_in_fp8=True",
    ),
    "part of a group in a plan": (
        _part_of_a_group,
        "2 of the weights .* are cast in this plan, but 3 share a tensor amax",
    ),
    "delayed scaling": (
        lambda: zerocast.quantize_(Net(), recipe("fp8_delayed")),
        "scales come from the amax history of each weight",
    ),
    "no group": (
        lambda: zerocast.quantize_(nn.Linear(64, 64), Recipe({"weight": "nvfp4"}, share_amax="llama")),
        "finds no two",
    ),
    "an unknown preset": (
        lambda: recipe("nvfp4", "gpt"),
        "share_amax is one of llama, or groups of patterns; got 'gpt'",
    ),
    "a group of one": (lambda: recipe("nvfp4", [["*.q_proj.weight"]]), "has two patterns or more"),
    "a switch": (_switched, "share_amax is settled when weights are quantized"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()
