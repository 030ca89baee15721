"""load_masters: a prepared model starts from somebody's high-precision weights."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zerocast.checkpoint.sources import AnySource
from zerocast.checkpoint.sources.masters import read_masters
from zerocast.distributed.group import Group
from zerocast.fsdp2 import torn
from zerocast.fsdp2.prepare import casts_of, load_state_dict, state_dict


@torch.no_grad()
def load_masters(model: nn.Module, source: AnySource, ignore: Sequence[str] = ()) -> None:
    """Take parameters and persistent buffers of a prepared model, which `fully_shard` has sharded, from high-precision weights.

    `source`, `ignore` and errors are those of `zerocast.optim.load_masters`. Second names of shared parameters need not be there.
    All ranks call it, before the first forward pass or between steps; each reads its shards. Delayed scaling is seeded anew, with
    a warning; moments belong to the optimizer, which is better built afterwards. ValueError for a model that was not prepared.
    After a file that breaks off on the way the model says so at every gather, until masters or a state are loaded.
    """
    owners = [model, *casts_of(model)]
    with torn.overlooked(owners):
        state_dict(model)  # casts what is due, and finds the shards
        state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    held = {name: tensor.detach() for name, tensor in state.items() if first[id(tensor)] == name}
    again = [name for name in state if name not in held]
    with contextlib.ExitStack() as stack:
        begin = partial(stack.enter_context, _overwriting(owners))
        read_masters(held, source, [*ignore, *again, *(f"model.{name}" for name in again)], Group.of(None), begin)
        load_state_dict(model, {})


@contextlib.contextmanager
def _overwriting(owners: list[Any]) -> Iterator[None]:
    _, *all_casts = owners
    for casts in all_casts:
        casts.make_due()
    with torn.writing("loading masters", owners):
        yield
