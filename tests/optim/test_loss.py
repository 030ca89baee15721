"""100 steps on several ranks with sharded casts: each rank's loss is, to the bit, that of one process that casts every
weight whole."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.optim.language_model import FORMATS, LM, batch
from tests.optim.probe import PLAIN, Spec
from tests.optim.runs import ADAM
from tests.optim.undistributed import Undistributed, mean
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig

DETERMINISTIC = ZeroConfig(bucket_size=4096, deterministic=True)
CLIP = 1.0


def sharded(config: ZeroConfig, stage: int, steps: int) -> list[float]:
    """The losses of this rank."""
    model = LM()
    optimizer = ZeroAdamW(model.named_parameters(), **ADAM, stage=stage, config=config)
    losses = []
    for step in range(steps):
        loss = model(batch(step, dist.get_rank()))
        loss.backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclasses.dataclass(frozen=True)
class Named(Spec):
    """A parameter of the model as the reference has it: from the model's own value."""

    value: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0), compare=False)

    def initial(self) -> Tensor:
        """The high-precision value that `quantize_` kept."""
        return self.value


def unsharded(ranks: int, steps: int, grad_dtype: torch.dtype | None) -> list[list[float]]:
    """The losses by step and rank, from one model whose weights are the reference's bytes, and the reference's own update."""
    model = LM()
    specs = []
    for name, p in model.named_parameters():
        value = p.high_precision_init_val if isinstance(p, QuantizedWeight) else p.detach().float().clone()
        specs.append(Named(name, tuple(p.shape), FORMATS.get(name, PLAIN), p.dtype, value=value.float()))
        if isinstance(p, QuantizedWeight) and grad_dtype is torch.float32:
            p.grad_dtype = torch.float32
    reference, losses = Undistributed(specs), []
    for step in range(steps):
        _put(reference, model)
        by_rank: list[dict[str, Tensor | None]] = []
        losses.append([])
        for rank in range(ranks):
            model.zero_grad()
            loss = model(batch(step, rank))
            loss.backward()
            losses[-1].append(loss.item())
            by_rank.append({name: p.grad for name, p in model.named_parameters()})
        gradients = {spec.name: [mean([local[spec.name] for local in by_rank], spec)] for spec in specs}
        reference.step(gradients, [ADAM], CLIP)
    return losses


def _put(reference: Undistributed, model: LM) -> None:
    for name, parameter in model.named_parameters():
        for buffer, values in reference.bytes[name].items():
            target = getattr(parameter, buffer) if isinstance(parameter, QuantizedWeight) else parameter.detach()
            target.view(-1).view(torch.uint8).copy_(torch.from_numpy(values))


CASES = {
    "nominal gradients": (DETERMINISTIC, 2),
    "stage 1": (DETERMINISTIC, 1),
    "overlap": (dataclasses.replace(DETERMINISTIC, overlap_all_gather=True), 2),
    "fp32 gradients": (dataclasses.replace(DETERMINISTIC, grad_dtype=torch.float32), 2),
    "one bucket": (ZeroConfig(deterministic=True), 2),
}


@pytest.fixture(scope="module")
def reference(ranks):
    """`unsharded`, computed once for each pair of arguments."""
    return functools.cache(lambda world, grad_dtype: np.array(ranks(1)(unsharded, world, 100, grad_dtype)[0]))


LONG = [
    (1, "nominal gradients"),
    (2, "nominal gradients"),
    (4, "nominal gradients"),
    *((3, case) for case in CASES if case != "nominal gradients"),
]
WORLDS = [(3, "nominal gradients")]
WORLDS += [pytest.param(*case, marks=pytest.mark.slow) for case in LONG]


@pytest.mark.parametrize(("world", "case"), WORLDS)
def test_the_loss_of_100_steps(ranks, reference, world, case):
    config, stage = CASES[case]
    found = np.array(ranks(world)(sharded, config, stage, 100)).T
    wanted = reference(world, config.grad_dtype)
    assert np.array_equal(found, wanted), f"first at step {np.argmax((found != wanted).any(1))}"
    assert found[-10:].mean() < found[:5].mean() - 0.5, "and it learns"
