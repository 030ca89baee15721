"""Changes that let torchtitan run on the CPU over gloo, in the pool of this suite. The integration needs none.

* It looks for an accelerator once, when it is imported, and finds the CPU.
* The CPU has no memory statistics, and no number.
* Gloo has no reduction that multiplies first, which FSDP2 takes for a divide factor: it sums and divides.
* Torch's context parallelism attends with the attention kernels of GPUs alone: `gathered_attention` stands for it.
* A mixture of experts asks for a GPU before it takes grouped products, which the CPU has too; counts tokens in a histogram of
  integers; and orders them with a Triton kernel that has a twin for the CPU.
* After the last step rank 0 sleeps for two seconds.
* A Trainer changes its process: the garbage collector, the environment, timeouts of process groups. All that is put back.
"""

import contextlib
import functools
import gc
import logging
import os
import time
import types
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch._utils
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tests.torchtitan.torchrun import without_datasets
from tests.workers import COLLECTIVE_SECONDS

# -- Attention over a sequence that context parallelism has cut: keys and values of all ranks are gathered, and the backward pass
# of the gather sums their gradients over the ranks. Torch's own (`torch.distributed.tensor.experimental`) sends them round by
# kernels that are there for GPUs alone.

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


WHY_NOT = ""


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """While the context is open, torchtitan can be imported, for the CPU."""
    with without_datasets(), mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"):
        yield


with importable():
    try:
        import torchtitan.train
        from torchtitan.components import metrics
        from torchtitan.models.deepseek_v3.infra import parallelize as deepseek
        from torchtitan.models.deepseek_v3.model import args as deepseek_args
        from torchtitan.models.llama3.infra import parallelize as llama
        from torchtitan.models.moe import utils as experts

        import zerocast.integrations.torchtitan  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError where it has another shape
        WHY_NOT = str(error)

needs_torchtitan = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def _divide(module: FSDPModule, factor: float) -> None:
    _set_gradient_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


def _histogram(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _histc(input.float(), *args, **kwargs).to(input.dtype)


_histc = torch.histc
_set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor


@contextlib.contextmanager
def process_on_cpu() -> Iterator[None]:
    """While the context is open, a Trainer of any torchtitan finds its environment on this rank of
    the default gloo group, and what it changes of the process is put back.
    """
    assert dist.get_backend() == "gloo"
    here = {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, here))
        stack.enter_context(mock.patch.object(torch.cpu, "current_device", return_value=0))
        stack.enter_context(mock.patch.object(FSDPModule, "set_gradient_divide_factor", _divide))
        stack.callback(logging.getLogger().setLevel, logging.getLogger().level)
        stack.callback(gc.enable)
        stack.callback(dist.distributed_c10d._set_pg_timeout, timedelta(seconds=COLLECTIVE_SECONDS), dist.group.WORLD)
        yield


@contextlib.contextmanager
def device_of(metrics: Any, trainer: Any) -> Iterator[None]:
    """While the context is open, torchtitan's modules find a device without memory statistics, and
    rank 0 sleeps no longer than the others.
    """
    nothing = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = mock.Mock(device_name="cpu", get_peak_stats=lambda: nothing)
    with (
        mock.patch.object(metrics, "build_device_memory_monitor", return_value=monitor),
        mock.patch.object(trainer, "time", mock.Mock(wraps=time, sleep=lambda seconds: None)),
        mock.patch.object(metrics.utils, "get_peak_flops", return_value=1.0),
    ):
        yield


@contextlib.contextmanager
def host_on_cpu() -> Iterator[None]:
    """While the context is open, the real Trainer of torchtitan 0.2 runs on this rank of the
    default gloo group.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_on_cpu())
        stack.enter_context(device_of(metrics, torchtitan.train))
        for model in (llama, deepseek):
            stack.enter_context(mock.patch.object(model, "apply_cp_to_attention_module", gathered_attention))
        stack.enter_context(mock.patch.object(deepseek_args, "has_cuda_capability", return_value=True))
        stack.enter_context(mock.patch.object(torch, "histc", _histogram))
        ordered = functools.partial(experts.generate_permute_indices, use_cpu=True)
        stack.enter_context(mock.patch.object(experts, "generate_permute_indices", ordered))
        yield
