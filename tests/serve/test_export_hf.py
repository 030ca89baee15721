"""Folders that transformers loads as they are: its weights are ours, and so are its tokens."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerocast
from tests.serve.models import dequantized, greedy, in_bf16, logits, made, quantized, read, transformers
from zerocast import Recipe
from zerocast.export import export_hf
from zerocast.serve import named_tensors, write

ULP = 2**-8  # of bf16, relative: compressed-tensors multiplies in bf16, and holds per-tensor scales in it

SLOW_CASES = [
    *((model, "deepseek", "fp8_block", 0.0) for model in ("qwen3", "mixtral", "qwen3_moe")),
    *(("llama", "compressed-tensors", fmt, 0.0) for fmt in ("mxfp8", "mxfp8:block=32x32", "mxfp4")),
    *((model, "compressed-tensors", "nvfp4", ULP) for model in ("llama", "llama, tied", "qwen3")),
    ("llama", "compressed-tensors", "fp8_delayed", 2 * ULP),
    *((model, "compressed-tensors", "fp8_current", 2 * ULP) for model in ("llama", "mixtral", "qwen3_moe")),
    *((model, "compressed-tensors", "int4", 0.0) for model in ("mixtral", "qwen3_moe")),
    *((model, "bf16", "nvfp4", 0.0) for model in ("llama", "llama, tied", "qwen3_moe")),
]
CASES = [
    ("llama, tied", "deepseek", "fp8_block", 0.0),
    ("llama", "compressed-tensors", "fp8_block", 0.0),
    ("llama", "compressed-tensors", "int4", 0.0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
]


@pytest.mark.parametrize(("name", "naming", "fmt", "rounding"), CASES)
def test_transformers_reads_what_was_trained(tmp_path: Path, name: str, naming: str, fmt: str, rounding: float) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    model = quantized(name, fmt)
    files = export_hf(model, tmp_path / "out", naming, allow_unequal_scales=True, shard_bytes=10**6)
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    found, wanted = read(tmp_path / "out"), dequantized(model)
    assert found.dtype == torch.bfloat16
    logits(found)  # compressed-tensors decompresses at the first forward pass
    weights = dict(found.named_parameters())
    for key, value in wanted.named_parameters():
        torch.testing.assert_close(weights[key], value, rtol=rounding, atol=0.0)
    if not rounding:
        assert torch.equal(logits(found), logits(wanted))
        assert torch.equal(greedy(found), greedy(wanted))
    live = in_bf16(model)
    bound = 8 * ULP * logits(wanted).abs().max().item()
    torch.testing.assert_close(logits(found), logits(live), rtol=0.0, atol=bound)
    if rounding <= ULP:  # beyond it tokens that are about as likely change places
        assert torch.equal(greedy(found), greedy(live))


def test_the_config_says_what_is_not_quantized(tmp_path: Path) -> None:
    model = zerocast.quantize_(made("llama"), Recipe({"*.mlp.*": "nvfp4"}), dtype=torch.bfloat16)
    export_hf(model, tmp_path / "out", "modelopt", allow_unequal_scales=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    said = config["quantization_config"]
    assert (said["quant_method"], said["quant_algo"], said["group_size"]) == ("modelopt", "W4A16_NVFP4", 16)
    attention = [f"model.layers.0.self_attn.{part}_proj" for part in "koqv"]
    assert said["ignore"] == ["lm_head", *attention]


def test_formats_beside_each_other(tmp_path: Path) -> None:
    recipe = Recipe({"*.mlp.*": "mxfp4", "*.self_attn.*_proj.weight": "fp8_block"})
    model = zerocast.quantize_(made("llama"), recipe, dtype=torch.bfloat16)
    export_hf(model, tmp_path / "out", "compressed-tensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    targets = {group["format"]: group["targets"] for group in said["config_groups"].values()}
    assert targets["mxfp4-pack-quantized"] == [f"model.layers.0.mlp.{part}_proj" for part in ("down", "gate", "up")]
    found, wanted = read(tmp_path / "out"), dequantized(model)
    assert torch.equal(logits(found), logits(wanted))


@pytest.mark.parametrize("naming", ["compressed-tensors", "modelopt"])
def test_unequal_scales_of_fused_weights(tmp_path: Path, naming: str, caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"2 groups of weights that engines fuse .* to 0.\d\d of their values"):
        export_hf(quantized("llama", "nvfp4"), tmp_path / "out", naming)
    assert not list(tmp_path.iterdir())
    export_hf(quantized("llama", "nvfp4"), tmp_path / "warned", naming, allow_unequal_scales=True)
    assert "groups of weights that engines fuse" in caplog.text
    caplog.clear()
    export_hf(quantized("llama", "nvfp4", "llama"), tmp_path / "out", naming)
    assert not caplog.text


def _cut_blocks() -> nn.Module:
    config = transformers.LlamaConfig(**{**made("llama").config.to_dict(), "intermediate_size": 192})
    model = transformers.AutoModelForCausalLM.from_config(config)
    return zerocast.quantize_(model, Recipe({"*_proj.weight": "fp8_block"}), dtype=torch.bfloat16)


def _untied() -> nn.Module:
    model: Any = made("llama, tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _tied() -> nn.Module:
    model: Any = made("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _renamed() -> nn.Module:
    model: Any = made("llama")
    model.model.extra = nn.Linear(4, 4)
    return model


def _recipe(name: str, **formats: str) -> Callable[[], nn.Module]:
    """A model of which the weights with these parts of names are quantized."""
    recipe = Recipe({f"*.{part}*": fmt for part, fmt in formats.items()}, share_amax=())
    return lambda: zerocast.quantize_(made(name), recipe, dtype=torch.bfloat16)


REFUSED: dict[str, tuple[Any, str, str]] = {
    "a block that is cut": (_cut_blocks, "deepseek", "takes 2 blocks of 96 for those of 128 and does not notice"),
    "a part of a fused layer": (
        _recipe("llama", q_proj="fp8_block"),
        "deepseek",
        r"q_proj.weight is fp8_block and \S+k_proj.weight is not quantized: engines compute the 3 weights of this layer together",
    ),
    "fused layers of two formats": (
        _recipe("llama", gate_proj="mxfp8", up_proj="nvfp4"),
        "compressed-tensors",
        r"gate_proj.weight is mxfp8 and \S+up_proj.weight is nvfp4: engines compute the 2 weights of this layer together",
    ),
    "some matrices of experts": (
        _recipe("qwen3_moe", **{"experts.down_proj": "fp8_block"}),
        "deepseek",
        r"gate_proj.weight is not quantized and \S+down_proj.weight is fp8_block: engines compute the 6 weights",
    ),
    "a router": (
        _recipe("phimoe", router="fp8_block", experts="fp8_block"),
        "deepseek",
        "block_sparse_moe.gate.weight is fp8_block and the weight of a router of experts",
    ),
    "several algorithms of modelopt": (
        _recipe("llama", self_attn="mxfp8", mlp="fp8_block"),
        "modelopt",
        "the weights are mxfp8 and fp8_block: in a model of several algorithms engines know few of modelopt's",
    ),
    "a head that config.json ties": (_untied, "bf16", "lm_head.weight is in no place of the model"),
    "a head that config.json does not tie": (_tied, "bf16", "lm_head.weight is missing"),
    "a name that no mapping knows": (_renamed, "bf16", "model.extra.weight is in no place of the model"),
    "an unknown naming": (lambda: made("llama"), "gguf", "naming is one of bf16, compressed-tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_readers_would_misread_is_refused(tmp_path: Path, case: str) -> None:
    make, naming, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        export_hf(make(), tmp_path / "out", naming)
    assert not list(tmp_path.iterdir())


def test_models_of_others(tmp_path: Path) -> None:
    """One without a config, one that transformers does not know, one without a causal model, and code that it would have to run."""
    with pytest.raises(TypeError, match="export_hf expects a model of transformers, got Linear: pass the config"):
        export_hf(nn.Linear(4, 4), tmp_path / "out", "bf16")
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}')
    with pytest.raises(ValueError, match=r"unheard_of|trust_remote_code"):
        export_hf(Fused(), tmp_path / "out", "bf16", config=tmp_path)
    with pytest.raises(ValueError, match="transformers knows no causal model of CLIPVisionConfig"):
        export_hf(Fused(), tmp_path / "out", "bf16", config=transformers.CLIPVisionConfig())
    assert not (tmp_path / "out").exists()


def names_of_a_fused_model() -> dict[str, Any]:
    """Megatron's layout of one layer of Llama: query, key and value of each group of heads, gate above up."""
    parts = {"q": (0, 128), "k": (128, 192), "v": (192, 256)}
    qkv = {part: [range(first, last), range(256 + first, 256 + last)] for part, (first, last) in parts.items()}
    front = "model.layers.0"
    return {
        "qkv.weight": {f"{front}.self_attn.{part}_proj.weight": found for part, found in qkv.items()},
        "fc1.weight": {
            f"{front}.mlp.gate_proj.weight": [range(512)],
            f"{front}.mlp.up_proj.weight": [range(512, 1024)],
        },
        "fc2.weight": f"{front}.mlp.down_proj.weight",
        "proj.weight": f"{front}.self_attn.o_proj.weight",
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "norm1": f"{front}.input_layernorm.weight",
        "norm2": f"{front}.post_attention_layernorm.weight",
        "norm": "model.norm.weight",
    }


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj = nn.Linear(256, 512, bias=False), nn.Linear(256, 256, bias=False)
        self.fc1, self.fc2 = nn.Linear(256, 1024, bias=False), nn.Linear(512, 256, bias=False)
        self.embedding, self.head = nn.Parameter(torch.randn(96, 256)), nn.Parameter(torch.randn(96, 256))
        for name in ("norm", "norm1", "norm2"):
            self.register_parameter(name, nn.Parameter(torch.rand(256)))


