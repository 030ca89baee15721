"""What the study of the loss makes of its runs; the training itself is that of test_step.py."""

import json
from pathlib import Path

from tests.benchmarks import loss_study
from zerocast.bench.variant import VARIANTS


def test_a_run_that_a_limit_cut_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    assert loss_study.read(file) == []
    file.write_text(json.dumps({"seed": 0, "row": "a", "losses": [1.0]}) + '\n{"seed": 1, "row": "a", "los')
    assert [(run["seed"], run["row"]) for run in loss_study.read(file)] == [(0, "a")]


def test_distances_are_of_the_same_seed_and_of_the_last_steps() -> None:
    plain, ours, wgrad = (f"fsdp2:{name} eager" for name in ("bf16", "fp8_block", "fp8_block+fp8_wgrad"))
    wire = "fsdp2:bf16+fp8_wire eager"
    ends = {(plain, 0): 2.0, (plain, 1): 4.0, (ours, 1): 4.5, (ours, 0): 2.25, (ours, 2): 9.0, (wgrad, 1): 4.25}
    ends[wire, 1] = 4.125
    runs = [{"row": row, "seed": seed, "losses": [99.0, *[end] * loss_study.LAST]} for (row, seed), end in ends.items()]
    lines = list(loss_study.table([*runs, {"row": "broken", "seed": 0, "failure": "RuntimeError: no"}]))
    assert "| fsdp2:fp8_block eager | 2.2500, 4.5000, 9.0000 | +0.2500, +0.5000 | +0.3750 | 0.1768 |" in lines
    assert "| broken | RuntimeError: no | | | |" in lines
    _, weight_gradients, sent = "\n".join(lines).split("\n\n")
    assert weight_gradients.splitlines()[2:] == ["| fsdp2:fp8_block eager | -0.2500 | -0.2500 |  |"]
    assert sent.splitlines()[2:] == ["| fsdp2:bf16 eager | +0.1250 | +0.1250 |  |"]


def test_the_plan_asks_for_rows_that_there_are_and_for_none_twice() -> None:
    asked = [(seed, row) for seed, rows in loss_study.PLAN for row in rows]
    assert len(asked) == len(set(asked))
    names = {f"{variant.name} {mode}" for variant in VARIANTS for mode in ("compiled", "eager")}
    assert {row for _, row in asked} <= names
