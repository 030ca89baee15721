"""zerocast under FSDP2: an MLP with NVFP4 weights learns to multiply two numbers, with AdamW of
torch.

    torchrun --nproc-per-node 2 examples/minimal_fsdp2.py

Only the lines with zerocast differ from plain FSDP2. Parameters stay FP32, sharded; ranks gather
NVFP4 bytes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import zerocast


def main() -> None:
    """Train on all processes that torchrun started."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    torch.manual_seed(0)  # the same initial weights on every rank
    model = nn.Sequential(
        nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
    )
    zerocast.fsdp2.prepare(model, zerocast.Recipe({"2.weight": "nvfp4", "4.weight": "nvfp4"}, default="identity"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index in (2, 4):
        fully_shard(model[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank; gradients are averaged
    for step in range(1, 201):
        x = torch.randn(256, 2)
        loss = F.mse_loss(model(x).float(), x.prod(dim=1, keepdim=True))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # the next forward pass casts the masters first: one all-reduce of amaxes
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 40 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")

    layer = model[2]
    assert isinstance(layer, FSDPModule)
    layer.unshard()
    weight = layer.weight
    assert isinstance(weight, zerocast.QuantizedWeight)
    if dist.get_rank() == 0:
        print(
            f"2.weight: {tuple(weight.shape)} gathered as {weight.format}, {weight.rowwise_data.nbytes} bytes of codes"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
