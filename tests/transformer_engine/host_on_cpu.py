"""TransformerEngine's own Python, and what it needs to be imported and called without a GPU. The integration needs none of it.

The folder that holds the package `transformer_engine` is named by ZEROCAST_TE; with a GPU an installed one is taken without it.
Where there is no GPU

* `transformer_engine_torch`, the compiled part, is a stub: the numbers of its dtypes, and names that raise when they are called;
* so are its ONNX export, which needs packages of its own, and its attention, which counts names of the compiled part; nothing here
  calls either;
* what TransformerEngine asks of CUDA is answered as on an H200: capability 9.0, tensors on the CPU.

Its modules are in `sys.modules` inside `host_on_cpu()` only, since other hosts look whether they can import it. With a GPU nothing
of this is done.
"""

import contextlib
import enum
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

WITH_GPU = torch.cuda.is_available()
PATH = mock.patch.object(sys, "path", [*filter(None, [os.environ.get("ZEROCAST_TE")]), *sys.path])
CAPABILITY = (9, 0)
_OURS = ("transformer_engine", "transformer_engine_torch")
_ONNX = "transformer_engine.pytorch.onnx_extensions"
_ATTENTION = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_READ = ("tensor.utils", "quantization")  # in this order, for they import each other
_MODULES = tuple(f"module.{name}" for name in ("base", "linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"))
_TORCH_CASTS = {name: getattr(torch.nn.Module, name) for name in ("float", "half", "bfloat16")}


class _DType(enum.IntEnum):
    """The values of NVTEDType in transformer_engine.h."""

    kByte = 0  # noqa: N815
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


class _Absent(type):
    """A class that stands for anything compiled: its members are numbers, and it cannot be called."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} is compiled, and not here")


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


def _stubs() -> dict[str, ModuleType]:
    compiled, folder = _Stub("transformer_engine_torch"), os.environ.get("ZEROCAST_TE", "")
    compiled.DType = _DType  # type: ignore[attr-defined]
    stubs = {"transformer_engine_torch": compiled, _ONNX: _Stub(_ONNX), _ATTENTION: _Stub(_ATTENTION)}
    for name in (
        "transformer_engine",
        "transformer_engine.pytorch",
    ):  # without what these load: shared objects, modules
        stubs[name] = ModuleType(name)
        stubs[name].__path__ = [os.path.join(folder, *name.split("."))]
    return stubs


def _theirs() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in _OURS}


def _import() -> dict[str, ModuleType]:
    """TransformerEngine's modules that the integration reads, by name."""
    before = _theirs()
    sys.modules.update(_stubs())
    building = mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"})  # by which it loads no shared object
    try:
        with PATH, building:
            for name in (*_READ, *_MODULES):
                importlib.import_module(f"transformer_engine.pytorch.{name}")
        return _theirs()
    finally:
        for name, cast in _TORCH_CASTS.items():  # importing it replaces these
            setattr(torch.nn.Module, name, cast)
        for name in _theirs():
            del sys.modules[name]
        sys.modules.update(before)


WHY_NOT, MODULES = "", {}
if WITH_GPU:
    try:
        with PATH:
            import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        WHY_NOT = f"TransformerEngine cannot be imported: {error}"
elif not os.path.isdir(os.path.join(os.environ.get("ZEROCAST_TE", ""), "transformer_engine")):
    WHY_NOT = "ZEROCAST_TE names no folder that holds transformer_engine: make test-hosts"
else:
    try:
        MODULES = _import()
    except Exception as error:
        WHY_NOT = f"TransformerEngine's Python cannot be imported: {error}"

needs_te = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """While the context is open, its modules are in `sys.modules`; what else is imported meanwhile
    stays there afterwards.
    """
    before = _theirs()
    sys.modules.update(MODULES)
    try:
        yield
    finally:
        for name in _theirs():
            del sys.modules[name]
        sys.modules.update(before)


@contextlib.contextmanager
def host_on_cpu() -> Iterator[None]:
    """While the context is open, TransformerEngine can be imported and called on this rank."""
    if WITH_GPU:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_importable())
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value="cpu"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY))
        yield


def integration() -> Any:
    """zerocast.integrations.transformer_engine; call it inside `host_on_cpu()`."""
    import zerocast.integrations.transformer_engine as module

    return module


@contextlib.contextmanager
def modules_on_cpu() -> Iterator[None]:
    """Within `host_on_cpu()`, TransformerEngine's modules can be made without a GPU; their forward passes need one."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        yield
