"""A hook that lets torch's own optimizers refuse to step QuantizedWeights, before any parameter is
written.

Without it the optimizer's first operator on a weight would raise, but by then it may have updated
the biases that come before that weight. Optimizers from elsewhere are left alone, since they may
keep master weights of their own.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zerocast.weight import unsupported

# The one hook of the process. Empty until the first weight is made.
_hooks: list[RemovableHandle] = []


def refuse_steps(kind: type[Tensor]) -> None:
    """Let torch's optimizers refuse parameters of this class from now on.

    The hook is global to the process and is registered once, when the first weight is made. A
    process without weights has no hook.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(functools.partial(_check_parameters, kind)))


def _check_parameters(kind: type[Any], optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).step.__module__.startswith("torch.optim"):
        return
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            # Optimizers of torch skip parameters without a gradient, so these do no harm.
            if isinstance(parameter, kind) and parameter.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step parameter {index} of group {number}, a {parameter.format} "
                    f"QuantizedWeight of shape {tuple(parameter.shape)}: {unsupported.OPTIMIZER}"
                )
