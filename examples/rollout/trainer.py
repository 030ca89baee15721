"""The trainer: REINFORCE over a ZeroAdamW, which refits the generator before every step.

In addition to the loss it records how far the generator's distribution over answers is from its
own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import zerocast
from examples.rollout import toy
from examples.rollout.config import RolloutConfig


class Generator(Protocol):
    """The generator of answers, with the weights of the trainer.

    Attributes:
        passes: names of the passes that compute its distributions over answers.
    """

    passes: tuple[str, ...]

    def refit(self) -> int:
        """Send the weights. Returns the bytes that were sent."""
        ...

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (sequences, i64 `[count, 5]`; logits of their answers, f32 `[passes, count,
        tokens]`).
        """
        ...

    def close(self) -> None:
        """End the generator and its processes."""
        ...


@dataclass(frozen=True)
class Step:
    """One step of a run. `kl` is by pass of the generator the mean KL divergence over answers, in
    nats; `gap` the largest difference of a log-probability in the first pass; `is_equal` says that
    the logits of the first pass are equal to the bit.
    """

    reward: float
    kl: dict[str, float]
    gap: float
    is_equal: bool
    nbytes: int
    full_nbytes: int


def run(config: RolloutConfig, made: Callable[[Any, Any, RolloutConfig], Generator], group: Any = None) -> list[Step]:
    """Train, and refit the generator that `made` makes of (the model, the group of masters, the
    configuration).
    """
    model = zerocast.quantize_(toy.build(), toy.RECIPES[config.format], dtype=torch.bfloat16)
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=config.lr, weight_decay=0.0, group=group)
    generator = made(model, group, config)
    steps: list[Step] = []
    try:
        for step in range(config.steps):
            nbytes = generator.refit()
            sequences, theirs = generator.sample(step)

            logits = toy.answer_logits(model, sequences)
            rewards = toy.reward(sequences)
            chosen = logits.log_softmax(-1).gather(1, sequences[:, 4:]).squeeze(1)
            loss = -((rewards - rewards.mean()) * chosen).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            divergences, gap = compared(logits, theirs)
            is_equal = torch.equal(logits, theirs[0])
            kl = dict(zip(generator.passes, divergences, strict=True))
            full_nbytes = steps[0].nbytes if steps else nbytes
            steps.append(Step(rewards.mean().item(), kl, gap, is_equal, nbytes, full_nbytes))
    finally:
        generator.close()
    return steps


@torch.no_grad()
def compared(ours: Tensor, theirs: Tensor) -> tuple[list[float], float]:
    """Return (mean KL divergence of each of the generator's passes from the trainer's, the largest
    difference of a log-probability in the first), in FP64.
    """
    p, q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    divergences: list[float] = (p.exp() * (p - q)).sum(-1).mean(-1).tolist()
    return divergences, (p - q[0]).abs().max().item()
