"""full_state_dict: masters under the names of the model, whatever the optimizer calls them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.workers import error_of, on_ranks
from zerocast.optim import full_state_dict
from zerocast.optim.pretrained import _gathered

FP32 = torch.float32


class Around(nn.Module):
    """A quantized net inside a model whose own names are those of the net's parameters too."""

    def __init__(self, inner: str = "nvfp4") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        self.add_module("0", nn.Linear(64, 32))  # of another shape: 0.weight is net.1.weight's
        zerocast.quantize_(self.net, {"*.weight": inner}, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def trained(parameters: object) -> zerocast.ZeroAdamW:
    return zerocast.ZeroAdamW(parameters, lr=0.05)


def masters_of(optimizer: zerocast.ZeroAdamW) -> dict[str, Tensor]:
    """Whole on every rank, by the optimizer's names."""
    group = zerocast.distributed.group.Group.of(optimizer.process_group)
    return {name: _gathered(master, group, name).clone() for name, master in optimizer.state_dict()["model"].items()}


@on_ranks(1, 2)
def test_an_optimizer_of_a_part_has_other_names() -> None:
    model = Around()
    optimizer = trained(model.net.named_parameters())
    model(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    state, masters = full_state_dict(model, optimizer, dtype=FP32), masters_of(optimizer)
    if dist.is_initialized() and dist.get_rank():
        assert state == {}
        return
    for name, master in masters.items():
        assert torch.equal(state[f"net.{name}"], master)
    weight = model.net[0].weight
    assert not torch.equal(state["net.0.weight"], weight.dequantize().float())
    assert torch.equal(state["0.weight"], model.get_parameter("0.weight"))


@on_ranks(2)
def test_a_weight_whose_master_is_elsewhere() -> None:
    """A weight that nobody trains, and one that only rank 1 lacks."""
    model = Around()
    first = [(name, p) for name, p in model.net.named_parameters() if name != "1.weight"]
    rank = dist.get_rank()
    optimizer = trained(first)
    everywhere = error_of(lambda: full_state_dict(model, optimizer))
    model.net[1].weight.requires_grad_(rank == 1)
    for said in (everywhere, error_of(lambda: full_state_dict(model, optimizer))):
        assert said.startswith("ValueError")
        assert "net.1.weight requires a gradient and is not a parameter of this ZeroAdamW" in said


def test_frozen_weights_are_dequantized() -> None:
    model = Around()
    model.net[1].weight.requires_grad_(False)
    state = full_state_dict(model, trained(model.net.named_parameters()))
    assert torch.equal(state["net.1.weight"], model.net[1].weight.dequantize())
