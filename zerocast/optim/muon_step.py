"""Muon's update of the matrices that this rank owns, by torch's own optimizer.

A `torch.optim.Muon` steps each matrix, over an FP32 master and FP32 momentum. So momentum, the
orthogonalization by Newton-Schulz (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)
and the adjustment of the learning rate come from the installed version of torch. The function
behind that class would cost less CPU time, but it is private, and its arguments have changed
before. Two things are added: the clip factor, and a step with a gradient that is not finite is
undone on the device, since the CPU does not know of it.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.backends.reference.moments import dequantize_rows, quantize_rows
from zerocast.distributed.bucket import Bucket, Layout
from zerocast.distributed.group import Group
from zerocast.distributed.owned_matrices import owned_matrices
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gradient_exchange import GradientExchange
from zerocast.optim.gradient_shard import GradientShard

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
