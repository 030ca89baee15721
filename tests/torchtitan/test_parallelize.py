"""A model's own parallelize_fn in two passes: what each of them is told, and when the weights are prepared."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.torchtitan.host_on_cpu import WHY_NOT, importable, needs_torchtitan
from tests.torchtitan.training import Case

if not WHY_NOT:
    with importable():
        from torchtitan.config import ConfigManager
        from torchtitan.distributed import ParallelDims

        from zerocast.fsdp2.prepare import is_prepared
        from zerocast.integrations.torchtitan.train_spec import Parallelize

pytestmark = needs_torchtitan
FLAGS = ("tp", "cp", "fsdp", "dp_replicate", "dp_shard", "pp", "ep")


def passes(case: Case, tp: int = 2, cp: int = 1) -> list[dict[str, Any]]:
    """Return what a parallelize_fn is told at each call."""
    seen: list[dict[str, Any]] = []

    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        enabled = [name for name in FLAGS if getattr(parallel_dims, f"{name}_enabled")]
        recomputes, compiles = job_config.activation_checkpoint.mode, job_config.compile.enable
        seen.append(
            {"enabled": enabled, "prepared": is_prepared(model), "recomputes": recomputes, "compiles": compiles}
        )
        assert (parallel_dims.tp, parallel_dims.cp) == (tp, cp)
        return model

    config = ConfigManager().parse_args(case.arguments("nowhere"))
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=cp, tp=tp, pp=1, ep=1, etp=1, world_size=2 * cp * tp)
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)]), "output": nn.Linear(32, 32)})
    mesh = SimpleNamespace(_flatten=lambda name: None)
    with mock.patch.object(ParallelDims, "get_mesh", return_value=mesh):
        assert Parallelize(parallelize)(model, dims, config) is model
    return seen


RECOMPUTED = Case("nvfp4", options=("--activation_checkpoint.mode=full", "--compile.enable"))


def test_slices_first() -> None:
    first, second = passes(RECOMPUTED, cp=2)
    assert first == {"enabled": ["tp", "cp"], "prepared": False, "recomputes": "none", "compiles": False}
    shards = ["fsdp", "dp_shard"]
    assert second == {"enabled": shards, "prepared": True, "recomputes": "full", "compiles": True}


@pytest.mark.parametrize(("converters", "tp"), [("", 2), (RECOMPUTED.converters, 1)])
def test_one_pass_where_nothing_is_prepared_in_between(converters: str, tp: int) -> None:
    (only,) = passes(dataclasses.replace(RECOMPUTED, converters=converters), tp)
    assert not only["prepared"]
    assert (only["recomputes"], only["compiles"]) == ("full", True)
    assert ("tp" in only["enabled"]) == (tp == 2)
