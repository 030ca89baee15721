"""Optimizer CPU offload: the masters of Megatron's HybridDeviceOptimizer, in CPU memory only.

As Megatron has it, that optimizer keeps the moments and a copy of every offloaded master in CPU
memory. A step updates the copies and copies them back into the FP32 masters on the GPU. Under
zerocast the copies are the only masters: they are cast from CPU memory, and on the GPU each is
represented by a `CpuMaster` that has no memory. That begins at the construction of the optimizer,
or at `attach`.

With BF16 weights Megatron gives the optimizer the weights themselves, and its CPU copies are the
only FP32 masters. That is impossible for quantized weights, which have no values to start from.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zerocast import QuantizedWeight
from zerocast.integrations import Patch, Patches, replaced

from . import host
from .primary import is_primary

# The name of the CPU copy in the state of a master that a HybridDeviceOptimizer has offloaded.
HOST_COPY = "master_param"


def hybrid() -> Any:
    """Return the class of optimizers whose masters and moments are in CPU memory."""
    return host.module(host.HYBRID).HybridDeviceOptimizer


def offloads(inner: Any) -> bool:
    """Return True if an inner optimizer is a HybridDeviceOptimizer."""
    return isinstance(inner, hybrid())


def cpu_copies(inner: Any) -> Mapping[Any, Any]:
    """Return a dict from each offloaded master to its copy in CPU memory, which a step updates.

    Empty for an optimizer that offloads nothing.
    """
    return inner.gpu_params_map_cpu_copy if offloads(inner) else {}


class CpuMaster(Tensor):
    """Represents on a device a master that is stored in CPU memory.

    Megatron sorts masters by their device and gives them gradients there, so a master in CPU memory
    needs a tensor on the GPU. Operators on it read and write `memory`. Their results are other
    CpuMasters where they are views of `memory`, else tensors copied to the device. It has no data
    pointer: kernels that ask for the address raise RuntimeError.

    Attributes:
        memory: the master's values, of the same shape and dtype, in page-locked CPU memory.
    """

    memory: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: Tensor, device: torch.device) -> "CpuMaster":
        """Represent on `device` the master in the CPU tensor `memory`; nothing is copied."""
        master: CpuMaster = Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(master)
        master.memory = memory
        return master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operator on `memory`, and return its results as tensors of the device."""
        kwargs = kwargs or {}
        masters: dict[int, CpuMaster] = {}  # by address of their storage, to recognize views

        def unwrap(master: CpuMaster) -> Tensor:
            masters[master.memory.untyped_storage().data_ptr()] = master
            return master.memory

        unwrapped_args, unwrapped_kwargs = tree_map_only(CpuMaster, unwrap, (args, kwargs))
        arguments = {id(leaf) for leaf in tree_leaves((unwrapped_args, unwrapped_kwargs))}
        device = next(iter(masters.values())).device

        def wrap(result: Tensor) -> Tensor:
            # A caller that names a device, as `.to("cpu")` does, gets the tensor there.
            if type(result) is not Tensor or result.device.type != "cpu" or kwargs.get("device") is not None:
                return result
            master = masters.get(result.untyped_storage().data_ptr())
            if master is None:
                # An in-place operator or `out=` returns an argument, which must stay that tensor.
                return result if id(result) in arguments else result.to(device)
            return master if result is master.memory else CpuMaster(result, device)

        return tree_map_only(Tensor, wrap, func(*unwrapped_args, **unwrapped_kwargs))

    @property
    def data(self) -> Tensor:
        """A view of the master. Setting it copies the values into `memory`."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(
                f"a master of {tuple(self.shape)} {self.dtype} in CPU memory can be set to values of that shape and dtype, got "
                f"{tuple(values.shape)} {values.dtype}"
            )
        self.memory.copy_(values)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CpuMaster({tuple(self.shape)}, {self.dtype}, for {self.device})"


def memory_of(master: Tensor) -> Tensor:
    """Return the tensor that stores a master's values, in CPU memory or on the device."""
    return master.memory if isinstance(master, CpuMaster) else master


