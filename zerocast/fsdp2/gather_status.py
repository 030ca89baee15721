"""GatherStatus: detects, on every rank, that ranks sent bytes of different casts, or that masters
were written after their cast.

The bytes of every rank include a header, a `RankReport` with the number of its cast. Headers in CPU
memory are compared immediately. With headers on a GPU the CPU never waits for work that it has just
launched. They are kept on the device, copied to pinned memory at the end of a forward pass and
before a cast, and compared before the next cast. So ranks that disagree raise up to a step later
than on a CPU, and all of them at the same point of the program, before the next cast. A forward
pass without gradients, a state dict and `zerocast.verify` wait for all headers and compare them.

Weights that a forward pass left gathered are not gathered again. Before the next forward pass the
ranks exchange their statuses in a separate collective (`GatherStatus.exchange`).

A header also reports masters that were NaN or Inf in the cast. Gathers do not raise for that, since
one of them may be for `zerocast.verify`. The next cast does, and so does a read of the state.
"""

import atexit
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.distributed.late_copy import LateCopy
from zerocast.distributed.rank_report import Comparison, RankReport, ShardStatus, not_finite_error
from zerocast.weight.validity import InvalidWeights, Use, Validity

logger = logging.getLogger(__name__)

# The number of unread forward passes and gathers at which the CPU reads the oldest headers. A loop
# without optimizer steps reaches it.
MAX_PASSES = 16
MAX_GATHERS = 1024
# The time that a process that ends waits for headers that are being copied to the CPU.
EXIT_SECONDS = 1.0


