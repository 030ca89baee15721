"""How the peers are driven: TransformerEngine gets the shard that we get. A recording stands in for it; nothing is timed here."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerocast.bench.peers import transformer_engine, usable
from zerocast.bench.workload import BenchEnv, C

CPU = torch.device("cpu")
SMALL = C.scaled(64)


class Recording:
    """The names of TransformerEngine that are used, each noting its call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return SimpleNamespace(
                make_empty=lambda shape, dtype, device: torch.empty(shape, dtype=dtype), step=lambda: None
            )

        return call


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    modules = {"transformer_engine_torch": SimpleNamespace(DType=SimpleNamespace(kFloat8E4M3="e4m3"))}
    monkeypatch.setattr(importlib, "import_module", lambda name: modules.get(name, recording))
    monkeypatch.setattr(transformer_engine, "_group", lambda device: "group")
    return recording


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "mxfp8"])
def test_transformer_engine_gets_the_same_shard(recorded: Recording, fmt: str):
    job = transformer_engine.PEER.works["whole step"](SMALL, fmt, BenchEnv(CPU, "cpu", 0))
    job.run()
    name, (weights, masters, starts, group), options = recorded.calls[-1]
    assert (name, group, options) == ("quantize_master_weights", "group", {"manual_post_all_gather_processing": True})
    assert [tuple(weight.shape) for weight in weights] == list(SMALL.shapes)
    spans = list(SMALL.spans(SMALL.rank))
    assert sum(master is not None for master in masters) == sum(span.numel > 0 for span in spans)
    for master, start, span in zip(masters, starts, spans, strict=True):
        assert (start, 0 if master is None else master.numel()) == (span.start if span.numel else None, span.numel)
    (adam,) = [call for call in recorded.calls if call[0] == "FusedAdam"]
    (parameter,) = adam[1][0]
    assert parameter.numel() == SMALL.owned and parameter.grad is not None and adam[2]["adam_w_mode"]


def test_its_transpose_follows_a_cast(recorded: Recording):
    transformer_engine.PEER.works["transpose"](SMALL, "fp8_block", BenchEnv(CPU, "cpu", 0)).run()
    assert [name for name, *_ in recorded.calls][-2:] == ["quantize_master_weights", "post_all_gather_processing"]


def test_fp4_is_not_asked_of_a_gpu_that_cannot(recorded: Recording, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RuntimeError, match="needs compute capability 10"):
        transformer_engine.PEER.works["cast"](SMALL, "nvfp4", BenchEnv(CPU, "cpu", 0))


def test_a_cpu_has_one_peer():
    assert [peer.name for peer in usable("cpu")] == ["torch fused", "torch copies"]
