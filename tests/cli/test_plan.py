"""zerocast plan: published models have the parameters that they are known for; a run takes and sends what was planned."""

import gc
import importlib
import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.observed import Traffic, settled_bytes
from tests.optim.probe import Spec
from tests.optim.runs import ADAM, Run, Trainer, planned_config
from tests.selection import some, worlds
from zerocast import ZeroAdamW, ZeroConfig, ZeroMuon
from zerocast.cast.amaxes import split_rows
from zerocast.cli import main
from zerocast.distributed.gradient_wire import RankOrderReduceScatter
from zerocast.footprint.footprint import OPTIMIZERS, Setup, footprint
from zerocast.footprint.model_files import PRESET_FILE, Parameter, presets, read_model
from zerocast.footprint.weight_bytes import PlannedConfig
from zerocast.footprint.zero_bytes import cut_amaxes
from zerocast.formats import get_format
from zerocast.optim.reduction import PendingBucket, Reduction

KNOWN = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
FORMATS = ("nvfp4", "mxfp8", "fp8_block", "fp8_current", "fp8_delayed", "bf16")
LAYERS = 4

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 8}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 96}


def test_presets_are_what_transformers_builds():
    """The presets are what `python -m tests.cli.presets` finds in transformers."""
    pytest.importorskip("transformers")
    made = importlib.import_module("tests.cli.presets")
    assert made.text() == PRESET_FILE.read_text()


