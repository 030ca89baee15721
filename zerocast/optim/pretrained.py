"""load_masters, which reads high-precision weights into the masters of an optimizer, and
full_state_dict, which gathers full masters from it.
"""

import contextlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zerocast.checkpoint.checkpoint import group_of
from zerocast.checkpoint.sources import AnySource, read_masters
from zerocast.checkpoint.torch_checkpoint import TensorShard
from zerocast.distributed.agreement import together
from zerocast.distributed.group import Group
from zerocast.optim.zero_optimizer import ZeroOptimizer
from zerocast.weight import QuantizedWeight


@torch.no_grad()
def load_masters(optimizer: ZeroOptimizer, source: AnySource, ignore: Sequence[str] = ()) -> None:
    """Load masters from high-precision weights, and cast the weights from them. Otherwise the
    optimizer is reset, as if it were new.

    FP32, bf16 and fp16 tensors become FP32 masters exactly. Moments and step counts become zero,
    delayed scaling starts from the new masters, and hyperparameters do not change. All ranks call
    it; each reads the elements that it owns. No code in a file is run.

    Args:
        optimizer: a ZeroAdamW or a ZeroMuon.
        source: a safetensors file, its index or folder; a file of torch.save; a folder of
            torch.distributed.checkpoint, such as one by `zerocast.optim.save`; a mapping from names
            to tensors, the same on every rank; or, for the files of a mixture of experts, a result
            of `zerocast.serve.stored_weights`.
        ignore: globs of tensors in the source that are not parameters of the optimizer: frozen
            weights, buffers, second names of shared parameters.

    Raises ValueError on every rank, with nothing changed, if names, shapes or dtypes do not fit:
    the source must have every parameter of the optimizer, and no other tensor that `ignore` does
    not match. Raises RuntimeError if a file cannot be read to its end. Every call of the optimizer
    then raises until a state or masters are loaded.
    """
    group = group_of(optimizer)
    state = together(group, optimizer.state_to_overwrite, "loads masters")
    with contextlib.ExitStack() as stack:
        begin = partial(stack.enter_context, optimizer.overwriting())
        read_masters(state["model"], source, ignore, group, begin)
        for moments in state["optim"]["state"].values():
            for tensor in moments.values():
                own_elements = tensor.flat if isinstance(tensor, TensorShard) else tensor
                own_elements.zero_()
        optimizer.load_state_dict({**state, "zerocast": {}})


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: ZeroOptimizer, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the model's state dict with masters in place of their weights, for `save_pretrained`
    and other programs that work with unsharded plain tensors.

    Keys are the names of the model. The names of the optimizer may differ, since it may have been
    built from a part of the model, or before the model was wrapped. Masters are rounded to `dtype`,
    or to the dtype of their parameters (for a QuantizedWeight the nominal one). Other parameters
    and buffers are unchanged, frozen QuantizedWeights are dequantized. Names of a shared parameter
    share a tensor. Tensors are copies on the CPU, on the first rank of the optimizer's group; other
    ranks get an empty dict, as from torch.distributed.checkpoint.state_dict. Collective. Raises
    ValueError on every rank for a QuantizedWeight that requires a gradient and is not a parameter
    of this optimizer. Raises RuntimeError if the masters are partly written or other code has
    written parameters (`ZeroAdamW.state_dict`).
    """
    group = group_of(optimizer)
    names, masters = together(group, partial(_masters_of, model, optimizer), "gathers masters")
    # Full values by the id of their parameter.
    values: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in names:
            value = _gathered(masters[names[id(parameter)]], group, name).to(dtype or parameter.dtype)
        elif isinstance(parameter, QuantizedWeight):
            value = parameter.dequantize()
        else:
            value = parameter.detach().clone()
        if group.rank == 0:
            values[id(parameter)] = value.cpu()
    if group.rank:
        return {}
    tensors = model.state_dict(keep_vars=True)
    return {name: values[id(t)] if id(t) in values else t.detach().clone().cpu() for name, t in tensors.items()}


def names_in(optimizer: ZeroOptimizer) -> dict[int, str]:
    """Return the optimizer's name of each of its parameters, by the parameter's id."""
    return {
        id(parameter): name
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def _masters_of(model: nn.Module, optimizer: ZeroOptimizer) -> tuple[dict[int, str], dict[str, Tensor]]:
    """Return the optimizer's name of each of its parameters, by the parameter's id, and the masters
    by these names. Raises ValueError for a trained weight of the model without a master.
    """
    names = names_in(optimizer)
    for name, parameter in model.named_parameters():
        trains = isinstance(parameter, QuantizedWeight) and parameter.requires_grad and parameter.numel()
        if trains and id(parameter) not in names:
            raise ValueError(
                f"{name} requires a gradient and is not a parameter of this ZeroAdamW, so its master is unknown: pass the "
                "optimizer that was built over this model, or call requires_grad_(False) on weights that are not trained"
            )
    return names, optimizer.state_dict()["model"]


def _gathered(master: Tensor, group: Group, name: str) -> Tensor:
    """Return a copy of the full master on every rank. Collective."""
    if not isinstance(master, TensorShard):
        return master.clone()
    gathered = torch.zeros(master.shape, dtype=torch.float32, device=master.flat.device)
    # Each element has one owner and is zero elsewhere, so a sum of integers keeps its bits.
    bits = gathered.view(-1).view(torch.int32)
    bits[master.span.start : master.span.stop] = master.flat.view(torch.int32)
    group.all_reduce_sum(bits, f"the master of {name}")
    return gathered
