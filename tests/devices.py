"""The backends that work here, with tensors of a CPU also for those that are made for GPUs."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops

if not torch.cuda.is_available():  # where there is a GPU, the kernels run on it as they are
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

CPU = torch.device("cpu")
HERE = [name for name in backends.backend_names() if backends.why_not(name, CPU) is None]
ON_A_GPU = [name for name in backends.backend_names() if name not in (*HERE, "reference")]


def patch_the_language_once() -> None:
    """Let Triton's interpreter replace the functions of its language once for each launch of a kernel. It repeats
    that for every call of a function within the kernel, where nothing is left to replace: a third of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # A launch takes back what it replaced.
    nothing = SimpleNamespace(restore=lambda: None)

    def patch_what_is_left(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(module.load) for module in modules):
            return patch(function)
        return nothing

    interpreter._patch_lang = patch_what_is_left


def look_types_up() -> None:
    """Let Triton's interpreter make the type of a tensor of one shape and dtype once, instead of for each
    result of each operator of each program: a fifth of its time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_block, find_dtype = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    @functools.cache
    def shape_and_numel(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init_block(self: Any, element: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        # A name says of a dtype, and of a pointer to one, all but its address space.
        key = (type(element), element.name, *sizes)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = {"shape": self.shape, "numel": self.numel, "name": self.name}
        self.element_ty = element
        self.__dict__.update(blocks[key])

    def init_tensor(self: Any, handle: Any, of_type: Any) -> None:
        self.handle, self.type, self.dtype = handle, of_type, of_type.scalar
        self.shape, self.numel = shape_and_numel(of_type.shape if of_type.is_block() else ())

    def np_dtype(of_type: Any) -> Any:
        name = of_type.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(of_type)
        return dtypes[name]

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = np_dtype


if "triton" in HERE:
    patch_the_language_once()
    look_types_up()


def _why_not_on_a_gpu(name: str) -> str | None:
    return backends.why_not(name, torch.device("cuda")) if torch.cuda.is_available() else "no CUDA device"


def gpu_params() -> list[Any]:
    """Test parameters for the backends that need a GPU, skipped with the reason where there is none for them."""
    reasons = [(name, _why_not_on_a_gpu(name)) for name in ON_A_GPU]
    skips = [(name, pytest.mark.skipif(reason is not None, reason=str(reason))) for name, reason in reasons]
    return [pytest.param(name, marks=[pytest.mark.gpu, skip]) for name, skip in skips]


def gpus(count: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a module that needs this many GPUs."""
    found = torch.cuda.device_count()
    reason = f"needs {count} CUDA devices, there are {found}"
    return [pytest.mark.gpu, pytest.mark.skipif(found < count, reason=reason)]


def worlds_of_gpus(*counts: int) -> list[Any]:
    """Test parameters for numbers of ranks, each of which needs a GPU."""
    return [pytest.param(count, marks=gpus(count)) for count in counts]


def of(backend: str | None) -> torch.device:
    """Return the device of a backend's tensors, the CPU for None."""
    return CPU if backend is None or backend in HERE else torch.device("cuda")


def stage(backend: str, name: str) -> Callable[..., None]:
    """Return a stage for CPU tensors. For a backend of a GPU, all tensors go there and come back, inputs too."""
    function = ops.implementation(name, backend)
    return function if backend in HERE else lambda *arguments: _on_a_gpu(function, arguments)


def to_gpu(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that is as far from an aligned address as a contiguous original."""
    offset = tensor.storage_offset() % 64
    storage = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device="cuda")
    return storage[offset:].view(tensor.shape).copy_(tensor)


def _on_a_gpu(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        return moved.setdefault(id(value), (value, to_gpu(value)))[1]

    function(*map(there, arguments))
    for original, copy in moved.values():
        original.copy_(copy)


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """While the context is open, an operation that lets the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """While the context is open, torch uses this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
