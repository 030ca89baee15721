"""zerocast.verify beyond what tests/hosts asks of every host: rows of a weight, memory, the text of a report."""

import gc
from collections.abc import Callable

import pytest
import torch

import zerocast
from tests.observed import same_on_all
from tests.optim.memory import allocations
from tests.optim.probe import Spec
from tests.optim.runs import Run, Trainer
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, ZeroConfig, verify
from zerocast.verification import verify as verification


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
    """What each step says if rank 1 flips a bit after every cast but the first, as a faulty kernel would."""
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
    assert str(report) == "15 weights, 37,990 bytes on each of 1 ranks: all equal the cast of the masters"
    report.raise_for_differences()
