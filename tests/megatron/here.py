"""Where a pool's ranks run the host: on the CPU over gloo, by stand-ins, or each on a GPU over NCCL, as it is."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tests.megatron.fused_adam import fused_adam_in_the_host
from tests.megatron.host_memory import host_memory
from tests.megatron.host_on_cpu import WHY_NOT, host_on_cpu
from tests.megatron.te import te_in_the_host

if not WHY_NOT:
    from megatron.core import parallel_state, tensor_parallel


def device() -> torch.device:
    """Where tensors of this rank lie."""
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
