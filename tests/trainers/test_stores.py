"""Lightning with checkpoints at URLs: it resumes from a store, also from what it saves when an exception ends a run."""

from pathlib import Path

import pytest

from tests.trainers.test_runs import PACKAGE, launched

CASES = [("lightning", 1), ("lightning", 2), ("fabric", 1), ("fabric", 2)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("trainer", "world"), CASES)
def test_stores(trainer: str, world: int, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE[trainer], reason=f"{PACKAGE[trainer]} is not installed: make hosts readers")
    (tmp_path / "store").mkdir()
    for of_rank in launched(["tests.trainers.stores", trainer, str(tmp_path / "store")], tmp_path / "found", world):
        assert of_rank and all(is_so for _, is_so in of_rank), of_rank
