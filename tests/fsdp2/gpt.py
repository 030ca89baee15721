"""The GPT of the examples under FSDP2, trained by two optimizers."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

import zerocast
from examples.gpt_pretrain.model import GPT, GPTConfig
from tests.fsdp2 import models

SMALL = GPTConfig(n_layer=3, n_head=2, n_embd=64, context=32)
MIXED = {
    "blocks.0.attn.*": "fp8_current",
    "blocks.0.mlp.*": "nvfp4",
    "blocks.1.attn.*": "mxfp8",
    "blocks.1.mlp.*": models.DELAYED,
    "blocks.2.*.weight": "fp8_block",
}


def gpt(recipe: dict[str, str] | None, frozen: str = "", replicas: int = 1, **options: Any) -> Any:
    """The model, sharded by block; `frozen` begins the names of what does not learn."""
    mesh = models.mesh((replicas, dist.get_world_size() // replicas), ("replicate", "shard"))
    options = {"mesh": mesh if replicas > 1 else mesh["shard"], "mp_policy": models.BF16, **options}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = GPT(SMALL).to(models.place())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    if recipe:
        zerocast.fsdp2.prepare(model, zerocast.Recipe(recipe))
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "loss")
    return model


def text(step: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Bytes of a noisy periodic text, of two bits a byte at least, and the bytes that follow."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, 61, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    noise = torch.randint(0, 4, (rows, SMALL.context + 1), generator=generator)
    tokens = (start + stride * torch.arange(SMALL.context + 1)) % 61 * 4 + noise
    tokens = tokens.to(models.place())
    return tokens[:, :-1], tokens[:, 1:]


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in learning if name.startswith("blocks.") and p.dim() == 2]
    return [
        torch.optim.Muon(matrices),
        torch.optim.AdamW([p for _, p in learning if all(p is not q for q in matrices)]),
    ]


def step_all(model: Any, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """Steps of two accumulated batches, with clipping."""
    for step in steps:
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model.loss(*text(2 * step + part, dist.get_rank())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def trained(steps: int = 2, recompute: bool = False, **options: Any) -> None:
    """Steps of two optimizers beside a frozen block."""
    model = gpt(MIXED, frozen="blocks.2.", **options)
    if recompute:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    optimizers = two_optimizers(model)
    before = {name: p.full_tensor().clone() for name, (p, _) in models.masters(model).items()}
    models.check(model, "start")
    for step in range(steps):
        step_all(model, optimizers, range(step, step + 1))
        models.check(model, f"step {step}")
    moved = {name for name, (p, _) in models.masters(model).items() if not torch.equal(p.full_tensor(), before[name])}
    assert moved == {name for name in before if not name.startswith("blocks.2.")}
