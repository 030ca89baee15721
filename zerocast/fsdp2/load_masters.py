"""load_masters: a prepared model starts from somebody's high-precision weights."""

from collections.abc import Sequence

import torch
from torch import nn

from zerocast.fsdp2.prepare import load_state_dict, state_dict
from zerocast.group import Group
from zerocast.sources import AnySource
from zerocast.sources.masters import read_masters


@torch.no_grad()
def load_masters(model: nn.Module, source: AnySource, ignore: Sequence[str] = ()) -> None:
    """Take parameters and persistent buffers of a prepared model, which `fully_shard` has sharded, from high-precision weights.

    `source`, `ignore` and errors are those of `zerocast.optim.load_masters`. Second names of shared parameters need not be there.
    All ranks call it, before the first forward pass or between steps; each reads its shards. Delayed scaling is seeded anew, with
    a warning; moments belong to the optimizer, which is better built afterwards. ValueError for a model that was not prepared.
    """
    state_dict(model)  # refuses a model that was not prepared
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    held = {name: tensor.detach() for name, tensor in state.items() if first[id(tensor)] == name}
    again = [name for name in state if name not in held]
    read_masters(held, source, [*ignore, *again, *(f"model.{name}" for name in again)], Group.of(None))
    load_state_dict(model, {})
