"""SkippedSteps: a run whose every step is skipped changes nothing any more, and its loss may look
as if it were training.

The host learns of it from a copy of the count of steps taken, which stands still where a step is
skipped.
"""

import logging

from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.distributed.late_copy import LateCopy

logger = logging.getLogger(__name__)
WARNED_AT = (20, 200)  # steps skipped in a row


class SkippedSteps:
    """The steps skipped in a row, by the int64[1] `count` of steps taken. Rank 0 warns of them."""

    def __init__(self, count: Tensor, group: Group) -> None:
        self._group, self._late = group, LateCopy(count)
        self._taken, self.in_a_row = 0, 0

    def before_step(self) -> None:
        """Read how the last step ended; on a GPU it is the host's first look."""
        copies = self._late.take()
        if not copies:
            return
        (taken,) = copies[-1].tolist()
        skipped = taken == self._taken
        self._taken, self.in_a_row = taken, self.in_a_row + 1 if skipped else 0
        if skipped and self.in_a_row in WARNED_AT and self._group.rank == 0:
            logger.warning(
                "the last %d steps were all skipped, since gradients are not finite: nothing is trained. zerocast.verify tells "
                "whether masters are to blame; load an older checkpoint, lower the learning rate or the loss scale",
                self.in_a_row,
            )

    def after_step(self) -> None:
        """Let the count travel to the host; on a CPU it is there at once."""
        self._late.send()
        if not self._late.is_late:
            self.before_step()

    def restart(self, taken: int) -> None:
        """A state with this many steps was loaded."""
        self._late.forget()
        self._taken, self.in_a_row = taken, 0