@pytest.mark.parametrize(
    ("config", "quantized"),
    [
        (LLAMA, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (MIXTRAL, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}),
        (GPT2, {"c_attn", "c_proj", "c_fc"}),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_config_is_built_by_transformers(capsys, tmp_path, config, quantized):
    """transformers builds a config from its file and its folder. Routers, embeddings and heads stay as they are."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(str(tmp_path))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert [(p.name, p.shape) for p in model.parameters] == [(n, tuple(p.shape)) for n, p in built.named_parameters()]
    assert {p.name.removesuffix(".weight").rpartition(".")[2] for p in model.parameters if p.linear} == quantized
    assert {p.unit for p in model.parameters} == {-1, 0, 1}
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(path)]) == 0
        name = tmp_path.name if path == tmp_path else "config"
        assert capsys.readouterr().out.startswith(f"{name}: {built.num_parameters():,} parameters")


def test_a_config_without_transformers(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["plan", str(tmp_path)]) == 2
    assert "is built by transformers: pip install 'zerocast[hf]'" in capsys.readouterr().err


def test_typos_and_presets_are_answered_without_torch():
    """Typos and presets need no torch, which takes seconds to import."""
    statuses = {
        "llama3-8": 2,
        "llama3-8b --format nvfp": 2,
        "deepseek-v3 --png no/plan.png": 2,
        "llama3-8b": 0,
        "gpt-oss-20b --format mxfp8 --optimizer muon --moment-dtype 8bit": 0,
        "qwen3-8b --format fp8_block --parallel hsdp --grad-wire fp8_1x128": 0,
        "llama3-8b --sweep --json": 0,
    }
    program = (
        "import sys; from zerocast.cli import main\n"
        "statuses = [main(['plan', *line.split()]) for line in sys.argv[1:]]\n"
        "assert not {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "print(statuses)"
    )
    done = subprocess.run([sys.executable, "-c", program, *statuses], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [str([*statuses.values()])], done.stderr


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8:block=32x32", "mxfp4", "int4", "fp8_block", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("matrix", [(96, 64), (64, 160), (256, 1152)])
def test_amaxes_of_cut_rows_are_those_of_a_cast(fmt, matrix):
    """The counts agree for shards of a few elements and of several block rows, with the first cut anywhere."""
    spec, numel = get_format(fmt), math.prod(matrix)
    for step in (32, 48, 80, 128, 160, 512, 2048, 32 * matrix[1], 48 * matrix[1], 96 * matrix[1], 6144 + 128):
        for first in {16, 32, 128, 32 * matrix[1], step}:
            cuts = range(first, numel, step)
            expected = sum(rows.numel for rows in split_rows(spec, matrix, cuts))
            assert cut_amaxes(spec, matrix, cuts) == expected, (step, first)


def test_what_a_preset_leaves_out_is_said(capsys):
    assert main(["plan", "deepseek-v3", "--format", "nvfp4"]) == 0
    assert "not counted: the layer for multi-token prediction" in capsys.readouterr().out
    assert main(["plan", "llama3-8b"]) == 0
    assert "not counted" not in capsys.readouterr().out


@pytest.mark.parametrize("name", KNOWN)
def test_published_models(name):
    parameters = read_model(name).parameters
    assert sum(torch.Size(parameter.shape).numel() for parameter in parameters) == KNOWN[name]
    assert len({parameter.name for parameter in parameters}) == len(parameters)
    assert KNOWN.keys() == presets().keys()


def test_what_is_left_for_activations(capsys):
    """The plan uses the memory that torch reports of a GPU. 70 billion parameters on 8 ranks leave nothing of an H100."""
    assert main(["plan", "llama3-8b"]) == 0
    left = [line.split()[3:] for line in capsys.readouterr().out.splitlines() if line.endswith(("49.6", "110.3"))]
    assert left == [["58.9", "56.0", "49.6"], ["119.6", "116.7", "110.3"]]
    assert main(["plan", "llama3-70b", "--ranks", "8"]) == 0
    assert "does not fit" in capsys.readouterr().out


def layers() -> list[Parameter]:
    """Return the parameters of a small model with norms between its weights, as in a transformer."""
    found = [Parameter("embedding", (512, 128), linear=False)]
    for i in range(LAYERS):
        found += [Parameter(f"norm{i}", (128,), False, i)]
        found += [Parameter(f"up{i}", (512, 128), True, i), Parameter(f"down{i}", (128, 512), True, i)]
    return found


def run_of(fmt: str, stage: int, config: ZeroConfig, muon: bool = False) -> Run:
    """Return the run that trains these layers."""
    specs = tuple(
        Spec(p.name, p.shape, fmt if p.linear and fmt != "bf16" else "plain", group=int(muon and p.linear))
        for p in layers()
    )
    if not muon:
        return Run(specs, stage=stage, config=config, options=(ADAM,))
    options = {**ADAM, "use_muon": False}, {"lr": 1e-2, "use_muon": True}
    return Run(specs, stage=stage, config=config, options=options, optimizer=ZeroMuon)


TRANSIENT = ("columnwise copies", "buckets")


def held_and_sent(fmt: str, config: ZeroConfig, muon: bool = False) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the bytes that a model and its optimizer keep between steps, the bytes of the tensors in the
    collectives of a step (sent to others in an all-to-all), and their calls.
    """
    while gc.collect():  # what one collection frees may hold the last reference to another cycle
        pass
    before = settled_bytes(frozenset())
    trainer = Trainer(run_of(fmt, 2, config, muon))
    trainer.train(range(2))
    with Traffic() as traffic:
        trainer.step(2)
    trainer.probe.zero_grad()
    gc.collect()
    sizes = {kind: [n for k, n in traffic.log if k == kind] for kind in ("reduce-scatter", "all-reduce", "all-gather")}
    sizes["all-to-all"] = traffic.exchanged
    sent, calls = ({kind: count(found) for kind, found in sizes.items()} for count in (sum, len))
    return settled_bytes(frozenset()) - before, sent, calls


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", worlds(3, slow=(1, 2)))
@pytest.mark.parametrize("fmt", some({fmt: fmt for fmt in FORMATS}, "bf16", "mxfp8", "nvfp4"))
def test_zero_is_what_a_run_takes_and_sends(ranks, fmt, world, optimizer):
    config = ZeroConfig(bucket_size=2**17)
    planned = footprint(layers(), fmt, Setup("zero2", world, config=planned_config(config), optimizer=optimizer))
    kept = sum(nbytes for purpose, nbytes in planned.memory.items() if purpose not in TRANSIENT)
    found = ranks(world)(held_and_sent, fmt, config, optimizer == "muon")
    exchanged = {"all-to-all": max(sent["all-to-all"] for _, sent, _ in found)} if optimizer == "muon" else {}
    for held, sent, counted in found:
        assert held == pytest.approx(kept, rel=0.03), planned.memory
        assert planned.wire == exchanged | {
            "reduce-scatter": sent["reduce-scatter"] * (world - 1),
            "all-reduce": pytest.approx(sent["all-reduce"] * 2 * (world - 1) / world, abs=2),
            "all-gather": sent["all-gather"] * (world - 1) // world,
        }
        calls = dict.fromkeys(counted, 0)
        for collective in planned.collectives:
            calls[collective.kind] += collective.calls
        assert world == 1 or counted == calls


def test_moments_in_8_bits_are_what_was_planned(ranks):
    """The plan counts the moments, and the all-reduce of groups that ranks cut. Rows of 200 elements have such groups."""
    config = ZeroConfig(bucket_size=2**17, moment_dtype="8bit")
    planned = footprint(layers(), "nvfp4", Setup("zero2", 3, config=planned_config(config)))
    kept = sum(nbytes for purpose, nbytes in planned.memory.items() if purpose not in TRANSIENT)
    assert [held for held, _, _ in ranks(3)(held_and_sent, "nvfp4", config)] == [pytest.approx(kept, rel=0.03)] * 3
    planned = footprint(layers(), "nvfp4", Setup("zero2", 2, config=planned_config(config), optimizer="muon"))
    kept = sum(nbytes for purpose, nbytes in planned.memory.items() if purpose not in TRANSIENT)
    for held, _, _ in ranks(2)(held_and_sent, "nvfp4", config, True):
        assert held == pytest.approx(kept, rel=0.03), planned.memory
    specs = (Spec("wide", (240, 200)), Spec("codes", (32, 48), "nvfp4"), Spec("vector", (1000,)))
    parameters = [Parameter(spec.name, spec.shape, spec.fmt == "nvfp4") for spec in specs]
    collectives = footprint(parameters, "nvfp4", Setup("zero2", 3, config=planned_config(config))).collectives
    planned_bytes = [one.sent for one in collectives if one.kind == "all-reduce"]
    for sizes in ranks(3)(all_reduced, Run(specs, config=config, options=(ADAM,))):
        assert planned_bytes == pytest.approx([2 * nbytes * 2 / 3 for nbytes in sizes], abs=2)
        assert len(sizes) == 3


def test_momentum_in_8_bits_is_planned_with_its_scales():
    """Momentum takes a byte an element, and four for each group: a row of 200 elements has two of them."""
    setup = Setup("zero2", 1, config=ZeroConfig(moment_dtype="8bit"), optimizer="muon")
    planned = footprint([Parameter("matrix", (512, 200), True)], "nvfp4", setup)
    assert planned.memory["moments"] == 512 * 200 + 512 * 2 * 4


def all_reduced(run: Run) -> list[int]:
    """Return the bytes of each all-reduce of a step: the norm, amaxes and cut groups."""
    trainer = Trainer(run)
    trainer.train(range(2))  # the second step compares what is left out
    with Traffic() as traffic:
        trainer.step(2)
    return traffic.sent["all-reduce"]


def test_muon_is_spread_over_ranks():
    """Eight matrices of one size: two ranks have four each, on three one has three, on sixteen half have none."""
    for world, busiest in ((1, 1.0), (2, 1.0), (3, 9 / 8), (8, 1.0), (16, 2.0)):
        one, other = (footprint(layers(), "fp8_current", Setup("zero2", world, optimizer=name)) for name in OPTIMIZERS)
        assert (one.busiest, other.busiest) == (0, busiest)
        matrices = -(-2 * LAYERS // world) * 512 * 128
        cut = (other.memory["masters"] - 4 * matrices) // 4
        assert other.memory["moments"] == 4 * matrices + 8 * cut


def test_muon_is_planned_where_zerocast_owns_it(capsys):
    assert main(["plan", "llama3-8b", "--ranks", "64", "--optimizer", "muon"]) == 0
    assert "1.06 of the mean" in capsys.readouterr().out
    assert main(["plan", "llama3-8b", "--parallel", "fsdp2", "--optimizer", "muon"]) == 2
    assert "muon is planned as ZeroMuon" in capsys.readouterr().err
    assert main(["plan", "llama3-8b", "--sweep", "--optimizer", "muon"]) == 2
    assert "a sweep has its own ranks and shardings, with AdamW" in capsys.readouterr().err
    with pytest.raises(ValueError, match="optimizer is one of adamw, muon, got 'sgd'"):
        Setup(optimizer="sgd")


@pytest.mark.parametrize("fmt", ["nvfp4:exact_in_fp8", "mxfp4"])
def test_operands_in_fp8_are_planned(fmt):
    """Operands in FP8 take a byte an element of one block, of one weight under ZeroAdamW, beside kept copies too."""
    numel = 512 * 128
    copies = 2 * LAYERS * numel // 2
    for setup, expected in (
        (Setup("fsdp2", 2), 2 * numel),
        (Setup("zero2", 2), numel),
        (Setup("zero2", 2, config=PlannedConfig(keep_columnwise=True)), numel + copies),
    ):
        found = footprint(layers(), fmt, setup).memory["columnwise copies"]
        assert 0 < found - expected <= 0.11 * expected, "and scales"


def test_stage_1_keeps_gradients():
    one, two = (footprint(layers(), "nvfp4", Setup(parallel, 2)).memory for parallel in ("zero1", "zero2"))
    assert one["gradients"] - two["gradients"] == 2 * sum(math.prod(p.shape) for p in layers())
    assert one["buckets"] < two["buckets"]


@pytest.mark.parametrize("parallel", ["zero1", "zero2", "fsdp2"])
def test_quantized_gradients_halve_their_bytes(capsys, parallel):
    """Quantized gradients take 1.03 bytes an element in place of 2, and nothing else changes on the wire."""
    arguments = ["plan", "llama3-8b", "--ranks", "8", "--parallel", parallel, "--json"]
    wires = []
    for options in ([], ["--grad-wire", "fp8_1x128"]):
        assert main([*arguments, *options]) == 0
        wires.append(json.loads(capsys.readouterr().out)["footprints"][0]["wire"])
    assert wires[1].pop("all-to-all") == pytest.approx(wires[0].pop("reduce-scatter") * 33 / 64, rel=1e-6)
    assert wires[0] == wires[1]


def chain(fmt: str) -> nn.Sequential:
    """Return layers with small activations and weights of several sizes, with plain parameters between them."""
    sizes = (256, 512, 128, 640, 256)
    parts = [(nn.Linear(k, n, bias=False), nn.LayerNorm(n)) for k, n in pairwise(sizes)]
    model = nn.Sequential(*(layer for part in parts for layer in part), nn.Linear(256, 1000)).bfloat16()
    return model if fmt == "bf16" else zerocast.quantize_(model, zerocast.Recipe({"[0-7].weight": fmt}))  # type: ignore[return-value]


def gradients_at_the_most(fmt: str, stage: int, config: ZeroConfig) -> int:
    """Return the most bytes that gradients and buckets take in a backward pass, without the FP32 shard and, at
    stage 1, without the gradients that stay.
    """
    model = chain(fmt)
    reducer = ZeroAdamW(model.named_parameters(), stage=stage, config=config)._reducer
    levels: list[int] = []

    def look() -> int:
        stays = [part.local for part in reducer.gradients.parts if stage == 1 and part.local is not None]
        known = [tensor.untyped_storage().data_ptr() for tensor in (reducer.gradients.flat, *stays)]
        levels.append(settled_bytes(frozenset(known)))
        return levels[-1]

    def watched(call: Any) -> Any:
        def run(*args: Any) -> Any:
            result = call(*args)
            look()
            return result

        return run

    x = torch.randn(2, 256, dtype=torch.bfloat16)
    loss = model(x).float().square().mean()
    gc.collect()
    before = look()
    # Nothing arrives before it is waited for. A single rank waits for nothing.
    is_complete = dist.get_world_size() == 1
    with (
        mock.patch.object(Reduction, "is_complete", return_value=is_complete),
        mock.patch.object(reducer, "_put", watched(reducer._put)),
        mock.patch.object(PendingBucket, "packed", watched(PendingBucket.packed)),
        mock.patch.object(Reduction, "__init__", watched(Reduction.__init__)),
        mock.patch.object(RankOrderReduceScatter, "__init__", watched(RankOrderReduceScatter.__init__)),
    ):
        loss.backward()
    assert len(levels) > len(list(model.parameters()))
    return max(levels) - before


@pytest.mark.parametrize(
    "config",
    [
        ZeroConfig(2**18),
        ZeroConfig(2**18, grad_dtype=torch.float32),
        ZeroConfig(2**18, deterministic=True),
        ZeroConfig(2**18, grad_wire="fp8_1x128"),
    ],
    ids=["bf16", "fp32", "deterministic", "fp8 wire"],
)
@pytest.mark.parametrize(("stage", "fmt"), [(1, "bf16"), (2, "nvfp4"), models.slow(1, "nvfp4"), models.slow(2, "bf16")])
def test_buckets_in_flight_are_what_was_planned(ranks, fmt, stage, config):
    model = chain("bf16").named_parameters()
    parameters = [Parameter(name, tuple(p.shape), p.dim() == 2 and name != "8.weight") for name, p in model]
    for world in (1, 2):
        planned = footprint(parameters, fmt, Setup(f"zero{stage}", world, config=planned_config(config))).memory[
            "buckets"
        ]
        for found in ranks(world)(gradients_at_the_most, fmt, stage, config):
            assert planned > 2**18
            assert found == pytest.approx(planned, abs=2**15)  # activations


def test_fsdp_gathers_codes_and_scales():
    """The plan agrees with a count by hand: nvfp4 is half a byte an element and a byte a 16x16 block."""
    parameters = [Parameter(f"w{i}", (512, 256), True, i) for i in range(3)]
    shard = 512 * 256 // 8
    planned = footprint(parameters, "nvfp4", Setup("fsdp2", 8))
    sent = 16 + 16 + shard // 2 + shard // 256  # the header and the tensor amax, aligned
    assert planned.memory["weights"] == 3 * sent + 2 * 8 * sent
    large = footprint([Parameter(f"w{i}", (16384, 32768), True, i) for i in range(3)], "nvfp4", Setup("fsdp2", 8))
    shard = 16384 * 32768 // 8
    codes, side = shard // 2, 16 + 16 + shard // 256
    # more than are kept: codes are there for one gather
    assert large.memory["weights"] == 3 * side + codes + 2 * 8 * (side + codes)
    shard = 512 * 256 // 8
    # the gradients of two blocks, in bf16
    assert planned.memory["buckets"] == 2 * 2 * 8 * shard
    assert planned.memory["moments"] == 8 * 3 * shard
    eight_bit = footprint(parameters, "nvfp4", Setup("fsdp2", 8, config=PlannedConfig(moment_dtype="8bit")))
    assert eight_bit.memory["moments"] == 2 * 3 * (shard + 4 * shard // 128)
    quantized = footprint(parameters, "nvfp4", Setup("fsdp2", 8, config=PlannedConfig(grad_wire="fp8_1x128")))
    assert quantized.wire["all-to-all"] == 7 * 3 * (shard + shard // 32)
    replicated = footprint(parameters, "nvfp4", Setup("hsdp", 16, 8))
    assert replicated.memory == planned.memory
    # gradients in bf16, and a flag for each weight and two numbers
    assert replicated.wire["all-reduce"] - planned.wire["all-reduce"] == 3 * shard * 2 + (3 + 2) * 2
    cut = footprint([Parameter("w", (72, 256), True, 0), *parameters], "fp8_block", Setup("fsdp2", 8))
    # 72 rows are one block row, which every rank cuts; 512 rows are four, each cut at its middle
    assert cut.wire["all-reduce"] == 2 * 2 * (1 * 2 + 3 * 4 * 2) * 7 // 8 + 2 * 4 * 7 // 8


def sent_by_fsdp(formats: tuple[str, ...], hidden: int, shape: tuple[int, ...] | None) -> dict[str, list[int]]:
    """Return the bytes that a rank puts into each collective of a step: forward and backward pass, clipping
    and optimizer.
    """
    names = None if shape is None else ("replicas", "shards")
    model = models.sharded(Net(formats, 128, hidden), mesh=models.mesh(shape, names))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        with Traffic() as traffic:
            model(models.batch(0, 128)).float().square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
    return traffic.sent


@pytest.mark.parametrize(("hidden", "shape"), [(96, None), (160, (2, 2))], ids=["fsdp2", "hsdp"])
def test_fsdp_sends_what_was_planned(ranks, hidden, shape):
    """The plan agrees on codes, scales, headers, cut amaxes and gradients on 3 ranks, and on 2x2 with replicas."""
    world, shards = (3, 3) if shape is None else (4, 2)
    linear, plain = (
        {"up": (hidden, 128), "down": (128, hidden)},
        {"norm": (128,), "norm.bias": (128,), "bias": (hidden,)},
    )
    parameters = [Parameter(f"{name}{i}", size, True, i) for i in range(2) for name, size in linear.items()]
    parameters += [Parameter(f"{name}{i}", size, False, i) for i in range(2) for name, size in plain.items()]
    setup = Setup("hsdp" if shape else "fsdp2", world, shards, PlannedConfig(grad_dtype="float32"))
    for fmt in ("nvfp4", "fp8_current", "mxfp8:block=32x32"):
        planned = {str(one): (one.calls, one.sent) for one in footprint(parameters, fmt, setup).collectives}
        for sent in ranks(world)(sent_by_fsdp, (fmt, fmt), hidden, shape):
            amaxes, *reports_and_gradients = sent["all-reduce"]
            reports, gradients = reports_and_gradients[: shape is not None], reports_and_gradients[shape is not None :]
            part = (shards - 1) / shards
            found = {
                "reduce-scatter of gradients": (len(sent["reduce-scatter"]), sum(sent["reduce-scatter"]) * part),
                "all-reduce of gradients": (len(gradients), sum(gradients)),  # to two replicas: 2 * n * 1/2
                "all-reduce of the norm": planned["all-reduce of the norm"],  # torch's own
                "all-reduce of amaxes": (1, int(2 * amaxes * part)),
                "all-reduce of reports of replicas": (len(reports), sum(reports)),
                "all-gather of weights": (len(sent["all-gather"]), sum(sent["all-gather"]) * (shards - 1)),
            }
            assert found == planned


def test_entries_of_a_list_are_numbered_where_they_are_counted(tmp_path):
    block = {"name": "layers", "count": 2, "parameters": [{"name": "w", "shape": [4]}]}
    entries = [{"name": "head", "shape": [4]}, {"name": "w", "shape": [4], "count": 2}, block]
    (tmp_path / "list.json").write_text(json.dumps({"parameters": entries}))
    names = [parameter.name for parameter in read_model(str(tmp_path / "list.json")).parameters]
    assert names == ["head", "w.0", "w.1", "layers.0.w", "layers.1.w"]


def test_weights_that_a_format_cannot_take(capsys, tmp_path):
    (tmp_path / "odd.json").write_text(
        json.dumps({"parameters": [{"name": "w", "shape": [30, 64], "quantized": True, "count": 2}]})
    )
    assert main(["plan", str(tmp_path / "odd.json"), "--ranks", "2"]) == 0
    assert "2 linear weights stay in bf16: nvfp4 does not support their shape" in capsys.readouterr().out


@pytest.mark.parametrize("parallel", ["zero1", "zero2", "fsdp2", "hsdp"])
def test_the_command(capsys, tmp_path, parallel):
    arguments = ["plan", "llama3-8b", "--ranks", "16", "--parallel", parallel, "--format", "mxfp8"]
    picture = tmp_path / "plan.png"
    assert main([*arguments, "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["format"] for f in found["footprints"]] == ["mxfp8", "fp8_block", "bf16"]
    for f in found["footprints"]:
        assert f["total_memory"] == sum(f["memory"].values())
        assert f"{f['total_memory'] / 2**30:.3f}" in text
        assert f"{f['total_wire'] / 1e9:.3f}" in text
        assert f["memory"]["masters"] == pytest.approx(4 * KNOWN["llama3-8b"] / (8 if parallel == "hsdp" else 16), 1e-3)


def test_a_sweep(capsys, tmp_path):
    """The numbers of a sweep are those of single plans, and its table shows them."""
    command = ["plan", "llama3-8b", "--sweep"]
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as saved:
        assert main([*command, "--json", "--png", str(tmp_path / "sweep.png")]) == 0
    assert saved.call_args.args[0].get_suptitle().startswith("llama3-8b: 8,")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(capsys.readouterr().out)["sweep"]
    assert [row["ranks"] for row in rows] == [8, 64, 512, 4096, 16384] * 3 + [64, 512, 4096, 16384]
    parameters = read_model("llama3-8b").parameters
    for row in rows:
        parallel, _, shards = row["sharding"].partition(" by ")
        planned = footprint(parameters, "nvfp4", Setup(parallel, row["ranks"], int(shards or 8)))
        assert [one["sent"] for one in row["collectives"]] == [one.sent for one in planned.collectives]
        assert row["memory"] == planned.memory
    assert main(command) == 0
    table = capsys.readouterr().out
    assert table.count("sent per rank") == 4
    for row in rows:
        assert f"{sum(row['memory'].values()) / 2**30:,.2f} GiB" in table


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not a config"),
        ('{"hidden_size": 8}', "Should have a `model_type` key"),
        ('{"model_type": "falkon", "hidden_size": 8}', "model type `falkon`"),
        ('{"parameters": [{"name": "w"}]}', "it lacks 'shape'"),
        ('{"parameters": [{"name": "w", "count": 1000000000000, "parameters": []}]}', "have no parameters"),
        ('{"parameters": [{"name": "w", "shape": [0, 2]}]}', "those have elements"),
        ('{"parameters": 3}', "is not a config"),
        (
            json.dumps(LLAMA | {"num_attention_heads": 0}),
            "is not a config that can be planned for",
        ),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**12}), "it has 1,000,000,000,000 layers"),
        ('{"parameters": [{"name": "w", "shape": [2], "count": 1000000}]}', "it has more than 250,000 parameters"),
        ('{"parameters": [{"name": "w", "shape": [1e999]}]}', "is not a config"),
    ],
)
def test_configs_that_are_none(capsys, tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["plan", os.fspath(path)]) == 2
    assert message in capsys.readouterr().err
