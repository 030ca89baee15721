"""The toy: a small Llama, and a task whose reward is verified by arithmetic."""

from typing import Any

import torch
from torch import Tensor, nn

import zerocast
from examples.gpt_pretrain.model import Linear

# Matrices of the layers; embeddings, norms and the head stay bf16.
QUANTIZED = "_proj.weight"
DIGITS = 10
PLUS, EQUALS = 10, 11
VOCABULARY = 12
RECIPES = {
    "fp8_block": zerocast.Recipe({f"*{QUANTIZED}": "fp8_block"}),
    "nvfp4": zerocast.Recipe({f"*{QUANTIZED}": "nvfp4"}, share_amax="llama"),
}
NAMINGS = {"fp8_block": "deepseek", "nvfp4": "compressed-tensors"}  # names of stored tensors, by engine


def build() -> Any:
    """Return a model of transformers in bf16; its buffers, in which rotary embeddings keep
    frequencies, stay FP32.
    """
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        initializer_range=0.1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for module in model.modules():
        if type(module) is nn.Linear:
            # plain weights are then multiplied like quantized ones, also on a CPU without bf16
            # instructions, so that generator and trainer compute the same values
            module.__class__ = Linear
    return model


def prompts(step: int, count: int) -> Tensor:
    """`a + b =` as tokens, int64 `[count, 4]`; the same in both processes."""
    generator = torch.Generator().manual_seed(step)
    numbers = torch.randint(DIGITS, (count, 2), generator=generator)
    signs = torch.tensor([PLUS, EQUALS]).expand(count, 2)
    return torch.stack([numbers[:, 0], signs[:, 0], numbers[:, 1], signs[:, 1]], 1)


def reward(sequences: Tensor) -> Tensor:
    """Return 1 where the token after the prompt is the last digit of the sum, else 0; f32
    `[count]`.
    """
    return (sequences[:, 4] == (sequences[:, 0] + sequences[:, 2]) % DIGITS).float()


def answer_logits(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the logits of the answer in one forward pass over full sequences, f32 `[count,
    tokens]`.
    """
    logits: Tensor = model(sequences).logits
    return logits[:, 3].float()


def requantized(value: Tensor) -> Tensor:
    """Quantize bf16 weights like an engine by itself: FP8 with an FP32 scale per row, where the
    trainer uses blocks.
    """
    scale = (value.float().abs().amax(1, keepdim=True) / 448.0).clamp(min=1e-12)
    codes = (value.float() / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).bfloat16()
