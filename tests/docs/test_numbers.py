"""The numbers of README.md and of the pages on speed are those of the stored reports and of `zerocast plan`."""

import json
import re
from typing import Any

import pytest

from tests.docs.page import ROOT
from zerocast import ZeroConfig
from zerocast.footprint.footprint import Setup, footprint
from zerocast.footprint.shapes import read_model

REPORTS = ROOT / "tests/benchmarks/reports"
FIRST_PAGE = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/performance.md").read_text()
GIB = 2**30
STEPS = {
    "FSDP2, bf16": "fsdp2:bf16",
    "FSDP2, torchao's float8, tensorwise, FP8 all-gather": "torchao:tensorwise",
    "FSDP2, `fp8_current`, FP8 weight gradients": "fsdp2:fp8_current+fp8_wgrad",
    "FSDP2, `fp8_block`, FP8 weight gradients": "fsdp2:fp8_block+fp8_wgrad",
    "FSDP2, `mxfp4`, FP8 weight gradients": "fsdp2:mxfp4+fp8_wgrad",
    "FSDP2, `nvfp4` (Hopper has no FP4 product)": "fsdp2:nvfp4",
    "ZeroAdamW, bf16": "zero_adamw:bf16",
    "ZeroAdamW, `fp8_current`, FP8 weight gradients": "zero_adamw:fp8_current+fp8_wgrad",
    "ZeroAdamW, `nvfp4`": "zero_adamw:nvfp4",
}
CASTS = {
    **{f"`{fmt}`": f"A cast {fmt}" for fmt in ("fp8_current", "fp8_block", "mxfp8", "nvfp4")},
    "1,024 small weights, host included, `fp8_current`": "B flat cast fp8_current",
}


def cells(name: str) -> list[str]:
    """The first row of the page with this name."""
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found, name
    return found[1].split(" | ")


