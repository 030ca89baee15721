"""A rank holds and writes its part of a checkpoint alone."""

from typing import Any

import pytest
from torch import Tensor

from tests.optim.probe import FP32, Spec
from tests.optim.runs import Run, Trainer, boxes
from zerocast import ZeroConfig, optim

LARGE = (
    Spec("a", (128, 256), "nvfp4"),
    Spec("b", (256, 128), "fp8_delayed:amax_history_len=4"),
    Spec("c", (128, 128), dtype=FP32),
)


def held_by_the_state(path: str) -> tuple[int, int]:
    """(bytes that the state dictionary of a rank refers to, bytes of the largest tensor in a rank's files)."""
    trainer = Trainer(Run(LARGE, config=ZeroConfig(bucket_size=2**14)))
    state = trainer.optimizer.state_dict()
    parts = [part for _, value in _leaves(state) for _, part in boxes(value)]
    optim.save(trainer.optimizer, path)
    return sum(part.nbytes for part in parts), max(part.nbytes for part in parts)


def _leaves(state: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    if not isinstance(state, dict):
        return [(prefix[1:], state)]
    return [leaf for key, value in state.items() for leaf in _leaves(value, f"{prefix}.{key}")]


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_holds_the_full_state(ranks, tmp_path, world):
    numel = 2 * 128 * 256 + 128 * 128
    for total, largest in ranks(world)(held_by_the_state, str(tmp_path / "checkpoint")):
        assert total <= 12 * numel / world + 1024
        assert largest <= 4 * 128 * 256 / 2
    files = [file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.distcp")]
    assert len(files) == world
    assert max(files) <= 1.3 * sum(files) / world
