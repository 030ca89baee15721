"""The shortest honest use of zerocast: an MLP with NVFP4 weights learns to multiply two numbers.

    python examples/minimal_zero.py
    torchrun --nproc-per-node 2 examples/minimal_zero.py

A rank keeps FP32 masters and moments of its shard only. After each step all ranks hold the same
NVFP4 bytes.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerocast


def main() -> None:
    """Train on one process, or on all that torchrun started."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)  # the same initial weights on every rank
    model = nn.Sequential(
        nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
    )

    # The matched weights become NVFP4. Their FP32 values are kept until the optimizer copies them.
    zerocast.quantize_(model, zerocast.Recipe({"2.weight": "nvfp4", "4.weight": "nvfp4"}, default="identity"))
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)  # other data on every rank; gradients are averaged
    for step in range(1, 201):
        x = torch.randn(256, 2)
        loss = F.mse_loss(model(x), x.prod(dim=1, keepdim=True))
        loss.backward()  # reduce-scatters gradients as they appear
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()  # Adam on the shard, one all-reduce of amaxes, cast, all-gather of bytes
        optimizer.zero_grad()
        if rank == 0 and step % 40 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")

    for name, weight in model.named_parameters():
        if rank == 0 and isinstance(weight, zerocast.QuantizedWeight):
            print(f"{name}: {tuple(weight.shape)} as {weight.format}, {weight.rowwise_data.nbytes} bytes of codes")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
