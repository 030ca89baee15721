"""Where a pool's ranks run the host: on the CPU over gloo, by stand-ins, or each on a GPU over NCCL, as it is."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tests.megatron.host_on_cpu import WHY_NOT, host_on_cpu
from tests.megatron.te import te_in_the_host

if not WHY_NOT:
    from megatron.core import parallel_state, tensor_parallel


def device() -> torch.device:
    """Where tensors of this rank lie."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


@contextlib.contextmanager
def host(te: str = "") -> Iterator[None]:
    """Inside, the real DistributedDataParallel and DistributedOptimizer run here, for `te` layers beside TransformerEngine."""
    if dist.get_backend() == "gloo":
        with te_in_the_host() if te else contextlib.nullcontext(), host_on_cpu():
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
