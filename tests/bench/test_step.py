"""The benchmark of training steps: every variant trains the same model, and the report says what was measured."""

import contextlib
import json
import math
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.workers import Ranks
from zerocast import gemm
from zerocast.bench import variant
from zerocast.bench.config import StepConfig
from zerocast.bench.llama import Llama
from zerocast.bench.step import StepBench, Text
from zerocast.bench.step_report import GIB, Profile, StepFailure, StepMeasurement, StepReport
from zerocast.cli import main

TINY = StepConfig(
    shape="tiny", layers=1, vocabulary=256, seq=32, steps=1, warm_up=2, modes=("eager",), compiler="aot_eager"
)


def ran(config: StepConfig) -> dict[str, Any]:
    return StepBench(config, torch.device("cpu")).run().as_dict()


@pytest.mark.parametrize(
    ("row", "code"),
    {
        "fsdp2:fp8_current+fp8_wgrad compiled": "fsdp2.prepare(model, zerocast.Recipe({WEIGHTS: 'fp8_current'}, fast=True))",
        "fsdp2:fp8_current eager": "fsdp2.prepare(model, zerocast.Recipe({WEIGHTS: 'fp8_current'}))",
        "zero_adamw:nvfp4 eager": "quantize_(model, zerocast.Recipe({WEIGHTS: 'nvfp4'}))",
        "fsdp2:fp8_current compiled": None,
        "fsdp2:fp8_current+fp8_wgrad eager": None,
        "fsdp2:fp8_current+fp8_wire eager": None,
        "fsdp2:fp8_current+fp8_wgrad+8bit compiled": None,
        "fsdp2:bf16 eager": None,
    }.items(),
)
def test_the_fast_recipe_and_the_default_have_their_line_of_code(row: str, code: str | None) -> None:
    """Other rows take more than one line."""
    if code is not None:
        code = "zerocast." + code.replace("WEIGHTS", f'"{variant.WEIGHTS}"').replace("'", '"')
    assert variant.code_of(row) == code


def test_variants_train_the_same_model(ranks: Ranks) -> None:
    chosen = (
        *("fsdp2:bf16", "fsdp2:fp8_current+fp8_wgrad", "fsdp2:fp8_delayed"),
        *("zero_adamw:bf16", "zero_adamw:fp8_block+*", "fsdp2_fused_adamw:bf16"),
        *("fsdp2:bf16+fp8_wire", "fsdp2:fp8_current+fp8_wgrad+8bit"),
        *("zero_adamw:bf16+fp8_wire", "zero_adamw:fp8_current+fp8_wgrad+8bit"),
    )
    report, other = ranks(2)(ran, replace(TINY, variants=chosen), timeout=120.0)
    assert report["failures"] == [] and report["ranks"] == 2 and report["tokens"] == 2 * 32
    rows = {row["variant"]: row for row in report["rows"]}
    assert list(rows) == [name.replace("*", "fp8_wgrad") for name in chosen]
    for name, row in rows.items():
        assert row["losses"] == pytest.approx(rows["fsdp2:bf16"]["losses"], abs=0.02), name
        assert row["losses"] != rows["fsdp2:bf16"]["losses"] or ":bf16" in name  # other weights are quantized
        assert len(row["losses"]) == TINY.warm_up and min(row["losses"]) > 0.9 * math.log(256)
        assert len(row["step_ms"]) == TINY.steps and 0 < row["host_ms"] <= max(row["step_ms"])
        assert row["tokens_per_s"] == pytest.approx(report["tokens"] / row["ms"] * 1e3)
        assert (row["peak_bytes"], row["kept_bytes"]) == (None, None)
    for host in ("fsdp2", "zero_adamw"):
        sent = rows[f"{host}:bf16+fp8_wire"]["wire_bytes"]
        assert "alltoall_base_" in sent and "_reduce_scatter_base_" not in sent
    assert [row["step_ms"] for row in other["rows"]] == [
        row["step_ms"] for row in report["rows"]
    ]  # of the slowest rank


@pytest.mark.parametrize("host", ["fsdp2", "zero_adamw"])
def test_moments_in_8_bits_are_rounded(ranks: Ranks, host: str) -> None:
    """Rounding shows in the losses once a step has been taken from moments of two gradients."""
    chosen = (f"{host}:fp8_current+fp8_wgrad", f"{host}:fp8_current+fp8_wgrad+8bit")
    exact, rounded = ranks(1)(ran, replace(TINY, variants=chosen, warm_up=5, lr=0.1))[0]["rows"]
    assert rounded["losses"][0] == exact["losses"][0]
    assert rounded["losses"][-1] != exact["losses"][-1]
    assert rounded["losses"] == pytest.approx(exact["losses"], abs=0.05)


