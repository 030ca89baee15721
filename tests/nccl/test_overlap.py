"""All-gathers beside the forward pass change no bit, however late they are."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import casts
from tests.devices import gpus
from tests.optim.flight import late_gathers
from tests.optim.lm import LM, batch
from tests.optim.runs import ADAM, DETERMINISTIC, weight_bytes
from zerocast import ZeroAdamW, ZeroConfig

pytestmark = gpus(2)
EAGER = {"rank order": DETERMINISTIC, "library order": ZeroConfig(bucket_size=4096)}


def trained(config: ZeroConfig, late: bool, steps: int = 10) -> dict[str, Any]:
    """The losses of this rank and every byte of its weights after the last step; each all-gather late if so said."""
    model = LM().to("cuda")
    with late_gathers() if late else contextlib.nullcontext([1]) as delayed:
        optimizer = ZeroAdamW(model.named_parameters(), **ADAM, config=config)
        losses = []
        for step in range(steps):
            loss = model(batch(step, dist.get_rank()).cuda())
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found = {f"{n} {b}": values for n, held in weight_bytes(model).items() for b, values in held.items()}
    assert delayed, "no all-gather was asynchronous"
    return found | {"losses": casts.raw(torch.stack(losses))}


@pytest.mark.parametrize("config", EAGER.values(), ids=EAGER)
def test_losses_and_bytes_are_those_without(gpu_ranks, config):
    overlap = dataclasses.replace(config, overlap_all_gather=True)
    eager = gpu_ranks(2)(trained, config, False, timeout=120.0)
    for late in (False, True):
        found = gpu_ranks(2)(trained, overlap, late, timeout=120.0)
        for rank in range(2):
            casts.assert_same_bytes(found[rank], eager[rank], f"rank {rank}, late {late}")
    losses = [held["losses"].view(np.float32) for held in eager]
    assert not np.array_equal(*losses), "each rank has text of its own"
    assert all(held[-1] < held[0] for held in losses), "and it learns"
