"""Optimizer CPU offload: Megatron's HybridDeviceOptimizer over the FP32 masters of a rank's shards.

It holds moments, and a copy of every offloaded master, in host memory. A step updates the copies
and brings them back into the masters, which are cast as without it. Whatever else writes masters, a
load or a call of `refresh()`, has to write the copies too: the next step starts from those.

With BF16 weights Megatron gives it those weights, and no FP32 masters but its copies. Quantized
weights have no values that it could start from.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zerocast.integrations.host_adapter import Patch

from . import host, ownership
from .primary import is_primary


def without_primary(sort: Callable[..., Any]) -> Callable[..., Any]:
    """The method by which a HybridDeviceOptimizer copies its parameters to the host.

    The host first makes one over the parameters of the model, whose settings it gives to a second
    one over masters: nothing of primary weights is copied for that.
    """

    def call(optimizer: Any, offload_fraction: float) -> Any:
        if any(is_primary(param) for group in optimizer.param_groups for param in group["params"]):
            return [], [], {}, {}, {}
        return sort(optimizer, offload_fraction)

    return call


def write_host_copies(optimizer: Any) -> None:
    """Copy the masters of a DistributedOptimizer to where its next step reads them."""
    for master, copy in host.host_copies(optimizer.optimizer).items():
        copy.data.copy_(master.data)


def patches(optimizer: Any) -> Iterator[Patch]:
    """The methods that load a HybridDeviceOptimizer, if a DistributedOptimizer has one."""
    inner = optimizer.optimizer
    if not host.offloads(inner):
        return

    def move_states() -> None:
        for one in inner.sub_optimizers:
            for param, state in one.state.items():
                moved = {key: value.to(param.device) for key, value in state.items() if isinstance(value, Tensor)}
                state.update(moved)

    yield Patch(optimizer, "state_dict", _without_settings(optimizer))
    # as it is, it finds no FP32 masters but those that it has made of BF16 parameters
    yield Patch(inner, "_update_fp32_params_by_new_state", lambda: None)
    # as it is, it takes every optimizer for one on the CPU where torch's AdamW is on both devices
    yield Patch(inner, "_move_new_state_to_right_device", move_states)


def _without_settings(optimizer: Any) -> Callable[..., Any]:
    """The host's method that returns what all ranks save alike, without what is said of the two
    sides: two classes, which the safe reading of a file refuses, and where to copy what.
    """
    method = optimizer.state_dict
    settings = inspect.signature(host.hybrid().__init__).parameters

    def call() -> Any:
        state = method()
        groups = state["optimizer"]["param_groups"]
        state["optimizer"]["param_groups"] = [{k: v for k, v in one.items() if k not in settings} for one in groups]
        return state

    return call


def reading_given_values(optimizer: Any) -> Callable[..., None]:
    """The host's method that makes masters of a state dict, which it leaves out for a
    HybridDeviceOptimizer.
    """
    read_given = ownership.of(optimizer).read_given(optimizer)

    def call(state_dict: Any) -> None:
        inner = optimizer.optimizer
        if not host.offloads(inner):
            read_given(state_dict)
            return
        optimizer.optimizer = None  # which it asks for its class
        try:
            read_given(state_dict)
        finally:
            optimizer.optimizer = inner

    return call