def test_compiled_and_eager_rows_beside_each_other(ranks: Ranks) -> None:
    """Compiled blocks train as the eager ones do."""
    chosen = replace(TINY, variants=("fsdp2:bf16", "zero_adamw:fp8_current"), modes=("compiled", "eager"))
    report = ranks(1)(ran, chosen, timeout=120.0)[0]
    assert report["failures"] == []
    losses = {row["row"]: row["losses"] for row in report["rows"]}
    assert list(losses) == [f"{name} {mode}" for mode in chosen.modes for name in chosen.variants]
    for name in chosen.variants:
        assert losses[f"{name} compiled"] == pytest.approx(losses[f"{name} eager"], abs=1e-2)
    assert all(v.host.compiles == (v.host.package != "transformer_engine") for v in variant.VARIANTS)


def in_cuda_graphs(config: StepConfig) -> tuple[list[list[float]], int, set[str | None]]:
    """Return the losses of all rows, the number of steps announced to the compiler, and the modes of the blocks."""
    modes: list[str | None] = []
    compile_block = nn.Module.compile

    def noted(block: nn.Module, *args: Any, **kwargs: Any) -> None:
        modes.append(kwargs.get("mode"))
        compile_block(block, *args, **kwargs)

    with (
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin") as begun,
        mock.patch.object(nn.Module, "compile", noted),
    ):
        report = ran(config)
    assert report["failures"] == []
    return [row["losses"] for row in report["rows"]], begun.call_count, set(modes)


def test_cuda_graphs_of_blocks(ranks: Ranks) -> None:
    """A CPU has no CUDA graphs, so the values are those without."""
    config = replace(TINY, variants=("zero_adamw:fp8_current",), modes=("compiled",), micro_batches=2)
    ((losses, begun, modes),) = ranks(1)(in_cuda_graphs, config, timeout=120.0)
    ((graphed, steps, of_graphs),) = ranks(1)(in_cuda_graphs, replace(config, cuda_graphs=True), timeout=120.0)
    assert graphed == losses
    assert (begun, modes) == (0, {None})
    # The steps before the clock, those that are timed in two ways, and one that counts bytes.
    assert (steps, of_graphs) == (TINY.warm_up + 2 * TINY.steps + 1, {"reduce-overhead"})


def test_micro_batches_train_as_one_batch_and_gather_once(ranks: Ranks) -> None:
    chosen = ("fsdp2:bf16", "fsdp2:fp8_current", "zero_adamw:fp8_current")
    together = replace(TINY, variants=chosen, batch=2)
    apart = replace(TINY, variants=chosen, micro_batches=2)
    kept = replace(apart, keep_gathered=True)
    whole, regathered, gathered_once = (ranks(2)(ran, config)[0] for config in (together, apart, kept))
    for row, again, once in zip(whole["rows"], regathered["rows"], gathered_once["rows"], strict=True):
        assert again["losses"] == pytest.approx(row["losses"], abs=0.01)
        assert once["losses"] == again["losses"]
        gathered, gathered_again, of_one = (one["wire_bytes"]["weight_gather"] for one in (row, again, once))
        if row["variant"].startswith("zero_adamw"):
            assert gathered == gathered_again == of_one
        else:
            assert gathered_again > 1.5 * gathered > 2 * of_one
        reduced = {name: nbytes for name, nbytes in row["wire_bytes"].items() if name != "weight_gather"}
        if row["variant"].startswith("zero_adamw"):
            reduced["allreduce_"] += 8  # after no_sync, whether a rank has gradients left
        assert {name: once["wire_bytes"][name] for name in reduced} == reduced
    assert whole["tokens"] == regathered["tokens"] == 2 * 2 * 32


