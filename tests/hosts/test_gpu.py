"""The shared tests of hosts over NCCL, a GPU a rank."""

from pathlib import Path

import pytest

from tests.devices import gpus
from tests.hosts import test_checkpoints, test_faults, test_verify
from tests.hosts.under_test import variants
from tests.workers import Ranks

SECONDS = 250.0


@pytest.mark.parametrize(("host", "variant"), variants())
class TestOnGpus:
    """Of each host's first variant."""

    pytestmark = gpus(2)

    def test_some_operators(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        arguments = host, variant, "step", test_faults.SAMPLES, str(tmp_path)
        ((outcomes, wrong),) = gpu_ranks(1)(test_faults.at_operators, *arguments, timeout=SECONDS)
        assert wrong == []
        assert outcomes["load"], outcomes

    def test_every_buffer(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        for tried, wrong in gpu_ranks(2)(test_verify.every_buffer, host, variant, str(tmp_path), 1, timeout=SECONDS):
            assert wrong == []
            assert tried >= 12

    def test_resume_is_exact(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        found = gpu_ranks(2)(test_checkpoints.interrupted, host, variant, str(tmp_path), timeout=SECONDS)
        assert found == [[], []]
