"""The numbers of README.md and of the pages on speed are those of the stored reports and of `zerocast plan`."""

import json
import re
from typing import Any

import pytest

from tests.docs.page import ROOT
from zerocast.footprint.footprint import Setup, footprint
from zerocast.footprint.model_files import read_model
from zerocast.footprint.weight_bytes import PlannedConfig

REPORTS = ROOT / "tests/benchmarks/reports"
FIRST_PAGE = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/performance.md").read_text()
GIB = 2**30
STEP_REPORT = (REPORTS / "2026-11-28-nvidia-h200-step.md").read_text()
# Rows of the page's table of training steps, and those of the report.
STEPS = {
    "FSDP2, bf16, torch's AdamW": "FSDP2 bf16",
    "torchao's float8, tensorwise, FP8 all-gather": "torchao's float8, tensorwise, FP8 all-gather",
    **{
        f"`fsdp2.prepare`, `{fmt}`": f"FSDP2 {fmt}"
        for fmt in ("fp8_current", "fp8_block", "mxfp4", "nvfp4:exact_in_fp8")
    },
    "ZeroAdamW, bf16": "ZeroAdamW bf16",
    **{f"ZeroAdamW, `{fmt}`": f"ZeroAdamW {fmt}" for fmt in ("fp8_current", "nvfp4:exact_in_fp8")},
}
CASTS = {
    **{f"`{fmt}`": f"A cast {fmt}" for fmt in ("fp8_current", "fp8_block", "mxfp8", "nvfp4")},
    "1,024 small weights, host included, `fp8_current`": "B flat cast fp8_current",
}


def stored(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((REPORTS / name).read_text())["rows"]
    return rows


def steps_of(section: str) -> dict[str, list[str]]:
    """Return the rows by name of the table in the section of the report on training steps that begins so."""
    text = STEP_REPORT.partition(f"\n## {section}")[2].partition("\n## ")[0]
    return {name: row.split(" | ") for name, row in re.findall(r"^\| (.+?) \| ([\d.]+ .*) \|$", text, re.MULTILINE)}


def speed(rows: dict[str, list[str]], name: str) -> str:
    return f"{float(rows['FSDP2 bf16'][0]) / float(rows[name][0]):.2f}x"


def test_training_steps() -> None:
    """The page has all rows of both columns, so that slow ones stay visible."""
    sections = [steps_of("A: "), steps_of("C: ")]
    assert set(STEPS.values()) == sections[0].keys() | sections[1].keys()
    for name, row in STEPS.items():
        line = f"| {name} |"
        for rows in sections:
            shown = [rows[row][0], speed(rows, row), rows[row][-1]] if row in rows else [""] * 3
            line += "".join(f" {cell} |" if cell else " |" for cell in shown)
        assert f"{line}\n" in PAGE


# Rows of the table of the first page: the row of the report, and that of the study.
COMPARED = {
    "bf16": ("FSDP2 bf16", "bf16"),
    "torchao's float8, tensorwise": ("torchao's float8, tensorwise, FP8 all-gather", None),
    "zerocast `fp8_current` (8 bits)": ("FSDP2 fp8_current", "fp8_current, fast"),
    "zerocast `nvfp4:exact_in_fp8` (4 bits)": (
        "FSDP2 nvfp4:exact_in_fp8",
        "nvfp4 exact in FP8, fast",
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_table_of_the_first_page(name: str) -> None:
    """The table of the first page has the speed and memory of a step, and the final loss of the same recipe."""
    row, variant = COMPARED[name]
    steps = steps_of("A: ")
    milliseconds, *_, peak = steps[row]
    shown = speed(steps, row) + f" ({milliseconds} ms)" * (name == "bf16")
    loss = "not studied"
    if variant is not None:
        study = json.loads((ROOT / "examples/gpt_pretrain/study/pairs/results.json").read_text())["variants"][variant]
        loss = f"{study['validation_loss']:.3f}"
        if name != "bf16":
            loss += f": {study['gap']:+.3f} ± {study['gap_interval']:.3f}"
            assert len(study["gaps"]) == 35
    assert f"| {name} | {shown} | {peak} GiB | {loss} |" in FIRST_PAGE


def test_what_casts_take() -> None:
    """Both pages promise what the best and the worst row of the table say."""
    text = " ".join(PAGE.split())
    rows = {(row["row"], row["by"]): row for row in stored("2026-11-21-nvidia-h200-cuda.json")}
    casts = [name for name in CASTS.values() if name.startswith("A cast ")]
    floors = [rows[name, "cuda"]["over_floor"] for name in casts]
    ratios = [
        rows[n, "transformer_engine"]["ms"] / rows[n, "cuda"]["ms"] for n in casts if (n, "transformer_engine") in rows
    ]
    cast = f"A cast takes {min(floors):.2f} to {max(floors):.2f} times as long as a copy of its bytes"
    assert cast in text and cast in " ".join(FIRST_PAGE.split())
    assert f"(TransformerEngine's: {min(ratios):.1f} to {max(ratios):.0f} times as long as ours; [why]" in text


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
        ("bf16", "bf16", PlannedConfig()),
        ("`fp8_block`", "fp8_block", PlannedConfig()),
        ("`fp8_block`, 8-bit moments", "fp8_block", PlannedConfig(moment_dtype="8bit")),
        ("`nvfp4`", "nvfp4", PlannedConfig()),
    ],
)
def test_bytes_a_parameter(name: str, fmt: str, config: PlannedConfig) -> None:
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