def to_save(master: Tensor) -> Tensor:
    """Return the tensor to save of a master: a copy of one in CPU memory, else the master itself.

    An asynchronous save overlaps the next step, which overwrites the masters. Megatron copies
    tensors on the device before that, and does not copy tensors that are on the CPU already.
    """
    return master.memory.clone() if isinstance(master, CpuMaster) else master


def copying_once(sort: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method by which a HybridDeviceOptimizer copies its parameters to CPU memory.

    Megatron first builds an optimizer over the parameters of the model, takes its settings, and
    then builds a second one over the masters. The first one would copy primary weights for nothing,
    so it copies none. The second one copies no master that is in CPU memory already.
    """

    def call(inner: Any, offload_fraction: float) -> Any:
        if any(is_primary(param) for group in inner.param_groups for param in group["params"]):
            return [], [], {}, {}, {}
        cpu_masters = _cpu_masters(inner)
        if cpu_masters:
            return _sorted(inner, cpu_masters, False)
        return sort(inner, offload_fraction)

    return call


def one_by_one(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method by which a DistributedOptimizer makes its masters, to make them one at a
    time.

    Each master that is to be offloaded moves to CPU memory before the next one is made, so that the
    device never holds all of them. As in a HybridDeviceOptimizer, these are the first masters, up
    to the fraction. `attach` moves the masters of the other optimizers: those without a
    QuantizedWeight on this rank, and those with FP32 parameters, which are their own masters.
    """

    def call(gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any) -> Any:
        params = [param for ranges in opt_group_ranges for param in ranges["params"]]
        in_fp32 = any(param.dtype == torch.float32 for param in params)
        if not config.optimizer_cpu_offload or in_fp32 or not any(isinstance(p, QuantizedWeight) for p in params):
            return build(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
        to_offload = _elements_to_offload(gbuf_ranges, params, config.optimizer_offload_fraction)
        groups = []
        for ranges in opt_group_ranges:
            # Each call gets a separate "orig_group", since the host's method writes the masters
            # into it. The real one is written below, once it is complete.
            built = build(gbuf_ranges, param_gbuf_map, [{**ranges, "params": [], "orig_group": {}}], config)
            for param in ranges["params"]:
                single = {**ranges, "params": [param], "orig_group": {}}
                built_single = build(gbuf_ranges, param_gbuf_map, [single], config)
                if to_offload > 0:
                    (masters,) = built_single[-1]
                    to_offload -= masters[0].numel()
                    masters[0] = param.main_param = _on_cpu(masters[0])
                for (group,), (new,) in zip(built, built_single, strict=True):
                    group.extend(new)
            ranges["orig_group"]["params"] = list(built[-1][0])
            groups.append(built)
        # The host's method returns one list per kind of parameter, with one entry per group.
        return tuple([group for (group,) in kind] for kind in zip(*groups, strict=True))

    return call


def _elements_to_offload(gbuf_ranges: Any, params: Iterable[Any], fraction: float) -> float:
    """Return the number of elements to offload: `fraction` of those that this rank owns of
    `params`.
    """
    maps = [bucket["param_map"] for ranges in gbuf_ranges for buckets in ranges.values() for bucket in buckets]
    owned: dict[Any, int] = {param: places["param"].size for param_map in maps for param, places in param_map.items()}
    return fraction * sum(owned[param] for param in params)


def _on_cpu(master: Tensor) -> CpuMaster:
    """Copy a master to page-locked CPU memory. Its attributes go along."""
    cpu_master = CpuMaster(master.cpu().pin_memory(), master.device)
    vars(cpu_master).update(vars(master))
    return cpu_master


def keep_on_cpu(optimizer: Any, patches: Patches) -> None:
    """Free the masters on the device that a HybridDeviceOptimizer updates in CPU memory.

    Undoing `patches` allocates them again. Until then a caller's reference to such a master reads
    NaN, and writing it raises.
    """
    inner = optimizer.optimizer
    if not offloads(inner):
        return

    def move_states() -> None:
        for sub_optimizer in inner.sub_optimizers:
            for param, state in sub_optimizer.state.items():
                moved = {key: value.to(param.device) for key, value in state.items() if isinstance(value, Tensor)}
                state.update(moved)

    patches.apply(
        [
            # The host's method supports only the FP32 masters that it made of BF16 parameters.
            Patch(inner, "_update_fp32_params_by_new_state", lambda: None),
            # The host's method distinguishes CPU and GPU by the class of the sub-optimizer, which
            # may be torch's Adam on both.
            Patch(inner, "_move_new_state_to_right_device", move_states),
        ]
    )
    copies = {master: copy for master, copy in cpu_copies(inner).items() if not isinstance(master, CpuMaster)}
    # The masters of FP32 parameters are views of the model's own memory: `_bring_back` reuses them,
    # and they are not freed below.
    in_model = {id(master) for group in optimizer.shard_fp32_groups for master in group}
    in_model_by_copy = {copy: master for master, copy in copies.items() if id(master) in in_model}
    patches.callback(_bring_back, optimizer, in_model_by_copy)
    patches.apply(
        [
            Patch(inner, "_get_sub_optimizer_param_groups", lambda _: _sorted(inner, _cpu_masters(inner), True)),
            # A step copies nothing back to the device: the masters there have no memory.
            Patch(inner, "_register_param_copy_back_gpu_hook", lambda: None),
        ]
    )
    _replace(optimizer, {master: CpuMaster(copy, master.device) for master, copy in copies.items()})
    # The caller may still have references to the old masters. Giving them a one-element storage of
    # NaN frees their memory without leaving stale values to be read.
    for master in (master for master in copies if id(master) not in in_model):
        master.data = torch.full((1,), torch.nan, dtype=master.dtype, device=master.device).expand(master.shape)
        torch._C._set_throw_on_mutable_data_ptr(master)


def _bring_back(optimizer: Any, in_model_by_copy: Mapping[Tensor, Tensor]) -> None:
    """Restore the masters on the device, and Megatron's CPU copies of them.

    `in_model_by_copy` maps CPU copies of FP32 parameters to the masters that are in the model.
    """
    inner = optimizer.optimizer
    copies: dict[Tensor, Tensor] = {}  # by restored master
    restored: dict[CpuMaster, Tensor] = {}
    for cpu_master, memory in _cpu_masters(inner).items():
        on_device = in_model_by_copy.get(memory)
        if on_device is None:
            on_device = torch.empty(memory.shape, dtype=memory.dtype, device=cpu_master.device)
        on_device.data.copy_(memory)
        restored[cpu_master] = on_device
        copies[on_device] = memory
    # The host's own sorting would allocate new copies, and moments belong to these.
    with replaced(inner, "_get_sub_optimizer_param_groups", lambda _: _sorted(inner, copies, False)):
        _replace(optimizer, restored)


def _replace(optimizer: Any, replacements: Mapping[Any, Any]) -> None:
    """Replace masters with the given tensors, in all lists of a DistributedOptimizer, and build the
    CPU and GPU sub-optimizers again.
    """
    for master, replacement in replacements.items():
        vars(replacement).update((name, value) for name, value in vars(master).items() if name != "memory")
        replacement.grad = master.grad
    inner = optimizer.optimizer
    lists = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    for masters in (*lists, *(group["params"] for group in inner.param_groups)):
        masters[:] = [replacements.get(master, master) for master in masters]
    for param in (param for group in optimizer.model_float16_groups for param in group):
        param.main_param = replacements.get(param.main_param, param.main_param)
    for master in [master for master in inner.state if master in replacements]:
        inner.state[replacements[master]] = inner.state.pop(master)
    old_groups = [group for sub_optimizer in inner.sub_optimizers for group in sub_optimizer.param_groups]
    inner._init_sub_optimizers()
    inner._sync_hdo_param_groups_to_sub_optimizers()
    if inner.state:
        inner._sync_hdo_state_to_sub_optimizers()
    new_groups = [group for sub_optimizer in inner.sub_optimizers for group in sub_optimizer.param_groups]
    # A fused Adam counts its steps in the parameter group, which the host does not carry over.
    for old, new in zip(old_groups, new_groups, strict=True):
        if "step" in old:
            new["step"] = old["step"]


def _cpu_masters(inner: Any) -> dict[CpuMaster, Tensor]:
    """Return a dict from each master of an inner optimizer that is in CPU memory to that memory."""
    params = (param for group in inner.param_groups for param in group["params"])
    return {param: param.memory for param in params if isinstance(param, CpuMaster)}


def _sorted(inner: Any, copies: Mapping[Any, Any], loads_into_copies: bool) -> tuple[Any, ...]:
    """Sort parameters into CPU and GPU groups as `_get_sub_optimizer_param_groups` does, without
    new copies.

    Returns the five results of that method:

    * the parameter groups of the CPU, and those of the GPU,
    * dicts from master to copy, and from copy to master,
    * a dict from master to copy for masters whose loaded state belongs to the copy: all `copies`
      with `loads_into_copies`, else none.
    """
    cpu_groups: list[Any] = []
    gpu_groups: list[Any] = []
    for group in inner.param_groups:
        for groups, on_cpu in ((cpu_groups, True), (gpu_groups, False)):
            params = [copies.get(param, param) for param in group["params"] if (param in copies) == on_cpu]
            if params:
                groups.append({**group, "params": params})
    masters = {copy: master for master, copy in copies.items()}
    return cpu_groups, gpu_groups, copies, masters, copies if loads_into_copies else {}


def including_cpu_masters(hosts_norm: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's norm of all masters: it includes the masters in CPU memory.

    Megatron computes the norm from the `main_param` of parameters by a kernel that needs addresses
    on the device. So during the call `main_param` is the L2 norm of the master, a tensor of one
    element on the device: the norm of these norms is the norm of all masters.
    """

    @functools.wraps(hosts_norm)
    def norm_of_all(model: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        with Patches() as patches:
            for param in (param for chunk in chunks for param in chunk.parameters()):
                master = vars(param).get("main_param")
                if isinstance(master, CpuMaster):
                    norm = torch.linalg.vector_norm(master.memory, dtype=torch.float64)
                    patches.apply([Patch(param, "main_param", norm.to(master.device, torch.float32).view(1))])
            return hosts_norm(model, *args, **kwargs)

    return norm_of_all


def patches(optimizer: Any) -> Iterator[Patch]:
    """Yield patches of an offloading optimizer's methods that return the state dict and that undo
    `offload_to_cpu`.
    """
    if offloads(optimizer.optimizer):
        yield Patch(optimizer, "state_dict", _without_settings(optimizer))
        if hasattr(optimizer, "restore_from_cpu"):
            yield Patch(optimizer, "restore_from_cpu", _leaving_hosted_moments(optimizer))


def _leaving_hosted_moments(optimizer: Any) -> Callable[[], None]:
    """Wrap the method that moves moments to the device: moments of offloaded masters stay.

    The host's method would move them too, and a step reads them in CPU memory.
    """
    method = optimizer.restore_from_cpu

    def call() -> None:
        inner = optimizer.optimizer
        offloaded = cpu_copies(inner)
        on_device = {master: moments for master, moments in inner.state.items() if master not in offloaded}
        with replaced(inner, "state", on_device):
            method()

    return call


def _without_settings(optimizer: Any) -> Callable[..., Any]:
    """Wrap the method that returns the state dict, which is identical on all ranks: it drops the
    settings of the HybridDeviceOptimizer from the parameter groups.

    They include two optimizer classes, on which `torch.load(weights_only=True)` raises.
    """
    method = optimizer.state_dict
    settings = inspect.signature(hybrid().__init__).parameters

    def call() -> Any:
        state = method()
        groups = state["optimizer"]["param_groups"]
        state["optimizer"]["param_groups"] = [
            {key: value for key, value in group.items() if key not in settings} for group in groups
        ]
        return state

    return call
