"""The state of the optimizers around a save or a load.

Megatron expects the state of a fused Adam, which counts steps per parameter group. torch's Adam has
no state before its first step, and then a step number for each parameter. Megatron neither saves
nor loads step numbers of parameters: after a load they are copied from their group's. The entries
of an optimizer include the state of delayed scaling, too.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.integrations import Patch, Patches, replaced

from . import host, offload
from .gathers import AttachedShare, Guard

# The entry of an optimizer's state dict with the state of delayed scaling.
SCALING = "zerocast_scaling"
logger = logging.getLogger(__name__)


def patches(optimizer: Any, shares: Sequence[AttachedShare], guard: Guard) -> Iterator[Patch]:
    """Yield patches of the methods that save and load the state of one optimizer."""
    hosts_entries, hosts_load = optimizer.sharded_state_dict, optimizer.load_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        with _offsets_to_save(optimizer, kwargs.get("metadata")):
            entries = hosts_entries(*args, **kwargs)
        if entries is not None:
            for share in shares:
                entries.update(_scaling_entry(share))
        return entries

    def load_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = hosts_load(state_dict, *args, **kwargs)
        # While a load is prepared, the host loads a state that it has made itself, and delayed
        # scaling stays as it is.
        if not guard.is_preparing:
            for share in shares:
                _load_scaling(share, state_dict)
        return result

    yield Patch(optimizer, "sharded_state_dict", sharded_state_dict)
    yield Patch(optimizer, "load_state_dict", load_state_dict)
    # A layer-wise optimizer saves the unsharded state.
    if not host.is_layer_wise(optimizer):
        yield Patch(optimizer, "_set_main_param_and_optimizer_states", _filling_states(optimizer))
        yield Patch(optimizer, "_get_main_param_and_optimizer_states", _reading_states(optimizer))


def check_checkpoint(optimizer: Any, metadata: Any) -> None:
    """Raise ValueError on all ranks for a checkpoint that Megatron cannot save.

    A `dp_reshardable` one needs a parameter on every rank: Megatron would fail an assertion on the
    ranks without one, and the others would wait. A `fully_reshardable` one may leave out moments.
    """
    # A layer-wise optimizer saves the unsharded state.
    if host.is_layer_wise(optimizer):
        return
    kind = (metadata or {}).get("distrib_optim_sharding_type")
    if kind == "fully_reshardable" and (missing := moments_left_out(optimizer)):
        raise ValueError(
            f"fully_reshardable checkpoints of Megatron leave out {', '.join(missing)} of parameters that Adam updates under "
            f"optimizer={optimizer.config.optimizer!r}: use dp_reshardable"
        )
    if kind != "dp_reshardable":
        return
    ranks = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            part_numel = bucket.grad_data.numel() // ranks
            spans = [buffer.param_index_map[param][:2] for param in bucket.params_list]
            owners = {
                rank
                for start, stop in spans
                for rank in _owners(start - bucket.offset, stop - bucket.offset, part_numel)
            }
            if len(owners) < ranks:
                raise ValueError(
                    f"bucket {bucket.bucket_id} with {len(spans)} parameters leaves {ranks - len(owners)} of {ranks} ranks "
                    "without any, which dp_reshardable checkpoints do not support: use fully_reshardable, or larger buckets"
                )


def moments_left_out(optimizer: Any) -> list[str]:
    """Return the moments of Adam that `fully_reshardable` checkpoints of a DistributedOptimizer
    leave out.

    Since 0.19 the host chooses the moments to save by the name of the configured optimizer. Under
    Muon that leaves out moments of the parameters that Adam updates.
    """
    moments = ("exp_avg", "exp_avg_sq")
    return [name for name in moments if name not in getattr(optimizer, "optimizer_state_keys", moments)]


def _owners(start: int, stop: int, part_numel: int) -> range:
    """Return the ranks that own elements [start, stop) of a bucket."""
    return range(start // part_numel, (stop - 1) // part_numel + 1)


@contextlib.contextmanager
def preparing_load(optimizers: Sequence[Any], guard: Guard) -> Iterator[None]:
    """Prepare `optimizers` for the template of a load, which the host makes while the context is
    open.
    """
    # Preparing writes moments. Weights that are partial already stay so, with their first reason,
    # until the load itself.
    with contextlib.nullcontext() if guard.validity.partial else guard.validity.transaction("preparing a load"):
        _prepare_states(optimizers)
        with replaced(guard, "is_preparing", True):
            yield
        # The host has rewritten states, and may have given all parameters of a group one step
        # tensor.
        copy_group_steps(optimizers)


def _prepare_states(optimizers: Sequence[Any]) -> None:
    """Make the states from which the host builds the template of a load.

    The host asserts that every parameter has all moments and that all step numbers are equal.
    Raises RuntimeError where an inner optimizer was interrupted in its first step, with states for
    some parameters only.
    """
    with_steps: list[Any] = []  # the states and parameter groups that have a step number
    for optimizer in optimizers:
        inner = optimizer.optimizer
        if not inner.state and (type(inner).__module__.startswith("torch.optim") or offload.offloads(inner)):
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
            if offload.offloads(inner):
                group.pop("step", None)


def _reading_states(optimizer: Any) -> Callable[..., Any]:
    """Wrap the method that returns the master and the moments of a parameter.

    Moments become unscaled: TransformerEngine's fused Adam stores FP16 and FP8 moments with a
    scale, which Megatron does not save. The CPU copy of an offloaded master is left out.
    """
    read = optimizer._get_main_param_and_optimizer_states

    def call(model_param: Any) -> dict[str, Any]:
        tensors: dict[str, Any] = read(model_param)
        tensors.pop(offload.HOST_COPY, None)
        master = tensors["param"]
        unscaled = getattr(optimizer.optimizer, "get_unscaled_state", lambda master, name: tensors[name])
        # BF16 moments have no scale.
        scaled = [name for name in tensors if name != "param" and tensors[name].dtype != torch.bfloat16]
        return {**tensors, "param": offload.to_save(master), **{name: unscaled(master, name) for name in scaled}}

    return call


def _filling_states(optimizer: Any) -> Callable[..., Any]:
    """Wrap the method that fills the master and the moments of a parameter from a checkpoint.

    A checkpoint has neither the parameter's step nor the CPU copy of its master: these keep their
    values.
    """
    read, fill = optimizer._get_main_param_and_optimizer_states, optimizer._set_main_param_and_optimizer_states

    def call(model_param: Any, tensors: dict[str, Any]) -> None:
        state = read(model_param)
        set_scaled = getattr(optimizer.optimizer, "set_scaled_state", None)
        if set_scaled is None:
            not_saved = {name: state[name] for name in ("step", offload.HOST_COPY) if name in state}
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


def _scaling_entry(share: AttachedShare) -> dict[str, Any]:
    """Return the entry for the state of delayed scaling; no entry if no weight has any.

    The state is the same on all ranks of a share, so it is saved once for them.
    """
    state = share.driver.plan.delayed.state_dict()
    if not state:
        return {}
    # Copies, since an asynchronous save overlaps the next step, which rolls the scales.
    values = {name: {key: tensor.cpu().clone() for key, tensor in tensors.items()} for name, tensors in state.items()}
    index, instance = share.owned.replica
    key = f"optimizer.distributed.dp_group_idx_{index}.{SCALING}.{next(iter(values))}"
    replica = (instance, 0, share.owned.group.rank)
    sharded = host.module(host.CHECKPOINT_MAPPING).ShardedObject
    return {SCALING + share.owned.suffix: sharded(key, values, (1,), (0,), replica_id=replica)}


def _load_scaling(share: AttachedShare, state_dict: Any) -> None:
    """Load delayed scaling from an optimizer's state. The next cast seeds the scales that the state
    lacks.
    """
    missing = share.driver.plan.delayed.load_state_dict(state_dict.get(SCALING + share.owned.suffix, {}))
    for name in missing:
        if share.owned.group.rank == 0:
            logger.warning("no scale and history of %s in the checkpoint: seeded from its master", name)


@contextlib.contextmanager
def _offsets_to_save(optimizer: Any, metadata: Any) -> Iterator[None]:
    """Let buffers have the offsets by which the host saves them while the context is open.

    For `fully_reshardable` checkpoints Megatron concatenates a buffer's buckets without the padding
    between them, and then slices parameters by offsets that include the padding. In the context the
    offsets exclude it.
    """
    is_unpadded = (metadata or {}).get("distrib_optim_sharding_type") == "fully_reshardable"
    with Patches() as patches:
        for buffer in optimizer.buffers if is_unpadded and not host.is_layer_wise(optimizer) else ():
            unpadded = _unpadded(buffer.buckets, buffer.param_index_map)
            patches.apply([Patch(buffer, "param_index_map", unpadded)])
        yield


def _unpadded(buckets: Sequence[Any], index_map: Mapping[Any, tuple[int, int, int]]) -> dict[Any, tuple[int, int, int]]:
    """Return a dict from parameter to (start, stop, bucket), as if buckets had no padding."""
    unpadded_offsets = list(itertools.accumulate((bucket.numel_unpadded for bucket in buckets), initial=0))
    # `strict=False`: the last accumulated offset is the end of the last bucket.
    padding = [bucket.offset - offset for bucket, offset in zip(buckets, unpadded_offsets, strict=False)]
    return {
        param: (start - padding[bucket], stop - padding[bucket], bucket)
        for param, (start, stop, bucket) in index_map.items()
    }
