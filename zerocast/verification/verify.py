"""verify: compare the live bytes of every weight with an unsharded cast of its gathered master.

No part of the cast plan is used, since it is under test. Every rank gathers a piece of a master,
casts it with the reference's `quantize`, and compares the result with the bytes that its products
read. A piece is 512 rows or a million elements, whichever is more, so memory does not grow with the
weight. A format with a tensor amax gathers its pieces twice.

Stale columnwise copies are skipped, since reading them raises. The scale of the next delayed cast
and the amax history do not follow from a master. They are compared with the values of rank 0,
unless a framework keeps them. The result is a VerifyReport, the same on every rank.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast.backends.reference.codec import round_nominal
from zerocast.backends.reference.quantize import Quantized, quantize
from zerocast.backends.reference.scales import amax_of_stored, block_amax
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.formats import Columnwise, FormatSpec, layout
from zerocast.formats.layout import Span
from zerocast.formats.memory import check_storage
from zerocast.formats.shared_amax import SharedAmax
from zerocast.verification.master_views import MasterView, MasterViews, owners_of


class VerificationError(RuntimeError):
    """Raised if live bytes differ from the cast of their masters, or if masters are not finite. The
    message is the report.
    """


@dataclass(frozen=True)
class Difference:
    """One buffer of one weight on one rank that differs from the expected bytes.

    Attributes:
        name: the name of the weight.
        format: the format of the weight.
        rank: the rank.
        buffer: a name in `zerocast.formats.layout.BUFFERS`.
        wrong: the number of bytes that differ, of `total`.
        offset: the byte offset of the first difference in the buffer.
        found: the live byte at the offset.
        expected: the byte that the master casts to.
    """

    name: str
    format: str
    rank: int
    buffer: str
    wrong: int
    total: int
    offset: int
    found: int
    expected: int

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.format}) on rank {self.rank}: {self.buffer} differs in {self.wrong:,} of {self.total:,} "
            f"bytes, first at {self.offset:,}: {self.found:#04x} where {self.expected:#04x} is expected"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The result of `zerocast.verify`.

    Attributes:
        weights: the number of weights compared.
        nbytes: the bytes compared on each rank.
        ranks: the number of ranks.
        differences: every buffer that differs on any rank.
        without_masters: quantized weights that were not compared, since some of their elements have
            no known master.
        not_finite: (name, number of NaN and Inf elements) of masters. Formats define the cast of
            such elements, so their bytes do not count as different.
        allow_nonfinite: True if masters that are not finite are reported but are not a failure.
    """

    weights: int
    nbytes: int
    ranks: int
    differences: tuple[Difference, ...]
    without_masters: tuple[str, ...] = ()
    not_finite: tuple[tuple[str, int], ...] = ()
    allow_nonfinite: bool = False

    @staticmethod
    def of(parts: "Sequence[VerifyReport]", without: tuple[str, ...], allow_nonfinite: bool = False) -> "VerifyReport":
        """Merge reports into one. `ranks` is the largest of their numbers of ranks, or 1."""
        return VerifyReport(
            weights=sum(part.weights for part in parts),
            nbytes=sum(part.nbytes for part in parts),
            ranks=max((part.ranks for part in parts), default=1),
            differences=tuple(difference for part in parts for difference in part.differences),
            without_masters=(*without, *(name for part in parts for name in part.without_masters)),
            not_finite=tuple(master for part in parts for master in part.not_finite),
            allow_nonfinite=allow_nonfinite,
        )

    @property
    def ok(self) -> bool:
        """True if no buffer differs on any rank, and all masters are finite or need not be."""
        return not self.differences and (self.allow_nonfinite or not self.not_finite)

    def __str__(self) -> str:
        compared = f"{self.weights:,} weights, {self.nbytes:,} bytes on each of {self.ranks} ranks"
        differ = f"{len(self.differences)} buffers differ"
        result = differ if self.differences else "all equal the cast of the masters"
        masters = [
            f"the master of {name} has {count:,} elements that are NaN or Inf" for name, count in self.not_finite
        ]
        return "\n".join([f"{compared}: {result}", *map(str, self.differences), *masters])

    def raise_for_differences(self) -> None:
        """Raise VerificationError, with the report as its message, unless the report is `ok`."""
        if not self.ok:
            raise VerificationError(str(self))


