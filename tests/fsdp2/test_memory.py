"""The memory of a rank: masters and the bytes that it sends, and gathered bytes only while they are
in use. It does not grow with time.
"""

import gc
import itertools
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests import observed
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, FEW, Net, slow
from tests.observed import live_bytes
from tests.workers import on_ranks
from zerocast import verify
from zerocast.fsdp2 import TrainingState
from zerocast.fsdp2.prepare import managers_of

WIDTH, HIDDEN = 512, 1024
# what is sent beside codes, and bf16 amaxes
EXTRA = {"nvfp4": 0.004 + 2 / 256, "fp8_current": 0.0, "mxfp8": 0.0625 + 2 * 2 / 32, DELAYED: 0.0}
CODES = {"nvfp4": 0.5, "fp8_current": 1.0, "mxfp8": 2.0, DELAYED: 1.0}  # where they are kept


def settled_bytes() -> int:
    """Return the live bytes once gloo's threads have freed what they sent, and models of earlier cases are gone."""
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
    """A rank holds the planned bytes an element of its shard beyond plain FSDP2, which holds plain masters alone."""
    sizes = []
    for prepare in (False, True):
        before = settled_bytes()
        model = models.sharded(Net((fmt,) * 2, WIDTH, HIDDEN), prepare=prepare, keep_codes=keep_codes)
        models.forward(model, 0, WIDTH)
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
    """The peak is one block, however many there are: what FSDP2 prefetches on a CPU is in the collective's
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


# -- thousands of steps leave nothing behind, nor does a model that is dropped


WARM = 800  # steps, in which the process takes a megabyte more, and none after them
STEPS = 2000
MAX_BYTES = 2**9  # a step


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
@on_ranks(2, timeout=1800.0)
def test_steps(optimizer: str) -> None:
    model: Any = models.sharded(Net((*FEW, "mxfp8"), 64, 96))
    made = models.OPTIMIZERS[optimizer](model)
    models.train(model, made, range(WARM), 64)
    before, memory = observed.process_counts(), observed.resident_bytes()
    models.train(model, made, range(WARM, WARM + STEPS), 64)
    assert observed.grown(before, observed.process_counts()) == {}
    assert (observed.resident_bytes() - memory) / STEPS < MAX_BYTES


def trained_and_dropped(optimizer: str, assigns: bool, **options: Any) -> list[weakref.ref[Any]]:
    """Train a model and drop it, with its state, a verification and perhaps a load that replaces masters.
    Return its weights.
    """
    model: Any = models.sharded(Net(("nvfp4", DELAYED), 64, 96), **options)
    made = models.OPTIMIZERS[optimizer](model)
    models.train(model, made, range(2), 64)
    TrainingState(model, made).state_dict()
    verify(model)
    if assigns:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    models.forward(model)
    return [weakref.ref(weight) for manager in managers_of(model) for weight in manager.weights]


@pytest.mark.parametrize("optimizer", ["FusedAdamW", models.slow("AdamW"), models.slow("8-bit moments")])
@on_ranks(2)
def test_a_model_that_is_dropped_is_freed(optimizer: str) -> None:
    """Masters, moments and gathered bytes are freed with the model. No cycle goes through what the garbage
    collector does not look into.
    """
    found = []
    for assigns, reshards in ((False, True), (False, False), (True, True)):
        counts = []
        for _ in range(3):
            weights = trained_and_dropped(optimizer, assigns, reshard_after_forward=reshards)
            # After one collection: the memory of the next model waits for no second one.
            counts.append(observed.process_counts())
            assert len(weights) == 4
            assert [weight().name for weight in weights if weight()] == []
        grown = [observed.grown(*pair) for pair in itertools.pairwise(counts)]
        found.append(sorted(grown[0].keys() & grown[1].keys()))
    assert found == [[]] * 3
