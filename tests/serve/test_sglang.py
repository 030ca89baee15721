"""The rules of SGLang 0.5.23's loaders, one test a rule, by the file that was read (`sglang/srt/layers/quantization/`).

SGLang itself needs a GPU. What its loader would refuse is shown too, so that the page on live weights does not promise it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serve.models import quantized
from tests.serve.test_live import collected
from zerocast.export import export_hf

pytest.importorskip("safetensors")


def stored(
    tmp_path: Path, name: str, naming: str, fmt: str, share_amax: Any = "llama"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(quantization_config, tensors as the engine receives them)."""
    source = quantized(name, fmt, share_amax if fmt == "nvfp4" else ())
    export_hf(source, tmp_path / "out", naming, allow_unequal_scales=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    return config, collected(source, naming, allow_unequal_scales=True)


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def of_fused(tensors: dict[str, Tensor], suffix: str) -> list[list[Tensor]]:
    """The tensors that one fused layer takes, for each such layer of a Llama of one layer."""
    return [
        [t for part in parts for name, t in tensors.items() if name.endswith(f"{part}.{suffix}")]
        for parts in FUSED.values()
    ]


def test_fp8_config(tmp_path: Path) -> None:
    """fp8.py, Fp8Config: `fp8` in quant_method, an activation scheme, which is dynamic for blocks of two dimensions."""
    config, _ = stored(tmp_path, "llama", "deepseek", "fp8_block")
    assert "fp8" in config["quant_method"] and config["activation_scheme"] == "dynamic"
    assert len(config["weight_block_size"]) == 2
    assert "lm_head" in config["modules_to_not_convert"]  # read as ignored_layers


def test_fp8_block_scales(tmp_path: Path) -> None:
    """fp8.py, Fp8LinearMethod.create_weights: E4M3 `weight`, FP32 `weight_scale_inv`, one for each begun block."""
    _, tensors = stored(tmp_path, "llama", "deepseek", "fp8_block")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        assert tensors[name].dtype == torch.float8_e4m3fn
        scale = tensors[f"{name}_scale_inv"]
        assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (-(-rows // 128), -(-columns // 128)))


def test_fp8_fused_blocks(tmp_path: Path) -> None:
    """fp8.py, validate_block_quant_shapes: each weight of a fused layer has rows in multiples of a block."""
    _, tensors = stored(tmp_path, "llama", "deepseek", "fp8_block")
    assert all(t.shape[0] % 128 == 0 for fused in of_fused(tensors, "weight") for t in fused)


def test_fp8_experts(tmp_path: Path) -> None:
    """fp8.py with model_loader: experts one by one, `weight_scale_inv` beside each."""
    _, tensors = stored(tmp_path, "qwen3_moe", "deepseek", "fp8_block")
    for expert in (0, 1):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
            assert tensors[name].dim() == 2 and f"{name}_scale_inv" in tensors


def test_nvfp4_weight_only_scheme(tmp_path: Path) -> None:
    """compressed_tensors/compressed_tensors.py, _is_fp4a16_nvfp4: no activations, float, 4 bits, groups of 16, symmetric."""
    config, _ = stored(tmp_path, "llama", "compressed-tensors", "nvfp4")
    (group,) = config["config_groups"].values()
    assert group["input_activations"] is None and group["format"] == "nvfp4-pack-quantized"
    found = {key: group["weights"][key] for key in ("strategy", "type", "num_bits", "group_size", "symmetric")}
    assert found == {"strategy": "tensor_group", "type": "float", "num_bits": 4, "group_size": 16, "symmetric": True}


def test_nvfp4_tensors(tmp_path: Path) -> None:
    """As create_weights of compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py makes them."""
    _, tensors = stored(tmp_path, "llama", "compressed-tensors", "nvfp4")
    for name in [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]:
        rows, packed = tensors[f"{name}_packed"].shape
        assert tensors[f"{name}_packed"].dtype == torch.uint8
        scale, divisor = tensors[f"{name}_scale"], tensors[f"{name}_global_scale"]
        assert (scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (rows, packed // 8))
        assert (divisor.dtype, divisor.numel()) == (torch.float32, 1) and float(divisor) > 1  # 1 / scale


@pytest.mark.parametrize(("share_amax", "loads"), [("llama", True), ((), False)])
def test_nvfp4_fused_global_scales(tmp_path: Path, share_amax: Any, loads: bool) -> None:
    """compressed_tensors_w4a16_nvfp4.py, process_weights_after_loading: ValueError unless fused projections share one."""
    _, tensors = stored(tmp_path, "llama", "compressed-tensors", "nvfp4", share_amax)
    fused = of_fused(tensors, "weight_global_scale")
    assert [len(scales) for scales in fused] == [3, 2]
    assert all(torch.cat(scales).unique().numel() == 1 for scales in fused) == loads


def test_fp8_per_tensor_weight_only_scheme(tmp_path: Path) -> None:
    """compressed_tensors.py, _is_fp8_w8a16: a static symmetric float weight with a scale a tensor or a channel."""
    config, tensors = stored(tmp_path, "llama", "compressed-tensors", "fp8_current")
    (group,) = config["config_groups"].values()
    weights = group["weights"]
    assert (weights["type"], weights["symmetric"], weights["dynamic"], weights["strategy"]) == (
        "float",
        True,
        False,
        "tensor",
    )
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (1,)


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "mxfp4"])
def test_weight_only_schemes_that_there_are_not(tmp_path: Path, fmt: str) -> None:
    """compressed_tensors.py, _get_scheme_from_parts: weights of blocks need activations; groups are of integers, or NVFP4's."""
    config, _ = stored(tmp_path, "llama", "compressed-tensors", fmt)
    (group,) = config["config_groups"].values()
    assert group["input_activations"] is None and group["weights"]["strategy"] in ("block", "group")


def test_modelopt_nvfp4(tmp_path: Path) -> None:
    """modelopt_quant.py, ModelOptFp4Config.from_config: a flat config with a quant_algo of NVFP4's, group_size and ignore."""
    config, tensors = stored(tmp_path, "llama", "modelopt", "nvfp4")
    assert config["quant_algo"] in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4") and config["group_size"] == 16
    assert "lm_head" in config["ignore"]
    for scales in of_fused(tensors, "weight_scale_2"):  # it takes the largest, and logs where they differ
        assert {t.dim() for t in scales} == {0} and torch.stack(scales).unique().numel() == 1


@pytest.mark.parametrize(("fmt", "algorithm"), [("fp8_block", "FP8_PB_WO"), ("mxfp8", "MXFP8")])
def test_modelopt_algorithms_that_stand_alone(tmp_path: Path, fmt: str, algorithm: str) -> None:
    """modelopt_quant.py, ModelOptFp8Config.from_config: alone it takes `FP8`, with scales of activations; these only in a mix."""
    config, _ = stored(tmp_path, "llama", "modelopt", fmt)
    assert config["quant_algo"] == algorithm != "FP8"
