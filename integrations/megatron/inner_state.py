"""The state of the inner optimizers around a save or a load.

Megatron expects the state of a fused Adam, which counts steps per parameter group. torch's Adam has
no state before its first step, and then a step number for each parameter. Megatron neither saves
nor loads step numbers of parameters: after a load they are copied from their group's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import host
from .offload import to_save

Method = Callable[..., Any]


def prepare_states(optimizers: Sequence[Any]) -> None:
    """Make the states from which the host builds the template of a load.

    The host asserts that every parameter has all moments and that all step numbers are equal.
    Raises RuntimeError where an inner optimizer was interrupted in its first step, with states for
    some parameters only.
    """
    with_steps: list[Any] = []  # the states and parameter groups that have a step number
    for optimizer in optimizers:
        inner = optimizer.optimizer
        if not inner.state and (type(inner).__module__.startswith("torch.optim") or host.offloads(inner)):
            _begin(inner)
        states = [inner.state.get(param, {}) for param in _parameters(inner)]
        if len({frozenset(state) - {"step"} for state in states}) > 1:
            raise RuntimeError(
                f"{type(inner).__name__} died in its first step, with states for some of its parameters only: build model and "
                "optimizer again, and load into those"
            )
        with_steps += [entries for entries in (*states, *inner.param_groups) if "step" in entries]
    last = max((int(entries["step"]) for entries in with_steps), default=0)
    for entries in with_steps:
        # A step is an int or a tensor, whose dtype and device stay as they are.
        entries["step"] = entries["step"] * 0 + last


def copy_group_steps(optimizers: Sequence[Any]) -> None:
    """Give every parameter its own step tensor, with the loaded step of its group."""
    for optimizer in optimizers:
        inner = optimizer.optimizer
        for group in inner.param_groups:
            for param in group["params"] if "step" in group else ():
                state = inner.state.get(param, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].new_tensor(float(group["step"]))
            # The sub-optimizers of a HybridDeviceOptimizer count by themselves. In every step it
            # copies its groups to theirs, and would set them back to this number each time.
            if host.offloads(inner):
                group.pop("step", None)


def reading_states(optimizer: Any) -> Method:
    """Wrap the method that returns the master and the moments of a parameter.

    Moments become unscaled: TransformerEngine's fused Adam stores FP16 and FP8 moments with a
    scale, which Megatron does not save. The CPU copy of an offloaded master is left out.
    """
    read = optimizer._get_main_param_and_optimizer_states

    def call(model_param: Any) -> dict[str, Any]:
        tensors: dict[str, Any] = read(model_param)
        tensors.pop(host.HOST_COPY, None)
        master = tensors["param"]
        unscaled = getattr(optimizer.optimizer, "get_unscaled_state", lambda master, name: tensors[name])
        # BF16 moments have no scale.
        scaled = [name for name in tensors if name != "param" and tensors[name].dtype != torch.bfloat16]
        return {**tensors, "param": to_save(master), **{name: unscaled(master, name) for name in scaled}}

    return call


def filling_states(optimizer: Any) -> Method:
    """Wrap the method that fills the master and the moments of a parameter from a checkpoint.

    A checkpoint has neither the parameter's step nor the CPU copy of its master: these keep their
    values.
    """
    read, fill = optimizer._get_main_param_and_optimizer_states, optimizer._set_main_param_and_optimizer_states

    def call(model_param: Any, tensors: dict[str, Any]) -> None:
        state = read(model_param)
        set_scaled = getattr(optimizer.optimizer, "set_scaled_state", None)
        if set_scaled is None:
            not_saved = {name: state[name] for name in ("step", host.HOST_COPY) if name in state}
            fill(model_param, {**tensors, **not_saved})
            return
        master = state.pop("param")
        master.copy_(tensors["param"])
        for name in state:
            if isinstance(tensors[name], Tensor):
                # A copy, since `set_scaled_state` scales its argument in place.
                set_scaled(master, name, tensors[name].to(master.device, torch.float32, copy=True))

    return call


def _parameters(inner: Any) -> Iterator[Any]:
    return (param for group in inner.param_groups for param in group["params"] if param.numel())


def _begin(inner: Any) -> None:
    """Make the state that an optimizer has before its first step.

    torch's optimizers make state in a step only. This step has a learning rate and gradients of
    zero, so it changes no master; afterwards the step numbers are set back to zero.
    """
    rates = [group["lr"] for group in inner.param_groups]
    for param in _parameters(inner):
        param.grad = param.new_zeros(param.shape)
    try:
        for group in inner.param_groups:
            group["lr"] = 0.0
        inner.step()
    finally:
        inner.zero_grad()
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
    for state in inner.state.values():
        if "step" in state:
            state["step"].zero_()
