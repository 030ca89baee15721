"""verify: compares the live bytes of every weight with an unsharded cast of its gathered master.

The plan is under test, so no part of it is used. Every rank gathers a piece of a master, casts it
with the reference's `quantize`, and compares the result with the bytes that its products read. A
piece is 512 rows or a million elements, whichever is more, so memory does not grow with the weight;
a format with a tensor amax gathers its pieces twice.

Stale columnwise copies are skipped, since reading one raises. No master determines the scale of the
next delayed cast and the amax history; they are compared with those of rank 0, unless a host keeps
them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends.reference.codec import round_nominal
from zerocast.backends.reference.quantize import Quantized, quantize
from zerocast.backends.reference.scales import block_amax
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.formats import Columnwise, FormatSpec, layout
from zerocast.formats.layout import Span
from zerocast.formats.shared_amax import SharedAmax
from zerocast.verification.master_views import MasterView, MasterViews, owners_of
from zerocast.verification.report import Difference, VerifyReport

PIECE = 2**20  # elements
ROWS = 512  # multiples of it cut neither a block nor the padding of a scale buffer
UNDETERMINED = ("scale", "amax_history")


@torch.no_grad()
def verify(model_or_optimizer: Any, group: GroupLike = None, *, allow_nonfinite: bool = False) -> VerifyReport:
    """Compare the live bytes, scales, amaxes and columnwise copies of every weight with an
    unsharded cast of its master.

    Accepts an owner of masters (a ZeroAdamW, a CastPlan, the result of a host's `attach`), a model
    whose weights have such an owner, or a model or optimizer under `zerocast.fsdp2`. All ranks of
    its group call it, between steps. It waits for gathers in flight and for the device, and
    performs a cast or gather that the next forward pass would begin with; nothing else changes.
    `group` is the ranks that the report covers, by default those that share the masters. Each of
    them gets the same report, whose `raise_for_differences()` raises, also where a master has
    elements that are NaN or Inf, unless `allow_nonfinite`.

    Raises TypeError for any other argument, ValueError for a model without any known master and for
    ranks that hold different weights.
    """
    owners, names, without = owners_of(model_or_optimizer)
    if not owners and not isinstance(model_or_optimizer, torch.nn.Module):
        kind = type(model_or_optimizer).__name__
        raise TypeError(f"verify takes a model or an optimizer that owns masters, got {kind}")
    if not owners:
        raise ValueError(
            "nobody is known to own masters of this model's weights: pass the optimizer, or build it first"
        )
    all_views = (views for owner in owners for views in owner.master_views())
    reports = [_verify(views, views.group if group is None else Group.of(group), names) for views in all_views]
    return VerifyReport.of(reports, without, allow_nonfinite)


def _verify(views: MasterViews, ranks: Group, names: Mapping[int, str]) -> VerifyReport:
    named = [_named(view, index, names) for index, view in enumerate(views.masters)]
    validate_across_ranks(views.group, [_describe(view) for view in named], None, "verifies")
    shared = _shared_amaxes(named, views.group)
    compared = [_compare(view, views.group, shared.get(view.weight.state.shared_amax)) for view in named]
    found = [dataclasses.replace(d, rank=ranks.rank) for differences, *_ in compared for d in differences]
    by_rank = ranks.all_gather_object(found, "what ranks found as they verify")
    return VerifyReport(
        len(named),
        sum(nbytes for _, nbytes, _ in compared),
        ranks.size,
        tuple(difference for differences in by_rank for difference in differences),
        views.left_out,
        tuple((str(view.name), count) for view, (_, _, count) in zip(named, compared, strict=True) if count),
    )


def _named(view: MasterView, index: int, names: Mapping[int, str]) -> MasterView:
    if view.name is not None:
        return view
    return dataclasses.replace(view, name=names.get(id(view.weight.state), f"weight {index}"))


def _describe(view: MasterView) -> str:
    weight = view.weight
    return f"{view.name}: {weight.format} {tuple(weight.shape)} {weight.dtype}"


def _compare(view: MasterView, group: Group, shared: Tensor | None) -> tuple[list[Difference], int, int]:
    """(differences on this rank, bytes compared, elements of the master that are not finite); with
    the tensor amax that the weight shares, if it does.
    """
    weight = view.weight
    weight.wait()
    held = dict(weight.state.buffers)
    if not weight.state.columnwise_is_fresh():
        held["columnwise_data"] = held["columnwise_scale_inv"] = None
    if weight.state.external_scaling_state:  # the host updates amax and scale between casts
        held["amax"] = held["scale"] = None
    comparisons = {name: _Comparison(tensor) for name, tensor in held.items() if tensor is not None}
    for name in UNDETERMINED:
        if name in comparisons:
            comparisons[name].take(comparisons[name].of_rank_0(group), (0, 0))
    pieces, not_finite = _pieces(weight.matrix_shape), 0
    in_parts = len(pieces) > 1 or view.slices is not None
    amax = shared
    if amax is None and weight.format.has_tensor_amax and in_parts:
        amax = _tensor_amax(view, pieces, group)
    for piece in pieces:
        whole = _gather(view, piece, group).view(-1, weight.matrix_shape[1])
        not_finite += int((~whole.isfinite()).sum())
        quantized = quantize(weight.format, whole, weight.dtype, view.scale, amax)
        for name, expected, origin in _expected(
            weight.format, quantized, piece.start // whole.shape[1], whole.shape[1]
        ):
            if name in comparisons:
                comparisons[name].take(expected, origin)
    of = str(view.name), str(weight.format)
    differences = [comparison.difference(*of, name) for name, comparison in comparisons.items() if comparison.wrong]
    return differences, sum(comparison.compared for comparison in comparisons.values()), not_finite


def _pieces(matrix_shape: tuple[int, int]) -> list[Span]:
    rows, columns = matrix_shape
    step = max(1, PIECE // (ROWS * columns)) * ROWS
    return [Span(first * columns, min(first + step, rows) * columns) for first in range(0, rows, step)]


def _gather(view: MasterView, piece: Span, group: Group) -> Tensor:
    """Gather a piece of the master from all ranks, f32.

    The all-reduce sums bits as integers; ranks that own nothing of the piece add 0.
    """
    whole = torch.zeros(piece.numel, dtype=torch.float32, device=view.weight.device)
    common = view.span.intersect(piece)
    if view.master is not None and common.numel:
        part = view.master[common.start - view.span.start : common.stop - view.span.start]
        whole[common.start - piece.start : common.stop - piece.start] = part
    group.all_reduce_sum(whole.view(torch.int32), "a master to verify")
    return whole


def _shared_amaxes(views: Sequence[MasterView], group: Group) -> dict[SharedAmax | None, Tensor]:
    """The tensor amax of each group of weights that share one. Members that are gathered at another
    time enter with the amax of their live bytes.
    """
    found: dict[SharedAmax | None, Tensor] = {}
    members: dict[SharedAmax, int] = {}
    for view in views:
        shared = view.weight.state.shared_amax
        if shared is not None and view.weight.format.has_tensor_amax:
            amax = _tensor_amax(view, _pieces(view.weight.matrix_shape), group)
            found[shared] = torch.maximum(found.get(shared, amax), amax)
            members[shared] = members.get(shared, 0) + 1
    for view in views:
        shared = view.weight.state.shared_amax
        if (
            shared is not None
            and members.get(shared, len(shared.names)) < len(shared.names)
            and view.weight.amax is not None
        ):
            found[shared] = torch.maximum(found[shared], view.weight.amax)
    return found


def _tensor_amax(view: MasterView, pieces: Sequence[Span], group: Group) -> Tensor:
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
    """(name, expected part, its (row, column) in the buffer) for the rows from `row` on."""
    before = layout.buffers(fmt, (row, columns), torch.float32)
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
        expected, buffer = getattr(quantized, name), before[name]
        if expected is None or buffer is None or (expected.dim() == 1 and row):
            continue
        transposed = fmt.columnwise is Columnwise.TRANSPOSE and name.startswith("columnwise")
        axis = 1 if transposed else 0
        start = buffer.shape[axis] if row else 0
        yield name, expected, (0, start) if transposed else (start, 0)
        if name == "rowwise_data" and fmt.columnwise is Columnwise.SHARED:
            yield "columnwise_data", expected, (start, 0)  # where a host keeps a copy of the codes


class _Comparison:
    """A live buffer that is compared part by part."""

    def __init__(self, live: Tensor) -> None:
        self._live = live.detach().view(1, -1) if live.dim() < 2 else live.detach()
        self.wrong = self.compared = 0
        self._first = (0, 0, 0)  # offset, found, expected

    def of_rank_0(self, group: Group) -> Tensor:
        """The same buffer as rank 0 has it."""
        theirs = self._live.clone()
        group.broadcast(theirs, "a buffer to verify")
        return theirs

    def take(self, expected: Tensor, origin: tuple[int, int]) -> None:
        """Compare the part that starts at (row, column) `origin`."""
        expected = expected.view(1, -1) if expected.dim() < 2 else expected
        (row, column), (height, width) = origin, expected.shape
        a = _bytes(self._live[row : row + height, column : column + width])
        b = _bytes(expected)
        self.compared += b.numel()
        differs = a != b
        wrong = int(differs.sum())
        if not wrong:
            return
        place = int(differs.view(-1).byte().argmax())
        size = expected.element_size()
        offset = (row + place // b.shape[1]) * self._live.shape[1] * size + column * size + place % b.shape[1]
        first = offset, int(a.view(-1)[place]), int(b.view(-1)[place])
        self._first = min(first, self._first) if self.wrong else first
        self.wrong += wrong

    def difference(self, name: str, fmt: str, buffer: str) -> Difference:
        """The difference that was found on this rank."""
        total = self._live.numel() * self._live.element_size()
        return Difference(name, fmt, 0, buffer, self.wrong, total, *self._first)


def _bytes(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.uint8)
