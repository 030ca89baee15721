"""A torch optimizer over QuantizedWeights is refused at its step, before it writes any of its
parameters.

Its first operator on a weight would raise too, by when it may have changed the biases before it.
Optimizers that were written elsewhere are left alone: they may keep masters of their own.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zerocast.weight import unsupported

_hooks: list[RemovableHandle] = []


def refuse_steps(kind: type[Tensor]) -> None:
    """Let torch's optimizers refuse parameters of this class from now on.

    The hook is the process's: a process that makes no weight has none.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(functools.partial(_check_parameters, kind)))


def _check_parameters(kind: type[Any], optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).step.__module__.startswith("torch.optim"):
        return
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if isinstance(parameter, kind) and parameter.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step parameter {place} of group {number}, a {parameter.format} "
                    f"QuantizedWeight of shape {tuple(parameter.shape)}: {unsupported.OPTIMIZER}"
                )
