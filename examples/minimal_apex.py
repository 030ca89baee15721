"""zerocast under NVIDIA's Apex: an MLP with NVFP4 weights learns to multiply two numbers, with
DistributedFusedAdam.

    torchrun --nproc-per-node 2 examples/minimal_apex.py

It needs GPUs, and Apex with its extensions (integrations/apex/README.md); only the lines with
zerocast differ from plain Apex. Masters and moments are sharded; ranks gather NVFP4 bytes.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerocast
from zerocast.integrations.apex import DistributedFusedAdam


def train(device: str, steps: int = 200) -> list[float]:
    """Train on the ranks of the default group; returns the losses of this rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
    ).to(device)
    zerocast.quantize_(model, zerocast.Recipe({"2.weight": "nvfp4", "4.weight": "nvfp4"}, default="identity"))
    optimizer = DistributedFusedAdam(model.named_parameters(), lr=1e-3, bucket_cap_mb=0.25)

    torch.manual_seed(1 + rank)  # other data on every rank; gradients are averaged
    losses = []
    for step in range(1, steps + 1):
        x = torch.randn(256, 2, device=device)
        loss = F.mse_loss(model(x), x.prod(dim=1, keepdim=True))
        loss.backward()  # Apex reduce-scatters gradients as they appear
        optimizer.clip_grad_norm(1.0)
        # Apex's Adam on the shard, one all-reduce of amaxes, cast, all-gather of bytes
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 40 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    zerocast.verify(optimizer).raise_for_differences()
    return losses


def main() -> None:
    """Train on one GPU per rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    train("cuda")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
