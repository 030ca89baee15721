"""Optimizer CPU offload: the masters of Megatron's HybridDeviceOptimizer, in host memory alone.

It holds moments, and a copy of every offloaded master, in host memory; a step updates the copies
and brings them back into the masters. Here the copies are the masters, which are cast where they
lie, and a `HostMaster` without memory stands on the GPU for each: from the construction of the
optimizer, or from `attach` on.

With BF16 weights Megatron gives it those weights, and no FP32 masters but its copies. Quantized
weights have no values that it could start from.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zerocast import QuantizedWeight
from zerocast.integrations.host_adapter import Patch, Patches

from . import host, ownership
from .primary import is_primary


class HostMaster(Tensor):
    """Stands on a device for a master in host memory, `memory`, of its shape and dtype.

    The host sorts it by its device and gives it gradients there. Operators read and write `memory`:
    a view is another HostMaster, and what else they return lies on the device. It has no address,
    so kernels that ask for one raise RuntimeError.
    """

    memory: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: Tensor, device: torch.device) -> "HostMaster":
        """Stand on `device` for the values in `memory`."""
        master: HostMaster = Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(master)
        master.memory = memory
        return master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operator on the host's memory."""
        kwargs, masters = kwargs or {}, dict[int, HostMaster]()

        def memory_of(master: HostMaster) -> Tensor:
            masters[master.memory.untyped_storage().data_ptr()] = master
            return master.memory

        memories = tree_map_only(HostMaster, memory_of, (args, kwargs))
        given = {id(leaf) for leaf in tree_leaves(memories)}
        device = next(iter(masters.values())).device

        def placed(result: Tensor) -> Tensor:
            if type(result) is not Tensor or result.device.type != "cpu" or kwargs.get("device") is not None:
                return result
            master = masters.get(result.untyped_storage().data_ptr())
            if master is None:
                return result if id(result) in given else result.to(device)  # as it is where it was written
            return master if result is master.memory else HostMaster(result, device)

        return tree_map_only(Tensor, placed, func(*memories[0], **memories[1]))

    @property
    def data(self) -> Tensor:
        """A view; values that are set are written to the host's memory."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(
                f"a master of {tuple(self.shape)} {self.dtype} in host memory takes values of that shape and dtype, got "
                f"{tuple(values.shape)} {values.dtype}"
            )
        self.memory.copy_(values)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"HostMaster({tuple(self.shape)}, {self.dtype}, for {self.device})"


def memory_of(master: Tensor) -> Tensor:
    """The tensor with a master's values, in host memory or on the device."""
    return master.memory if isinstance(master, HostMaster) else master


def to_save(master: Tensor) -> Tensor:
    """The master, or a copy of one in host memory: the host brings what is on the device to memory
    of its own before a save goes on beside the next step, and leaves what does not as it is.
    """
    return master.memory.clone() if isinstance(master, HostMaster) else master


def copying_once(sort: Callable[..., Any]) -> Callable[..., Any]:
    """The method by which a HybridDeviceOptimizer copies its parameters to the host.

    The host first makes one over the parameters of the model, whose settings it gives to a second
    one over masters: nothing of primary weights is copied for that, and of masters nothing that
    lies on the host already.
    """

    def call(inner: Any, offload_fraction: float) -> Any:
        if any(is_primary(param) for group in inner.param_groups for param in group["params"]):
            return [], [], {}, {}, {}
        hosted = _hosted(inner)
        return _sorted(inner, hosted, False) if hosted else sort(inner, offload_fraction)

    return call


