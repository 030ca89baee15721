"""Host and CastDriver without a training host: what every host relies on."""

from unittest import mock

import pytest
import torch

import zerocast
from zerocast import QuantizedWeight
from zerocast.cast.host import CastDriver, Host, raising_together
from zerocast.distributed.group import ONE_PROCESS


class Trained:
    """Masters of two weights on one process, and the driver of their casts."""

    def __init__(self) -> None:
        self.weights = [QuantizedWeight.empty((32, 64), fmt) for fmt in ("fp8_delayed", "fp8_block")]
        masters = [torch.randn(32, 64) for _ in self.weights]
        host = Host(owner="a host", group=ONE_PROCESS, weights=self.weights, masters=masters, starts=[0, 0])
        self.driver = CastDriver(host)
        self.driver.refresh()


def test_a_refresh_repeats_and_a_step_moves_delayed_scaling_on() -> None:
    trained = Trained()
    history = trained.weights[0].amax_history
    assert history is not None
    before = history.clone()
    trained.driver.refresh()
    assert torch.equal(history, before)
    trained.driver.after_step()
    assert not torch.equal(history, before)


def test_a_gather_that_fails_leaves_weights_partial_until_the_next_refresh() -> None:
    trained = Trained()
    fails = mock.patch.object(trained.driver.gather, "start", side_effect=torch.OutOfMemoryError("injected"))
    with fails, pytest.raises(torch.OutOfMemoryError):
        trained.driver.refresh()
    with pytest.raises(RuntimeError, match="a cast failed partway"):
        trained.weights[1].dequantize()
    trained.driver.refresh()
    assert not trained.driver.plan.validity.partial
    trained.weights[1].dequantize()


def test_an_exception_between_two_casts_is_told_by_the_second() -> None:
    """Nobody waits for the first, which was made, or for one without peers."""
    made, alone, second, third = [mock.Mock() for _ in range(4)]
    for driver in (made, alone, second, third):
        driver.plan.validity.casts, driver.plan.has_peers = 0, driver is not alone
    error = ValueError("injected")

    def step() -> None:
        with raising_together([made, alone, second, third]):
            made.plan.validity.casts += 1
            raise error

    with pytest.raises(ValueError, match="injected"):
        step()
    assert [driver.refuse.mock_calls for driver in (made, alone, second, third)] == [[], [], [mock.call(error)], []]


@pytest.mark.notices(
    "`switch` of weights in buffers of a host", where=("Megatron", "Apex", "TransformerEngine"), answer="raises"
)
def test_formats_of_a_host_cannot_be_switched() -> None:
    trained = Trained()
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(trained.weights[0])
    for what in (trained.driver, module):
        with pytest.raises(
            RuntimeError, match="are in buffers that the framework laid out for their current format: save a checkpoint"
        ):
            zerocast.switch(what, zerocast.Recipe({}, default="nvfp4"))
    assert str(trained.weights[0].format) == "fp8_delayed"
