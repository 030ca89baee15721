"""NVIDIA's Apex, and what it needs to run on the CPU over gloo. The integration needs none of it.

The folder that holds the package `apex` is named by ZEROCAST_APEX; without it an installed one is taken. On ranks over gloo

* `amp_C` and `distributed_adam_cuda` are stubs with the two kernels that a step needs, in plain torch;
* what Apex asks of CUDA (a device, streams) is answered by the CPU;
* collectives run one by one (`OneByOne`).

Over NCCL nothing of this is done. Where the extensions are not built, Apex and the stubs are taken out of `sys.modules` once they
were imported, since other hosts try to import them too.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import OneByOne

# -- Apex's two kernels of a step in plain torch: its formulas, operation by operation. `fused_adam` is `DistAdamFunctor` of
# `multi_tensor_distopt_adam_kernel.cu` in decoupled weight decay.

Lists = Sequence[Sequence[Tensor]]  # masters, both moments, gradients, results: a tensor a fragment


def _fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """Return the f32 sum. The product is exact in f64, but the sum is rounded there first, which an FMA does not."""
    product = b.double() * (a.double() if isinstance(a, Tensor) else a)
    return (product + c.double()).float()


def _lerp(t: float, x: Tensor, y: Tensor) -> Tensor:
    return _fma(t, y, _fma(-t, x, x))


def f32(value: float) -> float:
    """Return the nearest f32, to which C++ converts an argument."""
    return float(torch.tensor(value, dtype=torch.float32))


def corrections(betas: tuple[float, float], step: int) -> list[float]:
    """Return the f32 bias corrections for betas that are already f32."""
    return [f32(1 - f32(beta) ** step) for beta in betas]


def fused_adam(
    chunk: int,
    noop: Tensor,
    lists: Lists,
    grad_scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    assert mode == 1 and bias_correction == 1
    c1, c2 = corrections((beta1, beta2), step)
    for p, m, v, grad, out in zip(*lists, strict=True):
        g = grad.float() * grad_scale
        m.copy_(_lerp(f32(beta1), g, m))
        v.copy_(_lerp(f32(beta2), g * g, v))
        update = _fma(f32(weight_decay), p, (m / c1) / ((v / c2).sqrt() + f32(eps)))
        p.copy_(_fma(-f32(lr), update, p))
        out.copy_(p)


def l2norm(chunk: int, noop: Tensor, lists: Lists, per_tensor: bool) -> tuple[Tensor, Any]:
    """Return the norm of all tensors together."""
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().view(1), None


STUBS = {name: ModuleType(name) for name in ("amp_C", "distributed_adam_cuda")}
vars(STUBS["amp_C"])["multi_tensor_l2norm"] = l2norm
vars(STUBS["distributed_adam_cuda"])["multi_tensor_fused_adam"] = fused_adam
PATH = mock.patch.object(sys, "path", [*filter(None, [os.environ.get("ZEROCAST_APEX")]), *sys.path])
with PATH:
    MISSING = [name for name in STUBS if importlib.util.find_spec(name) is None]
WHY_NOT = ""


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """While the context is open, `apex` can be imported, from where ZEROCAST_APEX says."""
    with PATH:
        sys.modules.update({name: STUBS[name] for name in MISSING})
        try:
            yield
        finally:
            for name in [name for name in sys.modules if MISSING and name.split(".")[0] in ("apex", *MISSING)]:
                del sys.modules[name]


with importable():
    try:
        from zerocast.integrations.apex import host
    except ImportError as error:
        WHY_NOT = f"{error} (ZEROCAST_APEX names the folder of a checkout: make test-hosts)"
    else:
        apex: Any = sys.modules[host.MODULE]

needs_apex = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def device() -> str:
    """Return the type of the device on which Apex runs."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


@contextlib.contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[OneByOne]:
    yield OneByOne()


@contextlib.contextmanager
def host_on_cpu() -> Iterator[None]:
    """While the context is open, Apex runs on this rank of the default group; over NCCL it runs as
    it is.
    """
    if device() == "cuda":
        yield
        return
    cpu = property(lambda optimizer: torch.device("cpu"), lambda optimizer, device: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        for name in ("Stream", "current_stream", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        for name, stub in STUBS.items():
            stack.enter_context(mock.patch.object(apex, name, stub))
        stack.enter_context(mock.patch.object(apex, "_FOUND_DEPRECATED_FUSED_ADAM", False))
        stack.enter_context(mock.patch.object(apex, "_devices_match", return_value=True))
        stack.enter_context(mock.patch.object(apex, "_coalescing_manager", _one_by_one))
        stack.enter_context(
            mock.patch.object(apex, "_coalescing_manager_append_work", lambda manager, work: manager.works.append(work))
        )
        stack.enter_context(mock.patch.object(apex.DistributedFusedAdam, "device", cpu, create=True))
        yield
