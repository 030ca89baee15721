"""Apex's two kernels of a step in plain torch: its formulas, operation by operation, on the CPU.

`fused_adam` is `DistAdamFunctor` of `multi_tensor_distopt_adam_kernel.cu` in decoupled weight decay.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
