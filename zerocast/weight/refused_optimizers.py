"""A torch optimizer over QuantizedWeights is refused at its step, before it writes any of its
parameters.

Its first operator on a weight would raise too, by when it may have changed the biases before it.
Optimizers that were written elsewhere are left alone: they may keep masters of their own.
"""

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from zerocast.weight import unsupported
from zerocast.weight.weight import QuantizedWeight


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).step.__module__.startswith("torch.optim"):
        return
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if isinstance(parameter, QuantizedWeight) and parameter.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step parameter {place} of group {number}, a {parameter.format} "
                    f"QuantizedWeight of shape {tuple(parameter.shape)}: {unsupported.OPTIMIZER}"
                )


register_optimizer_step_pre_hook(_before_step)