def stored(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((REPORTS / name).read_text())["rows"]
    return rows


@pytest.mark.parametrize("name", STEPS)
def test_training_steps(name: str) -> None:
    (row,) = (row for row in stored("2026-11-23-nvidia-h200-step-x2.json") if row["row"] == f"{STEPS[name]} compiled")
    ratio, _ = row["over_bf16"]
    sent = sum(row["wire_bytes"].values()) / 1e9
    assert cells(name) == [
        f"{row['ms']:.1f}",
        f"{ratio:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['peak_bytes'] / GIB:.2f} GiB",
        f"{sent:.1f} GB",
    ]


def test_no_row_of_a_training_step_is_left_out() -> None:
    """What does not hold stays visible."""
    rows = {row["variant"] for row in stored("2026-11-23-nvidia-h200-step-x2.json") if row["mode"] == "compiled"}
    assert set(STEPS.values()) == rows


# Rows of the table of the first page: the row of the report, and that of the study.
COMPARED = {
    "bf16": ("FSDP2 bf16", "bf16"),
    "torchao's float8, tensorwise": ("torchao's float8, tensorwise, FP8 all-gather", None),
    "zerocast `fp8_current` (8 bits)": ("FSDP2 fp8_current, `fast=True`", "fp8_current, fast"),
    "zerocast `nvfp4:exact_in_fp8` (4 bits)": (
        "FSDP2 nvfp4:exact_in_fp8, `fast=True`",
        "nvfp4 exact in FP8, fast",
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_table_of_the_first_page(name: str) -> None:
    """Speed and memory of a step beside the final loss of the same recipe."""
    row, variant = COMPARED[name]
    report = (REPORTS / "2026-11-27-nvidia-h200-step.md").read_text()
    steps = dict(re.findall(r"^\| (.+?) \| ([\d.]+ .*) \|$", report.partition("## B")[0], re.MULTILINE))
    milliseconds, *_, peak, _ = steps[row].split(" | ")
    speed = float(steps["FSDP2 bf16"].split(" | ")[0]) / float(milliseconds)
    shown = f"{speed:.2f}x" + f" ({milliseconds} ms)" * (name == "bf16")
    loss = "not studied"
    if variant is not None:
        study = json.loads((ROOT / "examples/gpt_pretrain/study/pairs/results.json").read_text())["variants"][variant]
        loss = f"{study['validation_loss']:.3f}"
        if name != "bf16":
            loss += f": {study['gap']:+.3f} ± {study['gap_interval']:.3f}"
            assert len(study["gaps"]) == 35
    assert f"| {name} | {shown} | {peak} GiB | {loss} |" in FIRST_PAGE


def test_what_fp8_weights_and_casts_take() -> None:
    """What it promises of FP8 weights and of casts is what the tables below it say of their best and worst rows."""
    text = " ".join(PAGE.split())
    steps = {row["variant"]: row for row in stored("2026-11-23-nvidia-h200-step-x2.json") if row["mode"] == "compiled"}
    over = [row["over_bf16"][0] for name, row in steps.items() if ":fp8" in name]
    theirs, _ = steps["torchao:tensorwise"]["over_bf16"]
    assert (
        f"FP8 weights takes {min(over):.2f} to {max(over):.2f} of bf16's time (torchao's float8: {theirs:.2f})" in text
    )
    rows = {(row["row"], row["by"]): row for row in stored("2026-11-21-nvidia-h200-cuda.json")}
    casts = [name for name in CASTS.values() if name.startswith("A cast ")]
    floors = [rows[name, "cuda"]["over_floor"] for name in casts]
    ratios = [
        rows[n, "transformer_engine"]["ms"] / rows[n, "cuda"]["ms"] for n in casts if (n, "transformer_engine") in rows
    ]
    cast = f"A cast takes {min(floors):.2f} to {max(floors):.2f} times as long as a copy of its bytes"
    assert cast in text and cast in " ".join(FIRST_PAGE.split())
    assert f"(TransformerEngine's: {min(ratios):.1f} to {max(ratios):.0f} times as long as ours)" in text


def test_missed_targets_are_named() -> None:
    """Each with what was reached and what was to be reached, and none that was met."""
    report = json.loads((REPORTS / "2026-11-23-nvidia-h200-step-x2.json").read_text())
    measured = [target for target in report["targets"] if target["reached"] is not None]
    missed = {(t["reached"], t["limit"]) for t in measured if t["reached"] > t["limit"]}
    text = " ".join(PAGE.split())
    said = text.partition(" targets are missed ")[2].partition("`mxfp4` is")[0]
    shown = [
        (float(reached), float(limit)) for reached, limit in re.findall(r"([\d.]+) times.*?, for ([\d.]+)[;.]", said)
    ]
    assert (
        f"{'Two' if len(missed) == 2 else len(missed)} of {'eight' if len(measured) == 8 else len(measured)} targets"
        in text
    )
    assert sorted(shown) == sorted((round(reached, 3 if limit == 1 else 2), limit) for reached, limit in missed)


def test_the_first_page_is_short() -> None:
    """Words, without the rules of tables."""
    assert len([word for word in FIRST_PAGE.split() if re.search(r"\w", word)]) <= 600


@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str) -> None:
    rows = {row["by"]: row for row in stored("2026-11-21-nvidia-h200-cuda.json") if row["row"] == CASTS[name]}
    theirs = f"{rows['transformer_engine']['ms']:.2f}" if "transformer_engine" in rows else "does not run on Hopper"
    ours = rows["cuda"]
    found = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert f"{ours['ms']:.2f} | {ours['over_floor']:.2f} | {theirs}" in found


@pytest.mark.parametrize(
    ("name", "fmt", "config"),
    [
        ("bf16", "bf16", ZeroConfig()),
        ("`fp8_block`", "fp8_block", ZeroConfig()),
        ("`fp8_block`, 8-bit moments", "fp8_block", ZeroConfig(moment_dtype="8bit")),
        ("`nvfp4`", "nvfp4", ZeroConfig()),
    ],
)
def test_bytes_a_parameter(name: str, fmt: str, config: ZeroConfig) -> None:
    planned = footprint(read_model("llama3-8b").parameters, fmt, Setup("zero2", 8, config=config))
    resident = (planned.memory["weights"] + planned.memory["scales"]) / planned.numel
    gathered = planned.wire["all-gather"] * 8 / 7 / planned.numel
    row = f"| {name} | {resident:.2f} | {gathered:.2f} | {planned.total_memory / GIB:.1f} GiB |"
    assert row in PAGE


def test_why_a_cast_is_fast() -> None:
    page = (ROOT / "docs/concepts/speed.md").read_text()
    rows = {(row["row"], row["by"]): row for row in stored("2026-11-21-nvidia-h200-cuda.json")}
    large, many = (
        [rows[name, by] for by in ("transformer_engine", "cuda")]
        for name in ("A cast fp8_current", "B flat cast fp8_current")
    )
    for line in (
        ["time of the device", *(f"{row['ms']:.2f} ms" for row in large)],
        ["of the floor", *(f"{row['over_floor']:.2f}" for row in large)],
        ["bytes that must move, a second", *(f"{row['gbps']:,.0f} GB/s" for row in large)],
        ["launches of a call", *(f"{row['launches']}" for row in large)],
        ["host, until the call returns", *(f"{row['host_ms']:.2f} ms" for row in large)],
        ["from call to call, host included", *(f"{row['wall_ms']:.2f} ms" for row in many)],
        ["launches of a call", *(f"{row['launches']:,}" for row in many)],
        ["host, until the call returns", f"{many[0]['host_ms']:.1f} ms", f"{many[1]['host_ms']:.2f} ms"],
    ):
        assert f"| {' | '.join(line)} |\n" in page
    for stage in ("partial_amax", "compute_scales", "partial_cast"):
        row = rows[f"A {stage} fp8_current", "cuda"]
        over = f"{row['over_floor']:.2f}" if stage != "compute_scales" else ""
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{stage}`"))
        assert line.split("|")[2].strip() == f"{row['ms']:.3f}" and line.split("|")[3].strip() == over
    picture = (ROOT / "docs/concepts/speed.svg").read_text()
    for fmt in ("fp8_current", "mxfp8", "fp8_block"):
        theirs, ours = (rows[f"A cast {fmt}", by]["ms"] for by in ("transformer_engine", "cuda"))
        assert f"{theirs:.2f} ms, TransformerEngine" in picture and f"{ours:.2f} ms, zerocast" in picture
