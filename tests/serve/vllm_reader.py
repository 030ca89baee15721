"""vLLM reads folders, on a CPU: `python vllm_reader.py REPORT FOLDER ...`, in an environment that has vLLM and not zerocast.

Its configuration, loaders and fusing of layers are its own. It has no product of these weights on a CPU, so one that dequantizes
what they leave in a layer takes the place of each. REPORT gets, by folder, the decoded matrices and the logarithms of the
probabilities of prompts, or the error.
"""

import os
import sys
from typing import Any, ClassVar
from unittest import mock

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum

PROMPTS = torch.arange(24).view(2, 12).tolist()
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales of equal blocks, or of all, over the elements of a matrix; biased exponents have one byte."""
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    scales = scales.reshape(scales.shape[0], -1) if scales.dim() > 1 else scales.reshape(-1, 1)
    for dim in (0, 1):
        scales = scales.repeat_interleave(-(-shape[dim] // scales.shape[dim]), dim)
    return scales[: shape[0], : shape[1]]


def decoded(layer: nn.Module) -> Tensor:
    """The matrix [out, in] that the parameters of a layer stand for."""
    weight: Any = getattr(layer, "weight", None)
    weight = layer.weight_packed if weight is None else weight
    scales: Any = getattr(layer, "weight_scale_inv", None)
    scales = layer.weight_scale if scales is None else scales
    if weight.dtype == torch.uint8:
        codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        values = values * spread(scales.data, values.shape)
        overall = getattr(layer, "weight_global_scale", None)  # a divisor until the layer is processed, a factor then
        return values if overall is None else values * overall.data
    values = weight.data.float() if weight.is_contiguous() else weight.data.t().float()  # some are kept transposed
    return values * spread(scales.data, values.shape)


class Dequantizing:
    """In the place of each kernel of quantized products."""

    layers: ClassVar[list[nn.Module]] = []

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.config = config

    @classmethod
    def is_supported(cls, *args: Any) -> tuple[bool, str | None]:
        return True, None

    can_implement = is_supported

    def input_quant_key(self) -> None:
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.layers.append(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, decoded(layer).to(x.dtype), bias)


def read(folder: str) -> dict[str, Any]:
    Dequantizing.layers.clear()
    with mock.patch.object(
        linear, "MarlinNvFp4LinearKernel", Dequantizing
    ):  # which weights alone are given without a choice
        model = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = model.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    found = [
        [places[token].logprob for places, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
        for answer, ids in zip(answers, PROMPTS, strict=True)
    ]
    layers = {layer.prefix: decoded(layer).bfloat16() for layer in Dequantizing.layers}
    return {"layers": layers, "logprobs": torch.tensor(found)}


def found_in(folder: str) -> dict[str, Any]:
    try:
        return read(folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    report, *folders = sys.argv[1:]
    for name, table in vars(linear).items():
        if name.startswith("_POSSIBLE_"):
            table[PlatformEnum.CPU] = [Dequantizing]
    torch.save({folder: found_in(folder) for folder in folders}, report)
