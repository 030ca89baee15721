"""DelayedScaling around a cast: seeding, repeating, rolling back, saving; on flat buffers and on scattered ones."""

from unittest import mock

import pytest
import torch

from tests import casts
from zerocast import CastPlan, QuantizedWeight, Recipe, get_format, quantize_
from zerocast.backends import reference
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.distributed.group import ONE_PROCESS
from zerocast.quantize import cast_whole
from zerocast.weight.buffers import into_flat_buffer

FORMATS = (
    "fp8_delayed:amax_history_len=3",
    "fp8_delayed:amax_history_len=3",
    "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3,element=e5m2",
    "fp8_delayed:amax_history_len=2",
    "nvfp4",
)
NAMES = tuple("abcde")


class Held:
    """Weights of these formats with a plan, in flat buffers or each in storage of its own."""

    def __init__(self, flat: bool, backend: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [QuantizedWeight.empty((32, 48), fmt) for fmt in FORMATS]
        for name in ("scale", "amax_history") if flat else ():
            into_flat_buffer([weight for weight in self.weights if weight.scale is not None], name)
        self.masters = [torch.randn(32 * 48, generator=generator) * 3**i for i in range(len(FORMATS))]
        self.plan = CastPlan(self.weights, self.masters, [0] * len(FORMATS), ONE_PROCESS, backend=backend, names=NAMES)

    def step(self) -> None:
        for master in self.masters:
            master.mul_(1.5)
        self.plan.cast()

    def held(self) -> dict[str, dict[str, bytes]]:
        weights = {name: casts.bytes_of(weight) for name, weight in zip(NAMES, self.weights, strict=True)}
        held = {name: {key: value.tobytes() for key, value in found.items()} for name, found in weights.items()}
        for name, tensors in self.plan.delayed.state_dict().items():
            held[name]["cast_scale"] = tensors["cast_scale"].numpy().tobytes()
        return held


flat = pytest.mark.parametrize("flat", [True, False], ids=["flat", "scattered"])


@flat
def test_a_seed_is_what_two_casts_found(backend: str, flat: bool) -> None:
    """The first of two casts finds the amax that scales the second. Within one cast that takes one all-reduce."""
    twice, once = Held(flat, backend), Held(flat, backend)
    twice.plan.cast()
    twice.plan.cast()
    once.plan.delayed.forget()
    with mock.patch.object(once.plan.amaxes, "reduce", wraps=once.plan.amaxes.reduce) as reduced:
        once.plan.cast()
    assert reduced.call_count == 1
    assert not once.plan.delayed.unseeded
    assert once.held() == twice.held()
    twice.step()
    once.step()
    assert once.held() == twice.held()


@flat
def test_a_seed_leaves_the_other_weights_alone(flat: bool) -> None:
    both, one = Held(flat), Held(flat)
    for each in (both, one):
        each.step()
        each.step()
    one.plan.delayed.forget(["c"])
    both.plan.cast(repeat=True)
    one.plan.cast(repeat=True)
    found, wanted = one.held(), both.held()
    assert found.pop("c") != wanted.pop("c")
    assert found == wanted


@flat
def test_a_repeated_cast_changes_nothing(backend: str, flat: bool) -> None:
    here = Held(flat, backend)
    here.step()
    here.step()
    before = here.held()
    here.plan.cast(repeat=True)
    assert here.held() == before


def test_the_scale_of_a_host_is_read_and_never_written() -> None:
    ours = {"scale": torch.tensor([2.0]), "amax_history": torch.tensor([4.0, 0.0])}
    theirs = {"scale": torch.tensor([8.0]), "amax_history": None}
    delayed = DelayedScaling({"theirs": theirs, "ours": ours}, torch.device("cpu"))
    theirs["scale"].fill_(16.0)
    ours["scale"].fill_(32.0)
    with delayed.replay():
        assert (ours["scale"].item(), theirs["scale"].item()) == (2.0, 16.0)
    assert (ours["scale"].item(), theirs["scale"].item()) == (32.0, 16.0)
    delayed.advance(torch.tensor([True]))
    assert delayed.cast_scale("theirs") == 8.0
    delayed.advance(torch.tensor([False]))
    assert (delayed.cast_scale("theirs"), delayed.cast_scale("ours"), delayed.cast_scale("none")) == (16.0, 32.0, None)
    restore = delayed.saved()
    ours["scale"].fill_(1.0)
    theirs["scale"].fill_(64.0)
    restore()
    assert (ours["scale"].item(), theirs["scale"].item()) == (32.0, 64.0)
    assert list(delayed.state_dict()) == ["ours"]


@flat
def test_launches_do_not_grow_with_the_weights(flat: bool) -> None:
    """Weights in flat buffers take one launch. Others take one each."""
    weights = [QuantizedWeight.empty((16, 16), FORMATS[0]) for _ in range(40)]
    for name in ("scale", "amax_history") if flat else ():
        into_flat_buffer(weights, name)
    delayed = DelayedScaling({f"{i}": w.state.buffers for i, w in enumerate(weights)}, torch.device("cpu"))
    assert (len(delayed._scales), len(delayed._histories)) == ((1, 1) if flat else (40, 40))


def test_a_whole_value_is_scaled_by_the_amaxes_before_it() -> None:
    """Casting a whole value is a cast like any other: only a new weight takes the scale of its first value."""
    layer, value = torch.nn.Linear(64, 64, bias=False), torch.randn(64, 64)
    quantize_(layer, Recipe({"weight": "fp8_delayed"}))
    for factor in (1, 16):
        cast_whole(layer.weight, value * factor)
    expected = value.abs().max() / 448
    assert layer.weight.state.buffers["rowwise_scale_inv"].item() == pytest.approx(expected.item())


def test_a_host_may_keep_the_history(backend: str) -> None:
    """Without a history buffer the amax grows, exactly, until the host takes it; scale and what is beside the amax stay."""
    history = torch.tensor([[0.0, 3.0000002, -1.0]])  # no bf16 number: bf16 weights reduce in bf16 otherwise
    fmt = get_format("fp8_delayed")
    buffers = {
        "rowwise_data": torch.zeros(4, 4, dtype=torch.uint8),
        "rowwise_scale_inv": torch.zeros(1),
        "scale": torch.tensor([16.0]),
        "amax": history[0, 1:2],
    }
    weight = QuantizedWeight.of_buffers((4, 4), fmt, torch.bfloat16, buffers)
    rolls = QuantizedWeight.empty((4, 4), fmt)
    master, other = torch.full((16,), 2.0), torch.full((16,), 7.0)
    plan = CastPlan([weight, rolls], [master, other], [0, 0], ONE_PROCESS, backend=backend)
    plan.cast()
    assert history.tolist() == [[0.0, torch.tensor(3.0000002).item(), -1.0]]
    master.fill_(-5.0)
    plan.cast()
    assert history.tolist() == [[0.0, 5.0, -1.0]]
    assert (buffers["scale"].item(), buffers["rowwise_scale_inv"].item()) == (16.0, 1 / 16)
    expected = reference.quantize(fmt, master.view(4, 4), torch.bfloat16, torch.tensor([16.0]))
    assert torch.equal(buffers["rowwise_data"], expected.rowwise_data)
    assert rolls.scale is not None and rolls.scale.item() == 64.0  # one beside it keeps its own


@pytest.mark.parametrize("seed", range(20))
def test_a_later_plan_repeats_the_cast_of_the_live_codes(seed: int) -> None:
    """Its scale has moved on since, and its masters are the values of the codes."""
    weight = QuantizedWeight.empty((32, 32), "fp8_delayed")
    master = torch.randn(1024, generator=torch.Generator().manual_seed(seed))
    plan = CastPlan([weight], [master], [0])
    for factor in (1.0, 3.0, 0.7):
        plan.cast()
        master *= factor
    before = {name: buffer.clone() for name, buffer in weight.state.buffers.items() if buffer is not None}
    assert weight.scale is not None and before["rowwise_scale_inv"] * weight.scale != 1
    values = weight.dequantize().float().view(-1)
    CastPlan([weight], [values], [0]).cast(repeat=True)
    del before["amax"]
    assert all(torch.equal(weight.state.buffers[name], buffer) for name, buffer in before.items())
