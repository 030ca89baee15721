"""Trainers with checkpoints at URLs: Lightning resumes from a store, also from what it saves when an exception ends a run, and
others say that they need local folders.
"""

from pathlib import Path

import pytest

from tests.trainers.test_runs import launched, trainer

__all__ = ["trainer"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_stores(trainer: str, world: int, tmp_path: Path) -> None:
    if trainer == "accelerate" or (trainer == "transformers" and world == 2):
        pytest.skip("refused by transformers' case, on one rank")
    (tmp_path / "store").mkdir()
    for of_rank in launched(["tests.trainers.stores", trainer, str(tmp_path / "store")], tmp_path / "found", world):
        assert of_rank and all(is_so for _, is_so in of_rank), of_rank