class _Linear(nn.Module):
    """A loss whose gradient is the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.weight * inputs + targets).mean()


def test_micro_batches_are_averaged() -> None:
    """AdamW behind a clipping of norms steps the same with any multiple of a gradient, so SGD shows it here."""
    model = _Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = variant.Training(model, optimizer, clip=lambda: None, no_sync=contextlib.nullcontext)
    loss = training.step([torch.tensor([[2.0, 10.0]]), torch.tensor([[4.0, 30.0]])])
    assert (loss.item(), model.weight.item()) == (20.0, -3.0)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block"])
def test_masters_start_from_the_same_values_under_every_host(ranks: Ranks, fmt: str) -> None:
    """Steps that are smaller than the rounding of a bf16 weight add up, from the first one on."""
    config = replace(TINY, layers=2, variants=(f"fsdp2:{fmt}", f"zero_adamw:{fmt}"), warm_up=8)
    fsdp2, zero_adamw = (row["losses"] for row in ranks(1)(ran, config)[0]["rows"])
    assert fsdp2[0] - fsdp2[-1] > 0.02
    assert zero_adamw == pytest.approx(fsdp2, abs=0.002)


def _with_one_that_raises(config: StepConfig) -> tuple[dict[str, Any], list[bool], bool]:
    models: list[weakref.ref[Llama]] = []
    alive: list[bool] = []

    def broken(model: Llama, *arguments: Any) -> variant.Training:
        models.append(weakref.ref(model))
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("no such kernel\nand more")
        return variant.FSDP2.build(model, *arguments)

    def look(model: Llama, *arguments: Any) -> variant.Training:
        alive.extend(one() is not None for one in models)
        return variant.FSDP2.build(model, *arguments)

    hosts = variant.Host("broken", broken), variant.Host("look", look)
    before = variant.VARIANTS
    try:
        variant.VARIANTS = tuple(variant.Variant(host, "bf16", True) for host in hosts)
        return ran(config), alive, gemm.settings.now[1]
    finally:
        variant.VARIANTS = before


def test_a_row_that_raises_on_one_rank_costs_no_other_and_holds_nothing(ranks: Ranks) -> None:
    for report, alive, weight_gradients in ranks(2)(_with_one_that_raises, TINY):
        reason = "RuntimeError: rank 1: no such kernel"
        assert report["failures"] == [{"row": "broken:bf16+fp8_wgrad eager", "reason": reason}]
        assert [row["variant"] for row in report["rows"]] == ["look:bf16+fp8_wgrad"]
        assert alive == [False] and weight_gradients == "nominal"  # products are as they were


def text(length: int) -> Text:
    return Text("made", "0" * 64, torch.arange(length) % 251)


def test_no_byte_of_a_text_is_used_twice() -> None:
    steps, ranks, batch, sequence = 3, 2, 2, 8
    whole = text(steps * ranks * batch * sequence + 1)
    taken = [list(whole.batches(steps, rank, ranks, (batch, sequence), seed=0)) for rank in range(ranks)]
    starts = sorted(int(row[0]) for batches in taken for tokens in batches for row in tokens)
    assert starts == list(range(0, steps * ranks * batch * sequence, sequence))
    assert all(tokens.shape == (batch, sequence + 1) for batches in taken for tokens in batches)
    assert all((row.diff() == 1).all() for batches in taken for tokens in batches for row in tokens)
    other = [list(whole.batches(steps, rank, ranks, (batch, sequence), seed=1)) for rank in range(ranks)]
    assert not all(torch.equal(a, b) for a, b in zip(taken[0], other[0], strict=True))
    with pytest.raises(ValueError, match=r"made has 97 bytes.* are 12 sequences of 8; 4 steps of 2 on 2 ranks need 16"):
        list(whole.batches(4, 0, ranks, (batch, sequence), seed=0))


def measured(row: str, ms: float, peak: int | None = None, losses: tuple[float, ...] = (1.0,)) -> StepMeasurement:
    name, mode = row.split()
    profile = Profile((), (), waits=2.0, wait_ms=1.0)
    return StepMeasurement(
        name,
        mode,
        [ms + 1, ms, ms - 1],
        0.3 * ms,
        6.0,
        0.5 * ms,
        4.0,
        peak,
        1 << 30,
        {"weight_gather": 10**6},
        [*losses],
        profile,
    )


def report(*rows: StepMeasurement, **changes: Any) -> StepReport:
    settings = {"shape": "llama3-8b", "layers": 8, "vocabulary": 32768, "seq": 8192, "batch": 1}
    settings |= {"micro_batches": 1, "keep_gathered": False}
    machine = {"device": "None At All", "torch": "0", "l2": 1}
    return replace(StepReport("2000-01-01", 2, 16384, machine, settings, rows), **changes)


def test_a_stored_report_is_read_as_it_was(tmp_path: Path) -> None:
    found = report(measured("fsdp2:bf16 eager", 10.0), failures=(StepFailure("torchao:rowwise eager", "no"),))
    (tmp_path / "report.json").write_text(json.dumps(found.as_dict()))
    again = StepReport.read(tmp_path / "report.json")
    assert again.as_dict() == json.loads((tmp_path / "report.json").read_text())
    assert again.measurements[0].profile == Profile([], [], 2.0, 1.0)  # type: ignore[arg-type]
    assert not again.failed and replace(again, failures=(StepFailure("fsdp2:nvfp4 eager", "no"),)).failed
    (tmp_path / "other.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="not a report"):
        StepReport.read(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("row", "ms", "peak", "grown"),
    [
        ("fsdp2:nvfp4 eager", 10.4, GIB, []),
        ("fsdp2:nvfp4 eager", 10.6, GIB, ["ms"]),
        ("fsdp2:nvfp4 eager", 10.0, 2 * GIB, ["GiB"]),
        ("torchao:rowwise eager", 20.0, 2 * GIB, []),  # not ours
        ("fsdp2:mxfp8 eager", 20.0, 2 * GIB, []),  # not stored
    ],
)
def test_growth_of_ours_is_a_regression(row: str, ms: float, peak: int, grown: list[str]) -> None:
    stored = report(measured("fsdp2:nvfp4 eager", 10.0, GIB), measured("torchao:rowwise eager", 10.0, GIB))
    assert [found.unit for found in report(measured(row, ms, peak)).regressions(stored, 0.05)] == grown
    with pytest.raises(ValueError, match="the stored report has 4 ranks"):
        report(measured(row, ms, peak)).regressions(replace(stored, ranks=4), 0.05)


def test_the_command_writes_a_report_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(256)))
    tiny = ["--shape", "tiny", "--layers", "1", "--vocabulary", "256", "--seq", "16", "--modes", "eager"]
    wish = [
        *("bench", "step", *tiny, "--steps", "1", "--loss-steps", "2", "--text", str(tmp_path / "text.txt")),
        *("--variants", "fsdp2:bf16", "zero_adamw:nvfp4"),
    ]
    assert main([*wish, "--profile", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    written = sorted((tmp_path / "out").iterdir())
    assert [path.suffix for path in written] == [".json", ".md"] and all(str(path) in err for path in written)
    assert written[1].read_text().strip() == out.strip()
    stored = json.loads(written[0].read_text())
    assert stored["settings"]["text"]["bytes"] == 256 and len(stored["settings"]["text"]["sha256"]) == 64
    (line,) = [line for line in out.splitlines() if line.startswith("| zero_adamw:nvfp4 eager |")]
    row = stored["rows"][1]
    over_fsdp2, _ = row["over_fsdp2_bf16"]  # a ZeroAdamW with bf16 was not asked for
    cells = [f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", "", f"{over_fsdp2:.3f}", f"{row['free_ms']:.1f}"]
    assert line.split(" | ")[1:6] == cells
    assert line.split(" | ")[-1] == f"{row['loss']:.4f} |" and len(row["losses"]) == 2 and row["profile"]["host"]

    for factor, status in ((1e6, 0), (1e-6, 1)):  # what was stored was far slower, then far faster
        changed = {**stored, "rows": [{**row, "step_ms": [factor]} for row in stored["rows"]]}
        written[0].write_text(json.dumps(changed))
        assert main([*wish, "--json", "--out", str(tmp_path / "again"), "--compare", str(written[0])]) == status
        assert json.loads(capsys.readouterr().out)["ranks"] == 1
    assert main([*wish, "--seed", "1", "--compare", str(written[0])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the stored report has 1 ranks" in line, "said before anything is measured"
    assert not dist.is_initialized()


def test_options_are_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, message in (
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"threshold": -1.0}, "threshold must be between 0 and inf, got -1.0"),
        ({"text": Path("x"), "vocabulary": 128}, "a vocabulary of at least 256, got 128"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            StepConfig(**changes)
    missing = replace(variant.TORCHAO, package="no_such_package")
    monkeypatch.setattr(variant, "VARIANTS", (variant.Variant(missing, "tensorwise"),))
    assert variant.select((), ("eager",)) == variant.select(("torchao:*",), ("eager",)) == []
    with pytest.raises(RuntimeError, match="torchao:tensorwise needs no_such_package, which is not installed"):
        variant.select(("torchao:tensorwise",), ("eager",))


def test_rows_are_chosen_with_or_without_their_mode() -> None:
    chosen = variant.select(("fsdp2:bf16", "zero_adamw:fp8_* compiled", "fsdp2:nvfp4 eager"), ("compiled", "eager"))
    names = [row.name for row in chosen]
    assert names[0] == "fsdp2:bf16 compiled" and names[-2:] == ["fsdp2:bf16 eager", "fsdp2:nvfp4 eager"]
    assert len(names) == 11 and all(name.endswith(" compiled") for name in names[:9])
