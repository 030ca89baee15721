"""Muon's update of the matrices that this rank owns, by torch's own optimizer.

A `torch.optim.Muon` steps each matrix, over an FP32 master and FP32 momentum. So momentum, the
orthogonalization by Newton-Schulz (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)
and the adjustment of the learning rate come from the installed version of torch. The function
behind that class would cost less CPU time, but it is private, and its arguments have changed
before. Two things are added: the clip factor, and a step with a gradient that is not finite is
undone on the device, since the CPU does not know of it.

During a backward pass all gradients are reduced into equal shards, so that norms, clips and other
operations on gradients work with a single layout (`bucket.Layout`). A step then collects the
gradients of matrices at their owners (`GradientExchange`), in several rounds. A round has the next
matrices of every rank, up to `limit` elements, or one matrix that is larger. So a rank needs memory
for its shard and for one round, and not for a second shard. Every rank knows both layouts, and from
them the lengths of all messages. Padding is not sent. With one rank nothing is sent, and gradients
are read from the shard.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.backends.reference.adam import dequantize_rows, quantize_rows
from zerocast.distributed.bucket import Bucket, Layout
from zerocast.distributed.group import Group
from zerocast.distributed.owned_matrices import Matrix, owned_matrices, rounds
from zerocast.formats.layout import Span
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gradient_shard import GradientShard


@dataclass(frozen=True)
class _Round:
    """The messages of this rank in one round.

    Attributes:
        sent: the elements of its flat shard that it sends, in the order of the receivers.
        received_lengths: the number of elements that arrive from each rank.
        sent_lengths: the number of elements for each rank.
        matrices: for each of its matrices, the parts of the gradient in the received elements. With
            one rank, which receives nothing, they are parts of the shard.
    """

    sent: list[Span]
    received_lengths: list[int]
    sent_lengths: list[int]
    matrices: list[list[Span]]


class GradientExchange:
    """The exchange of one optimizer.

    Args:
        limit: the number of elements that a rank receives in a round, unless a single matrix has
            more.
    """

    def __init__(self, layout: Layout, group: Group, limit: int) -> None:
        self._group = group
        self._slots = {slot.name: (bucket, slot) for bucket in layout.gradients for slot in bucket.slots}
        self._rounds = [self._round(by_rank) for by_rank in rounds(layout, group.size, limit)]
        self._most_received = max((sum(round_.received_lengths) for round_ in self._rounds), default=0)

    def deliver(self, shard: Tensor, take: Callable[[Tensor], None]) -> None:
        """Call `take` with the full gradient of each of this rank's matrices, f32 and
        one-dimensional, in their order. `shard` is this rank's flat part of all gradients.
        Collective.

        A gradient is only valid until `take` returns.
        """
        received = shard if self._group.size == 1 else shard.new_empty(self._most_received)
        for number, round_ in enumerate(self._rounds, 1):
            if self._group.size > 1:
                self._exchange(number, round_, shard, received)
            for spans in round_.matrices:
                take(_joined(received, spans))

    def _exchange(self, number: int, round_: _Round, shard: Tensor, received: Tensor) -> None:
        """Send each owner its parts of this round, and receive the parts of this rank's
        matrices.
        """
        what = f"gradients for the owners of matrices, round {number} of {len(self._rounds)}"
        out = received[: sum(round_.received_lengths)]
        lengths = (round_.received_lengths, round_.sent_lengths)
        self._group.all_to_all(out, _joined(shard, round_.sent), what=what, lengths=lengths)

    def _round(self, by_rank: Sequence[Sequence[Matrix]]) -> _Round:
        own_rank = self._group.rank
        ranks = self._group.size
        sent: list[Span] = []
        sent_lengths = [0] * ranks
        for receiver, matrices in enumerate(by_rank):
            for matrix in matrices:
                part = self._part(matrix, own_rank)
                sent_lengths[receiver] += part.numel
                _append(sent, part)
        own_matrices: list[list[Span]] = [[] for _ in by_rank[own_rank]]
        received_lengths = [0] * ranks
        start = 0
        for sender in range(ranks):
            for spans, matrix in zip(own_matrices, by_rank[own_rank], strict=True):
                part = self._part(matrix, sender)
                received_lengths[sender] += part.numel
                _append(spans, part if ranks == 1 else Span(start, start + part.numel))
                start += part.numel
        return _Round(sent, received_lengths, sent_lengths, own_matrices)

    def _part(self, matrix: Matrix, rank: int) -> Span:
        """Return the part of a matrix's gradient that a rank has, in that rank's flat shard."""
        bucket, slot = self._slots[matrix.slot.name]
        span, start = bucket.owned(slot, rank)
        common = span.intersect(matrix.span)
        start += common.start - span.start
        return Span(start, start + common.numel)


def _append(spans: list[Span], span: Span) -> None:
    """Append a span. If it begins where the last one ends, extend that one."""
    if not span.numel:
        return
    if spans and spans[-1].stop == span.start:
        span = Span(spans.pop().start, span.stop)
    spans.append(span)


def _joined(flat: Tensor, spans: Sequence[Span]) -> Tensor:
    """Concatenate parts of a flat tensor; a single part is not copied."""
    parts = [flat[span.start : span.stop] for span in spans] or [flat[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


ARGUMENTS = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
STATE = "momentum_buffer"


@dataclass(frozen=True)
class SteppedMatrix:
    """One matrix, or one of a stack.

    Attributes:
        param_group: the number of its parameter group.
        master: its f32 `[m, n]` master, a view of the flat masters.
        muon: steps the master.
        momentum: a view of its momentum, f32 `[m, n]` or i8 codes.
        scales: a view of the scales of codes, f32 `[m, groups of a row]`; None with FP32 momentum.
    """

    param_group: int
    master: nn.Parameter
    muon: torch.optim.Muon
    momentum: Tensor
    scales: Tensor | None

    @staticmethod
    def from_views(param_group: int, master: Tensor, momentum: Tensor, scales: Tensor | None) -> "SteppedMatrix":
        """Return a matrix with these views of flat tensors."""
        parameter = nn.Parameter(master)
        return SteppedMatrix(param_group, parameter, torch.optim.Muon([parameter]), momentum, scales)

    def read_momentum(self) -> Tensor:
        """Return the momentum, f32 `[m, n]`: the view itself, or a copy if it is kept as codes."""
        return self.momentum if self.scales is None else dequantize_rows(self.momentum, self.scales)

    def keep_momentum(self, momentum: Tensor) -> None:
        """Store the result of `read_momentum`, which a step has changed."""
        if self.scales is not None:
            quantize_rows(momentum, self.momentum, self.scales)

    def step(self, gradient: Tensor, momentum: Tensor, group: Mapping[str, Any]) -> None:
        """Step master and momentum with an f32 `[m, n]` gradient and the hyperparameters of a
        parameter group.
        """
        self.muon.param_groups[0].update({name: group[name] for name in ARGUMENTS}, lr=float(group["lr"]))
        self.muon.state[self.master][STATE] = momentum
        self.master.grad = gradient
        # The undecorated function, so that hooks of all optimizers see only the step of the caller,
        # which has disabled gradients.
        inspect.unwrap(torch.optim.Muon.step)(self.muon)
        self.master.grad = None
        self.muon.state.clear()


class MuonStep:
    """Steps all matrices of this rank, one at a time, with the hyperparameters that their groups
    have at the time of the step.

    Args:
        limit: the number of gradient elements that a rank is sent at a time.
    """

    def __init__(
        self,
        layout: Layout,
        masters: FlatMasters,
        param_groups: Sequence[Mapping[str, Any]],
        group: Group,
        limit: int,
    ) -> None:
        self._param_groups = param_groups
        self._exchange = GradientExchange(layout, group, limit)
        self._matrices: list[SteppedMatrix] = []
        for bucket in layout.buckets:
            if bucket.storage.single_owner:
                self._matrices += _matrices(bucket, masters, group)

    def __call__(self, gradients: Tensor, clip: Tensor, skip: Tensor) -> None:
        """Step with this rank's flat f32 shard of the `gradients` times `clip`, f32[1]. Nothing
        changes if `skip`, bool[1], is True. Collective, also for ranks without a matrix.

        The CPU waits for a learning rate that is a tensor on a device, as in torch. While a matrix
        is stepped, memory is needed for three FP32 tensors of its size, for a fourth if momentum is
        kept in 8 bits, and for Newton-Schulz in bf16; with several ranks also for the gradients
        that were sent together.
        """
        matrices = iter(self._matrices)
        self._exchange.deliver(gradients, lambda gradient: self._step(next(matrices), gradient, clip, skip))
        assert next(matrices, None) is None

    def join_collectives(self, gradients: GradientShard) -> None:
        """Send this rank's shard of the gradients to the ranks that step, and step nothing."""
        self._exchange.deliver(gradients.flat, lambda gradient: None)

    def _step(self, matrix: SteppedMatrix, gradient: Tensor, clip: Tensor, skip: Tensor) -> None:
        master = matrix.master.detach()
        momentum = matrix.read_momentum()
        master_before = master.clone()
        momentum_before = momentum.clone()
        matrix.step(gradient.view(master.shape) * clip, momentum, self._param_groups[matrix.param_group])
        torch.where(skip, master_before, master, out=master)
        torch.where(skip, momentum_before, momentum, out=momentum)
        # The codes of a skipped step do not change: quantizing decoded codes gives the same codes.
        matrix.keep_momentum(momentum)


def _matrices(bucket: Bucket, masters: FlatMasters, group: Group) -> Iterator[SteppedMatrix]:
    """Yield the matrices of a bucket that this rank owns, in the order of `owned_matrices`."""
    for owner, (slot, elements) in owned_matrices(bucket):
        if owner != group.rank:
            continue
        span, views = masters.owned(bucket, slot)
        assert span.numel == slot.numel, slot.name
        rows, columns = slot.shape[-2:]
        master = views["master"][elements.start : elements.stop].view(rows, columns)
        momentum = views[STATE][elements.start : elements.stop].view(rows, columns)
        scales = masters.momentum_scales(slot)
        if scales is not None:
            first = elements.start // columns
            scales = scales[first : first + rows]
        yield SteppedMatrix.from_views(slot.param_group, master, momentum, scales)
