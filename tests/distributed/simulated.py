"""Many ranks in one process: a thread each, whose groups exchange what every rank really passes.

torch's fake process group answers with this rank's own input; here a check sees the inputs of all ranks, far apart too.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from zerocast.distributed.group import Flight, Group

Result = TypeVar("Result")
STACK = 512 * 1024  # bytes of a thread


class Exchange:
    """The meeting point of simulated ranks. One runs at a time, up to its next collective. When all are there they go on.

    `log` holds (collective, bytes of rank 0's part) in order.
    """

    def __init__(self, size: int) -> None:
        self.log: list[tuple[str, int]] = []
        self._parts: dict[int, tuple[str, Any, Callable[[list[Any]], Any]]] = {}
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._result: Any = None

    def meet(self, rank: int, kind: str, part: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for all ranks. Return what `combine` makes of their parts."""
        self._parts[rank] = kind, part, combine
        self._back.release()
        self._turns[rank].acquire()
        if isinstance(self._result, AssertionError):
            raise self._result
        return self._result

    def start(self, rank: int, run: Callable[[], None]) -> threading.Thread:
        """Start the thread of a rank, which waits for its first turn."""

        def runs() -> None:
            self._turns[rank].acquire()
            run()
            self._back.release()

        thread = threading.Thread(target=runs)
        thread.start()
        return thread

    def run(self) -> None:
        """Give each rank its turns until all have returned."""
        size = len(self._turns)
        waiting: Sequence[int] = range(size)
        while waiting:
            self._parts.clear()
            for rank in waiting:
                self._turns[rank].release()
                self._back.acquire()
            waiting = sorted(self._parts)
            if waiting:
                self._result = self._combined(size)

    def _combined(self, size: int) -> Any:
        parts = [self._parts.get(rank, ("nothing any more", None, None)) for rank in range(size)]
        kinds = {kind for kind, _, _ in parts}
        if len(kinds) > 1:
            return AssertionError(f"ranks are in different collectives: {kinds}")
        kind, first, combine = parts[0]
        self.log.append((kind, first.nbytes if isinstance(first, Tensor) else 0))
        assert combine is not None
        return combine([part for _, part, _ in parts])


@dataclass(frozen=True)
class Simulated(Group):
    """The group of one of the threads. `sent` has the elements that it sent to others in each exchange of unequal parts."""

    exchange: Exchange = field(kw_only=True)
    sent: list[int] = field(default_factory=list, compare=False)

    def all_reduce_max(self, tensor: Tensor, what: str = "") -> None:
        tensor.copy_(self._meet("max", tensor.clone(), lambda parts: torch.stack(parts).amax(0)))

    def all_reduce_sum(self, tensor: Tensor, what: str = "") -> None:
        tensor.copy_(self._meet("sum", tensor.clone(), lambda parts: torch.stack(parts).sum(0)))

    def all_gather_into(self, out: Tensor, part: Tensor, async_op: bool = False, what: str = "") -> Flight | None:
        out.copy_(self._meet("all-gather", part, torch.cat))
        return None

    def all_to_all(
        self,
        out: Tensor,
        full: Tensor,
        async_op: bool = False,
        what: str = "",
        lengths: tuple[list[int], list[int]] | None = None,
    ) -> None:
        assert lengths is not None
        parts = list(full.split(lengths[1]))
        arriving = [of_rank[self.rank] for of_rank in self._meet("all-to-all", parts, list)]
        assert list(map(len, arriving)) == lengths[0], what
        out.copy_(torch.cat(arriving))
        self.sent.append(full.numel() - lengths[1][self.rank])

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        found: list[Any] = self._meet("objects", value, lambda parts: list(parts))
        return found

    def broadcast_object(self, value: Any, what: str = "an object", root: int = 0) -> Any:
        return self._meet(f"object of {root}", value, lambda parts: parts[root])

    def _meet(self, kind: str, part: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return self.exchange.meet(self.rank, kind, part, combine)


def simulate(size: int, run: Callable[[Simulated], Result]) -> tuple[list[Result | Exception], list[tuple[str, int]]]:
    """Return (what each rank returned or raised, the collectives) of `run` on `size` ranks."""
    exchange, found = Exchange(size), dict[int, Result | Exception]()

    def rank_runs(rank: int) -> None:
        try:
            found[rank] = run(Simulated(None, rank, size, exchange=exchange))
        except Exception as error:
            found[rank] = error

    before = threading.stack_size(STACK)
    try:
        threads = [exchange.start(rank, functools.partial(rank_runs, rank)) for rank in range(size)]
    finally:
        threading.stack_size(before)
    exchange.run()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)], exchange.log
