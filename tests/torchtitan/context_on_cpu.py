"""Attention over a sequence that context parallelism has cut, on the CPU: keys and values of all ranks are gathered.

Torch's own (`torch.distributed.tensor.experimental`) sends them round by kernels that are there for GPUs alone. Gradients are
summed over the ranks by the backward pass of the gather, as there.
"""

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh

SEQUENCE = 2  # the dimension of `[batch, heads, sequence, channels]`


def positions(length: int, ranks: int) -> list[Tensor]:
    """Return the positions of each rank's elements: the n-th part from both ends, as torchtitan's balancer deals them."""
    parts = torch.arange(length).chunk(2 * ranks)
    return [torch.cat([parts[rank], parts[2 * ranks - 1 - rank]]) for rank in range(ranks)]


def gathered_attention(modules: Sequence[nn.Module], mesh: DeviceMesh, attention_type: str) -> None:
    """Stand in for `torchtitan.distributed.context_parallel.apply_cp_to_attention_module` on a CPU."""
    assert attention_type == "sdpa", attention_type

    def forward(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        held = positions(q.shape[SEQUENCE] * mesh.size(), mesh.size())
        keys, values = (all_gather_tensor_autograd(x.contiguous(), SEQUENCE, mesh.get_group()) for x in (k, v))
        causal = held[mesh.get_local_rank()][:, None] >= torch.cat(held)[None, :]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=causal, **options)

    for module in modules:
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