class GatherStatus:
    """Compares the status headers of a model's gathers: on a CPU immediately, on a GPU later, in
    the order in which they were issued.

    Args:
        validity: the validity of the model. Its error is raised if masters of this rank are
            partial.

    Attributes:
        problem: the reason why this rank could not make the last cast, for its error. None if it
            could.
        ignores_errors: True inside `ignoring_errors`: errors of earlier casts are not raised, since
            the caller is about to overwrite all masters.
    """

    def __init__(self, validity: Validity) -> None:
        self._validity = validity
        self.problem: Exception | None = None
        # Headers of gathers whose copy to the CPU has not been started, with the names of their
        # weights. Each weight has one header per rank.
        self._unsent: list[tuple[tuple[str, ...], Tensor]] = []
        # Headers with their copies to the CPU, oldest first. The copy may run on another stream, so
        # the headers are kept until the CPU has read it.
        self._sent: deque[tuple[list[tuple[tuple[str, ...], Tensor]], LateCopy]] = deque()
        # Weights whose masters were not finite, with the number of the cast. Cleared by the error
        # that reports them.
        self._not_finite: dict[str, int] = {}
        # The number of the last cast for which an error has reported masters that are not finite.
        self._reported_cast = 0
        self.ignores_errors = False

    def compare_headers(self, names: tuple[str, ...], statuses: Sequence[ShardStatus], headers: Tensor) -> bool:
        """Return True if all ranks that have rows of some weight have written to its masters since
        the last cast.

        Headers on a CPU are compared immediately (`_compare`). Reading headers from a GPU makes the
        CPU wait. A rank does so now only if all ranks may have written, as far as it knows: its own
        masters changed outside of an optimizer, or it has no rows of the weight. Otherwise it reads
        the headers later, as all ranks do, and all raise then if they disagree.

        Args:
            names: the weights.
            statuses: the status that this rank has reported of each weight.
            headers: int32 `[weights * ranks, 2]`, weight by weight.
        """
        if not self.reads_late(headers):
            return self._compare(names, headers)
        self.note(names, headers)
        if not any(status.may_be_written for status in set(statuses)):
            return False
        by_weight = zip(headers.cpu().chunk(len(names)), statuses, strict=True)
        return any(Comparison.of_headers(own).may_be_written for own, status in by_weight if status.may_be_written)

    def exchange(
        self, names: Sequence[str], statuses: Sequence[ShardStatus], cast_number: int, group: Group, device: str
    ) -> bool:
        """Compare statuses as `compare_headers` does, by one all-gather of them, for weights whose
        headers no gather has sent. Collective over `group`, on devices of type `device`.
        """
        here = torch.tensor([RankReport(status, cast_number) for status in statuses], dtype=torch.int32)
        if device != "cpu":
            here = here.pin_memory().to(device, non_blocking=True)
        headers = torch.empty((group.size, *here.shape), dtype=here.dtype, device=here.device)
        group.all_gather_into(headers.view(-1), here.view(-1), what="writes to weights that are gathered")
        return self.compare_headers(tuple(names), statuses, headers.transpose(0, 1).flatten(0, 1))

    def _compare(self, names: Sequence[str], headers: Tensor) -> bool:
        """Return True if all ranks that have rows of some weight have written to its masters.

        Raises RuntimeError if only some of these ranks have written, if masters of some ranks are
        partial, if some could not make the last cast, and for bytes of different casts.
        """
        if Comparison.of_headers(headers).all_clean:
            return False
        by_weight = headers.chunk(len(names))
        written = [self._is_written(name, own) for name, own in zip(names, by_weight, strict=True)]
        return any(written)

    def _is_written(self, name: str, headers: Tensor) -> bool:
        """Compare the headers `[ranks, 2]` of one weight as `_compare` does."""
        comparison = Comparison.of_headers(headers)
        partial = comparison.ranks(ShardStatus.PARTIAL)
        if partial:
            self._validity.check(Use.READ)
            raise InvalidWeights(
                f"{name}: an optimizer step or a load failed partway on ranks {partial} of its shard group, which have masters "
                "of different steps",
                "",
                "load a checkpoint on all ranks",
            )
        refused = comparison.ranks(ShardStatus.REFUSED)
        if refused:
            why = f" ({self.problem})" if self.problem is not None else ", whose errors say why"
            raise InvalidWeights(
                f"{name}: ranks {refused} of its shard group could not cast{why}",
                "since the last optimizer step",
                "fix the error on those ranks, then call zerocast.fsdp2.refresh(model) on all ranks",
            )
        if comparison.ranks(ShardStatus.REFUSED_ELSEWHERE):
            raise InvalidWeights(
                f"{name}: a rank of another slice of tensor parallelism, or of another replica, could not cast, whose error says "
                "why",
                "since the last optimizer step",
                "fix the error on those ranks, then call zerocast.fsdp2.refresh(model) on all ranks",
            )
        if comparison.ranks(ShardStatus.REPLICAS_DIFFER):
            raise InvalidWeights(
                f"{name}: some replicas have made casts that others have not, since only their masters were changed",
                "since the last optimizer step",
                "load a checkpoint, or write the same masters on all ranks and call zerocast.fsdp2.refresh(model) on all ranks",
            )
        casts = [report.call for report in comparison.reports]
        if not comparison.is_same_call:
            raise InvalidWeights(
                f"{name}: the ranks of a shard group sent bytes of different casts, numbers {casts} by rank",
                "",
                "optimizer steps and zerocast.fsdp2.refresh must happen on all of them",
            )
        if casts[0] > self._reported_cast and comparison.ranks(ShardStatus.NOT_FINITE):
            self._not_finite[name] = casts[0]
            _unread.add(self)
        written = comparison.ranks(ShardStatus.WRITTEN)
        clean = comparison.ranks(ShardStatus.CLEAN, ShardStatus.NOT_FINITE)
        if written and clean:
            raise InvalidWeights(
                f"{name}: the master, or a plain parameter that is gathered with it, was changed on ranks {written} of its shard "
                f"group and not on ranks {clean}",
                "since the last cast",
                "change it on all, or call zerocast.fsdp2.refresh(model) on all after changing some",
            )
        return bool(written)

    @staticmethod
    def reads_late(headers: Tensor) -> bool:
        """Return True if the CPU would have to wait for these headers."""
        return headers.is_cuda

    def note(self, names: tuple[str, ...], headers: Tensor) -> None:
        """Keep the headers of these weights, to compare them later. They must be a copy, since
        FSDP2 may free the gathered bytes before.
        """
        self._unsent.append((names, headers))
        _unread.add(self)
        if len(self._unsent) > MAX_GATHERS:
            self.end_pass()

    def end_pass(self) -> None:
        """Called at the end of a forward pass. Starts the copy of its headers to the CPU."""
        self._send()
        while len(self._sent) > MAX_PASSES:
            self._read_oldest()

    def next_step(self) -> None:
        """Compare the headers whose copies were started in the step that ends, and start the copies
        of the remaining ones. Raises RuntimeError on every rank if ranks disagree, or if masters of
        the step were not finite.
        """
        while self._sent:
            self._read_oldest()
        self._send()
        self.check_finite()

    def check_finite(self) -> None:
        """Raise RuntimeError on every rank, once per cast, if compared headers have reported
        masters that were NaN or Inf.
        """
        if self._not_finite and not self.ignores_errors:
            names = list(self._not_finite)
            self._reported_cast = max(self._not_finite.values())
            self._not_finite.clear()
            raise not_finite_error(names, f"{len(names)} weights")

    def check(self) -> None:
        """Raise RuntimeError if ranks disagree in any headers. Waits for the device."""
        self._send()
        while self._sent:
            self._read_oldest()

    def forget(self) -> None:
        """Drop unread headers. Called when masters are about to be overwritten on all ranks."""
        self._unsent.clear()
        self._sent.clear()
        self._not_finite.clear()

    @contextlib.contextmanager
    def ignoring_errors(self) -> Iterator[None]:
        """While the context is open, raise no error of earlier casts. For code that is about to
        overwrite the masters on all ranks, such as a load. Headers that are unread now are compared
        after the context, unless the caller overwrites the masters and calls `forget`.
        """
        sent, unsent = list(self._sent), self._unsent
        self._sent, self._unsent, self.ignores_errors = deque(), [], True
        try:
            yield
        finally:
            self.ignores_errors = False
            self._sent.extendleft(reversed(sent))
            self._unsent = [*unsent, *self._unsent]

    def report_at_exit(self) -> None:
        """Raise RuntimeError if ranks disagree, or masters were not finite, and no call has raised
        for it yet. Headers that do not arrive within EXIT_SECONDS are ignored.
        """
        self._send()
        until = time.monotonic() + EXIT_SECONDS
        while self._sent and (self._sent[0][1].has_arrived or time.monotonic() < until):
            if self._sent[0][1].has_arrived:
                self._read_oldest()
        self.check_finite()

    def _send(self) -> None:
        if self._unsent:
            self._sent.append((self._unsent, LateCopy(torch.cat([headers for _, headers in self._unsent]))))
            self._unsent = []

    def _read_oldest(self) -> None:
        gathers, copy = self._sent.popleft()
        by_gather = copy.read().split([len(headers) for _, headers in gathers])
        try:
            for (names, _), headers in zip(gathers, by_gather, strict=True):
                self._compare(names, headers)
        except RuntimeError:
            # The others report the same disagreement.
            self.forget()
            raise


_unread: "weakref.WeakSet[GatherStatus]" = weakref.WeakSet()


@atexit.register
def _report_unread() -> None:
    for status in list(_unread):
        try:
            status.report_at_exit()
        except RuntimeError as error:
            logger.error("found as the process ended: %s", error)
