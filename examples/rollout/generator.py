"""The generator: a plain model of transformers in another process, which samples answers.

It holds either the trainer's own bytes, or bf16 weights that it has quantized by a rule of its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.rollout import toy, transport
from examples.rollout.config import RolloutConfig
from zerocast.serve import Receiver, dequantized

TRAINER, GENERATOR = 0, 1


def run(config: RolloutConfig) -> None:
    """Refit, sample and send, once for each step of the trainer."""
    model, receiver = toy.build(), Receiver()
    parameters = dict(model.named_parameters())
    for step in range(config.steps):
        changed = transport.receive(receiver, TRAINER)
        for name, value in dequantized(receiver.tensors):
            if changed & {name, *(name + suffix for suffix in ("_scale", "_scale_2", "_scale_inv"))}:
                parameters[name].data.copy_(requantized(value) if _rounds_again(config, name) else value)
        sequences, cached = sample(model, toy.prompts(step, config.batch_size), config.seed + step)
        dist.send(sequences, TRAINER)
        dist.send(torch.stack([toy.answer_logits(model, sequences), cached]), TRAINER)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """(prompts with an answer, the logits that it was drawn from): decoding with a cache, as
    engines do, whose sums are added in another order than those of a whole forward pass.
    """
    before = model(prompts[:, :-1], use_cache=True)
    logits = model(prompts[:, -1:], past_key_values=before.past_key_values).logits[:, -1].float()
    generator = torch.Generator().manual_seed(seed)
    answers = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    return torch.cat([prompts, answers], 1), logits


def requantized(value: Tensor) -> Tensor:
    """What an engine makes of bf16 weights by itself: FP8 with an FP32 scale for each row, where
    the trainer computes with blocks.
    """
    scale = (value.float().abs().amax(1, keepdim=True) / 448.0).clamp(min=1e-12)
    codes = (value.float() / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).bfloat16()


def _rounds_again(config: RolloutConfig, name: str) -> bool:
    return config.requantize and name.endswith("_proj.weight")
