"""The methods of the host that an attachment replaces, and what each does then.

Methods are replaced on instances, from top to bottom, so that a method that is named twice is
wrapped twice. `attach` replaces them by one `Patches`, which `Attachment.detach` closes. Everything
depends on the first: Megatron's step calls it after the inner step.

    each distributed optimizer inside `optimizer`
      _copy_main_params_to_model...   is the cast; then Megatron starts the gathers
      _copy_model_params_to_main...,  read masters from the model, then cast and gather
        reload_model_params
      state_dict, restore_from_cpu    under CPU offload: drops settings; leaves offloaded moments
      offload_to_cpu                  also drops references to the masters' device memory
    each bucket group
      start_param_sync,               make columnwise copies when the bytes have arrived, one thread
        finish_param_sync             at a time
      _post_param_sync                does nothing: the copies of TransformerEngine's tensors exist
    each distributed optimizer, in checkpoints (`optimizer_state.py`)
      sharded_state_dict              also saves the state of delayed scaling, and corrects offsets
                                      in `fully_reshardable` checkpoints
      load_state_dict                 also loads the state of delayed scaling
      _set_main_param_and_...,        keep step numbers; moments are saved without their scale
        _get_main_param_and_...
    `optimizer` and each distributed optimizer
      step_with_ready_grads           an exception in it leaves the weights partial, and is raised
                                      on all ranks that share masters
      step, state_dict, save_...      raise unless the weights are valid for it
      sharded_state_dict              raises as well, or prepares the template of a load
      load_...                        also cast and gather the loaded masters
    `optimizer`
      step_with_ready_grads           then verifies, every so many steps
    each model chunk
      sharded_state_dict              entries raise if saved or loaded without `dequantize_`
      hooks of modules                cast loaded values; check weights before a forward pass
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerocast.cast.host import casting
from zerocast.distributed.group import Group
from zerocast.integrations import Patch
from zerocast.weight.owners import Claim
from zerocast.weight.validity import Use

from . import checkpoint, host, offload, optimizer_state
from .gathers import AttachedShare, Guard, raising_on_all
from .primary import is_primary, is_te_tensor
from .shards import holder_of_masters, read_from_model, read_from_state_dict

Method = Callable[..., Any]

# Methods that raise while weights are partial, on this rank: a training loop may call the state
# dict on some ranks only.
USES = {"step": Use.STEP, "state_dict": Use.SAVE}
# Methods that make partial weights complete.
LOAD = ("load_state_dict", "load_parameter_state")
# Further methods of an optimizer whose ranks own whole matrices.
USES_OF_MATRICES = {"save_state_dict_to_file": Use.SAVE}
LOAD_MATRICES = ("load_state_dict_from_file",)


def replacements(
    optimizer: Any,
    distributed: Sequence[Any],
    chunks: Sequence[Any],
    shares: Sequence[AttachedShare],
    guard: Guard,
    after_step: Callable[[], None],
) -> Iterator[Patch]:
    """Yield a patch of each method in the table above, in its order.

    `optimizer` is the argument of `attach`, and `distributed` are the optimizers inside it.
    `after_step` is called after each complete step of `optimizer`.
    """
    for inner in distributed:
        of_inner = [share for share in shares if share.owned.optimizer is inner]
        if of_inner:
            yield from _cast_patches(inner, of_inner, guard)
        yield from optimizer_state.patches(inner, of_inner, guard)
    # The methods that check and mark the weights come after these, so that they surround them. An
    # optimizer that is not a chain is also its only distributed optimizer.
    for owner in {id(owner): owner for owner in (optimizer, *distributed)}.values():
        # A chain steps, saves and loads all of its optimizers.
        is_whole = owner is optimizer or len(distributed) == 1
        of_owner = [share for share in shares if is_whole or share.owned.optimizer is owner]
        yield from _step_and_load_patches(owner, distributed if is_whole else [owner], of_owner, is_whole, guard)
        # All pipeline stages and tensor-parallel ranks save together. Inside that call each
        # optimizer of a chain is saved by the ranks that have it.
        everyone = _groups_of_all_ranks(distributed) if owner is optimizer else []
        savers = [Group.of(group) for group in everyone] or [share.owned.group for share in of_owner]
        yield from _check_patches(owner, distributed, savers, guard)
    yield Patch(optimizer, "step_with_ready_grads", followed_by(optimizer.step_with_ready_grads, after_step))
    for chunk in chunks:
        model = chunk.module
        yield Patch(model, "sharded_state_dict", checkpoint.refusing_quantized(model.sharded_state_dict))


def module_hooks(
    chunks: Sequence[nn.Module], shares: Sequence[AttachedShare], guard: Guard
) -> Iterator[RemovableHandle]:
    """Register the hooks of modules in the table above, and yield their handles.

    A QuantizedWeight checks by itself when it is read; a tensor of TransformerEngine does not.
    """
    # The load hooks look claims up here. Values are weak, so that the hooks keep no claim alive
    # once its attachment is gone.
    claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
    for share in shares:
        claim = share.driver.claim
        assert claim is not None
        claims.update(dict.fromkeys((id(own.param) for own in share.owned.weights), claim))
    for module in (module for chunk in chunks for module in chunk.modules()):
        params = list(module.parameters(recurse=False))
        if any(map(is_primary, params)):
            yield module.register_load_state_dict_pre_hook(functools.partial(checkpoint.cast_in, claims))
        if any(map(is_te_tensor, params)):
            yield module.register_forward_pre_hook(lambda *_: guard.check(Use.READ))


def _cast_patches(optimizer: Any, shares: Sequence[AttachedShare], guard: Guard) -> Iterator[Patch]:
    """Yield patches by which the shares of one optimizer are cast and gathered, and their masters
    overwritten with the model's values.
    """

    def cast() -> None:
        with guard.writing("a cast", masters=False):
            for share in shares:
                share.driver.cast()

    @torch.no_grad()
    def read_model(state_dict: Any = None) -> None:
        with raising_on_all(shares), guard.writing("reading masters from the model", masters=True):
            _read_masters(optimizer, shares, state_dict)
            # Quantizing a dequantized value again need not give the same bytes.
            for share in shares:
                share.driver.refresh()

    def leave_memory() -> None:
        for share in shares:
            share.driver.leave_memory()

    holder = holder_of_masters(optimizer)
    yield Patch(holder, "_copy_main_params_to_model_params", cast)
    yield Patch(holder, "_copy_model_params_to_main_params", read_model)
    if host.is_layer_wise(optimizer):
        # It reads masters by itself.
        yield Patch(optimizer, "reload_model_params", read_model)
    yield from offload.patches(optimizer)
    if hasattr(optimizer, "offload_to_cpu"):
        # The host moves masters and moments to the CPU while a model generates. A view that a plan
        # still held would keep their device memory allocated.
        yield Patch(optimizer, "offload_to_cpu", followed_by(optimizer.offload_to_cpu, leave_memory))
    for share in shares:
        yield from share.gathers.patches(share.driver.plan)


def _read_masters(optimizer: Any, shares: Sequence[AttachedShare], state_dict: Any) -> None:
    if state_dict is not None:
        read_from_state_dict(optimizer, state_dict)
        return
    for share in shares:
        share.gathers.te_tensors.locate()
        read_from_model(share.owned)


def _step_and_load_patches(
    owner: Any, optimizers: Sequence[Any], shares: Sequence[AttachedShare], is_whole: bool, guard: Guard
) -> Iterator[Patch]:
    """Yield patches of the methods of `owner` that step and load `optimizers`. `is_whole` is True
    if these are all optimizers of the attachment.
    """
    hosts_step = owner.step_with_ready_grads

    def step(*args: Any, **kwargs: Any) -> Any:
        drivers = [share.driver for share in shares]
        with raising_on_all(shares), guard.writing("an optimizer step", masters=True), casting(drivers):
            return hosts_step(*args, **kwargs)

    def loading(hosts_load: Method) -> Method:
        def load(*args: Any, **kwargs: Any) -> Any:
            # One load of the host consists of several calls. A call inside another one, or one
            # without masters, completes nothing: the outer or the later call does.
            validity = guard.validity
            given = args[0] if args else kwargs.get("state_dict", kwargs.get("filename"))
            completes = not validity.partial or _holds_masters(given)
            if guard.is_preparing or validity.is_writing or not completes:
                return hosts_load(*args, **kwargs)
            # Only a load of all optimizers makes partial weights complete.
            if not is_whole:
                guard.check(Use.STEP)
            with validity.transaction("loading a checkpoint"), raising_on_all(shares):
                result = hosts_load(*args, **kwargs)
                optimizer_state.copy_group_steps(optimizers)
                for share in shares:
                    share.driver.refresh()
            return result

        return load

    yield Patch(owner, "step_with_ready_grads", step)
    for name in (*LOAD, *LOAD_MATRICES) if host.is_layer_wise(owner) else LOAD:
        yield Patch(owner, name, loading(getattr(owner, name)))


def _holds_masters(state: Any) -> bool:
    """Return True if `state` has the state of the parameters: masters and moments.

    `state` is the name of a file, or the state dict of one optimizer or of several.
    """
    if isinstance(state, dict) and "optimizer" not in state:
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        return all(map(_holds_masters, state))
    return not isinstance(state, dict) or "param_state" in state or "fp32_from_fp16_params" in state


def _check_patches(owner: Any, distributed: Sequence[Any], savers: Sequence[Group], guard: Guard) -> Iterator[Patch]:
    """Yield patches of the methods that raise unless the weights are valid for a step or a save,
    and of `sharded_state_dict`, which also makes the template of a load. All ranks of `savers` save
    together.
    """

    def checked(method: Method, use: Use) -> Method:
        def call(*args: Any, **kwargs: Any) -> Any:
            guard.check(use)
            return method(*args, **kwargs)

        return call

    for name, use in (USES | USES_OF_MATRICES if host.is_layer_wise(owner) else USES).items():
        yield Patch(owner, name, checked(getattr(owner, name), use))
    hosts_save, hosts_entries = owner.save_parameter_state, owner.sharded_state_dict

    def save_parameter_state(*args: Any, **kwargs: Any) -> Any:
        guard.check_save(savers)
        return hosts_save(*args, **kwargs)

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        for inner in distributed:
            optimizer_state.check_checkpoint(inner, kwargs.get("metadata"))
        if host.is_loading(args, kwargs):
            with optimizer_state.preparing_load(distributed, guard):
                return hosts_entries(*args, **kwargs)
        guard.check_save(savers)
        return hosts_entries(*args, **kwargs)

    yield Patch(owner, "save_parameter_state", save_parameter_state)
    yield Patch(owner, "sharded_state_dict", sharded_state_dict)


def _groups_of_all_ranks(optimizers: Sequence[Any]) -> list[Any]:
    """Return process groups that connect all ranks of a model. The first one has all pipeline
    stages, tensor-parallel and data-parallel ranks of an optimizer instance; the host reduces the
    norm of gradients over it. The second one, if there are several instances, has the ranks at the
    same place in each. Empty if no optimizer has the first.
    """
    of_norms = [getattr(optimizer, "grad_stats_parallel_group", None) for optimizer in optimizers]
    instance = next((group for group in of_norms if group is not None), None)
    if instance is None:
        return []
    chunks = [chunk for optimizer in optimizers for chunk in getattr(optimizer, "model_chunks", ())]
    # A chunk has this attribute only if there are several instances.
    of_instances = (chunk.inter_dist_opt_group for chunk in chunks if hasattr(chunk, "inter_dist_opt_group"))
    return [instance, *itertools.islice(of_instances, 1)]


def followed_by(first: Method, second: Callable[[], None]) -> Method:
    """Return a function that calls `first`, then `second` unless `first` raised."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both
