"""StepCounts: the number of steps taken by an optimizer, and by each of its parameter groups.
SkippedSteps: a warning if all steps of a run are skipped.

A group that is added between two steps begins at zero, as in torch, where each parameter has a step
count. Adam corrects the bias of moments by the count of the parameter's group.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.distributed.late_copy import LateCopies

logger = logging.getLogger(__name__)
# The numbers of steps skipped in a row at which a warning is logged.
WARNED_AT = (20, 200)


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


class SkippedSteps:
    """Counts the steps that are skipped in a row, and warns on rank 0 if there are many. Such a run
    no longer trains, but its loss may look as if it did.

    The CPU learns of skipped steps from the count of steps taken, which a skipped step does not
    increase. On a GPU it reads a late copy.

    Args:
        count: int64[1], the number of steps taken, on the device.

    Attributes:
        in_a_row: the number of steps that were skipped in a row, as far as the CPU knows.
    """

    def __init__(self, count: Tensor, group: Group) -> None:
        self._group, self._count = group, count
        self._late = LateCopies(count)
        # The last count that the CPU knows.
        self._taken = 0
        self.in_a_row = 0

    def before_step(self) -> None:
        """On a GPU, learn now whether the last step was skipped."""
        if self._late.unread:
            self._note(self._late.pop()[-1])

    def after_step(self) -> None:
        """On a GPU, start the copy of the count to the CPU. On a CPU, learn whether this step was
        skipped.
        """
        if self._count.is_cuda:
            self._late.send()
        else:
            self._note(self._count)

    def _note(self, count: Tensor) -> None:
        (taken,) = count.tolist()
        skipped = taken == self._taken
        self._taken = taken
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if skipped and self.in_a_row in WARNED_AT and self._group.rank == 0:
            logger.warning(
                "the last %d steps were all skipped, since gradients are not finite: nothing is trained. zerocast.verify shows "
                "whether masters are not finite; load an older checkpoint, lower the learning rate or the loss scale",
                self.in_a_row,
            )

    def restart(self, taken: int) -> None:
        """Start again after a state with this many steps taken was loaded."""
        self._late.forget()
        self._taken = taken
        self.in_a_row = 0
