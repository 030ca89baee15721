"""The example trains; what its launch line adds is a process group and a GPU a rank."""

from tests.apex.host_on_cpu import WHY_NOT, device, host_on_cpu, needs_apex
from tests.workers import Ranks

if not WHY_NOT:
    from examples import minimal_apex

pytestmark = needs_apex


def losses() -> list[float]:
    with host_on_cpu():
        return minimal_apex.train(device(), steps=100)


def test_the_loss_falls(host_ranks: Ranks) -> None:
    for found in host_ranks(2)(losses):
        assert sum(found[-10:]) < 0.2 * sum(found[:10])
