"""The whole of a weight that tensor parallelism slices."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerocast.distributed.agreement import together
from zerocast.distributed.group import Group
from zerocast.formats.layout import buffer_rows
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Use


def joined(weight: QuantizedWeight, sliced: DTensor, group: Group) -> QuantizedWeight:
    """Return the unsharded weight, in separate memory, from the slices of all ranks. Collective.

    `sliced` has the shape of the whole and says how it is sliced; `weight` is this rank's slice.
    Raises RuntimeError, on all ranks of `group`, for a slice that was never cast, is partial, or
    older than its masters.
    """

    def allocated() -> tuple[QuantizedWeight, list[tuple[Tensor, Tensor]]]:
        """Allocate the unsharded weight. Return it with pairs (own slice, unsharded entries) of its
        buffers.
        """
        weight.check(Use.SEND)
        whole = QuantizedWeight.empty(sliced.shape, weight.format, weight.dtype, weight.device)
        pairs = []
        for name in ("rowwise_data", "rowwise_scale_inv", "amax"):
            own, target = weight.state.buffers[name], whole.state.buffers[name]
            if own is None or target is None:
                continue
            if target.dim() == 1:
                # Slices share the amax and the scale of a tensor.
                target.copy_(own)
            else:
                pairs.append((unpadded(weight, name, own).contiguous(), unpadded(whole, name, target)))
        return whole, pairs

    whole, pairs = together(group, allocated, "joins slices of a weight")
    for own, entries in pairs:
        slices = DTensor.from_local(
            own,
            sliced.device_mesh,
            sliced.placements,
            run_check=False,
            shape=entries.shape,
            stride=torch.empty(entries.shape, device="meta").stride(),
        )
        entries.copy_(slices.full_tensor())
    whole.state.was_cast = True
    return whole


def unpadded(weight: QuantizedWeight, name: str, buffer: Tensor) -> Tensor:
    """Return the codes or scales of a weight without padding, a view `[*leading, rows, columns]`. A
    block has as many rows and columns of them in a slice as in the whole.
    """
    count, (rows, columns) = weight.stored_matrices
    block = weight.format.block
    has_scales = name != "rowwise_data" and block is not None
    used_columns = -(-columns // block[1]) if has_scales else buffer.shape[1]
    used_rows = buffer_rows(weight.format, name, rows)
    entries = buffer.view(count, -1, buffer.shape[1])[:, :used_rows, :used_columns]
    leading = tuple(weight.shape[:-2])
    if not leading:
        return entries[0]
    return torch.unflatten(entries, 0, leading) if count > 1 else torch.unflatten(entries[0], 0, (*leading, -1))
