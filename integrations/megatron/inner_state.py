"""The state of the inner optimizers around a load.

Megatron expects the state of fused optimizers. torch's own Adam has another: none before its first
step, and then a step number for each parameter. Megatron neither saves nor loads these; it keeps
those of the parameter groups, which therefore count.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor


def prepare_states(optimizers: Sequence[Any]) -> None:
    """Make states that the host can build a template of a load from: there, complete and of one
    step, as it asserts.

    RuntimeError where an inner optimizer died in its first step, with states for some parameters
    only.
    """
    counted: list[Any] = []
    for one in optimizers:
        inner = one.optimizer
        if not inner.state and type(inner).__module__.startswith("torch.optim"):
            _begin(inner)
        states = [inner.state.get(param, {}) for param in _parameters(inner)]
        if len({frozenset(state) for state in states}) > 1:
            raise RuntimeError(
                f"{type(inner).__name__} died in its first step, with states for some of its parameters only: build model and "
                "optimizer again, and load into those"
            )
        counted += [held for held in (*states, *inner.param_groups) if "step" in held]
    last = max((int(held["step"]) for held in counted), default=0)
    for held in counted:
        held["step"] = held["step"] * 0 + last


def copy_group_steps(optimizers: Sequence[Any]) -> None:
    """Give every parameter a step of its own, that of its group, as it was loaded."""
    for one in optimizers:
        for group in one.optimizer.param_groups:
            for param in group["params"] if "step" in group else ():
                state = one.optimizer.state.get(param, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].new_tensor(float(group["step"]))


def keeping_step(one: Any) -> Callable[[Any, dict[str, Any]], None]:
    """The host's method that fills the state of a parameter, but for its step, which a checkpoint
    does not have.
    """
    fill = one._set_main_param_and_optimizer_states

    def call(model_param: Any, tensors: dict[str, Any]) -> None:
        held = one._get_main_param_and_optimizer_states(model_param)
        fill(model_param, {**tensors, **({"step": held["step"]} if "step" in held else {})})

    return call


def _parameters(inner: Any) -> Iterator[Any]:
    return (param for group in inner.param_groups for param in group["params"] if param.numel())


def _begin(inner: Any) -> None:
    """State as before the first step: by a step that changes nothing."""
    rates = [group["lr"] for group in inner.param_groups]
    for param in _parameters(inner):
        param.grad = param.new_zeros(param.shape)
    for group in inner.param_groups:
        group["lr"] = 0.0
    inner.step()
    inner.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in inner.state.values():
        state["step"].zero_()
