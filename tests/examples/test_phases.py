"""Where the time of a step goes: the stages are found under the names that they have, and are parts of the step."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt_pretrain import phases
from examples.gpt_pretrain.config import Format, Parallel, TrainConfig
from examples.gpt_pretrain.data import Corpus
from examples.gpt_pretrain.model import GPTConfig
from examples.gpt_pretrain.world import World
from tests.workers import Ranks

TEXT = bytes(range(256)) * 400
EFFORT = phases.Effort(warm_up=1, timed=3, profiled=2)


def measured(name: Format, parallel: Parallel = "zero") -> dict[str, Any]:
    """One format on a tiny model, by this rank."""
    config = TrainConfig(format=name, model=GPTConfig(1, 2, 128, 32), batch_size=2, parallel=parallel)
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return phases.measure(config, world, Corpus(TEXT, 32), EFFORT)


@pytest.mark.parametrize("parallel", ["zero", "fsdp2"])
def test_every_stage_of_a_step_is_found(ranks: Ranks, parallel: Parallel) -> None:
    """Under FSDP2 in the forward and backward passes."""
    for found in ranks(2)(measured, "nvfp4", parallel):
        assert set(found["profile_ms"]) == {"reduce-scatter", "norm", *phases.PHASES}
        absent = [name for name, value in found["profile_ms"].items() if value == 0]
        assert absent == (
            ["columnwise"] if parallel == "fsdp2" else []
        )  # on a CPU, where weights are dequantized as they are
        timeline = [found["timeline_ms"][name] for name in phases.TIMELINE]
        assert min(timeline) > 0
        assert found["timeline_ms"]["total"] > max(timeline)
        assert found["skipped_steps"] == 0


def test_bf16_has_no_amaxes_and_no_columnwise_copies(ranks: Ranks) -> None:
    plain, quantized = ranks(2)(measured, "bf16")[0], ranks(2)(measured, "fp8_block")[0]
    assert [plain["profile_ms"][name] for name in ("all-reduce", "columnwise")] == [0, 0]
    assert plain["profile_ms"]["Adam + amax"] > 0
    gathered = [found["traffic_bytes"]["weight_gather"] for found in (plain, quantized)]
    assert plain["parameters"] == quantized["parameters"]
    assert 0.4 * gathered[0] < gathered[1] < 0.7 * gathered[0]


def test_parts_of_a_step_add_up_to_it() -> None:
    def event(name: str, own: float, *children: Any) -> Any:
        total = own + sum(child.total for child in children)
        return SimpleNamespace(name=name, own=own, total=total, cpu_children=children)

    gather = event("c10d::_allgather_base_", 1.0, event("nccl", 30.0))
    step = event(
        "step", 0.5, event("Optimizer.step", 0.25, event("zerocast::adam_amax", 7.0), gather), event("add", 2.0)
    )
    assert phases._rest(step, "own") == 2.75
    assert step.total == 2.75 + 7.0 + 31.0


def test_one_process_writes_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    tiny = "--layers 1 --width 128 --heads 2 --context 16 --batch-size 1 --steps 1 --device cpu --formats bf16 mxfp8"
    phases.main([*tiny.split(), "--out", str(tmp_path / "phases.json")])
    results = json.loads((tmp_path / "phases.json").read_text())
    assert results["machine"]["ranks"] == 1
    printed = capsys.readouterr().out
    for name, run in results["formats"].items():
        column = list(results["formats"]).index(name)
        for label, value in run["timeline_ms"].items():
            (line,) = [line for line in printed.splitlines() if line.startswith(f"| {label} |")]
            assert line.strip("| ").split(" | ")[1 + column] == f"{value:.3f}"