@pytest.mark.parametrize("fmt", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_names_by_a_mapping(tmp_path: Path, fmt: str) -> None:
    model = zerocast.quantize_(Fused(), Recipe({"*.weight": fmt}), dtype=torch.bfloat16)
    config = made("llama").config
    names = names_of_a_fused_model()
    export_hf(model, tmp_path / "out", "compressed-tensors", config=config, names=names)
    found = read(tmp_path / "out")
    logits(found)
    qkv = model.get_parameter("qkv.weight").dequantize().view(2, 256, 256)  # type: ignore[operator]
    weights = dict(found.named_parameters())
    rounding = ULP if fmt == "nvfp4" else 0.0
    for part, wanted in (("q", qkv[:, :128]), ("k", qkv[:, 128:192]), ("v", qkv[:, 192:])):
        stored = weights[f"model.layers.0.self_attn.{part}_proj.weight"]
        torch.testing.assert_close(stored, wanted.reshape(-1, 256), rtol=rounding, atol=0.0)
    assert torch.equal(weights["lm_head.weight"], model.head.bfloat16())


def test_a_mapping_that_cuts_blocks_is_refused(tmp_path: Path) -> None:
    model = zerocast.quantize_(Fused(), Recipe({"*.weight": "fp8_block"}), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="blocks are 128 rows high: a piece begins and ends with a block"):
        export_hf(model, tmp_path / "out", "deepseek", config=made("llama").config, names=names_of_a_fused_model())
    assert not list(tmp_path.iterdir())


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 96}


