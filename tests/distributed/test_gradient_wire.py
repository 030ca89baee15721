"""A reduce-scatter in rank order: what it takes, and that one rank rounds like many where it sends FP8 messages."""

import numpy as np
import pytest
import torch

from tests.formats import model
from tests.workers import Ranks
from zerocast.distributed.gradient_wire import GRAD_WIRES, RankOrderReduceScatter
from zerocast.distributed.group import ONE_PROCESS, Group


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float64, torch.complex64])
def test_other_gradients_are_refused(dtype: torch.dtype) -> None:
    for wire in (None, *GRAD_WIRES):
        with pytest.raises(TypeError, match=f"gradients of {dtype} cannot be added in FP32"):
            RankOrderReduceScatter(torch.zeros(256, dtype=dtype), ONE_PROCESS, wire, None)


def reduced(numel: int, wire: str | None) -> tuple[bytes, bytes]:
    """Return the mean that this rank receives of parts of `numel` elements, and the model's mean."""
    group = Group.of(None)
    random = torch.Generator().manual_seed(7)
    given = [torch.randn(group.size * numel, generator=random) * 10.0**rank for rank in range(group.size)]
    mean, begun = torch.ones(numel), RankOrderReduceScatter(given[group.rank], group, wire, None)
    begun.land(mean, group.size, adds=True)
    parts = [rank.view(group.size, numel)[group.rank].numpy() for rank in given]
    if wire:
        expected = model.gradient_mean([model.gradient_message(part) for part in parts], numel, group.size)
    else:
        expected = np.add.accumulate(parts)[-1] / np.float32(group.size)
    assert begun.is_complete()
    return mean.numpy().tobytes(), (np.float32(1.0) + expected).tobytes()


@pytest.mark.parametrize("wire", [None, *GRAD_WIRES])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_any_length(ranks: Ranks, world: int, wire: str | None) -> None:
    for numel in (0, 1, 100, 128, 1000):
        for mean, expected in ranks(world)(reduced, numel, wire):
            assert mean == expected