def one_by_one(build: Callable[..., Any]) -> Callable[..., Any]:
    """The method by which a DistributedOptimizer makes its masters: each that is to be offloaded
    goes to host memory before the next one is made, so that the device never holds all of them.

    It chooses as a HybridDeviceOptimizer does, the first ones up to the fraction. An optimizer that
    owns no QuantizedWeight here, or FP32 parameters, whose masters are the parameters, waits for
    `attach`.
    """

    def call(gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any) -> Any:
        params = [param for ranges in opt_group_ranges for param in ranges["params"]]
        in_fp32 = any(param.dtype == torch.float32 for param in params)
        if not config.optimizer_cpu_offload or in_fp32 or not any(isinstance(p, QuantizedWeight) for p in params):
            return build(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
        room, groups = _threshold(gbuf_ranges, params, config.optimizer_offload_fraction), []
        for ranges in opt_group_ranges:
            own = build(gbuf_ranges, param_gbuf_map, [{**ranges, "params": [], "orig_group": {}}], config)
            for param in ranges["params"]:
                alone = {**ranges, "params": [param], "orig_group": {}}
                made = build(gbuf_ranges, param_gbuf_map, [alone], config)
                if room > 0:
                    (masters,) = made[-1]
                    room -= masters[0].numel()
                    masters[0] = param.main_param = _on_host(masters[0])
                for (known,), (new,) in zip(own, made, strict=True):
                    known.extend(new)
            ranges["orig_group"]["params"] = list(own[-1][0])
            groups.append(own)
        return tuple([group for (group,) in kind] for kind in zip(*groups, strict=True))

    return call


def _threshold(gbuf_ranges: Any, params: Iterable[Any], fraction: float) -> float:
    """How many elements are to be offloaded of those that this rank owns of some parameters."""
    maps = [bucket["param_map"] for ranges in gbuf_ranges for buckets in ranges.values() for bucket in buckets]
    owned: dict[Any, int] = {param: places["param"].size for one in maps for param, places in one.items()}
    return fraction * sum(owned[param] for param in params)


def _on_host(master: Tensor) -> HostMaster:
    """The master in page-locked memory of the host, with its attributes."""
    stands = HostMaster(master.cpu().pin_memory(), master.device)
    vars(stands).update(vars(master))
    return stands


def keep_on_host(optimizer: Any, patches: Patches) -> None:
    """Free the device's masters that a HybridDeviceOptimizer updates on the host, until `patches`
    are undone, which makes them anew.

    A tensor that somebody still holds reads NaN then, and writing it raises.
    """
    inner = optimizer.optimizer
    if not host.offloads(inner):
        return

    def move_states() -> None:
        for one in inner.sub_optimizers:
            for param, state in one.state.items():
                moved = {key: value.to(param.device) for key, value in state.items() if isinstance(value, Tensor)}
                state.update(moved)

    patches.apply(
        [
            # as it is, it finds no FP32 masters but those that it has made of BF16 parameters
            Patch(inner, "_update_fp32_params_by_new_state", lambda: None),
            # as it is, it tells the sides apart by the class of Adam, torch's on both perhaps
            Patch(inner, "_move_new_state_to_right_device", move_states),
        ]
    )
    copies = {m: copy for m, copy in host.host_copies(inner).items() if not isinstance(m, HostMaster)}
    of_the_model = {id(master) for group in optimizer.shard_fp32_groups for master in group}
    kept = {copies[master]: master for master in copies if id(master) in of_the_model}  # FP32 parameters
    patches.callback(_bring_back, optimizer, kept)
    patches.apply(
        [
            Patch(inner, "_get_sub_optimizer_param_groups", lambda _: _sorted(inner, _hosted(inner), True)),
            Patch(inner, "_register_param_copy_back_gpu_hook", lambda: None),
        ]
    )
    _replace(optimizer, {master: HostMaster(copy, master.device) for master, copy in copies.items()})
    for master in (master for master in copies if id(master) not in of_the_model):
        master.data = torch.full((1,), torch.nan, dtype=master.dtype, device=master.device).expand(master.shape)
        torch._C._set_throw_on_mutable_data_ptr(master)


def _bring_back(optimizer: Any, kept: Mapping[Tensor, Tensor]) -> None:
    """Masters on the device again, and their copies on the host as Megatron has them."""
    inner, copies, others = optimizer.optimizer, {}, {}
    for stands, memory in _hosted(inner).items():
        on_device = kept.get(memory)
        if on_device is None:
            on_device = torch.empty(memory.shape, dtype=memory.dtype, device=stands.device)
        on_device.data.copy_(memory)
        others[stands], copies[on_device] = on_device, memory
    with Patches() as patches:
        patches.apply([Patch(inner, "_get_sub_optimizer_param_groups", lambda _: _sorted(inner, copies, False))])
        _replace(optimizer, others)


def _replace(optimizer: Any, others: Mapping[Any, Any]) -> None:
    """Put other tensors in the place of masters, and let the two sides be sorted anew."""
    for master, other in others.items():
        vars(other).update((name, value) for name, value in vars(master).items() if name != "memory")
        other.grad = master.grad
    host.replace_masters(optimizer, others)
    inner = optimizer.optimizer
    before = [group for one in inner.sub_optimizers for group in one.param_groups]
    inner._init_sub_optimizers()
    inner._sync_hdo_param_groups_to_sub_optimizers()
    if inner.state:
        inner._sync_hdo_state_to_sub_optimizers()
    after = [group for one in inner.sub_optimizers for group in one.param_groups]
    for group, anew in zip(before, after, strict=True):
        anew.update((key, group[key]) for key in ("step",) if key in group)  # where a fused Adam counts


def _hosted(inner: Any) -> dict[HostMaster, Tensor]:
    params = (param for group in inner.param_groups for param in group["params"])
    return {param: param.memory for param in params if isinstance(param, HostMaster)}


def _sorted(inner: Any, copies: Mapping[Any, Any], loads_into_copies: bool) -> tuple[Any, ...]:
    """What the host's method returns, without new copies: groups of each side, maps between a
    master and its copy, and of those masters whose state is loaded beside the copy.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    for group in inner.param_groups:
        for side, hosted in zip(sides, (True, False), strict=True):
            params = [copies.get(param, param) for param in group["params"] if (param in copies) == hosted]
            if params:
                side.append({**group, "params": params})
    return *sides, copies, {copy: master for master, copy in copies.items()}, copies if loads_into_copies else {}


@contextlib.contextmanager
def norms_for_masters(chunks: Iterable[Any]) -> Iterator[None]:
    """Inside, the L2 norm of a master in host memory, of one element on the device, is the
    `main_param` of its parameter: kernels by address take the norm of all masters from those.
    """
    params = [param for chunk in chunks for param in chunk.parameters()]
    masters = {param: param.main_param for param in params if isinstance(vars(param).get("main_param"), HostMaster)}
    try:
        for param, master in masters.items():
            norm = torch.linalg.vector_norm(master.memory, dtype=torch.float64)
            param.main_param = norm.to(master.device, torch.float32).view(1)
        yield
    finally:
        for param, master in masters.items():
            param.main_param = master


def patches(optimizer: Any) -> Iterator[Patch]:
    """The methods of a DistributedOptimizer that say what all ranks save alike, and that bring back
    to the device what `offload_to_cpu` moved.
    """
    if host.offloads(optimizer.optimizer):
        yield Patch(optimizer, "state_dict", _without_settings(optimizer))
        if hasattr(optimizer, "restore_from_cpu"):
            yield Patch(optimizer, "restore_from_cpu", _leaving_hosted_moments(optimizer))


def _leaving_hosted_moments(optimizer: Any) -> Callable[[], None]:
    """The host's method that moves all moments to the device, those that a step reads on the host
    too, without these.
    """
    method = optimizer.restore_from_cpu

    def call() -> None:
        inner = optimizer.optimizer
        state, hosted = inner.state, host.host_copies(inner)
        inner.state = {master: held for master, held in state.items() if master not in hosted}
        try:
            method()
        finally:
            inner.state = state

    return call


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
