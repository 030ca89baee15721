"""The GPT of the examples with its MLPs in slices of tensor parallelism under FSDP2: every
format, with and without replicas.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from examples.gpt_pretrain.model import GPT, GPTConfig
from tests.fsdp2 import models
from tests.fsdp2.models import FORMATS
from tests.workers import on_ranks

# slices of 128 and 256 rows or columns: whole blocks of any format, also where the other extent is half of one
WIDE, NARROW = 128, 64
CONTEXT = 32
MIXED = {"blocks.0.*.weight": "fp8_current", "blocks.1.attn.*": "nvfp4", "blocks.1.mlp.*": "mxfp8"}


def text(step: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Return bytes of a noisy periodic text, of two bits a byte at least, and the bytes that follow."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, 61, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    noise = torch.randint(0, 4, (rows, CONTEXT + 1), generator=generator)
    tokens = ((start + stride * torch.arange(CONTEXT + 1)) % 61 * 4 + noise).to(models.place())
    return tokens[:, :-1], tokens[:, 1:]


def sliced(formats: dict[str, str], replicas: int, frozen: str, width: int) -> Any:
    """Return the GPT on replicas of shards of two slices. Parameters that begin with `frozen` do not learn."""
    mesh = models.mesh((replicas, dist.get_world_size() // replicas // 2, 2), ("replicate", "shard", "tp"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=width, context=CONTEXT)).to(models.place())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    zerocast.fsdp2.prepare(model, zerocast.Recipe(formats), weight_mesh=mesh["shard", "tp"]._flatten("weight"))
    data = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=data, mp_policy=models.BF16)
    fully_shard(model, mesh=data, mp_policy=models.BF16)
    register_fsdp_forward_method(model, "loss")
    return model


def check(formats: dict[str, str], replicas: int, fused: bool, frozen: str, width: int = WIDE) -> None:
    """Verify the slices at each of three steps, and check that exactly the parameters that learn have moved."""
    model = sliced(formats, replicas, frozen, width)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours, of_torch = zerocast.fsdp2.FusedAdamW, functools.partial(torch.optim.AdamW, fused=True)
    optimizer = (ours if fused else of_torch)(learning, lr=1e-2)
    before = {name: p.full_tensor().clone() for name, (p, _) in models.masters(model).items()}
    for step in range(3):
        report = zerocast.verify(model)
        assert report.ok, report
        assert report.weights == len(before)
        model.loss(*text(step, dist.get_rank() // 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zerocast.verify(model).raise_for_differences()
    moved = {name for name, (p, _) in models.masters(model).items() if not torch.equal(p.full_tensor(), before[name])}
    assert moved == {name for name in before if not frozen or not name.startswith(frozen)}


@pytest.mark.slow
@pytest.mark.shows(
    host="FSDP2",
    parallel=lambda replicas: "data, tensor" if replicas == 1 else "tensor, replicas",
    formats=lambda fmt: [fmt],
    ranks=4,
)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
@on_ranks(4)
def test_every_format(fmt: str, replicas: int) -> None:
    check({"blocks.*.weight": fmt}, replicas, True, "")


@pytest.mark.parametrize("replicas", [models.slow(1), 2])
@on_ranks(4)
def test_beside_a_frozen_block(replicas: int) -> None:
    check(MIXED, replicas, False, "blocks.0.")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
@on_ranks(4)
def test_blocks_that_reach_over_what_is_not_sliced(fmt: str) -> None:
    """A block of 128 rows reaches over the 64 that there are, whose columns are in slices."""
    check({"blocks.*.weight": fmt}, 1, True, "", NARROW)
