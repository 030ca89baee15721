"""Masters under Megatron's optimizer that become NaN or Inf on one rank: the next step raises on all ranks. Whether a gradient that
is not finite skips the step is up to Megatron's own settings; here it does not.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.megatron.attached import Attached
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.training import Case
from tests.workers import Ranks, error_of
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.optimizer_kinds import shares
from zerocast.integrations.megatron.primary import is_primary

pytestmark = needs_megatron
VALUES = (float("nan"), float("inf"), -float("inf"))


def poison(attached: Attached, what: str, value: float) -> None:
    """One element of the gradient, or of the master, of each quantized weight that this rank has a part of."""
    for one in distributed_optimizers(attached.run.optimizer):
        for share in shares(one):
            for parameter, master, start, _ in share.masters():
                if is_primary(parameter) and master is not None and master.numel():
                    place = parameter.main_grad.view(-1)[start:] if what == "gradient" else master.view(-1)
                    place[0] = value


def told(culprit: int) -> list[list[str]]:
    """What each rank is told by the first and the second step after the one that was poisoned."""
    case, found = Case(), []
    with case.host():
        attached = Attached(case)
        attached.run.step(0)
        whole = attached.saved()
        for what, value in itertools.product(("gradient", "master"), VALUES):
            attached.load(whole)
            attached.run.forward_and_backward(1)
            if dist.get_rank() == culprit:
                with torch.no_grad():
                    poison(attached, what, value)
            attached.run.optimizer.step()
            attached.run.forward_and_backward(2)
            found.append([f"{what} {value}", error_of(attached.run.optimizer.step)])
    return found


@pytest.mark.notices(
    "a master becomes NaN or Inf, by its gradient or by hand",
    where="Megatron",
    answer="raises on all ranks at the next step, names the weights",
)
def test_the_next_step_raises(ranks: Ranks) -> None:
    first, second = ranks(2)(told, 1, timeout=120.0)
    assert first == second
    for what, said in first:
        assert said.startswith("InvalidWeights: the masters of ") and "were NaN or Inf in the last cast" in said, what