# Elements of a piece, if that is more than `ROWS` rows.
PIECE = 2**20
# A boundary between pieces is at a multiple of this. It then splits neither a block nor the padding
# of a scale buffer.
ROWS = 512
# Buffers that do not follow from the master.
UNDETERMINED = ("scale", "amax_history")


@torch.no_grad()
def verify(model_or_optimizer: Any, group: GroupLike = None, *, allow_nonfinite: bool = False) -> VerifyReport:
    """Compare the live bytes, scales, amaxes and columnwise copies of every weight with an
    unsharded cast of its master.

    All ranks call it, between steps. It waits for gathers in flight and for the device. A cast or
    gather that the next forward pass would begin with is performed; nothing else changes.

    Args:
        model_or_optimizer: an owner of masters (a ZeroAdamW, a CastPlan, the result of a host's
            `attach`), a model whose weights have such an owner, or a model or optimizer under
            `zerocast.fsdp2`.
        group: the ranks that the report covers; by default those that share the masters. Each of
            them gets the same report.
        allow_nonfinite: if False, `raise_for_differences()` of the report also raises for masters
            with elements that are NaN or Inf.

    Raises TypeError for any other argument, ValueError for a model without any known master and for
    ranks that hold different weights.
    """
    owners, names, without = owners_of(model_or_optimizer)
    if not owners and not isinstance(model_or_optimizer, torch.nn.Module):
        kind = type(model_or_optimizer).__name__
        raise TypeError(f"verify takes a model or an optimizer that owns masters, got {kind}")
    if not owners:
        raise ValueError(
            "this model's weights have no known owner of masters: build the optimizer first, or pass the optimizer to verify()"
        )
    all_views = (views for owner in owners for views in owner.master_views())
    reports = [_verify(views, views.group if group is None else Group.of(group), names) for views in all_views]
    return VerifyReport.of(reports, without, allow_nonfinite)


def _verify(views: MasterViews, ranks: Group, names: Mapping[int, str]) -> VerifyReport:
    """Return the report of one MasterViews, the same on every rank of `ranks`."""
    named = [
        view
        if view.name is not None
        else dataclasses.replace(view, name=names.get(id(view.weight.state), f"weight {index}"))
        for index, view in enumerate(views.masters)
    ]
    # Ranks with different weights would wait for each other in the collectives below.
    weights = [(view.name, view.weight) for view in named]
    lines = [f"{name}: {weight.format} {tuple(weight.shape)} {weight.dtype}" for name, weight in weights]
    validate_across_ranks(views.group, lines, views.problem or _freed_memory(named), "verifies")
    shared = _shared_amaxes(named, views.group)
    compared = [_compare_matrices(view, views.group, shared.get(view.weight.state.shared_amax)) for view in named]
    own_differences = [dataclasses.replace(d, rank=ranks.rank) for weight in compared for d in weight.differences]
    by_rank = ranks.all_gather_object(own_differences, "the results of verify")
    counts = [(str(view.name), weight.not_finite) for view, weight in zip(named, compared, strict=True)]
    return VerifyReport(
        weights=len(named),
        nbytes=sum(weight.nbytes for weight in compared),
        ranks=ranks.size,
        differences=tuple(difference for differences in by_rank for difference in differences),
        without_masters=views.left_out,
        not_finite=tuple((name, count) for name, count in counts if count),
    )


def _freed_memory(views: Sequence[MasterView]) -> ValueError | None:
    """Return the error of a weight whose memory was freed, which a comparison must not read."""
    try:
        for view in views:
            for buffer, tensor in view.weight.state.buffers.items():
                if tensor is not None:
                    check_storage(f"{buffer} of {view.name}", tensor)
    except ValueError as error:
        return error
    return None


class _Compared(NamedTuple):
    """The comparison of a weight on this rank.

    Attributes:
        differences: the buffers that differ.
        nbytes: the number of bytes compared.
        not_finite: the number of elements of the master that are NaN or Inf.
    """

    differences: list[Difference]
    nbytes: int
    not_finite: int


