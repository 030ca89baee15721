"""SkippedSteps: a warning if all steps of a run are skipped. Such a run no longer trains, but its
loss may look as if it did.

The CPU learns of skipped steps from a late copy of the count of steps taken, which a skipped step
does not increase.
"""

import logging

from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.distributed.late_copy import LateCopies

logger = logging.getLogger(__name__)
# The numbers of steps skipped in a row at which a warning is logged.
WARNED_AT = (20, 200)


class SkippedSteps:
    """Counts the steps that are skipped in a row. Rank 0 logs a warning.

    Args:
        count: int64[1], the number of steps taken, on the device.

    Attributes:
        in_a_row: the number of steps that were skipped in a row, as far as the CPU knows.
    """

    def __init__(self, count: Tensor, group: Group) -> None:
        self._group = group
        self._late = LateCopies(count)
        # The last count that the CPU knows.
        self._taken = 0
        self.in_a_row = 0

    def before_step(self) -> None:
        """Check if the last step was skipped. On a GPU its count arrives only now."""
        copies = self._late.pop()
        if not copies:
            return
        (taken,) = copies[-1].tolist()
        skipped = taken == self._taken
        self._taken = taken
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if skipped and self.in_a_row in WARNED_AT and self._group.rank == 0:
            logger.warning(
                "the last %d steps were all skipped, since gradients are not finite: nothing is trained. zerocast.verify shows "
                "whether masters are not finite; load an older checkpoint, lower the learning rate or the loss scale",
                self.in_a_row,
            )

    def after_step(self) -> None:
        """Start the copy of the count to the CPU. With masters on the CPU it arrives
        immediately.
        """
        self._late.send()
        if not self._late.is_late:
            self.before_step()

    def restart(self, taken: int) -> None:
        """Start again after a state with this many steps taken was loaded."""
        self._late.forget()
        self._taken = taken
        self.in_a_row = 0
