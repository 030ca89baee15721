"""The ranks of a run: started by torchrun, or one process with no process group at all."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of ranks, and the device."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str, timeout: float = 1800.0) -> "World":
        """Join the ranks that torchrun started, over NCCL for CUDA or gloo; without torchrun, use
        one process. A collective waits `timeout` seconds for a rank. Raises ValueError where CUDA
        is asked for and there are fewer GPUs than ranks.
        """
        rank, size, local_rank, local_size = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        has_gpus = torch.cuda.device_count() >= local_size
        if device == "cuda" and not has_gpus:
            raise ValueError(
                f"--device cuda needs a GPU for each of the {local_size} ranks of this machine, torch {torch.__version__} finds "
                f"{torch.cuda.device_count()}"
            )
        use_cuda = device != "cpu" and has_gpus
        place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
        if use_cuda:
            torch.cuda.set_device(place)
        if "RANK" in os.environ:
            dist.init_process_group(
                "nccl" if use_cuda else "gloo",
                timeout=timedelta(seconds=timeout),
                device_id=place if use_cuda else None,
            )
        return cls(rank, size, place)

    def share(self, slices: int) -> "World":
        """Number the groups of `slices` neighbouring ranks, which work on the same batches."""
        return World(self.rank // slices, self.size // slices, self.device)

    def sum(self, value: Tensor) -> Tensor:
        """Add `value` up over all ranks, in place, for every rank."""
        if dist.is_initialized():
            dist.all_reduce(value)
        return value

    def leave(self) -> None:
        """Destroy the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
