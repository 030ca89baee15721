"""Two kinds of memory on a machine without a GPU, as optimizer CPU offload tells them apart by `is_cuda`.

Results of `cpu()` and `pin_memory()`, and tensors computed from them, count as host memory; all
other tensors count as device memory. Copies between the two are real, so a missing copy back is
detected. A plan casts host masters as it does with a GPU.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerocast.cast import partition
from zerocast.integrations.megatron.host import HYBRID

_TO_HOST = (Tensor.cpu, Tensor.pin_memory)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostMemory(TorchFunctionMode):
    """Inside, tensors are on a device, but for those that were brought to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA and _asked_by(HYBRID):  # others ask for what is there
            return not on_host(args[0])
        kwargs.pop("pin_memory", None)
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], str):
            func, args, kwargs = (Tensor.cpu if args[1] == "cpu" else Tensor.detach), args[:1], {}
        if func is Tensor.pin_memory:
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.cpu:
            result = result.clone()
        written = bool(args) and result is args[0]
        if isinstance(result, Tensor) and not written and (func in _TO_HOST or any(map(on_host, args))):
            result.on_host = True  # type: ignore[attr-defined]
        return result


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Inside, tensors and masters of plans are told apart as on a host and a device."""
    with mock.patch.object(partition, "is_on_cpu", lambda master, device: on_host(master)), HostMemory():
        yield


def _asked_by(module: str) -> bool:
    """True for a call from a module, through other modes."""
    frame: Any = sys._getframe(2)
    for _ in range(3):
        if frame is not None and frame.f_globals["__name__"] == module:
            return True
        frame = frame and frame.f_back
    return False


def on_host(value: Any) -> bool:
    """True for a tensor that was brought to the host, or was made of one."""
    return isinstance(value, Tensor) and "on_host" in vars(value)
