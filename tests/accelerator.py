"""An accelerator that is played on a CPU: its tensors say that they are on it, and what fails on a GPU for their device raises.

Its memory is storage of the CPU that has a mark. What an operator makes of marked tensors is marked, and so is what is made for
its `DEVICE`. An operator that takes tensors of both devices raises, apart from copies and numbers, and so does a collective that
takes a tensor of the CPU over a group that only serves the accelerator, as NCCL's.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerocast import QuantizedWeight
from zerocast.distributed import group
from zerocast.distributed.group import Group

CPU = torch.device("cpu")
DEVICE = torch.device("maia", 0)  # no build of torch has memory for it
# Operators that take tensors of both devices.
ACROSS = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_", "_index_put_impl_", "is_pinned"}
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)

_device_of = torch._C.TensorBase.device.__get__
_to, _numpy, _make_wrapper = Tensor.to, Tensor.numpy, Tensor._make_wrapper_subclass


class OneByOne:
    """Stands for a coalescing manager: collectives have started when they are added, and `wait` waits for all. gloo has
    no coalescing, and silently corrupts a coalesced group of several dtypes.
    """

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def is_there(tensor: Tensor) -> bool:
    """Return True if a tensor is on the accelerator."""
    if type(tensor) in (Tensor, nn.Parameter):
        return _device_of(tensor) == CPU and hasattr(tensor.untyped_storage(), "is_on_the_accelerator")
    inner = getattr(tensor, "_local_tensor", getattr(tensor, "rowwise_data", None))
    return hasattr(tensor, "is_on_the_accelerator") if inner is None else is_there(inner)


def _put(tensor: Tensor) -> Tensor:
    if type(tensor) is not FakeTensor:
        tensor.untyped_storage().is_on_the_accelerator = True
    return tensor


def _is_ours(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == DEVICE.type


class _Operators(TorchDispatchMode):
    """Marks what operators make, and raises for those that take tensors of both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        is_asked = _is_ours(kwargs.get("device"))
        if is_asked:
            kwargs["device"] = CPU
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_meta]
        on_cpu = [tensor for tensor in given if not is_there(tensor)]
        name = func._schema.name.split("::")[1]
        is_mixed = len(on_cpu) < len(given) and any(tensor.dim() and tensor.numel() for tensor in on_cpu)
        if is_mixed and name not in ACROSS:
            raise RuntimeError(
                f"{func} takes tensors of the CPU, {[(t.shape, t.dtype) for t in on_cpu]}, and of an accelerator"
            )
        made = func(*args, **kwargs)
        # Operators of torch also name the device of their argument, which they take for the CPU.
        if is_asked or len(on_cpu) < len(given):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor) and not leaf.is_meta and not any(leaf is tensor for tensor in given):
                    _put(leaf)
        return made


def _moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to, which copies where the devices differ."""
    targets = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device))]
    targets += [value.device for value in args if isinstance(value, Tensor)]
    wanted = _is_ours(targets[0]) if targets else is_there(tensor)
    of_cpu = [CPU if isinstance(value, (str, torch.device)) else value for value in args]
    of_cpu = [value.dtype if isinstance(value, Tensor) else value for value in of_cpu]
    named = {key: CPU if key == "device" else value for key, value in kwargs.items()}
    if type(tensor) not in (Tensor, nn.Parameter):
        if isinstance(tensor, QuantizedWeight):
            return _to(tensor, *args, **kwargs)
        if wanted or not is_there(tensor):
            return _to(tensor, *of_cpu, **named)
        tensor = torch.ops.aten._to_copy.default(tensor)
    moved = _to(tensor, *of_cpu, **named)
    if wanted == is_there(moved):
        return moved
    if wanted:
        return _put(moved.clone())
    return _on_cpu(moved)


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def _as_array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if is_there(tensor):
        raise TypeError("can't convert a tensor of an accelerator to numpy")
    return _numpy(tensor, *args, **kwargs)


def _wrapper(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    made = _make_wrapper(kind, *args, device=CPU if _is_ours(device) else device, **kwargs)
    if _is_ours(device):
        made.is_on_the_accelerator = True
    return made


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if _is_ours(device):
            return _put(make(*args, device=CPU, **kwargs))
        if device is None:
            return make(*args, **kwargs)
        result = make(*args, device=device, **kwargs)
        return _on_cpu(result) if is_there(result) else result

    return made


def _collective(send: Callable[..., Any]) -> Callable[..., Any]:
    def sent(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        is_gloo = _is_of_gloo(group)
        # torch's own functions ask the group, which is gloo's, where to put tensors.
        is_ours = sys._getframe(1).f_globals["__name__"].startswith("zerocast.")
        for tensor in tree_leaves((args, kwargs)):
            if is_ours and isinstance(tensor, Tensor) and is_there(tensor) == is_gloo:
                sent_from, served = ("an accelerator", "the CPU") if is_gloo else ("the CPU", "an accelerator")
                raise RuntimeError(
                    f"{send.__name__} of a tensor of {sent_from}, {tensor.shape}, over a group that serves {served}"
                )
        return send(*args, group=group, **kwargs)

    return sent


# The groups that were asked to use gloo, beside the twins that earlier tests have made. All others serve the accelerator alone.
_of_gloo: set[Any] = set()


def _is_of_gloo(handle: Any) -> bool:
    return handle in _of_gloo or any(handle is twin.handle for twin in group._twins.values())


def _duplicate(ranks: Group, backend: str | None = None, patience: int = 1) -> Group:
    made = _original_duplicate(ranks, backend, patience)
    if made.handle is not None and (backend == "gloo" or _is_of_gloo(ranks.handle)):
        _of_gloo.add(made.handle)
    return made


_original_duplicate = Group.duplicate


def _group_device(ranks: Group) -> torch.device:
    return CPU if ranks.handle is None or _is_of_gloo(ranks.handle) else DEVICE


@contextlib.contextmanager
def playing() -> Iterator[None]:
    """While the context is open, `DEVICE` is a device, which all groups serve that are not asked to use gloo."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        where = property(lambda tensor: DEVICE if is_there(tensor) else _device_of(tensor))
        stack.enter_context(patch.object(Tensor, "device", where, create=True))
        replace(Tensor, "to", _moved)
        replace(Tensor, "cpu", lambda tensor: tensor.to(CPU))
        replace(Tensor, "numpy", _as_array)
        replace(Tensor, "_make_wrapper_subclass", staticmethod(_wrapper))
        for name in FACTORIES:
            replace(torch, name, _factory(getattr(torch, name)))
        for name in COLLECTIVES:
            if hasattr(dist, name):
                replace(dist, name, _collective(getattr(dist, name)))
        stack.enter_context(patch.object(DeviceMesh, "device_type", DEVICE.type))
        # FSDP2 looks for streams and events of a device here.
        stack.enter_context(patch.object(torch, DEVICE.type, torch.cpu, create=True))
        replace(_fully_shard, "_get_device_from_mesh", lambda mesh: DEVICE)
        replace(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event())
        if hasattr(_fsdp_collectives, "record_grad_output_stream"):  # of torch 2.15; a no-op on GPUs
            replace(_fsdp_collectives, "record_grad_output_stream", lambda buffer, stream: None)
        replace(sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: [DEVICE.type])
        replace(Tensor, "pin_memory", lambda tensor: tensor)
        replace(torch.accelerator, "current_stream", torch.cpu.current_stream)
        replace(Group, "device", property(_group_device))
        replace(Group, "duplicate", _duplicate)
        stack.enter_context(_Operators())
        yield
