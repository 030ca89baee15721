"""What a rank holds: masters and the bytes that it sends, what was gathered only while it is in
use, and no more with time.
"""

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, FEW, Net, slow
from tests.optim.memory import live_bytes
from tests.workers import on_ranks

WIDTH, HIDDEN = 512, 1024
# what is sent beside codes, and bf16 amaxes
EXTRA = {"nvfp4": 0.004 + 2 / 256, "fp8_current": 0.0, "mxfp8": 0.0625 + 2 * 2 / 32, DELAYED: 0.0}
CODES = {"nvfp4": 0.5, "fp8_current": 1.0, "mxfp8": 2.0, DELAYED: 1.0}  # where they are kept


def settled_bytes() -> int:
    """Live bytes once gloo's threads have let go of what they sent, and models of earlier cases are gone."""
    dist.barrier()
    time.sleep(0.2)
    while gc.collect():  # what one collection frees may hold the last reference to a tensor's cycle
        pass
    return live_bytes()


@pytest.mark.parametrize(
    ("fmt", "keep_codes"),
    [("nvfp4", False), *(slow(fmt, keep) for fmt in EXTRA for keep in (False, True) if keep or fmt != "nvfp4")],
)
@on_ranks(2)
def test_what_a_rank_holds(fmt: str, keep_codes: bool) -> None:
    """Bytes an element of a rank's shard beyond plain FSDP2 between steps, and with plain masters alone."""
    sizes = []
    for prepare in (False, True):
        before = settled_bytes()
        model = models.sharded(Net((fmt,) * 2, WIDTH, HIDDEN), prepare=prepare, keep_codes=keep_codes)
        with torch.no_grad():
            model(models.batch(0, WIDTH))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        weights = [weight for _, weight in models.masters(model).values()]
        # where rows of scales come from, 4 bytes a row of the weights of one layer, however many there are
        fills = [fill for weight in weights for fill in weight.group.metadata.row_fills]
        indices = {id(fill.index): fill.index.nbytes for fill in fills}
        assert sum(indices.values()) <= 2 * 4 * (WIDTH + HIDDEN)
        sizes.append(settled_bytes() - before - sum(indices.values()))
        elements = sum(p.numel() for p in models.held(model) if p.dim() == 2) / models.mesh().size()
        del model, module, weights, fills
    assert (sizes[1] - sizes[0]) / elements == pytest.approx(EXTRA[fmt] + CODES[fmt] * keep_codes, abs=0.004)
    assert sizes[0] / elements == pytest.approx(4.0, abs=0.05)


@on_ranks(2)
def test_peak_of_a_backward_pass() -> None:
    """One block, however many there are: what FSDP2 prefetches on a CPU is in the collective's
    buffer until it is needed.
    """
    blocks = 5
    model: Any = models.sharded(Net(("nvfp4",) * blocks, WIDTH, HIDDEN))
    owners = [owner for _, owner in models.masters(model).values()]
    levels: list[int] = []

    def look(_: Any) -> None:
        gathered = (owner.unsharded.state.buffers for owner in owners if owner.unsharded is not None)
        storages = {b.untyped_storage() for buffers in gathered for b in buffers.values() if b is not None}
        levels.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))

    def at_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(look)

    for block in model.blocks:
        block[1].register_forward_hook(at_gradient)
    model(models.batch(0, WIDTH)).float().square().mean().backward()
    assert len(levels) == blocks
    assert max(levels) / (2 * WIDTH * HIDDEN) == pytest.approx(0.504 + 1 / 16, rel=0.02)


@on_ranks(2)
def test_nothing_grows() -> None:
    model: Any = models.sharded(Net(FEW, 64, 96))
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = []
    for until in (range(3), range(3, 10)):
        models.train(model, optimizer, until, 64)
        sizes.append(settled_bytes())
    early, late = sizes
    assert late == early
