"""Small models of the families that store experts in one weight, each in its own way."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from zerocast import QuantizedWeight

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make readers")

EXPERTS, TOKENS = 32, 64
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_attention_heads": 4, "num_local_experts": EXPERTS}
EMBEDDING = {"*embed_tokens*": "identity"}
# Name -> (configuration, what is no matrix of a product).
FAMILIES: dict[str, tuple[Any, dict[str, str]]] = {
    # [E, K, M], a bias for each expert.
    "gpt_oss": (
        lambda: transformers.GptOssConfig(**SIZES, **HEADS, head_dim=32, sliding_window=8, rope_parameters=ROPE),
        {**EMBEDDING, "*_bias": "identity"},
    ),
    # [E, K, M] by bmm.
    "llama4": (
        lambda: transformers.Llama4TextConfig(
            **SIZES, **HEADS, head_dim=32, intermediate_size_mlp=64, interleave_moe_layer_step=1
        ),
        EMBEDDING,
    ),
    # [E, M, K], one expert after another; attention has experts, too.
    "jetmoe": (
        lambda: transformers.JetMoeConfig(**SIZES, num_local_experts=EXPERTS, kv_channels=32),
        EMBEDDING,
    ),
    # [E, M, K], and a weight as the first operand of a product.
    "jamba": (
        lambda: transformers.JambaConfig(
            **SIZES,
            num_attention_heads=4,
            num_experts=EXPERTS,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=1,
            expert_layer_offset=0,
            mamba_dt_rank=32,
        ),
        {**EMBEDDING, "*conv1d*": "identity", "*A_log": "identity"},
    ),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def recipe(family: str, fmt: str) -> dict[str, str]:
    """The format for every matrix of a family, routers and heads included."""
    return {**FAMILIES[family][1], "*": fmt}


def made(family: str, implementation: str = "grouped_mm") -> Any:
    """A model with values of which rows and columns differ in size, so that blocks in rows and in columns differ."""
    torch.manual_seed(0)
    config = FAMILIES[family][0]()
    if family in ("gpt_oss", "jamba"):
        config._experts_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                for dim in (-1, -2):
                    sizes = torch.randn(parameter.shape[dim]).mul(2).exp2()
                    parameter.mul_(sizes if dim == -1 else sizes[:, None]).clamp_(-2, 2)
    return model


def quantized(family: str, fmt: str, implementation: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> Any:
    """The same with every matrix quantized."""
    return zerocast.quantize_(made(family, implementation), recipe(family, fmt), dtype=dtype)


def weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)}


def tokens(step: int, rank: int = 0) -> Tensor:
    return torch.randint(3, TOKENS, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: Any, step: int = 0, rank: int = 0) -> Tensor:
    x = tokens(step, rank)
    return model(input_ids=x, labels=x).loss  # type: ignore[no-any-return]


def bytes_of(weight: QuantizedWeight) -> str:
    """A digest of all bytes that products read."""
    digest = hashlib.sha256()
    for columnwise in (False, True):
        for tensor in weight.direction(columnwise):
            if tensor is not None:
                digest.update(tensor.clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def assign_gradients(model: nn.Module, step: int) -> None:
    """Whole numbers, the same on every rank, so that their mean over any number of ranks is exact."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        parameter.grad = torch.randint(-8, 9, parameter.shape, generator=generator).to(parameter.dtype)
