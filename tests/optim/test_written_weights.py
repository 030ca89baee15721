"""Masters are the truth: what somebody else writes into the weights of a ZeroAdamW raises at the next step, and is never undone."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zerocast
from tests.observed import allocations, debug_mode, same_on_all
from tests.optim.faults import slow_gathers
from tests.optim.probe import BF16, FP16, MIXED, Probe, Spec
from tests.optim.runs import DETERMINISTIC, OVERLAP, Compared, Run, Trainer, build
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, ZeroAdamW, ZeroConfig, verify
from zerocast.verification import verify as verification

SPECS = tuple(
    spec for spec in MIXED if spec.name in ("embedding", "norm", "delayed", "block", "mx", "nv", "unused", "bias")
)
_other: list[Probe] = []


def other() -> Probe:
    """Return a new model of other values at each call."""
    if not _other:
        probe = Probe(SPECS)
        optimizer = ZeroAdamW(probe.named_parameters(), lr=0.5)
        probe.backward(3, 0)
        optimizer.step()
        _other.append(copy.deepcopy(probe))
    return copy.deepcopy(_other[0])


def quantized(probe: nn.Module) -> QuantizedWeight:
    weight = probe.get_parameter("nv")
    assert isinstance(weight, QuantizedWeight)
    return weight


def load(probe: Probe) -> None:
    probe.load_state_dict(other().state_dict())


def swap_all(probe: Probe) -> None:
    twin = other()
    for a, b in zip(probe.parameters(), twin.parameters(), strict=True):
        a.data, b.data = b.data, a.data


def in_place(write: Callable[[torch.Tensor], object], name: str = "norm") -> Callable[[Probe], None]:
    def call(probe: Probe) -> None:
        with torch.no_grad():
            write(probe.get_parameter(name))

    return call


def same_values(probe: Probe) -> None:
    probe.load_state_dict(copy.deepcopy(probe.state_dict()))


WRITES: dict[str, Callable[[Probe], None]] = {
    "load_state_dict": load,
    "load_state_dict of what is there": same_values,
    "an EMA swap": swap_all,
    "data =": in_place(lambda p: setattr(p, "data", p.data + 1)),
    "copy_ of a quantized weight": lambda probe: quantized(probe).data.copy_(quantized(other())),
    "rebind, then a write": lambda probe: (
        quantized(probe).rebind(torch.zeros_like(quantized(probe).rowwise_data)),
        quantized(probe).rowwise_data.zero_(),
    ),
    "fill_": in_place(lambda p: p.fill_(1), "bias"),
    "set_": in_place(lambda p: p.set_(torch.ones_like(p))),  # type: ignore[call-overload]
}


def wrote(name: str, config: ZeroConfig) -> list[str]:
    """Write; the next step says so with nothing changed, whatever it says, until a state is loaded."""
    trainer = Compared(Run(SPECS, config=config))
    with slow_gathers():
        trainer.step(0)
        trainer.follow(0)
        kept = trainer.optimizer.state_dict()
        kept["zerocast"] = copy.deepcopy(kept["zerocast"])  # views, which a load of the model writes
        WRITES[name](trainer.probe)
        trainer.backward(1)
        said = []
        for _ in range(2):
            with pytest.raises(RuntimeError, match="since the last step") as caught:
                trainer.optimizer.step()
            said.append(str(caught.value))
        trainer.optimizer.zero_grad()
        trainer.optimizer.load_state_dict(kept)
        trainer.check("loaded")
        trainer.go_on(1)
    return said


@pytest.mark.notices(
    "model.load_state_dict, a write by hand, or an average left swapped in by `.data =`, after the optimizer was built",
    where="ZeroAdamW",
    answer="the next step raises",
)
@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_noticed(name):
    first, again = wrote(name, DETERMINISTIC)
    assert first == again
    assert "load_masters" in first


@pytest.mark.notices(
    "model.load_state_dict, a write by hand, or an average left swapped in by `.data =`, after the optimizer was built",
    where="ZeroAdamW",
    answer="the next step raises",
)
@on_ranks(2)
def test_every_rank_says_so():
    same_on_all(wrote("an EMA swap", OVERLAP))


@pytest.mark.notices(
    "parameters written through .data or numpy after the optimizer was built",
    where="ZeroAdamW",
    answer="in debug mode the next step raises",
)
@debug_mode()
def test_debug_mode_sees_what_no_counter_does():
    for write in (
        lambda probe: probe.norm.data.fill_(1),
        lambda probe: probe.embedding.detach().view(torch.int16).numpy().fill(3),
        lambda probe: quantized(probe).rowwise_data.numpy().fill(3),
    ):
        trainer = Trainer(Run(SPECS))
        trainer.step(0)
        write(trainer.probe)
        trainer.backward(1)
        with pytest.raises(RuntimeError, match="since the last step"):
            trainer.optimizer.step()


def test_bf16_values_are_compared_bit_by_bit():
    """NaN is a value like others, so that a move is no write."""
    parameter = nn.Parameter(torch.full((4,), float("nan"), dtype=BF16))
    optimizer = ZeroAdamW([("p", parameter)])
    parameter.data = parameter.data.clone()
    optimizer.step()


def test_a_converted_parameter_is_refused():
    trainer = Trainer(Run())
    parameter = trainer.probe.get_parameter("norm")
    parameter.data = parameter.data.to(FP16)
    with pytest.raises(RuntimeError, match="float16"):
        trainer.optimizer.step()


@pytest.mark.parametrize("kind", ["ZeroAdamW", "ZeroMuon"])
@pytest.mark.notices("a frozen bias or norm is unfrozen in mid-run", where="ZeroAdamW", answer="the next step raises")
def test_a_plain_parameter_that_is_unfrozen(kind):
    """An unfrozen parameter raises, with or without a gradient, until it is frozen or another optimizer trains it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
    zerocast.quantize_(model, {"0.weight": "nvfp4"})
    model[1].requires_grad_(False)
    optimizer = build(kind, model.named_parameters())
    for with_gradient in (False, True):
        model[1].bias.requires_grad_(True)
        if with_gradient:
            model(torch.randn(4, 64).bfloat16()).sum().backward()
        with pytest.raises(RuntimeError, match=r"1 parameters were frozen when this Zero\w+ was built .* 1\.bias:"):
            optimizer.step()
        model[1].bias.requires_grad_(False)
        model(torch.randn(4, 64).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model[1].bias.requires_grad_(True)
    other = build(kind, [("bias", model[1].bias)])
    before = model[1].bias.detach().clone()
    model(torch.randn(4, 64).bfloat16()).sum().backward()
    optimizer.step()
    other.step()
    assert not torch.equal(before, model[1].bias)


# -- zerocast.verify beyond what tests/hosts asks of every host: rows of a weight, memory, the text of a report


def test_memory_does_not_grow_with_the_weight(monkeypatch):
    monkeypatch.setattr(verification, "PIECE", 512 * 64)
    peaks = []
    for rows in (1024, 8192):
        trainer = Trainer(Run((Spec("w", (rows, 64), "nvfp4"),)))
        peaks.append(allocations(lambda optimizer=trainer.optimizer: verify(optimizer)).peak)
    assert peaks[1] < 1.2 * peaks[0], peaks


@pytest.mark.parametrize("every", [1, 2])
@on_ranks(2)
def test_verify_every(every: int) -> None:
    """`verify_every` finds a bit that rank 1 flips after every cast but the first, as a faulty kernel would."""
    trainer = Trainer(Run(config=ZeroConfig(bucket_size=4096, verify_every=every)))
    gathers, weight = trainer.optimizer._weights.gather, trainer.probe.get_parameter("nv")
    start: Callable[[CastPlan], None] = gathers.start

    def broken(plan: CastPlan) -> None:
        start(plan)
        codes = weight.rowwise_data.data  # whose writes move no counter
        codes.view(-1)[5] ^= 1

    said = []
    for step in range(4):
        trainer.backward(step)
        if step == 1 and trainer.rank == 1:
            gathers.start = broken  # type: ignore[method-assign]
        said.append(error_of(trainer.optimizer.step))
        trainer.optimizer.zero_grad()
    assert [bool(text) for text in same_on_all(said)] == [False, True, every == 1, True]
    assert "nv (nvfp4) on rank 1: rowwise_data differs in 1 of 2,688 bytes, first at 5:" in said[1]


def test_a_model_with_masters_here_and_elsewhere():
    trainer = Trainer(Run())
    lonely = torch.nn.Linear(32, 32, bias=False)
    zerocast.quantize_(lonely, zerocast.Recipe({"*": "nvfp4"}))
    report = verify(torch.nn.ModuleDict({"ours": trainer.probe, "other": lonely}))
    assert report.ok
    assert report.without_masters == ("other.weight",)
    with pytest.raises(ValueError, match="have no known owner of masters"):
        verify(lonely)
    with pytest.raises(TypeError, match="a model or an optimizer that owns masters, got SGD"):
        verify(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


def test_a_discarded_optimizer_is_not_asked():
    trainer = Trainer(Run())
    probe = trainer.probe
    del trainer
    gc.collect()
    with pytest.raises(ValueError, match="no known owner"):
        verify(probe)


def test_the_report_reads_well():
    trainer = Trainer(Run())
    report = verify(trainer.optimizer)
    assert str(report) == "9 weights, 15,438 bytes on each of 1 ranks: all equal the cast of the masters"
    report.raise_for_differences()
