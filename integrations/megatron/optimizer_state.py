"""The state of the optimizers around a save or a load.

Megatron expects the state of a fused Adam, which counts steps per parameter group. torch's Adam has
no state before its first step, and then a step number for each parameter. Megatron neither saves
nor loads step numbers of parameters: after a load they are copied from their group's. The entries
of an optimizer include the state of delayed scaling, too.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.integrations.patches import Patch

from . import host
from .gathers import AttachedShare
from .guard import Method, MethodGuard
from .offload import to_save
from .validate import check_checkpoint

# The entry of an optimizer's state dict with the state of delayed scaling.
SCALING = "zerocast_scaling"
logger = logging.getLogger(__name__)


def patches(optimizer: Any, shares: Sequence[AttachedShare], guard: MethodGuard) -> Iterator[Patch]:
    """Yield patches of the methods that save and load the state of one optimizer."""
    for share in shares:
        yield Patch(optimizer, "sharded_state_dict", _saving_scaling(share))
        yield Patch(optimizer, "load_state_dict", _loading_scaling(share, guard))
    if not host.is_layer_wise(optimizer):  # which saves the unsharded state
        yield Patch(optimizer, "_set_main_param_and_optimizer_states", _filling_states(optimizer))
        yield Patch(optimizer, "_get_main_param_and_optimizer_states", _reading_states(optimizer))
        yield Patch(optimizer, "sharded_state_dict", _saving_unpadded(optimizer))


def preparing(guard: MethodGuard, sharded_state_dict: Method, optimizers: Sequence[Any]) -> Method:
    """Wrap the method that makes sharded state dicts: it prepares `optimizers` for the template
    of a load.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        for optimizer in optimizers:
            check_checkpoint(optimizer, kwargs.get("metadata"))
        if not host.is_loading(args, kwargs):
            return sharded_state_dict(*args, **kwargs)
        # Preparing writes moments. Weights that are partial already stay so, with their first
        # reason, until the load itself.
        with contextlib.nullcontext() if guard.validity.partial else guard.validity.transaction("preparing a load"):
            _prepare_states(optimizers)
            before, guard.is_preparing = guard.is_preparing, True
            try:
                # The host rewrites states here, and may give all parameters of a group one step
                # tensor, which `copy_group_steps` undoes.
                template = sharded_state_dict(*args, **kwargs)
            finally:
                guard.is_preparing = before
            copy_group_steps(optimizers)
            return template

    return call


def _prepare_states(optimizers: Sequence[Any]) -> None:
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


def _reading_states(optimizer: Any) -> Method:
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


def _filling_states(optimizer: Any) -> Method:
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


def _saving_scaling(share: AttachedShare) -> Method:
    """Wrap an optimizer's `sharded_state_dict`: it gets an entry for delayed scaling.

    The state is the same on all ranks of a share, so it is saved once for them.
    """
    method, delayed = share.owned.optimizer.sharded_state_dict, share.driver.plan.delayed

    def call(*args: Any, **kwargs: Any) -> Any:
        entries = method(*args, **kwargs)
        state = delayed.state_dict()
        if entries is not None and state:
            # Copies, since an asynchronous save overlaps the next step, which rolls the scales.
            values = {
                name: {key: tensor.cpu().clone() for key, tensor in tensors.items()} for name, tensors in state.items()
            }
            index, instance = share.owned.share.replica
            key = f"optimizer.distributed.dp_group_idx_{index}.{SCALING}.{next(iter(values))}"
            replica = (instance, 0, share.owned.group.rank)
            sharded = host.module(host.CHECKPOINT_MAPPING).ShardedObject
            entries[SCALING + share.owned.share.suffix] = sharded(key, values, (1,), (0,), replica_id=replica)
        return entries

    return call


def _loading_scaling(share: AttachedShare, guard: MethodGuard) -> Method:
    """Wrap an optimizer's `load_state_dict`: it loads delayed scaling from the same state.

    The next cast seeds the scales that the state lacks. While a load is prepared, the host loads
    a state that it has made itself, and delayed scaling stays as it is.
    """
    method, delayed = share.owned.optimizer.load_state_dict, share.driver.plan.delayed

    def call(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(state_dict, *args, **kwargs)
        if guard.is_preparing:
            return result
        missing = delayed.load_state_dict(state_dict.get(SCALING + share.owned.share.suffix, {}))
        for name in missing:
            if share.owned.group.rank == 0:
                logger.warning("no scale and history of %s in the checkpoint: seeded from its master", name)
        return result

    return call


def _saving_unpadded(optimizer: Any) -> Method:
    """Wrap an optimizer's `sharded_state_dict`: `fully_reshardable` checkpoints become right.

    For these Megatron concatenates a buffer's buckets without the padding between them, and then
    slices parameters by offsets that include the padding. During the call the offsets exclude it.
    """
    method = optimizer.sharded_state_dict

    def call(*args: Any, **kwargs: Any) -> Any:
        if (kwargs.get("metadata") or {}).get("distrib_optim_sharding_type") != "fully_reshardable":
            return method(*args, **kwargs)
        index_maps = [(buffer, buffer.param_index_map) for buffer in optimizer.buffers]
        try:
            for buffer, index_map in index_maps:
                buffer.param_index_map = _unpadded(buffer.buckets, index_map)
            return method(*args, **kwargs)
        finally:
            for buffer, index_map in index_maps:
                buffer.param_index_map = index_map

    return call


def _unpadded(buckets: Sequence[Any], index_map: Mapping[Any, tuple[int, int, int]]) -> dict[Any, tuple[int, int, int]]:
    """Return a dict from parameter to (start, stop, bucket), as if buckets had no padding."""
    unpadded_offsets = list(itertools.accumulate((bucket.numel_unpadded for bucket in buckets), initial=0))
    # `strict=False`: the last accumulated offset is the end of the last bucket.
    padding = [bucket.offset - offset for bucket, offset in zip(buckets, unpadded_offsets, strict=False)]
    return {
        param: (start - padding[bucket], stop - padding[bucket], bucket)
        for param, (start, stop, bucket) in index_map.items()
    }