def _compare_matrices(view: MasterView, group: Group, shared: Tensor | None) -> _Compared:
    """Compare all matrices that a weight is stored in."""
    view.weight.wait()
    compared = [_compare(matrix, group, shared) for matrix in view.matrices()]
    return _Compared(
        differences=[difference for matrix in compared for difference in matrix.differences],
        nbytes=sum(matrix.nbytes for matrix in compared),
        not_finite=sum(matrix.not_finite for matrix in compared),
    )


def _compare(view: MasterView, group: Group, shared: Tensor | None) -> _Compared:
    """Compare a weight that is stored in one matrix. Collective.

    `shared` is the tensor amax that the weight shares with others; None for a weight that shares
    none.
    """
    weight = view.weight
    weight.wait()
    live = dict(weight.state.buffers)
    if not weight.state.columnwise_is_fresh():
        live["columnwise_data"] = live["columnwise_scale_inv"] = None
    if weight.state.external_scaling_state:
        # The host updates these two between casts, so they do not belong to the last cast.
        live["amax"] = live["scale"] = None
    comparisons = {name: _Comparison(tensor) for name, tensor in live.items() if tensor is not None}
    for name in UNDETERMINED:
        if name in comparisons:
            comparisons[name].compare(comparisons[name].of_rank_0(group), (0, 0))
    columns = weight.matrix_shape[1]
    pieces = _pieces(weight.matrix_shape)
    # `quantize` takes the amax from its input, unless that is only a part of the tensor.
    is_cast_in_parts = len(pieces) > 1 or view.slices is not None
    amax = shared
    if amax is None and weight.format.has_tensor_amax and is_cast_in_parts:
        amax = _tensor_amax(view, pieces, group)
    not_finite = 0
    for piece in pieces:
        master = _gather(view, piece, group).view(-1, columns)
        not_finite += int((~master.isfinite()).sum())
        quantized = quantize(weight.format, master, weight.dtype, view.scale, amax)
        for name, expected, origin in _expected(weight.format, quantized, piece.start // columns, columns):
            if name in comparisons:
                comparisons[name].compare(expected, origin)
    name, fmt = str(view.name), str(weight.format)
    differences = [
        comparison.difference(name, fmt, buffer) for buffer, comparison in comparisons.items() if comparison.wrong
    ]
    return _Compared(differences, sum(comparison.compared for comparison in comparisons.values()), not_finite)


def _pieces(matrix_shape: tuple[int, int]) -> list[Span]:
    """Split a matrix at multiples of `ROWS` rows into spans of about `PIECE` elements or more."""
    rows, columns = matrix_shape
    step = max(1, PIECE // (ROWS * columns)) * ROWS
    return [Span(first * columns, min(first + step, rows) * columns) for first in range(0, rows, step)]


def _gather(view: MasterView, piece: Span, group: Group) -> Tensor:
    """Gather a piece of the master from all ranks, f32."""
    gathered = torch.zeros(piece.numel, dtype=torch.float32, device=view.weight.device)
    common = view.span.intersect(piece)
    if view.master is not None and common.numel:
        own_values = view.master[common.start - view.span.start : common.stop - view.span.start]
        gathered[common.start - piece.start : common.stop - piece.start] = own_values
    # Only one rank owns an element, the others add 0. The bits are summed as integers, which keeps
    # -0.0 and the payload of NaN.
    group.all_reduce_sum(gathered.view(torch.int32), "a master to verify")
    return gathered


def _shared_amaxes(views: Sequence[MasterView], group: Group) -> dict[SharedAmax | None, Tensor]:
    """Return the tensor amax of each group of weights that share one.

    If some members of a group are not among the views, since they are gathered at another time, the
    `amax` buffer that the last cast wrote is used as theirs.
    """
    amaxes: dict[SharedAmax | None, Tensor] = {}
    members: dict[SharedAmax, int] = {}
    for view in views:
        shared = view.weight.state.shared_amax
        if shared is not None and view.weight.format.has_tensor_amax:
            amax = _tensor_amax(view, _pieces(view.weight.matrix_shape), group)
            amaxes[shared] = torch.maximum(amaxes.get(shared, amax), amax)
            members[shared] = members.get(shared, 0) + 1
    for view in views:
        shared = view.weight.state.shared_amax
        if shared is None or view.weight.amax is None:
            continue
        is_incomplete = members.get(shared, len(shared.names)) < len(shared.names)
        if is_incomplete:
            others = amax_of_stored(view.weight.format, view.weight.amax)
            amaxes[shared] = torch.maximum(amaxes[shared], others)
    return amaxes


def _tensor_amax(view: MasterView, pieces: Sequence[Span], group: Group) -> Tensor:
    """Return the amax f32[1] of an unsharded master, over all slices of a weight under tensor
    parallelism.
    """
    amax = torch.zeros(1, dtype=torch.float32, device=view.weight.device)
    for piece in pieces:
        x = round_nominal(_gather(view, piece, group).view(-1, view.weight.matrix_shape[1]), view.weight.dtype)
        amax = torch.maximum(amax, block_amax(x, None).view(1))
    if view.slices is not None:
        view.slices.all_reduce_max(amax, "an amax to verify")
    return amax


def _expected(
    fmt: FormatSpec, quantized: Quantized, row: int, columns: int
) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
    """Yield (buffer name, expected part, its (row, column) in the buffer) for a piece of the weight
    that starts at `row`.
    """
    # The buffers of a weight that ends at `row` are as large as the offsets of the piece.
    before = layout.buffers(fmt, (row, columns), torch.float32)
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
        expected, buffer = getattr(quantized, name), before[name]
        # A value per tensor is compared once, with the first piece.
        if expected is None or buffer is None or (expected.dim() == 1 and row):
            continue
        is_transposed = fmt.columnwise is Columnwise.TRANSPOSE and name.startswith("columnwise")
        axis = 1 if is_transposed else 0
        start = buffer.shape[axis] if row else 0
        yield name, expected, (0, start) if is_transposed else (start, 0)
        if name == "rowwise_data" and fmt.columnwise is Columnwise.SHARED:
            # A host may keep the codes twice.
            yield "columnwise_data", expected, (start, 0)


class _Comparison:
    """A live buffer that is compared part by part.

    Attributes:
        wrong: the number of bytes that differ so far.
        compared: the number of bytes compared so far.
    """

    def __init__(self, live: Tensor) -> None:
        self._live = live.detach().view(1, -1) if live.dim() < 2 else live.detach()
        self.wrong = 0
        self.compared = 0
        # (byte offset, live byte, expected byte) of the first difference, if `wrong` is not 0.
        self._first = (0, 0, 0)

    def of_rank_0(self, group: Group) -> Tensor:
        """Return rank 0's values of the buffer."""
        values = self._live.clone()
        group.broadcast(values, "a buffer to verify")
        return values

    def compare(self, expected: Tensor, origin: tuple[int, int]) -> None:
        """Compare the part that starts at (row, column) `origin` with its expected values."""
        expected = expected.view(1, -1) if expected.dim() < 2 else expected
        (row, column), (height, width) = origin, expected.shape
        live_bytes = _bytes(self._live[row : row + height, column : column + width])
        expected_bytes = _bytes(expected)
        self.compared += expected_bytes.numel()
        differs = live_bytes != expected_bytes
        wrong = int(differs.sum())
        if not wrong:
            return
        # argmax is the first index of the largest value. It does not take bool.
        index = int(differs.view(-1).byte().argmax())
        # From the index in the part to the byte offset in the buffer.
        part_row, part_byte = divmod(index, expected_bytes.shape[1])
        size = expected.element_size()
        offset = ((row + part_row) * self._live.shape[1] + column) * size + part_byte
        first = offset, int(live_bytes.view(-1)[index]), int(expected_bytes.view(-1)[index])
        # Parts of a transposed buffer do not come in the order of their bytes.
        self._first = min(first, self._first) if self.wrong else first
        self.wrong += wrong

    def difference(self, name: str, fmt: str, buffer: str) -> Difference:
        """Return the difference on this rank. `_verify` sets the rank."""
        total = self._live.numel() * self._live.element_size()
        return Difference(name, fmt, 0, buffer, self.wrong, total, *self._first)


def _bytes(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.uint8)
