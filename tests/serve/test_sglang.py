"""What the loaders of SGLang 0.5.23 ask of config.json, by the file that was read (`sglang/srt/layers/quantization/`).

SGLang itself needs a GPU. What its loader would refuse is shown too, so that the page on live weights does not promise it. The
dtypes and shapes of the tensors are those of test_export.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.models import quantized
from zerocast.export import export_hf

pytest.importorskip("safetensors")

# (naming, format): what quantization_config has, with its one group and that group's weights in it.
CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    # fp8.py, Fp8Config, which reads modules_to_not_convert as ignored_layers: dynamic for blocks of two dimensions
    ("deepseek", "fp8_block"): {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    # compressed_tensors/compressed_tensors.py, _is_fp4a16_nvfp4: no activations, symmetric float of 4 bits in groups of 16
    ("compressed-tensors", "nvfp4"): {
        "input_activations": None,
        "format": "nvfp4-pack-quantized",
        "strategy": "tensor_group",
        "type": "float",
        "num_bits": 4,
        "group_size": 16,
        "symmetric": True,
    },
    # _is_fp8_w8a16: a static symmetric float with a scale a tensor or a channel
    ("compressed-tensors", "fp8_current"): {
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor",
    },
    # _get_scheme_from_parts has no scheme for these: weights of blocks need activations, groups are of integers or NVFP4's
    ("compressed-tensors", "fp8_block"): {"input_activations": None, "strategy": "block"},
    ("compressed-tensors", "mxfp8"): {"input_activations": None, "strategy": "group"},
    ("compressed-tensors", "mxfp4"): {"input_activations": None, "strategy": "group"},
    # modelopt_quant.py, ModelOptFp4Config.from_config: a flat config
    ("modelopt", "nvfp4"): {"quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    # ModelOptFp8Config.from_config takes neither alone
    ("modelopt", "fp8_block"): {"quant_algo": "FP8_PB_WO"},
    ("modelopt", "mxfp8"): {"quant_algo": "MXFP8"},
}


@pytest.mark.parametrize(("naming", "fmt"), CONFIGS)
def test_config(tmp_path: Path, naming: str, fmt: str) -> None:
    export_hf(quantized("llama", fmt, "llama" if fmt == "nvfp4" else ()), tmp_path / "out", naming)
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for group in found.pop("config_groups", {}).values():
        found |= group | group["weights"]
    expected = CONFIGS[naming, fmt]
    assert {key: found[key] for key in expected} == expected
