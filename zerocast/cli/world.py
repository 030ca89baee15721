"""The ranks that torchrun started, for the commands that work with several of them."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def joined() -> Iterator[torch.device]:
    """The device of this rank, inside a default process group: NCCL where every rank of the host has a GPU, else gloo.

    Started without torchrun there is no process group.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cuda = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield device
        return
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()
