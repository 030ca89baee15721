"""A rank that is killed in a step of Apex leaves the other with an error in time, over NCCL too; see tests/nccl."""

from pathlib import Path

import pytest

from tests.apex.dying import PLACES, train
from tests.apex.host_on_cpu import needs_apex
from tests.devices import gpus
from tests.nccl.killing import check_both_finish, check_error_in_time

BACKENDS = [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=gpus(2))]

pytestmark = needs_apex


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_the_other_rank_gets_an_error_in_time(tmp_path: Path, place: str, backend: str) -> None:
    check_error_in_time(train, backend, tmp_path, place)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_death_both_finish(tmp_path: Path, backend: str) -> None:
    check_both_finish(train, backend, tmp_path)
