"""accelerate's real `Accelerator.prepare` with `fsdp_version: 2` on two GPUs: the cases of `tests/trainers/test_fsdp2.py`, in which
nothing of accelerate is replaced here. The model comes from a CPU.
"""

from pathlib import Path

import pytest

from tests.devices import gpus
from tests.workers import Ranks

pytest.importorskip("accelerate", reason="accelerate is not installed: make readers")

from tests.trainers import test_fsdp2

pytestmark = gpus(2)


@pytest.mark.parametrize("fused", [False, True])
def test_trains_saves_and_loads(gpu_ranks: Ranks, tmp_path: Path, fused: bool) -> None:
    test_fsdp2.check(gpu_ranks(2)(test_fsdp2.compared, str(tmp_path / "state"), fused, timeout=120.0))