def test_parameters_that_are_stored_otherwise_are_refused(tmp_path: Path) -> None:
    """Experts of Qwen3VL are stored with rows and columns exchanged."""
    text = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2, "num_experts": 2, "moe_intermediate_size": 32}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    source = transformers.Qwen3VLMoeForConditionalGeneration(config)
    said = "is stored together with other parameters, or transposed, by a mapping of transformers"
    for export in (lambda: export_hf(source, tmp_path / "out", "bf16"), lambda: next(named_tensors(source, "bf16"))):
        with pytest.raises(ValueError, match=said):
            export()
    assert not list(tmp_path.iterdir())


def test_the_config_names_no_code_to_run(tmp_path: Path) -> None:
    """A config that was loaded with code of its own says where that is; the export is of a class of transformers."""
    model = made("llama")
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_other.Other"}
    export_hf(model, tmp_path / "out", "bf16")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_files_of_the_tokenizer_come_along(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "modeling_llama.py", "model.safetensors"):
        (given / name).write_text("{}")
    export_hf(made("llama"), tmp_path / "out", "bf16", files_from=given)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "config.json"} <= names
    assert not {"modeling_llama.py", "model.safetensors"} & names
    assert (tmp_path / "out" / "generation_config.json").read_text() == "{}"


def test_hostile_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    os.mkfifo(tmp_path / "given" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json is a FIFO"):
        export_hf(made("llama"), tmp_path / "out", "bf16", files_from=tmp_path / "given")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(write, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        export_hf(made("llama"), tmp_path / "out", "bf16")
    assert not list(tmp_path.iterdir())
