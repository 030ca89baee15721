"""Hyperparameters: those of all parameter groups on the device, and the scalars of a step that
follow from them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.late_copy import LateCopies

# options of torch.optim.AdamW, and the one value of each that this update has
FIXED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
# by column, each with the number that it is less than
COLUMNS = {"lr": math.inf, "weight_decay": math.inf, "beta1": 1.0, "beta2": 1.0, "eps": math.inf}


def check_options(param_groups: Sequence[dict[str, Any]]) -> None:
    """ValueError for options of torch.optim.AdamW that would change the update and have no effect
    here.
    """
    for group in param_groups:
        for name, value in FIXED.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"{name}={group[name]} in a parameter group has no effect here: this is AdamW without it"
                )


class Hyperparameters:
    """Learning rate, weight decay, betas and eps, f64 `[groups, 5]` on the device.

    `refresh` is the host's part of a step: a number that has changed is filled in by a launch that
    carries it, a tensor on the device is copied there, so nothing waits and nothing is uploaded.
    A step reads one tensor, as does a CUDA graph of it. Of tensors on a GPU the host learns
    one step later whether they were in range.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self._values = torch.zeros(groups, 5, dtype=torch.float64, device=device)
        self._known = [[0.0] * 5 for _ in range(groups)]
        # the numbers as all ranks must have them; their last bits may differ between processors
        self.description = ""
        self._late = LateCopies(self._values)

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Take over what the parameter groups say now. ValueError as `check_options`, and for
        tensors on a GPU that were out of range in the last step.
        """
        check_options(param_groups)
        for taken in self._late.take():
            _check_taken(taken.tolist())
        changed, has_tensors = not self.description, False
        for row, group in enumerate(param_groups):
            for column, value in enumerate((group["lr"], group["weight_decay"], *group["betas"], group["eps"])):
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    # a number that comes next is always a change
                    self._known[row][column], has_tensors = float("nan"), True
                    self._values[row, column].copy_(value.detach().view(()))
                elif float(value) != self._known[row][column]:
                    self._values[row, column].fill_(float(value))
                    self._known[row][column], changed = float(value), True  # not before it is true
        if changed:
            self.description = "; ".join(_described(*row) for row in self._known)
        if has_tensors and self._values.is_cuda:
            self._late.send()

    def scalars(self, step: Tensor) -> Tensor:
        """f32 `[groups, 8]` for step numbers `step`, `[1]` or one a group, counted from 1.

        In the order of `zerocast/backends/README.md`. Bias corrections are taken in f64 on the
        device, each scalar is rounded once to f32.
        """
        lr, weight_decay, beta1, beta2, eps = self._values.unbind(1)
        t = step.double()
        c1, c2 = 1 - torch.pow(beta1, t), 1 - torch.pow(beta2, t)
        columns = [1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / c1, c2.sqrt(), eps]
        return torch.stack(columns, 1).float()


def _check_taken(values: Sequence[Sequence[float]]) -> None:
    """ValueError for hyper-parameters of a step, by group and column, that are out of range."""
    for group, row in enumerate(values):
        for (name, end), value in zip(COLUMNS.items(), row, strict=True):
            if not 0.0 <= value < end:
                raise ValueError(
                    f"{name} of parameter group {group}, a tensor on a GPU, was out of range in the last step: {value}. Masters "
                    "have taken that step: load a checkpoint"
                )


def _described(lr: float, weight_decay: float, beta1: float, beta2: float, eps: float) -> str:
    return f"lr {lr:.6g}, weight_decay {weight_decay:.6g}, betas {beta1:.6g} {beta2:.6g}, eps {eps:.6g}"
