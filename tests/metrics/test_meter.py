"""Meter: which steps it measures, what it times and weighs there, and that it leaves the others alone."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.observed import Traffic
from tests.optim.probe import FEW, MIXED, Probe, Spec
from tests.optim.runs import Run, Trainer
from tests.workers import Ranks, on_ranks
from zerocast import ZeroAdamW, ZeroConfig, metrics
from zerocast.backends.ops import STAGES
from zerocast.formats.layout import GradientMessage
from zerocast.metrics import Meter, Sample
from zerocast.metrics import meter as meters
from zerocast.metrics.meter import Clock


def train(trainer: Trainer, meter: Meter, steps: int) -> Iterator[Sample | None]:
    for step in range(steps):
        with meter.step() as measured:
            with measured.phase("backward"):
                trainer.backward(step)
            with measured.phase("norm"):
                trainer.optimizer.clip_grad_norm_(1.0)
            with measured.phase("step"):
                trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        yield measured.sample


def samples(every: int, steps: int, config: ZeroConfig) -> list[Sample | None]:
    trainer = Trainer(Run(config=config))
    return list(train(trainer, Meter(trainer.optimizer, every), steps))


def test_every_so_many_steps_are_measured(ranks: Ranks) -> None:
    for found in ranks(2)(samples, 3, 7, ZeroConfig()):
        assert [sample is not None for sample in found] == [False, False, True, False, False, True, False]
        for sample in filter(None, found):
            assert set(sample.weights) == {spec.name for spec in FEW if spec.fmt != "plain"}


@pytest.mark.parametrize("options", [{}, {"overlap_all_gather": True}, {"grad_wire": "fp8_1x128"}], ids=str)
@on_ranks(3)
def test_bytes_are_those_of_the_buffers_and_a_sample_costs_one_collective(options: dict[str, Any]) -> None:
    """A sample has the bytes that the layout of its buckets makes, and costs one collective beyond a step's own."""
    config = ZeroConfig(**options)
    run = Run((*MIXED, Spec("scales are gathered too", (256, 128), "mxfp8")), config=config)
    trainer = Trainer(run)
    optimizer, ranks = trainer.optimizer, dist.get_world_size()
    # In the second step ranks also compare what the optimizer does not train.
    meter, alone = Meter(optimizer, every=3), Trainer(run)
    list(train(trainer, meter, 2))
    list(train(alone, Meter(alone.optimizer), 2))
    with Traffic() as measured:
        (sample,) = filter(None, train(trainer, meter, 1))
    with Traffic() as plain:
        list(train(alone, Meter(alone.optimizer), 1))
    expected: Counter[str] = Counter()
    for buffer in optimizer._weights.buffers:
        expected["weight_gather"] += sum(flat.nbytes for flat in buffer.flats)
        bucket = buffer.bucket
        if config.grad_wire:
            expected["alltoall_base_"] += ranks * GradientMessage(bucket.shard_numel).nbytes
        else:
            expected["_reduce_scatter_base_"] += bucket.shard_numel * ranks * bucket.storage.grad_dtype.itemsize
    packed = optimizer._weights.driver.plan.amaxes._reduced
    expected["allreduce_"] += packed.nbytes + 8  # and the norm, f64
    assert sample.nbytes == dict(expected)
    assert [call for call in measured.log if call not in plain.log] == [("all-gather", 3 * 8 * 8 * len(sample.weights))]


def test_phases_hold_their_stages_and_add_up(ranks: Ranks) -> None:
    for found in ranks(2)(samples, 1, 3, ZeroConfig(keep_columnwise=True)):
        for sample in filter(None, found):
            times = sample.milliseconds
            assert min(times.values()) > 0
            phases = [times[name] for name in ("backward", "norm", "step", "rest")]
            assert times["total"] == pytest.approx(sum(phases), rel=1e-6)
            stages = {name: value for name, value in times.items() if name.startswith("step/")}
            wanted = ("adam", "all_reduce", "scales_and_cast", "all_gather", "columnwise")
            assert set(stages) == {f"step/{stage}" for stage in wanted}
            assert sum(stages.values()) < times["step"]
            assert {name for name in times if name.startswith("norm/")} == {"norm/all_reduce"}


def test_every_stage_of_a_cast_is_timed() -> None:
    of_products, of_gradients = {"dequantize", "upcast"}, {"quantize_gradient", "add_gradients"}
    timed = {name.removeprefix("zerocast::") for name in meters.STAGES if name.startswith("zerocast::")}
    assert timed == STAGES.keys() - of_products - of_gradients


def test_marks_divide_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.5, 3.5, 4.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    clock = Clock(torch.device("cpu"))
    for label in ("a", "b", "a", "end"):
        clock.mark(label)
    assert clock.milliseconds() == {"a": 1000.0, "b": 2000.0}


def test_a_step_that_raises_leaves_no_mode_behind() -> None:
    trainer = Trainer(Run())
    meter = Meter(trainer.optimizer, every=1)
    before = torch.utils._python_dispatch._get_current_dispatch_mode()
    with pytest.raises(ZeroDivisionError), meter.step() as measured, measured.phase("forward"):
        1 / 0  # noqa: B018
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is before
    assert measured.sample is None
    assert next(iter(train(trainer, meter, 1))) is not None


def test_phases_do_not_nest() -> None:
    trainer = Trainer(Run())
    meter = Meter(trainer.optimizer, every=1)
    with (
        meter.step() as measured,
        measured.phase("forward"),
        pytest.raises(RuntimeError, match="phase step begins within phase forward"),
        measured.phase("step"),
    ):
        pass


def test_a_model_without_quantized_weights_has_times_and_bytes() -> None:
    probe = Probe([spec for spec in FEW if spec.fmt == "plain"])
    optimizer = ZeroAdamW(probe.named_parameters())
    meter = metrics.Meter(optimizer, every=1)
    with meter.step() as measured:
        probe.backward(0, 0)
        optimizer.step()
    assert measured.sample
    assert measured.sample.by_weight() == {}
    assert set(measured.sample.scalars()) >= {"ms/total", "ms/adam"}
    assert not any("percent" in name for name in measured.sample.scalars())


def test_scalars_are_flat() -> None:
    trainer = Trainer(Run())
    (sample,) = filter(None, train(trainer, Meter(trainer.optimizer, every=1), 1))
    scalars = sample.scalars()
    assert all(isinstance(value, int | float) for value in scalars.values())
    assert scalars["saturated_percent"] == sample.together.scalars()["saturated_percent"]
    assert scalars["ms/step/adam"] == sample.milliseconds["step/adam"]
    assert sample.by_weight()["nv"] == sample.weights["nv"].scalars()


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_positive(every: int) -> None:
    with pytest.raises(ValueError, match=f"every is at least 1, got {every}"):
        Meter(Trainer(Run()).optimizer, every=every)
