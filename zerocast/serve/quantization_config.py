"""The `quantization_config` of config.json, by which readers know what is quantized and how.

compressed-tensors and modelopt are told of weights alone: activations stay as they are, except
where an algorithm says otherwise by its name. Modules that are not quantized are listed.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from zerocast.serve.namings import NAMINGS

# group size, strategy, dtype of scales
_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "nvfp4": {"num_bits": 4, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"num_bits": 4, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
    "mxfp8": {"num_bits": 8, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
    "fp8_block": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "fp8_current": {"num_bits": 8, "strategy": "tensor"},
    "fp8_delayed": {"num_bits": 8, "strategy": "tensor"},
}
_GROUP_SIZES = {"nvfp4": 16, "mxfp8": 32}
Modules = Mapping[str, Sequence[str]]  # names of modules by format


def quantization_config(naming: str, modules: Modules, ignore: Sequence[str]) -> dict[str, Any] | None:
    """The entry of config.json for quantized `modules`; None if nothing is quantized."""
    return _CONFIGS[naming](modules, list(ignore)) if modules and naming in _CONFIGS else None


def _targets(modules: Modules) -> dict[str, list[str]]:
    """The modules of each format: all Linear that are not ignored, or some by name."""
    if len(modules) == 1:
        return {fmt: ["Linear"] for fmt in modules}
    return {fmt: sorted(names) for fmt, names in modules.items()}


def _compressed_tensors(modules: Modules, ignore: list[str]) -> dict[str, Any]:
    formats = {fmt: NAMINGS["compressed-tensors"][fmt].algorithm for fmt in modules}
    groups = {
        f"group_{number}": {
            "targets": targets,
            "weights": {"type": "float", "symmetric": True, "dynamic": False, **_WEIGHTS[fmt]},
            "input_activations": None,
            "output_activations": None,
            "format": formats[fmt],
        }
        for number, (fmt, targets) in enumerate(_targets(modules).items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": next(iter(formats.values())) if len({*formats.values()}) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _modelopt(modules: Modules, ignore: list[str]) -> dict[str, Any]:
    algorithms = {fmt: NAMINGS["modelopt"][fmt].algorithm for fmt in modules}
    sizes = {fmt: {"group_size": _GROUP_SIZES[fmt]} for fmt in modules if fmt in _GROUP_SIZES}
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "producer": {"name": "zerocast", "version": metadata.version("zerocast")},
        "ignore": ignore,
    }
    if len({*algorithms.values()}) == 1:
        fmt = next(iter(modules))
        return config | {"quant_algo": algorithms[fmt]} | sizes.get(fmt, {})
    layers = {
        name: {"quant_algo": algorithms[fmt], **sizes.get(fmt, {})} for fmt, names in modules.items() for name in names
    }
    return config | {"quant_algo": "MIXED_PRECISION", "quantized_layers": dict(sorted(layers.items()))}


def _deepseek(modules: Modules, ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ignore,
    }


_CONFIGS: Mapping[str, Callable[[Modules, list[str]], dict[str, Any]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "deepseek": _deepseek,
}
