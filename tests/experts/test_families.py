"""gpt-oss, Llama 4, JetMoE and Jamba train with all of their matrices quantized."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.fsdp2 import models
from tests.workers import Ranks, on_ranks
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig

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


# Blocks of 128 rows would span two of these experts, which are stored one after another then.
TRAINED = [
    ("gpt_oss", "mxfp8"),
    ("llama4", "mxfp4"),
    ("jetmoe", "nvfp4"),
    ("jamba", "fp8_block"),
    pytest.param("gpt_oss", "fp8_block", marks=pytest.mark.slow),
    *(pytest.param(family, "fp8_current", marks=pytest.mark.slow) for family in FAMILIES),
]
CASES = [(family, "grouped_mm") for family in FAMILIES] + [("gpt_oss", "eager"), ("jamba", "eager")]


@pytest.mark.parametrize(("family", "implementation"), CASES)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block"])
def test_a_model_is_that_of_its_dequantized_weights(family: str, implementation: str, fmt: str) -> None:
    """In FP32, the forward pass and all gradients of a plain model over the values of the codes. Experts `[E, K, M]` are
    multiplied by their columnwise codes, which are others in mxfp8, and their gradients pass through the rowwise ones.
    """
    model, plain = quantized(family, fmt, implementation), made(family, implementation)
    transposed = family in ("gpt_oss", "llama4")
    quantized_weights = weights(model)
    assert sum(weight.dim() == 3 for weight in quantized_weights.values()) >= 4
    copies = [
        weight.read(columnwise, torch.float32) for weight in quantized_weights.values() for columnwise in (False, True)
    ]
    assert (fmt == "mxfp8") != all(map(torch.equal, copies[::2], copies[1::2]))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name in quantized_weights:
                columnwise = transposed and parameter.dim() == 3
                parameter.copy_(quantized_weights[name].read(columnwise, torch.float32).view(parameter.shape))
            else:
                parameter.copy_(model.get_parameter(name))
    found, expected = loss(model), loss(plain)
    torch.testing.assert_close(found, expected)
    if fmt == "mxfp8":
        return  # input gradients are those of another plain model
    found.backward()
    expected.backward()
    for name, parameter in plain.named_parameters():
        gradient: Any = model.get_parameter(name).grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max())
            )


def trained(family: str, fmt: str) -> tuple[list[str], list[float], set[bool]]:
    """Under ZeroAdamW: what verify says after the last step, losses on a batch of all ranks, and whether spans of experts begin
    at an expert.
    """
    model = quantized(family, fmt, dtype=torch.bfloat16).bfloat16()
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-2, config=ZeroConfig(bucket_size=4096))
    rank, losses = dist.get_rank(), []
    for step in range(2):
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(loss(model)))
    found = [str(difference) for difference in zerocast.verify(optimizer).differences]
    views = [view for views in optimizer.master_views() for view in views.masters if view.weight.dim() == 3]
    cuts = {view.span.start % math.prod(view.weight.shape[1:]) == 0 for view in views if view.span.numel}
    return found, losses, cuts


@pytest.mark.parametrize(("family", "fmt"), TRAINED)
def test_training_with_zero(ranks: Ranks, family: str, fmt: str) -> None:
    """Live bytes are those of the unsharded cast, with cuts between ranks inside an expert."""
    results = ranks(3)(trained, family, fmt)
    assert [found for found, _, _ in results] == [[]] * 3
    assert set().union(*(cuts for *_, cuts in results)) == {False, True}
    _, losses, _ = results[0]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("family", "fmt"), TRAINED)
@on_ranks(3)
def test_training_with_fsdp2(family: str, fmt: str) -> None:
    """32 experts over 3 ranks: 11, 11 and 10."""
    model = made(family)
    zerocast.fsdp2.prepare(model, recipe(family, fmt))
    for layer in model.model.layers:
        fully_shard(layer, mesh=models.mesh(), mp_policy=models.BF16)
    fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)
    optimizer = models.OPTIMIZERS["AdamW"](model)
    losses = []
    for step in range(3):
        loss(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            with torch.no_grad():
                losses.append(float(loss(model)))
    models.check(model, family)
    first, last = losses
    assert last < first
