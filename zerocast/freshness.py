"""Freshness: which cast the copies of a weight belong to.

One `Freshness` is shared by all weights of a plan: a step marks every weight with one write, whatever their number, and a read
compares and refuses what is stale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Freshness:
    """Counters of casts. `finish(weight)` completes a gather in flight; `rebuild(weight)` makes columnwise copies on demand."""

    cast: int = 0
    columnwise: int = -1  # the cast that the columnwise copies of all of them were made from
    finish: Callable[[Any], None] | None = None
    rebuild: Callable[[Any], None] | None = None
    owner: Callable[[], Any] | None = (
        None  # a weak reference to what owns the masters and shows them to `zerocast.verify`
    )
