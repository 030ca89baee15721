"""An optimizer that starts from somebody's high-precision weights."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerocast.checkpoint.checkpoint import group_of
from zerocast.checkpoint.sharded_tensor import TensorShard
from zerocast.checkpoint.sources import AnySource
from zerocast.checkpoint.sources.master_reader import read_masters
from zerocast.optim.zero_adamw import ZeroAdamW


@torch.no_grad()
def load_masters(optimizer: ZeroAdamW, source: AnySource, ignore: Sequence[str] = ()) -> None:
    """Take masters from high-precision weights, and make the weights from them; the rest is as in a
    new optimizer.

    `source` is a safetensors file, its index or folder, a file of torch.save, a folder of
    torch.distributed.checkpoint (what `zerocast.optim.save` wrote too), a mapping from names to
    tensors, which is then the same on every rank, or what `zerocast.serve.stored_weights` made of
    the files of a mixture of experts. FP32, bf16 and fp16 tensors become FP32 masters
    exactly. Moments and step counts become zero, delayed scaling is seeded anew, hyper-parameters
    stay. All ranks call it; each reads the elements that it owns. Nothing that a file carries is
    run.

    Raises ValueError on every rank, with nothing changed and both values named, where names, shapes
    or dtypes do not fit: every parameter of the optimizer is to be there, and everything there is
    to be one of them, or to match a glob of `ignore` (frozen weights, buffers, second names of
    shared ones). RuntimeError for a file that breaks off on the way: the optimizer then says so at
    every call, until a state or masters are loaded.
    """
    state = optimizer.state_to_overwrite()
    with contextlib.ExitStack() as stack:
        begin = partial(stack.enter_context, optimizer.overwriting())
        read_masters(state["model"], source, ignore, group_of(optimizer), begin)
        for moments in state["optim"]["state"].values():
            for tensor in moments.values():
                _plain(tensor).zero_()
        optimizer.load_state_dict({**state, "zerocast": {}})


def _plain(tensor: Any) -> Tensor:
    """The elements of this rank."""
    return tensor.flat if isinstance(tensor, TensorShard) else tensor
