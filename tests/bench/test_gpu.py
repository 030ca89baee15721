"""Events and launches, which only a GPU has, at a small scale. `make bench` is the measurement."""

import pytest
import torch
import torch.distributed as dist

from zerocast import backends
from zerocast.bench.config import BenchConfig, StepConfig
from zerocast.bench.row import all_rows
from zerocast.bench.run import Bench
from zerocast.bench.step import StepBench

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_every_row_runs_on_the_device():
    report = Bench(BenchConfig(scale=16, seconds=0.0)).run()
    assert [failure for failure in report.failures if failure.ours] == []
    ours = {m.row.name: m for m in report.measurements if m.by == report.backend}
    assert list(ours) == [row.name for row in all_rows()]
    assert all(m.launches and m.times.device_ms > 0 and m.times.host_ms > 0 for m in ours.values())
    assert report.settings["flushed"] > 0 and report.machine["device"] == torch.cuda.get_device_name()


def test_launches_of_a_cast_do_not_grow_with_the_number_of_weights():
    if backends.choose(torch.device("cuda")) == "reference":
        pytest.skip("the reference backend works weight by weight")
    found = [Bench(BenchConfig(scale=s, seconds=0.0, only=("B flat",), peers=False)).run() for s in (64, 256)]
    many, few = ({m.row.name: m.launches for m in report.measurements} for report in found)  # 16 weights, and 4
    assert many == few


def test_training_steps_on_the_device():
    """Training steps of all hosts run on the device, those of torchao and TransformerEngine where they are installed."""
    patterns = "fsdp2:bf16", "fsdp2:fp8_current*", "fsdp2:nvfp4", "zero_adamw:fp8_block*", "torchao:*", "transformer_*"
    config = StepConfig(
        patterns, ("eager",), shape="tiny", layers=2, vocabulary=256, seq=256, steps=2, warm_up=2, profile=True
    )
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report = StepBench(config, torch.device("cuda", torch.cuda.current_device())).run()
    finally:
        dist.destroy_process_group()
    assert report.failures == ()
    for row in report.measurements:
        assert row.kept_bytes and row.peak_bytes and row.kept_bytes < row.peak_bytes, row.row
        assert row.profile and row.profile.kernels[0][1] > 0 and row.profile.host[0][1] > 0
        assert row.losses == pytest.approx(report.measurements[0].losses, abs=0.05), row.row
