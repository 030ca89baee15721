"""The benchmark runs: every row on a CPU at a small scale, checked against the reference, and the commands around it."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import zerocast.bench.run as bench_run
from zerocast.bench.clock import Clock, launches
from zerocast.bench.config import BenchConfig
from zerocast.bench.row import CAST, Row, Work, all_rows, select
from zerocast.bench.run import Bench, WrongBytesError, check
from zerocast.bench.work import Shard
from zerocast.bench.workload import A, BenchEnv, Job, Workload
from zerocast.cli import main

CPU = torch.device("cpu")
SMALL = A.scaled(64)


def small(**changes: object) -> BenchConfig:
    return BenchConfig(backend="cpu", scale=64, check_scale=64, seconds=0.0, **changes)


def test_every_row_runs_and_writes_the_bytes_of_the_reference():
    report = Bench(small()).run()
    assert report.failures == ()
    ours = {m.row.name: m for m in report.measurements if m.by == "cpu"}
    assert list(ours) == [row.name for row in all_rows()]
    assert all(m.checked for m in ours.values())
    assert {m.row.name for m in report.measurements if m.by == "torch fused"} == {"A Adam"}
    assert all(m.ms > 0 and m.moved > 0 and m.times.calls >= 11 for m in report.measurements)
    assert report.copy.before > 0 and report.copy.after > 0


def test_only_ours_is_measured_without_peers():
    heard = []
    report = Bench(small(only=("A Adam",), peers=False)).run(heard.append)
    assert [m.by for m in report.measurements] == ["cpu"]
    assert heard == ["A Adam by cpu"]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block"])
def test_a_shard_does_one_ranks_share_of_the_whole(fmt: str):
    env = BenchEnv(CPU, "cpu", seed=0)
    shard = Shard(SMALL, fmt, env)
    assert len(shard.plan.amaxes.offsets) == len(SMALL.shapes)  # amaxes and scales of every weight, owned or not
    before = [weight.rowwise_data.clone() for weight in shard.weights]
    shard.plan.cast()
    for weight, old, span in zip(shard.weights, before, SMALL.spans(SMALL.rank), strict=True):
        changed = (weight.rowwise_data.view(-1) != old.view(-1)).nonzero().view(-1)
        per_byte = weight.format.elements_per_byte
        assert bool(len(changed)) == bool(span.numel)
        assert all(span.start // per_byte <= byte < -(-span.stop // per_byte) for byte in changed.tolist())
    again = Shard(SMALL, fmt, env)
    assert torch.equal(again.flat, shard.flat)
    assert not torch.equal(Shard(SMALL, fmt, BenchEnv(CPU, "cpu", seed=1)).flat, shard.flat)


@pytest.mark.parametrize("row", select(("step",), scale=256), ids=lambda row: row.name)
def test_a_step_steps(row: Row):
    """A step changes masters and moments. The check of rows compares a row with itself and does not show it."""
    job = row.work.build(row.workload, row.fmt, BenchEnv(CPU, "cpu", seed=0))
    before = [written.clone() for written in job.written()]
    job.run()
    masters_and_moments = zip(before[:3], job.written()[:3], strict=True)
    assert not any(torch.equal(old, new) for old, new in masters_and_moments)


@pytest.mark.parametrize("row", list(all_rows()), ids=lambda row: row.name)
def test_the_check_notices_one_wrong_byte(row: Row):
    def spoiled(workload: Workload, fmt: str, env: BenchEnv) -> Job:
        job = row.work.build(workload, fmt, env)
        if env.backend == "reference":
            return job

        def run() -> None:
            job.run()
            job.written()[0].view(-1).view(torch.uint8)[-1] ^= 1

        return Job(run, job.written)

    wrong = dataclasses.replace(row, work=Work("wrong", spoiled, row.work.moved, ""))
    with pytest.raises(WrongBytesError, match="buffer 0"):
        check(wrong, row.workload.scaled(256), BenchEnv(CPU, "cpu", seed=0))


def test_a_row_that_fails_is_reported_and_costs_no_other(monkeypatch: pytest.MonkeyPatch):
    def broken(workload: Workload, fmt: str, env: BenchEnv) -> Job:
        raise RuntimeError("no such kernel\nand more")

    rows = [Row(SMALL, Work("broken", broken, lambda traffic: 1, ""), "nvfp4"), Row(SMALL, CAST, "nvfp4")]
    monkeypatch.setattr(bench_run, "select", lambda only, scale: rows)
    report = Bench(small()).run()
    assert [m.row.name for m in report.measurements] == ["A cast nvfp4"]
    (failure,) = report.failures
    assert failure.reason == "RuntimeError: no such kernel" and report.failed


def test_the_clock_measures_the_call():
    calls = []
    times = Clock(CPU, seconds=0.0).time(lambda: calls.append(None))
    assert times.calls == 11 and len(calls) > 11
    assert 0 <= times.device_p10_ms <= times.device_ms <= times.device_p90_ms < 10
    assert launches(lambda: None, CPU) is None


def test_deciles_are_of_the_times_of_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Clock, "_host", lambda clock, run, calls: [float(ms) for ms in range(1, 100)])
    times = Clock(CPU, seconds=0.0).time(lambda: None)
    assert (times.device_p10_ms, times.device_ms, times.device_p90_ms) == (10, 50, 90)


def test_the_command_prints_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["bench", "--backend", "cpu", "--scale", "64", "--seconds", "0", "--only", "A cast nvfp4", "A Adam"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [len(re.findall(rf"^\| {row} \| cpu \|", out, re.MULTILINE)) for row in ("A cast nvfp4", "A Adam")] == [1, 1]
    assert "A Adam" not in err
    (written,) = tmp_path.glob("*.json")
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}
    assert written.with_suffix(".md").read_text() in out

    stored = json.loads(written.read_text())
    for factor, status in ((1e6, 0), (1e-6, 1)):  # what was stored was far slower, then far faster
        for line in stored["rows"]:
            line["over_floor"] *= factor
        written.write_text(json.dumps(stored))
        assert main([*options, "--json", "--out", str(tmp_path / "again"), "--compare", str(written)]) == status
        printed = capsys.readouterr()
        stored = json.loads((tmp_path / "again" / written.name).read_text())
        assert json.loads(printed.out) == stored
    assert "regression: A cast nvfp4" in printed.err


def test_without_its_extra_the_command_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["bench"]) == 2
    assert "needs tyro: pip install 'zerocast[cli]'" in capsys.readouterr().err
