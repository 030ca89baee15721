"""vLLM's loaders read pairs of folders on a CPU: `python vllm_families_reader.py REPORT PLAIN QUANTIZED ...`, in an environment
that has vLLM and not zerocast.

A pair is a model in bf16 and the same values quantized. vLLM makes its model of each, names, fuses and loads the weights. What its
layers hold then, before a kernel repacks anything, is decoded here and compared with what those in bf16 hold. REPORT gets, by the
quantized folder, `equal` or what went wrong.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import PlatformEnum
from vllm.utils.network_utils import get_open_port
from vllm.utils.torch_utils import set_default_torch_dtype

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Unused:
    """A kernel of quantized products, of which vLLM has none on a CPU. It is chosen and never called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def is_supported(cls, *args: Any) -> tuple[bool, str | None]:
        return True, None

    can_implement = is_supported

    def input_quant_key(self) -> None:
        return None


def spread(scales: Tensor, shape: torch.Size, block: int | None) -> Tensor:
    """Scales over the elements of matrices: of square blocks, the last of which may be cut, of groups, of rows or of all. Biased
    exponents have one byte.
    """
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    scales = scales.reshape(-1, *[1] * (len(shape) - 1)) if scales.dim() < 2 else scales
    for dim in (-2, -1):
        scales = scales.repeat_interleave(block or shape[dim] // scales.shape[dim], dim)
    return scales[..., : shape[-2], : shape[-1]]


def decoded(held: dict[str, Tensor], name: str) -> Tensor:
    """The matrix [out, in] of a layer, or those of its experts. An engine takes one global scale for the matrices that it fuses."""
    if "weight_packed" in held:
        codes = held["weight_packed"]
        unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
        values = E2M1[unpacked & 7] * torch.where(unpacked > 7, -1.0, 1.0)
        # vLLM keeps the inverse of a divisor.
        return values * spread(held["weight_scale"], values.shape, None) * (1.0 / held["weight_global_scale"].max())
    values = held[name].float()
    if f"{name}_scale_inv" in held:
        return values * spread(held[f"{name}_scale_inv"], values.shape, 128)
    return values * spread(held[f"{name}_scale"], values.shape, None)


def loaded(folder: str) -> dict[str, dict[str, Tensor]]:
    """The parameters of each module of vLLM's model, by module and name."""
    config = EngineArgs(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    settings = config.create_engine_config()
    loader = get_model_loader(settings.load_config)
    with set_current_vllm_config(settings):
        with set_default_torch_dtype(torch.bfloat16):
            model: nn.Module = loader.create_model(settings, settings.model_config)
        loader.load_weights(model, settings.model_config)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, own_name = name.rpartition(".")
        tensors.setdefault(path, {})[own_name] = parameter.data
    return tensors


def difference(plain: dict[str, dict[str, Tensor]], quantized: dict[str, dict[str, Tensor]]) -> str:
    """The first weight that differs, and otherwise `equal`."""
    num_quantized = 0
    for path, wanted in plain.items():
        held = quantized[path]
        # compressed-tensors stores a divisor, which is rounded. A value between two of bf16 may become the other one.
        bound = 2**-7 if "weight_global_scale" in held else 0.0
        for name, tensor in wanted.items():
            found = held.get(name)
            if any(f"{name}_{beside}" in held for beside in ("packed", "scale", "scale_inv")):
                num_quantized += 1
                found = decoded(held, name).to(tensor.dtype)
            if not torch.allclose(found, tensor, rtol=bound, atol=0.0):
                return f"{path}.{name} is read as other values"
    return "equal" if num_quantized else "nothing is quantized"


def said(plain: str, quantized: str) -> str:
    try:
        wanted = loaded(plain)
    except BaseException as error:
        return f"not loaded in bf16: {type(error).__name__}: {str(error)[:300]}"
    try:
        return difference(wanted, loaded(quantized))
    except BaseException as error:
        return f"refused: {type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    report, *folders = sys.argv[1:]
    for name, table in vars(linear).items():
        if name.startswith("_POSSIBLE_"):
            table[PlatformEnum.CPU] = [Unused]
    linear.MarlinNvFp4LinearKernel = Unused  # which weights alone are given without a choice
    # Without a model, since one without experts makes no group for them.
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, backend="gloo")
        initialize_model_parallel(1, backend="gloo")
    results = {}
    for first, second in zip(folders[::2], folders[1::2], strict=True):
        results[second] = said(first, second)
        # A crash leaves what was found before it.
        Path(report).write_text(json.dumps(results))
