"""Small models of transformers with random weights, and what readers make of their exports."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from zerocast import QuantizedWeight, Recipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make readers")

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "initializer_range": 0.2,  # or all tokens are about as likely
}
EXPERTS = {"num_experts_per_tok": 1}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama, four heads": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=2),
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, **EXPERTS, num_local_experts=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=128, num_experts=2),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=64),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    return model


def quantized(name: str, fmt: str, share_amax: Any = ()) -> nn.Module:
    """FP32 parameters besides the quantized ones, whose nominal dtype is bf16, as in training."""
    model = made(name)
    matched = {p: fmt for p in ("*_proj.weight", "*.experts.*") if "moe" in name or "mixtral" in name or "proj" in p}
    return zerocast.quantize_(model, Recipe(matched, share_amax=share_amax), dtype=torch.bfloat16)


def in_bf16(model: nn.Module) -> nn.Module:
    """The live model as it computes under FSDP2's mixed precision: plain parameters in bf16, buffers as they are."""
    for parameter in model.parameters():
        if not isinstance(parameter, QuantizedWeight):
            parameter.data = parameter.data.bfloat16()
    return model


def dequantized(model: nn.Module) -> nn.Module:
    """The model with plain weights, all in bf16: the values that a reader of the export has to find."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = parameter.dequantize() if isinstance(parameter, QuantizedWeight) else parameter.detach()
            setattr(module, name, nn.Parameter(value.bfloat16(), requires_grad=False))
    plain.tie_weights()  # type: ignore[operator]
    return plain  # its buffers, the frequencies of rotary embeddings among them, are FP32 as a reader's


def read(folder: Path) -> nn.Module:
    """Read a folder by transformers alone. Nothing may be missing, left over or of another shape."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.arange(24, device=model.device).view(2, 12)).logits.float()  # type: ignore[no-any-return]


@torch.no_grad()
def greedy(model: Any) -> Tensor:
    ids = torch.arange(5, 13).view(1, 8)
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids
