"""torch's optimizers do not step quantized weights, and have written nothing when they say so."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import zerocast
from tests import casts

CLASSES: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
WAYS = ("foreach", "fused", "capturable", "differentiable")


def variants() -> list[tuple[str, dict[str, bool]]]:
    """Every class of torch.optim, with each of the ways to compute that it has."""
    found: list[tuple[str, dict[str, bool]]] = []
    for name, kind in CLASSES.items():
        options = inspect.signature(kind).parameters
        found += [(name, {}), *((name, {way: True}) for way in WAYS if way in options)]
    return found


def quantized_last() -> list[nn.Parameter]:
    """A plain parameter first, which a loop over parameters would have written by the time it met the weight."""
    layers = zerocast.quantize_(nn.Sequential(nn.Linear(64, 32, bias=False)), zerocast.Recipe({"*": "nvfp4"}))
    return [nn.Parameter(torch.ones(32, 64)), *layers.parameters()]


def values(parameters: list[nn.Parameter]) -> casts.Bytes:
    return {"plain": casts.raw(parameters[0]).copy(), **casts.bytes_of(parameters[1])}


@pytest.mark.notices(
    "a torch optimizer is given quantized weights", where="Weights", answer="its first step raises, nothing changed"
)
@pytest.mark.parametrize(("name", "options"), variants(), ids=str)
def test_every_class_of_torch_optim_raises_before_it_writes(name: str, options: dict[str, bool]) -> None:
    parameters = quantized_last()
    if name == "Adagrad":  # it makes its states when it is built
        with pytest.raises(RuntimeError, match=r"aten\.full_like.*zerocast\.ZeroAdamW"):
            CLASSES[name](parameters, **options)
        return
    optimizer = CLASSES[name](parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.shape)
    before = values(parameters)
    closure: Any = (lambda: torch.ones(())) if name == "LBFGS" else None
    with pytest.raises(RuntimeError, match=rf"{name} cannot step parameter 1 of group 0, a nvfp4.*zerocast\.ZeroAdamW"):
        optimizer.step(closure)
    casts.assert_same_bytes(values(parameters), before)
    assert not optimizer.state.get(parameters[0])


def test_frozen_weights_beside_trained_parameters_are_no_mistake() -> None:
    """Adapters: the optimizer holds all parameters, and the quantized ones get no gradient."""
    parameters = quantized_last()
    optimizer = torch.optim.AdamW(parameters)
    parameters[0].grad = torch.ones(32, 64)
    optimizer.step()
    assert not torch.equal(parameters[0], torch.ones(32, 64))


def test_a_class_that_inherits_the_step_is_a_torch_optimizer() -> None:
    class Renamed(torch.optim.SGD):
        pass

    parameters = quantized_last()
    parameters[1].grad = torch.ones(32, 64)
    with pytest.raises(RuntimeError, match="Renamed cannot step parameter 1"):
        Renamed(parameters).step()
