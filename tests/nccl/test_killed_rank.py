"""A rank that is killed in the middle of a step leaves the other with an error, not a hang.

With gloo that is an exception. With NCCL the host runs ahead of the GPU and waits there; the watchdog of the process group ends the
process, some seconds after the group's timeout. Both are errors to whatever started the process: an exit status that is not zero.
"""

from pathlib import Path

import pytest

from tests.devices import gpus
from tests.nccl.dying import PLACES, train
from tests.nccl.killing import check_both_finish, check_error_in_time

BACKENDS = ["gloo", pytest.param("nccl", marks=gpus(2))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_the_other_rank_gets_an_error_in_time(tmp_path: Path, place: str, backend: str) -> None:
    check_error_in_time(train, backend, tmp_path, place)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_death_both_finish(tmp_path: Path, backend: str) -> None:
    check_both_finish(train, backend, tmp_path)
