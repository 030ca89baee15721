"""The state of the inner optimizers around a load.

Megatron expects the state of fused optimizers. torch's own Adam has another: none before its first
step, and then a step number for each parameter. Megatron neither saves nor loads these; it keeps
those of the parameter groups, which therefore count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import host
from .offload import to_save

Method = Callable[..., Any]


def prepare_states(optimizers: Sequence[Any]) -> None:
    """Make states that the host can build a template of a load from: there, complete and of one
    step, as it asserts.

    RuntimeError where an inner optimizer died in its first step, with states for some parameters
    only.
    """
    counted: list[Any] = []
    for one in optimizers:
        inner = one.optimizer
        if not inner.state and (type(inner).__module__.startswith("torch.optim") or host.offloads(inner)):
            _begin(inner)
        states = [inner.state.get(param, {}) for param in _parameters(inner)]
        if len({frozenset(state) - {"step"} for state in states}) > 1:
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
            if host.offloads(one.optimizer):  # its parts count by themselves; it would tell them this in every step
                group.pop("step", None)


def reading_states(one: Any) -> Method:
    """The host's method that returns the master and the state of a parameter: moments as numbers,
    and no copy of the master.

    TransformerEngine's fused Adam keeps FP16 and FP8 moments with a scale, which Megatron omits.
    """
    read = one._get_main_param_and_optimizer_states

    def call(model_param: Any) -> dict[str, Any]:
        tensors: dict[str, Any] = read(model_param)
        tensors.pop(host.HOST_COPY, None)
        unscaled, master = getattr(one.optimizer, "get_unscaled_state", _unchanged(tensors)), tensors["param"]
        scaled = [name for name in tensors if name != "param" and tensors[name].dtype != torch.bfloat16]
        return {**tensors, "param": to_save(master), **{name: unscaled(master, name) for name in scaled}}

    return call


def _unchanged(tensors: Mapping[str, Any]) -> Method:
    return lambda master, name: tensors[name]


def filling_states(one: Any) -> Method:
    """The host's method that fills the master and the state of a parameter from those numbers, but
    for what a checkpoint does not have: its step, and a copy of the master.
    """
    read, fill = one._get_main_param_and_optimizer_states, one._set_main_param_and_optimizer_states

    def call(model_param: Any, tensors: dict[str, Any]) -> None:
        held, set_scaled = read(model_param), getattr(one.optimizer, "set_scaled_state", None)
        if set_scaled is None:
            fill(model_param, {**tensors, **{name: held[name] for name in ("step", host.HOST_COPY) if name in held}})
            return
        master = held.pop("param")
        master.copy_(tensors["param"])
        for name in held:
            if isinstance(tensors[name], Tensor):
                set_scaled(master, name, tensors[name].to(master.device, torch.float32, copy=True))  # which it scales

    return call


def _parameters(inner: Any) -> Iterator[Any]:
    return (param for group in inner.param_groups for param in group["params"] if param.numel())


def _begin(inner: Any) -> None:
    """State as before the first step: by a step that changes nothing."""
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
