"""Where a pool's ranks run the host: on the CPU over gloo, by stand-ins, or each on a GPU over NCCL, as it is."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron.host_memory import host_memory
from tests.megatron.host_on_cpu import WHY_NOT, host_on_cpu
from tests.megatron.te import te_in_the_host

if not WHY_NOT:
    import megatron.core.optimizer as factories
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import distrib_optimizer, optimizer_config


def _adam(
    chunk: int,
    noop: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    correction: int,
    weight_decay: float,
) -> None:
    """Adam with decoupled weight decay, in FP32, of lists of gradients, parameters and both moments."""
    assert decoupled and correction
    for grad, param, first, second in zip(*tensors, strict=True):
        g, m, v = grad.float(), first.float(), second.float()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + weight_decay * param
        param.sub_(lr * update)
        first.copy_(m)
        second.copy_(v)


@contextlib.contextmanager
def fused_adam_in_the_host() -> Iterator[None]:
    """Within `te_in_the_host()`, megatron-core has found TransformerEngine's FusedAdam: its Python, whose one kernel is `_adam`.

    With TransformerEngine installed on a GPU, Megatron takes it by itself.
    """
    compiled = importlib.import_module("transformer_engine_torch")
    found = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    names: list[tuple[Any, dict[str, Any]]] = [
        (compiled, {"multi_tensor_adam": _adam}),
        (factories, {"Adam": found, "USING_PYTORCH_OPTIMIZER": False, "is_te_min_version": lambda *_: True}),
        (distrib_optimizer, {"Adam": found, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
        (optimizer_config, {"is_te_min_version": lambda *_: True}),
    ]
    with contextlib.ExitStack() as stack:
        for module, values in names:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def device() -> torch.device:
    """Return the device of the tensors of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


@contextlib.contextmanager
def host(te: str = "", fused_adam: bool = False, offload: bool = False) -> Iterator[None]:
    """Inside, the real DistributedDataParallel and DistributedOptimizer run here, for `te` layers beside TransformerEngine, whose
    FusedAdam is taken then or by the host's own choice; for `offload` with host memory apart.
    """
    if dist.get_backend() == "gloo":
        with contextlib.ExitStack() as stack:
            if te or fused_adam:
                stack.enter_context(te_in_the_host())
            stack.enter_context(host_on_cpu())
            if fused_adam:
                stack.enter_context(fused_adam_in_the_host())
            if offload:
                stack.enter_context(host_memory())
            yield
        return
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield


@contextlib.contextmanager
def groups(seconds: float | None = None, **sizes: int) -> Iterator[None]:
    """The host's process groups made anew, of other sizes or with a timeout; afterwards there are none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    timeout = {} if seconds is None else {"distributed_timeout_minutes": seconds / 60}
    parallel_state.initialize_model_parallel(**sizes, **timeout)
    if dist.get_backend() == "nccl":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
