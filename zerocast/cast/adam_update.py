"""AdamUpdate: an AdamW step that a cast takes on its masters, so that one pass updates and measures
them. Hyperparameters: the hyperparameters of all parameter groups on the device, and the scalars of
a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.backends import checks
from zerocast.distributed.late_copy import LateCopies

# Options of torch.optim.AdamW that this update supports with these values only.
FIXED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
# The hyperparameters by column, each with its exclusive upper bound.
COLUMNS = {"lr": math.inf, "weight_decay": math.inf, "beta1": 1.0, "beta2": 1.0, "eps": math.inf}


@dataclass(frozen=True)
class MomentGroups:
    """The groups of moments in 8 bits (docs/formats/moments_8bit.md) of one step.

    Attributes:
        scales: f32, the scales of both moments, for each tensor of masters. Written in place.
        pieces: a row for each part of a weight (`Piece` of `zerocast/backends/descriptor.py`), at
            offsets of the masters. The same list in all steps.
        steps: i64, the number of the step for each row of Adam's scalars.
        cut_largest: f32 `[2, cut groups]`, the largest values of the groups that several ranks have
            parts of; zeros before the step.
        reduce: reduces `cut_largest` over the ranks. Collective.
    """

    scales: list[Tensor]
    pieces: Sequence[list[int]]
    steps: Tensor
    cut_largest: Tensor
    reduce: Callable[[], None]


class AdamInputs(NamedTuple):
    """The tensors that Adam reads and writes besides masters, as lists of flat tensors, one for
    each base of a table.

    Attributes:
        grads: FP32 or bf16.
        exp_avgs, exp_avg_sqs: the moments, written in place: FP32 or bf16, or i8 and u8 codes.
        scalars, clip, groups: as in an AdamUpdate.
    """

    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    scalars: Tensor
    clip: Tensor
    groups: MomentGroups | None = None


@dataclass(frozen=True)
class AdamUpdate:
    """An AdamW step of the masters of a plan, which are views of one flat FP32 tensor.

    A cast takes it in the pass that measures the masters.

    Attributes:
        grad: FP32 or bf16, flat, parallel to the tensor of the masters up to the last one that
            takes the step. Later elements are not read.
        exp_avg, exp_avg_sq: the moments, also written in place: FP32 or bf16, or i8 and u8 codes.
        scalars: f32 `[groups, 8]`, a row for each parameter group (`Hyperparameters.scalars`).
        clip: f32[1], the factor of the gradients.
        groups: the groups of moments in 8 bits. None for moments of other dtypes.
    """

    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scalars: Tensor
    clip: Tensor
    groups: MomentGroups | None = None

    def check(self, end: int, group_count: int, device: torch.device) -> None:
        """Raise ValueError or TypeError unless the tensors are on `device` and have `end` elements,
        and the scalars rows of `group_count` groups.
        """
        first, second = (checks.ADAM_FLOATS,) * 2 if self.groups is None else ((torch.int8,), (torch.uint8,))
        for name, dtypes in (("grad", checks.ADAM_FLOATS), ("exp_avg", first), ("exp_avg_sq", second)):
            checks.check_plain(f"the {name} of an AdamUpdate", getattr(self, name), dtypes, end, device)
        if self.groups is None:
            checks.check_moments(self.exp_avg, self.exp_avg_sq)
        checks.check_scalars(self.scalars, self.clip, group_count, device)

    @cached_property
    def inputs(self) -> AdamInputs:
        """The same as lists of one tensor."""
        return AdamInputs([self.grad], [self.exp_avg], [self.exp_avg_sq], self.scalars, self.clip, self.groups)


def check_options(param_groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for options of torch.optim.AdamW that would have no effect here."""
    for group in param_groups:
        for name, value in FIXED.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"{name}={group[name]} in a parameter group has no effect in this optimizer, which is AdamW without it"
                )


class Hyperparameters:
    """Learning rate, weight decay, betas and eps, f64 `[groups, 5]` on the device.

    `refresh` is the CPU's part of a step. It fills in the numbers that have changed, by launches
    that carry them, and copies tensors on the device. So it neither waits nor uploads anything, and
    a step, or a CUDA graph of one, reads one tensor. Tensors on a GPU are checked one step later.

    Attributes:
        description: the numbers in six digits, which all ranks must share. The last bits may differ
            between processors.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self._values = torch.zeros(groups, 5, dtype=torch.float64, device=device)
        self._known = [[0.0] * 5 for _ in range(groups)]
        self.description = ""
        self._late = LateCopies(self._values)

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Read the current hyperparameters of the parameter groups. Raises ValueError for options
        for which `check_options` raises, and for tensors on a GPU that were out of range in the
        last step.
        """
        check_options(param_groups)
        for last_values in self._late.pop() if self._late.unread else ():
            _check_range(last_values.tolist())
        changed, has_tensors = not self.description, False
        for row, group in enumerate(param_groups):
            for column, value in enumerate((group["lr"], group["weight_decay"], *group["betas"], group["eps"])):
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    # NaN differs from every number, so a number that replaces the tensor is filled
                    # in.
                    self._known[row][column] = math.nan
                    has_tensors = True
                    self._values[row, column].copy_(value.detach().view(()))
                elif float(value) != self._known[row][column]:
                    self._values[row, column].fill_(float(value))
                    # Only after the launch, which may raise.
                    self._known[row][column] = float(value)
                    changed = True
        if changed:
            self.description = "; ".join(
                f"lr {lr:.6g}, weight_decay {weight_decay:.6g}, betas {beta1:.6g} {beta2:.6g}, eps {eps:.6g}"
                for lr, weight_decay, beta1, beta2, eps in self._known
            )
        if has_tensors and self._values.is_cuda:
            self._late.send()

    def scalars(self, step: Tensor) -> Tensor:
        """Return the scalars of a step, f32 `[groups, 8]`, in the order of
        `zerocast/backends/README.md`.

        `step` is the number of the step counted from 1, `[1]` or one for each group. Scalars are
        computed in f64 on the device, and each is rounded to f32 once.
        """
        lr, weight_decay, beta1, beta2, eps = self._values.unbind(1)
        t = step.double()
        c1, c2 = 1 - torch.pow(beta1, t), 1 - torch.pow(beta2, t)
        columns = [1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / c1, c2.sqrt(), eps]
        return torch.stack(columns, 1).float()


def _check_range(values: Sequence[Sequence[float]]) -> None:
    """Raise ValueError for hyperparameters of a step, by group and column, that are out of
    range.
    """
    for group, row in enumerate(values):
        for (name, end), value in zip(COLUMNS.items(), row, strict=True):
            if not 0.0 <= value < end:
                raise ValueError(
                    f"{name} of parameter group {group}, a tensor on a GPU, was out of range in the last step: {value}. Masters "
                    "have taken that step: load a checkpoint"
                )
