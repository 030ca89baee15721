"""The generator without vLLM: a plain model of transformers in another process.

It samples answers, and holds either the trainer's own bytes, or bf16 weights that it has quantized
by its own rule.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.rollout import toy, transport
from examples.rollout.config import RolloutConfig
from zerocast.serve import Receiver, Sender, dequantized

TRAINER, GENERATOR = 0, 1


class Peer:
    """The generator as its trainer sees it.

    Attributes:
        passes: names of the passes that compute its distributions over answers.
    """

    passes: tuple[str, ...] = ("same pass", "decoding")

    def __init__(self, model: Any, group: Any, config: RolloutConfig) -> None:
        self._config = config
        self._sender = Sender(model, "bf16" if config.requantize else toy.NAMINGS[config.format], group=group)

    def refit(self) -> int:
        """Send all weights, later only changes. Returns the number of bytes that were sent."""
        sender, nbytes = self._sender, 0
        for message in sender.named_deltas(since=sender.refit) if sender.refit else sender.named_tensors():
            nbytes += message.nbytes
            transport.send(message, GENERATOR)
        return nbytes

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (sequences, i64 `[count, 5]`; the logits of their answers, f32 `[2, count,
        tokens]`).
        """
        sequences = torch.zeros(self._config.batch_size, 5, dtype=torch.int64)
        logits = torch.zeros(len(self.passes), self._config.batch_size, toy.VOCABULARY)
        dist.recv(sequences, GENERATOR)
        dist.recv(logits, GENERATOR)
        return sequences, logits

    def close(self) -> None:
        """Do nothing: the other process ends after the same number of steps."""


def run(config: RolloutConfig) -> None:
    """Refit, sample and send, once for each step of the trainer."""
    model, receiver = toy.build(), Receiver()
    parameters = dict(model.named_parameters())
    for step in range(config.steps):
        changed = transport.receive(receiver, TRAINER)
        for name, value in dequantized(receiver.tensors):
            if changed & {name, *(name + suffix for suffix in ("_packed", "_scale", "_global_scale", "_scale_inv"))}:
                is_rounded = config.requantize and name.endswith(toy.QUANTIZED)
                parameters[name].data.copy_(toy.requantized(value) if is_rounded else value)
        sequences, cached = sample(model, toy.prompts(step, config.batch_size), config.seed + step)
        dist.send(sequences, TRAINER)
        dist.send(torch.stack([toy.answer_logits(model, sequences), cached]), TRAINER)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return (prompts with an answer, the logits that it was drawn from): decoding with a cache, as
    engines do, which adds in a different order than a forward pass over full sequences.
    """
    before = model(prompts[:, :-1], use_cache=True)
    logits = model(prompts[:, -1:], past_key_values=before.past_key_values).logits[:, -1].float()
    generator = torch.Generator().manual_seed(seed)
    answers = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    return torch.cat([prompts, answers], 1), logits
