"""Gathered weights have an owner, their master: no step of anybody takes them for weights that nobody trains."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp2.models import Net, batch, sharded, train
from tests.workers import Ranks

# gradients then stay on the gathered weights
PLAIN = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def others_step_between() -> None:
    """Gradients stay on gathered weights while another optimizer steps."""
    model, head = (
        sharded(Net(("nvfp4", "mxfp8"), 64, 128), reshard_after_forward=False, mp_policy=PLAIN),
        nn.Linear(64, 64),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for step in range(2):
        head(model(batch(step, 64)).float()).square().mean().backward()
        other.step()
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    train(model, optimizer, range(2, 4), 64)


def test_gathered_weights_have_an_owner(ranks: Ranks) -> None:
    ranks(2)(others_step_between)
