"""What follows an all-gather of a bucket group: the columnwise copies of its weights, once the bytes are here.

The host forgets a gather as soon as its bytes have come, before their copies are made. So one thread at a time starts or finishes
gathers, and whoever reads meanwhile waits for it (`Turns`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerocast import QuantizedWeight
from zerocast.cast.columnwise import ColumnwiseCopies

from . import te_tensors
from .primary import is_primary, weight_of
from .sources import Source


def primary_of(bucket_group: Any) -> list[Any]:
    """The parameters of a bucket group whose bytes it gathers."""
    return [param for bucket in bucket_group.buckets for param in bucket.params_list if is_primary(param)]


def nothing() -> None:
    """Instead of the host's work after a gather, where `after_gather_of` does it."""


def after_gather_of(params: Sequence[Any], backend: str, source: Source, bucket_group: Any) -> Callable[[], None]:
    """What to call once the bytes of these parameters, all those of a bucket group, are here."""
    copies = ColumnwiseCopies([param for param in params if isinstance(param, QuantizedWeight)], backend)
    theirs = [param for param in params if not isinstance(param, QuantizedWeight)]
    weights = [weight_of(param) for param in params]

    def after_gather() -> None:
        copies.make()
        te_tensors.make_copies(theirs)
        for weight in weights:
            weight.state.mark_columnwise()
        source.gathered(bucket_group)

    return after_gather


def completing(bucket_group: Any, name: str, after_gather: Callable[[], None]) -> Callable[..., Any]:
    """The host's method that starts or finishes a gather, then `after_gather` if the bytes are here now and were not before."""
    method = getattr(bucket_group, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        pending = bucket_group.param_gather_handle is not None or not bucket_group.param_gather_dispatched
        result = method(*args, **kwargs)
        if bucket_group.param_gather_handle is None and (pending or name == "start_param_sync"):
            after_gather()
        return result

    return call


class Turns:
    """One thread at a time in the gathers of an attachment. `check_complete` raises if what was waited for died half-way."""

    def __init__(self, check_complete: Callable[[], None]) -> None:
        self._lock, self._check_complete = threading.RLock(), check_complete
        self._busy = 0  # by how many calls the lock is held; read without it

    def alone(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, for which other threads, and readers, wait."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._turn():
                return method(*args, **kwargs)

        return call

    def finish(self, bucket_group: Any) -> None:
        """Wait for a gather in flight, and process what it brought; also for one that another thread is about to finish."""
        if bucket_group.param_gather_handle is None and not self._busy:
            return
        with self._turn():
            if bucket_group.param_gather_handle is not None:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
            self._check_complete()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            self._busy += 1
            try:
                yield
            finally:
                self._busy -= 1
