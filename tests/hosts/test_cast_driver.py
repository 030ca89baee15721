"""Host, CastDriver and Patches without a training host: what every host relies on."""

import contextlib
from unittest import mock

import pytest
import torch

import zerocast
from tests import casts
from zerocast import CastPlan, QuantizedWeight
from zerocast.cast.host import CastDriver, Gather, Host, PlainShard, raising_together
from zerocast.distributed.group import ONE_PROCESS
from zerocast.integrations import Patch, Patches


class Trained(Gather):
    """Masters of two weights and a bias, on one process; a gather that can be told to fail."""

    def __init__(self) -> None:
        self.weights = [QuantizedWeight.empty((32, 64), fmt) for fmt in ("fp8_delayed", "fp8_block")]
        self.masters = [torch.randn(32 * 64) for _ in self.weights]
        self.bias, self.bias_master = torch.zeros(32, dtype=torch.bfloat16), torch.randn(32)
        self.calls: list[str] = []
        self.fails = False

    def prepare(self) -> None:
        self.calls.append("prepare")

    def complete(self) -> None:
        self.calls.append("complete")

    def start(self, plan: CastPlan) -> None:
        self.calls.append("gather")
        if self.fails:
            raise torch.OutOfMemoryError("injected")
        plan.post_all_gather()

    def attach(self) -> CastDriver:
        return CastDriver(
            Host(
                owner="a host",
                group=ONE_PROCESS,
                names=["first", "second"],
                weights=self.weights,
                masters=self.masters,
                starts=[0, 0],
                plain=[PlainShard("bias", self.bias, self.bias_master, 0, self.bias)],
                gather=self,
            )
        )


def test_a_step_casts_and_rounds_and_is_verified_by_name() -> None:
    host = Trained()
    attached = host.attach()
    attached.refresh()
    for master in (*host.masters, host.bias_master):
        master.mul_(2)
    assert [difference.name for difference in zerocast.verify(attached).differences]
    attached.after_step()
    assert torch.equal(host.bias, host.bias_master.bfloat16())
    (views,) = attached.master_views()
    assert [view.name for view in views.masters] == ["first", "second", "bias"]
    assert zerocast.verify(attached).ok
    steps = ["prepare", "gather"]
    assert host.calls == [*steps, "complete", *steps, "complete", "complete"]


def test_masters_of_any_shape_are_followed_to_other_memory() -> None:
    """Writes in a master's new memory are seen by debug mode, verified and cast. The old memory is of no
    interest any more.
    """
    host = Trained()
    host.masters = [master.view(32, 64) for master in host.masters]
    host.bias_master, host.bias = host.bias_master.view(2, 16), host.bias.view(2, 16)
    zerocast.set_debug(True)
    try:
        attached = host.attach()
        attached.refresh()
        for master in (*host.masters, host.bias_master):
            master.data = master.data.clone()
            master.mul_(2)
        with pytest.raises(RuntimeError, match="its masters have been written since its last cast"):
            host.weights[1].dequantize()
        assert len(zerocast.verify(attached).differences) > 3
        attached.after_step()
        whole = casts.cast_whole("fp8_block", host.masters[1])
        casts.assert_same_bytes(casts.bytes_of(host.weights[1]), casts.bytes_of(whole))
        assert torch.equal(host.bias, host.bias_master.bfloat16())
        assert zerocast.verify(attached).ok
    finally:
        zerocast.set_debug(False)


def test_a_refresh_repeats_and_a_step_moves_delayed_scaling_on() -> None:
    host = Trained()
    attached = host.attach()
    attached.refresh()
    history = host.weights[0].amax_history
    assert history is not None
    before = history.clone()
    attached.refresh()
    assert torch.equal(history, before)
    attached.after_step()
    assert not torch.equal(history, before)


def test_a_gather_that_fails_leaves_weights_partial_until_the_next_refresh() -> None:
    host = Trained()
    attached = host.attach()
    attached.refresh()
    host.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        attached.refresh()
    assert attached.plan.validity.partial
    with pytest.raises(RuntimeError, match="a cast failed partway"):
        host.weights[1].dequantize()
    host.fails = False
    attached.refresh()
    assert not attached.plan.validity.partial and zerocast.verify(attached).ok


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


def test_patches_give_back_what_was_there() -> None:
    class Kind:
        def method(self) -> str:
            return "theirs"

    one = Kind()
    vars(one)["held"] = "before"
    state = dict(vars(one))
    with contextlib.suppress(ZeroDivisionError), Patches() as patches:
        patches.remove(one, "held")
        patches.apply(
            Patch(one, "method", lambda inner=one.method, number=number: f"{number} {inner()}") for number in (1, 2)
        )
        patches.apply([Patch(Kind, "method", lambda self: "patched")])
        assert (one.method(), Kind().method()) == ("2 1 theirs", "patched") and not hasattr(one, "held")
        raise ZeroDivisionError
    assert vars(one) == state and Kind().method() == "theirs"


@pytest.mark.notices(
    "`switch` of weights in buffers of a host", where=("Megatron", "Apex", "TransformerEngine"), answer="raises"
)
def test_formats_of_a_host_cannot_be_switched() -> None:
    host = Trained()
    attached = host.attach()
    attached.refresh()
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(host.weights[0])
    for what in (attached, module):
        with pytest.raises(
            RuntimeError, match="are in buffers that the framework laid out for their current format: save a checkpoint"
        ):
            zerocast.switch(what, zerocast.Recipe({}, default="nvfp4"))
    assert str(host.weights[0].format) == "fp8_delayed"
