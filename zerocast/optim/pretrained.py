"""High-precision weights into an optimizer's masters, and masters out of it, whole."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.checkpoint.checkpoint import group_of
from zerocast.checkpoint.sharded_tensor import TensorShard
from zerocast.checkpoint.sources import AnySource
from zerocast.checkpoint.sources.master_reader import read_masters
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.optim.zero_optimizer import ZeroOptimizer
from zerocast.weight import QuantizedWeight


@torch.no_grad()
def load_masters(optimizer: ZeroOptimizer, source: AnySource, ignore: Sequence[str] = ()) -> None:
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


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: ZeroOptimizer, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The model's state dict with its masters in the place of their weights, for `save_pretrained`
    and other programs that know whole plain tensors.

    Keys are the names of the model, whatever those of the optimizer are: it may have been built
    from a part of the model, or before the model was wrapped. Masters are rounded to `dtype`, or to
    the dtype of their parameters, of which a QuantizedWeight has its nominal one; other parameters
    and buffers are as they are, frozen QuantizedWeights dequantized. Names of one shared parameter
    share their tensor. Tensors are copies on the CPU, on the first rank of the optimizer's group;
    the others get an empty dict, as from torch.distributed.checkpoint.state_dict. Collective.
    ValueError on every rank for a QuantizedWeight that requires a gradient and is not a parameter
    of this optimizer, whose master is elsewhere. RuntimeError as from `ZeroAdamW.state_dict`.
    """
    group, names = group_of(optimizer), names_in(optimizer)
    validate_across_ranks(group, (), _without_master(model, names), "gathers masters")
    masters = optimizer.state_dict()["model"]
    written: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in names:
            whole = _whole(masters[names[id(parameter)]], group, name).to(dtype or parameter.dtype)
        else:
            whole = parameter.dequantize() if isinstance(parameter, QuantizedWeight) else parameter.detach().clone()
        if group.rank == 0:
            written[id(parameter)] = whole.cpu()
    if group.rank:
        return {}
    tensors = model.state_dict(keep_vars=True)
    return {name: written[id(t)] if id(t) in written else t.detach().clone().cpu() for name, t in tensors.items()}


def names_in(optimizer: ZeroOptimizer) -> dict[int, str]:
    """The optimizer's name of each of its parameters, by the parameter's id."""
    return {
        id(parameter): name
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def _without_master(model: nn.Module, names: Mapping[int, str]) -> ValueError | None:
    for name, parameter in model.named_parameters():
        trains = isinstance(parameter, QuantizedWeight) and parameter.requires_grad and parameter.numel()
        if trains and id(parameter) not in names:
            return ValueError(
                f"{name} requires a gradient and is not a parameter of this ZeroAdamW, so its master is not here: give the "
                "optimizer that was built over this model, or call requires_grad_(False) on weights that are not trained"
            )
    return None


def _whole(master: Tensor, group: Group, name: str) -> Tensor:
    """A master on every rank. Each element has one owner, so a sum of integers keeps its bits."""
    if not isinstance(master, TensorShard):
        return master
    whole = torch.zeros(master.shape, dtype=torch.float32, device=master.flat.device)
    bits = whole.view(-1).view(torch.int32)
    bits[master.span.start : master.span.stop] = master.flat.view(torch.int32)
    group.all_reduce_sum(bits, f"the master of {name}")
    return whole


def _plain(tensor: Any) -> Tensor:
    """The elements of this rank."""
    return tensor.flat if isinstance(tensor, TensorShard) else tensor
