"""The trainer: REINFORCE over a ZeroAdamW, which refits the generator before every step.

Beside the loss it prints how far the generator's distribution over answers is from its own: 0, to
the bit, for the same bytes and the same forward pass.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from examples.rollout import toy, transport
from examples.rollout.config import RolloutConfig
from examples.rollout.generator import GENERATOR
from zerocast.serve import Sender


@dataclass(frozen=True)
class Step:
    """One step of a run. KL divergences are means over answers, in nats; `is_equal` says that the
    logits of the same forward pass are equal to the bit.
    """

    reward: float
    kl: float
    kl_decoding: float
    is_equal: bool
    nbytes: int
    full_nbytes: int


def run(config: RolloutConfig) -> list[Step]:
    """Train, and refit by what changed; in the control by bf16 weights, which are rounded again."""
    model = zerocast.quantize_(toy.build(), toy.RECIPES[config.format], dtype=torch.bfloat16)
    group = dist.new_group([0], use_local_synchronization=True)  # the generator has no masters
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=config.lr, weight_decay=0.0, group=group)
    sender = Sender(model, "bf16" if config.requantize else toy.NAMINGS[config.format], group=group)
    steps: list[Step] = []
    full_nbytes = 0
    for step in range(config.steps):
        nbytes = 0
        for message in sender.named_deltas(since=step) if step else sender.named_tensors():
            nbytes += message.nbytes
            transport.send(message, GENERATOR)
        full_nbytes = full_nbytes or nbytes

        sequences = torch.zeros(config.batch_size, 5, dtype=torch.int64)
        theirs = torch.zeros(2, config.batch_size, toy.VOCABULARY)
        dist.recv(sequences, GENERATOR)
        dist.recv(theirs, GENERATOR)

        logits = toy.answer_logits(model, sequences)
        rewards = toy.reward(sequences)
        chosen = logits.log_softmax(-1).gather(1, sequences[:, 4:]).squeeze(1)
        loss = -((rewards - rewards.mean()) * chosen).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        whole, cached = theirs
        divergences = kl(logits, whole), kl(logits, cached)
        is_equal = torch.equal(logits.detach(), whole)
        steps.append(Step(rewards.mean().item(), *divergences, is_equal, nbytes, full_nbytes))
    return steps


@torch.no_grad()
def kl(ours: Tensor, theirs: Tensor) -> float:
    """Mean KL divergence of the generator's distributions from the trainer's, in FP64."""
    p, q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()
