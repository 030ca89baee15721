"""StepCounts: the number of steps taken by an optimizer, and by each of its parameter groups.

A group that is added between two steps begins at zero, as in torch, where each parameter has a step
count. Adam corrects the bias of moments by the count of the parameter's group.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class StepCounts:
    """The steps taken, on the device, since only the device knows of skipped steps.

    Attributes:
        taken: i64[1], the steps of the optimizer, a view.
        of_groups: i64[groups], the steps since each parameter group was added, a view.
        before: the number of steps taken before each group was added, on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._all = torch.zeros(1, dtype=torch.int64, device=device)
        self.before: list[int] = []
        self._show()

    def _show(self) -> None:
        self.taken, self.of_groups = self._all[:1], self._all[1:]

    def add_groups(self, number: int) -> None:
        """Count the steps of `number` more groups, from zero. The counts get new storage, and the
        CPU waits for the device unless there was no group before.
        """
        taken = int(self.taken) if self.before else 0
        self.before += [taken] * number
        self._all = torch.cat([self._all, self._all.new_zeros(number)])
        self._show()

    def count(self, takes_step: Tensor) -> None:
        """Count one more step if `takes_step`, bool[1], is True. Does not wait for the device."""
        self._all += takes_step

    def load(self, by_group: Mapping[int, int]) -> None:
        """Load the counts of groups. The optimizer has taken the number of steps of the group with
        the most. Groups without a count are assumed to exist from the start.
        """
        if not by_group:
            return
        taken = max(by_group.values())
        counts = [by_group.get(index, taken) for index in range(len(self.before))]
        self.before = [taken - count for count in counts]
        self._all.copy_(torch.tensor([taken, *counts], dtype=torch.int64))
