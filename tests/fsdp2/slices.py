"""Gathered slices of tensor parallelism over two ranks, against the slices of the unsharded cast."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests import casts
from tests.fsdp2 import models
from zerocast.backends import reference


def complaints(model: nn.Module, when: str) -> list[str]:
    """Return the gathered slices that differ from their part of the unsharded cast."""
    found, local = [], dist.get_rank() % 2
    tensors = models.masters(model)
    whole = {name: (p.full_tensor().cpu(), owner, p.placements[-1]) for name, (p, owner) in tensors.items()}
    for name, weight in models.unsharded(model):
        master, owner, placement = whole[name.replace("_orig_mod.", "")]
        scale = torch.tensor([models.cast_scale(owner)])
        expected = reference.quantize(owner.format, master, torch.bfloat16, scale)
        codes = casts.raw(expected.rowwise_data).reshape(*master.shape[:-1], -1)
        codes = np.array_split(codes, 2, placement.dim)[local]
        if not (casts.raw(weight.rowwise_data.clone()).reshape(codes.shape) == codes).all():
            found.append(f"{when}: codes of {name}")
        if weight.amax is not None and not torch.equal(weight.amax.cpu(), expected.amax):
            found.append(f"{when}: amax of {name} is {weight.amax} and {expected.amax} unsharded")
        value = casts.cast_whole(str(owner.format), master, scale=float(scale)).dequantize()
        if not torch.equal(weight.dequantize().cpu(), value.chunk(2, placement.dim)[local]):
            found.append(f"{when}: values of {name}")
    return found
