"""The methods of the host that an attachment replaces, and what each does then.

Methods are replaced on instances, from top to bottom, so that a method that is named twice is
wrapped twice. Everything depends on the first: Megatron's step calls it after the inner step.

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
      sharded_state_dict,             also save and load the state of delayed scaling
        load_state_dict
      _set_main_param_and_...,        keep step numbers; moments are saved without their scale
        _get_main_param_and_...
      sharded_state_dict              corrects offsets in `fully_reshardable` checkpoints
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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerocast.cast.host import raising_together
from zerocast.distributed.group import Group
from zerocast.integrations.patches import Patch, Patches
from zerocast.weight.validity import Use

from . import checkpoint, host, offload, optimizer_state, unattached
from .gathers import AttachedShare
from .guard import Method, MethodGuard
from .optimizer_state import copy_group_steps
from .primary import check_before_forward
from .shards import holder_of_masters, read_given, read_masters

# Methods that raise while weights are partial, on this rank: a training loop may call the state
# dict on some ranks only.
USES = {"step": Use.STEP, "state_dict": Use.SAVE}
# Methods that make partial weights complete.
LOAD = ("load_state_dict", "load_parameter_state")
# Further methods of an optimizer whose ranks own whole matrices.
USES_OF_MATRICES = {"save_state_dict_to_file": Use.SAVE}
LOAD_MATRICES = ("load_state_dict_from_file",)


def replace_methods(
    patches: Patches,
    optimizer: Any,
    distributed: Sequence[Any],
    chunks: Sequence[Any],
    shares: Sequence[AttachedShare],
    guard: MethodGuard,
    after_step: Callable[[], None],
) -> None:
    """Replace the methods of the host until `patches` are undone.

    `optimizer` is the argument of `attach`, and `distributed` are the optimizers inside it.
    `after_step` is called after each complete step of `optimizer`.
    """
    # An optimizer that is not a chain is also its only distributed optimizer.
    owners = list({id(owner): owner for owner in (optimizer, *distributed)}.values())
    # The methods that raise are removed first: the patches below wrap the host's own methods.
    unattached.lift(patches, owners)
    for inner in distributed:
        of_inner = [share for share in shares if share.owned.optimizer is inner]
        if of_inner:
            patches.apply(_casts(inner, of_inner, guard))
        patches.apply(optimizer_state.patches(inner, of_inner, guard))
    # The guard comes after these, so that it surrounds them.
    for owner in owners:
        # A chain steps, saves and loads all of its optimizers.
        is_whole = owner is optimizer or len(distributed) == 1
        of_owner = [share for share in shares if is_whole or share.owned.optimizer is owner]
        patches.apply(_steps_and_loads(owner, distributed if is_whole else [owner], of_owner, is_whole, guard))
        # All pipeline stages and tensor-parallel ranks save together. Inside that call each
        # optimizer of a chain is saved by the ranks that have it.
        everyone = host.groups_of_all_ranks(distributed) if owner is optimizer else []
        savers = [Group.of(group) for group in everyone] or [share.owned.group for share in of_owner]
        patches.apply(_saves(owner, distributed, savers, guard))
    step = followed_by(optimizer.step_with_ready_grads, after_step)
    patches.apply([Patch(optimizer, "step_with_ready_grads", step)])
    checkpoint.hook_chunks(patches, chunks, shares)
    for chunk in chunks:
        for remove in check_before_forward(chunk, lambda: guard.check(Use.READ)):
            patches.callback(remove)


def _casts(optimizer: Any, shares: Sequence[AttachedShare], guard: MethodGuard) -> Iterator[Patch]:
    """Yield patches by which the shares of one optimizer are cast and gathered, and their masters
    overwritten with the model's values.
    """

    def cast() -> None:
        for share in shares:
            share.driver.cast()

    def leave_memory() -> None:
        for share in shares:
            share.driver.leave_memory()

    holder = holder_of_masters(optimizer)
    cast_guarded = guard.writing(cast, Use.STEP, "a cast", masters=False)
    yield Patch(holder, "_copy_main_params_to_model_params", cast_guarded)
    copy_model = _copying_model(optimizer, shares)
    copy_guarded = guard.writing(copy_model, Use.STEP, "reading masters from the model", masters=True)
    copy_guarded = raising_on_all(copy_guarded, shares)
    yield Patch(holder, "_copy_model_params_to_main_params", copy_guarded)
    if host.is_layer_wise(optimizer):
        # It reads masters by itself.
        yield Patch(optimizer, "reload_model_params", copy_guarded)
    yield from offload.patches(optimizer)
    if hasattr(optimizer, "offload_to_cpu"):
        # The host moves masters and moments to the CPU while a model generates. A view that a plan
        # still held would keep their device memory allocated.
        yield Patch(optimizer, "offload_to_cpu", followed_by(optimizer.offload_to_cpu, leave_memory))
    for share in shares:
        yield from share.gathers.patches(share.driver.plan)


def _copying_model(optimizer: Any, shares: Sequence[AttachedShare]) -> Method:
    """Return the function that reads masters from the model or from a state dict, then casts and
    gathers them: quantizing a dequantized value again need not give the same bytes.
    """

    @torch.no_grad()
    def copy_model(state_dict: Any = None) -> None:
        if state_dict is not None:
            read_given(optimizer, state_dict)
        else:
            for share in shares:
                share.gathers.te_tensors.locate()
                read_masters(share.owned)
        for share in shares:
            share.driver.refresh()

    return copy_model


def _steps_and_loads(
    owner: Any, optimizers: Sequence[Any], shares: Sequence[AttachedShare], is_whole: bool, guard: MethodGuard
) -> Iterator[Patch]:
    """Yield patches of the methods that step and load `optimizers`, which are all if `is_whole`."""

    def cast_loaded() -> None:
        copy_group_steps(optimizers)
        for share in shares:
            share.driver.refresh()

    step = guard.writing(owner.step_with_ready_grads, Use.STEP, "an optimizer step", masters=True)
    yield Patch(owner, "step_with_ready_grads", raising_on_all(step, shares))
    for name in (*LOAD, *LOAD_MATRICES) if host.is_layer_wise(owner) else LOAD:
        method = getattr(owner, name)
        load_and_cast = raising_on_all(followed_by(method, cast_loaded), shares)
        yield Patch(owner, name, guard.loading(method, load_and_cast, is_whole))


def _saves(owner: Any, distributed: Sequence[Any], savers: Sequence[Group], guard: MethodGuard) -> Iterator[Patch]:
    """Yield patches of the methods that raise unless the weights are valid for a step or a save,
    and of the one that makes the template of a load.
    """
    for name, use in (USES | USES_OF_MATRICES if host.is_layer_wise(owner) else USES).items():
        yield Patch(owner, name, guard.checked(getattr(owner, name), use))
    yield Patch(owner, "save_parameter_state", guard.saving(owner.save_parameter_state, savers))
    sharded_state_dict = guard.saving(owner.sharded_state_dict, savers)
    yield Patch(owner, "sharded_state_dict", optimizer_state.preparing(guard, sharded_state_dict, distributed))


def raising_on_all(method: Method, shares: Sequence[AttachedShare]) -> Method:
    """Wrap a method that casts `shares`: an exception before a cast is raised on all ranks. The
    steps and loads of an optimizer that owns whole matrices have collectives of their own before
    the cast, so its methods stay as they are.
    """
    if any(host.is_layer_wise(share.owned.optimizer) for share in shares):
        return method
    return raising_together(method, [share.driver for share in shares])


def followed_by(first: Method, second: Callable[[], None]) -> Method:
    """Return a function that calls `first`, then `second` unless `first` raised."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both
