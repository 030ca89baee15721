"""What megatron-core needs to run on the CPU over gloo. The integration needs none of it.

* tensors that it asks of CUDA are made on the CPU, and there are no streams;
* parameters call themselves by the type string of CUDA tensors, by which its optimizer sorts them;
* dropout draws from the one generator there is;
* the all-gathers of a bucket group run one by one (`OneByOne`);
* what a save has written is told within the rank: for an asynchronous one each rank starts a Python that passes it on;
* megatron.training since 0.18, and emerging_optimizers, take `typing.override`, which is in Python from 3.12 on.
"""

import contextlib
import queue
import sys
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.accelerator import OneByOne
from zerocast.cast import partition
from zerocast.integrations.megatron import host
from zerocast.integrations.megatron.host import HYBRID

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

WHY_NOT = ""
try:
    import megatron.core.distributed.param_and_grad_buffer as buffers
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
except Exception as error:  # such as the syntax of a newer Python
    WHY_NOT = f"megatron-core cannot be imported: {error}"
needs_megatron = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
KNOWS_FOUR_BITS = not WHY_NOT and host.has_four_bit_buffers()
needs_four_bits = pytest.mark.skipif(
    not KNOWS_FOUR_BITS, reason="this megatron-core has no byte buffers of two elements a byte"
)


def _made_on_cpu(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _TYPE(tensor, *args, **kwargs)
    is_name = isinstance(result, str) and "cuda" not in result
    return result.replace("torch.", "torch.cuda.", 1) if is_name else result


_TYPE = Tensor.type
_FACTORIES = ("empty", "empty_like", "ones", "rand", "randn", "tensor", "triu", "zeros")


@contextlib.contextmanager
def _one_by_one(group: Any, async_ops: bool = False) -> Iterator[OneByOne]:
    manager = OneByOne()

    def recorded(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = function(*args, **kwargs)
            if work is not None:
                manager.works.append(work)
            return work

        return call

    names = ("dist_all_gather_func", "dist_reduce_scatter_func")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(buffers, name, recorded(getattr(buffers, name))))
        yield manager


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Inside, what the host asks of CUDA is answered by the CPU, and its gathers are right over gloo."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")))
        # A torch that was built with CUDA believes in a GPU once Megatron's tests say that there is one.
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", return_value=False))
        for name in ("current_stream", "synchronize", "Stream", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        stack.enter_context(mock.patch.object(buffers, "_coalescing_manager", _one_by_one))
        stack.enter_context(mock.patch.object(filesystem_async, "_results_queue", queue.Queue()))
        # A mode would be asked for every operator and attribute of every tensor.
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _made_on_cpu(getattr(torch, name))))
        stack.enter_context(mock.patch.object(Tensor, "cuda", lambda tensor, *_, **__: tensor))
        stack.enter_context(mock.patch.object(Tensor, "type", _type))
        yield


@contextlib.contextmanager
def without_modelopt() -> Iterator[None]:
    """Inside, modelopt cannot be imported for the first time. megatron.training imports it if it is there, which takes
    seconds, and none of these tests uses it.
    """
    hidden = "modelopt" not in sys.modules
    if hidden:
        sys.modules["modelopt"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["modelopt"]


@contextlib.contextmanager
def host_on_cpu() -> Iterator[None]:
    """Inside, the real DistributedDataParallel and DistributedOptimizer run on this rank of the default gloo group."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    assert dist.get_backend() == "gloo"
    tracker = mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", mock.MagicMock())
    with tracker, cuda_on_cpu(), without_modelopt():
        yield


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
