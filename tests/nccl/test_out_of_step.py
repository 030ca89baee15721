"""On GPUs ranks that are out of step hear of it one step later, all of them, and no host waits for it in between."""

import pytest

from tests.devices import gpus
from tests.distributed.test_same_call import MISTAKES, check, out_of_step
from tests.workers import Ranks

pytestmark = gpus(2)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_out_of_step(gpu_ranks: Ranks, mistake: str) -> None:
    check(gpu_ranks(2)(out_of_step, mistake, True), mistake)
