"""Weights that modules see as tensors of a host's own: when they are made and filled, and what is refused. No host is needed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests.fsdp2 import models
from tests.workers import on_ranks
from zerocast import FormatSpec, QuantizedWeight
from zerocast.fsdp2.weight import Presentation


class Presenting(Presentation):
    """A presentation that takes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def check(self, fmt: FormatSpec) -> None:
        """Raise for formats that are not FP8."""
        if fmt.bits != 8:
            raise ValueError(f"no {fmt} here")

    def attach(self, module: nn.Module, name: str) -> None:
        """Record the owner of the weight."""
        self.calls.append((type(module).__name__, name))

    def show(self, weight: QuantizedWeight) -> Tensor:
        """Return the weight, of which FSDP2 makes its parameter."""
        self.calls.append("show")
        return weight

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """Record that the parameter reads the gathered buffers."""
        same = isinstance(shown, QuantizedWeight) and shown.rowwise_data.data_ptr() == weight.rowwise_data.data_ptr()
        self.calls.append(("refill", same, isinstance(shown, nn.Parameter)))

    def live(self, shown: Tensor, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the weight that is shown."""
        self.calls.append("live")
        assert isinstance(shown, QuantizedWeight)
        return shown


@on_ranks(1, 2)
def test_a_presentation_is_made_once_and_refilled() -> None:
    """A presentation is made at the first gather, refilled by later gathers and read by `verify`. A
    switch to a format that it does not support raises.
    """
    net, made = models.Net(("fp8_block",), 32, 64), Presenting()

    def present(module: nn.Module, name: str, parameter: Tensor) -> Presenting | None:
        return made if parameter.shape == (64, 32) and name == "weight" else None

    models.sharded(net, prepared={"present": present}, keep_codes=None)
    models.train(net, torch.optim.SGD(net.parameters(), lr=0.1), range(2), 32)
    refilled = ("refill", True, True)
    assert made.calls == [("Linear", "weight"), "show", refilled, refilled, refilled]
    made.calls.clear()
    zerocast.verify(net).raise_for_differences()
    with pytest.raises(ValueError, match="no nvfp4 here"):
        zerocast.switch(net, {"blocks.*.weight": "nvfp4"})
    assert made.calls == [refilled, "live"]


def refusal(model: nn.Module, recipe: dict[str, str], present: Any) -> str:
    """Return the error of `prepare`, which leaves the parameters as they were."""
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        zerocast.fsdp2.prepare(model, zerocast.Recipe(recipe), present=present)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    return str(caught.value)


def test_what_cannot_be_presented_is_refused() -> None:
    """A format that is not taken is refused with the name of the weight, and so is a weight that two modules
    see differently.
    """
    model, made = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), Presenting()
    assert refusal(model, {"*.weight": "nvfp4"}, lambda *_: made) == "0.weight: no nvfp4 here"
    assert made.calls == []
    model[1].weight = model[0].weight
    error = refusal(model, {"*.weight": "fp8_block"}, lambda module, *_: made if module is model[0] else None)
    assert error.startswith("1.weight is 0.weight too")
    assert made.calls == []


def test_modules_with_tensors_of_their_own_are_presented() -> None:
    """TransformerEngine's modules need `present`: its kernels would be given memory that a QuantizedWeight
    does not have.
    """
    layer = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    model = nn.Sequential(layer(128, 128))
    expected = (
        r"0\.weight: weight of a Linear is multiplied .* present=zerocast\.integrations\.transformer_engine\.present"
    )
    with pytest.raises(ValueError, match=expected):
        zerocast.fsdp2.prepare(model, {"*": "fp8_current"})
    assert type(model[0].weight) is nn.Parameter
