"""Access to internals of FSDP2, which differ between versions of torch.

`GatheredByGroup` and `GroupOfWeights` replace the classes of FSDP2's own FSDPParam and
FSDPParamGroup objects.
"""

import contextlib
import functools
import importlib
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from zerocast.fsdp2.reduction import LaidOutReduceScatter, accumulate


def groups(model: nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of all FSDP modules within `model`, each once."""
    seen = set()
    for module in model.modules():
        for group in groups_at(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def groups_at(module: nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of one FSDP module; none of another module."""
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        # Torch 2.13 has several groups a module, earlier versions have one or None.
        param_groups = getattr(state, "_fsdp_param_groups", None)
        yield from filter(None, [state._fsdp_param_group] if param_groups is None else param_groups)


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yield (name, sharded parameter, the dtype that it computes in) once per parameter, also for
    parameters that a forward pass has left gathered.
    """
    # Modules have either the gathered or the sharded parameter of an FSDPParam.
    param_of: dict[int, Any] = {}
    for group in groups(model):
        for param in group.fsdp_params:
            param_of[id(getattr(param, "_unsharded_param", param.sharded_param))] = param
            param_of[id(param.sharded_param)] = param
    for name, parameter in model.named_parameters():
        param = param_of.get(id(parameter))
        if param is None:
            yield name, parameter, parameter.dtype
        else:
            yield name, param.sharded_param, param.mp_policy.param_dtype or param.sharded_param.dtype


def reduction_groups(model: nn.Module) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups over which gradients are reduced and scattered."""
    for group in groups(model):
        yield group._reduce_scatter_process_group


def replicas(group: Any) -> dist.ProcessGroup | None:
    """Return the process group over which gradients of a parameter group are added up after their
    reduce-scatter. None if it has no replicas.
    """
    replicated: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
    return replicated


def default_reduce_scatter() -> Any:
    """Return the reduce-scatter that FSDP2 uses by default."""
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    return collectives.DefaultReduceScatter()


def reshard(groups: Iterable[Any]) -> None:
    """Free the groups that a forward pass has left gathered, so that the next one gathers again."""
    for group in groups:
        if group.is_unsharded:
            group._to_sharded()


def discard_gathers(groups: Iterable[Any]) -> None:
    """Drop the unread results of gathers after a pass that failed partway. The next pass would take
    their bytes and not gather again.
    """
    for group in groups:
        result = group._all_gather_result
        if result is not None:
            if result.all_gather_event is not None:
                torch.accelerator.current_stream().wait_event(result.all_gather_event)
            if isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            group._all_gather_result = None


def gather_again(group: Any) -> None:
    """Free a group and gather it again. Its forward pass may have begun."""
    group._to_sharded()
    group.unshard()
    group.wait_for_unshard()


def is_reading_shard() -> bool:
    """Return whether FSDP2's own code is asking for the memory of a shard.

    FSDP2 compares the shard's memory with the parameter's if the shard is a plain tensor, and
    copies the shard otherwise.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").endswith("._fsdp_param"):
            return True
    return False


def backward_pass() -> int | None:
    """Return the number of the backward pass that autograd is running, for example when a hook of
    a gradient is called. None outside of a backward pass.
    """
    running: int = getattr(torch._C, "_current_graph_task_id")()  # noqa: B009
    return None if running == -1 else running


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of the backward pass that is running."""
    getattr(torch.autograd.Variable, "_execution_engine").queue_callback(call)  # noqa: B009


def is_idle(group: Any) -> bool:
    """Return whether a parameter group is neither in a forward nor in a backward pass."""
    return bool(group._training_state.name == "IDLE")


@contextlib.contextmanager
def while_gathered(group: Any) -> Iterator[None]:
    """Gather the parameters of a group for the body, and free them after it unless they were
    gathered before.
    """
    was_gathered = group.is_unsharded
    group.lazy_init()
    group.unshard()
    group.wait_for_unshard()
    try:
        yield
    finally:
        if not was_gathered:
            group._to_sharded()


def state_of(model: nn.Module) -> Any:
    """Return FSDP2's state of the first FSDP module within `model`. None without one."""
    return next((module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)), None)


def has_failed_backward(state: Any) -> bool:
    """Return True if a backward pass raised, of any module below the same root as the module of
    `state`, and FSDP2 was not reset since. FSDP2 then runs nothing at the end of any later pass, so
    some gradients are never reduced.
    """
    return getattr(state._state_ctx, "post_backward_final_callback_queued", False) and backward_pass() is None


def has_unreduced_gradient(param: Any) -> bool:
    """Return True if passes without a reduction have left a gradient with an FSDPParam."""
    gathered = getattr(param, "_unsharded_param", None)
    # Before torch 2.15 FSDP2 keeps this gradient separate from the parameter. Later versions use
    # the name for something else.
    accumulated = getattr(param, "unsharded_accumulated_grad", None)
    with torch._C.DisableTorchFunctionSubclass():
        return accumulated is not None or (gathered is not None and gathered.grad is not None)


class GatheredByGroup(FSDPParam):
    """The FSDPParam of a prepared weight. Its ParamGroup supplies the bytes that a gather sends and
    processes the gathered bytes, for all weights of the group together.

    FSDP2's hooks do this for one weight at a time. Around each call FSDP2 inspects the hook's
    signature and takes sizes and views, which costs more CPU time than the hook itself. So only the
    first gather uses hooks, which allocate the memory and the parameter that modules see. Later
    gathers call only the first weight (`GroupOfWeights`).

    Attributes:
        memory: a list of the one tensor that contains the outputs of all weights, so that FSDP2
            allocates and frees one storage. Empty for weights other than the first. None if each
            output has separate memory. Set in the first gather, reset by a switch of formats.
        gathered_into: the outputs of all weights, which `all_gather_outputs` is while FSDP2 copies
            to them. While FSDP2 frees the gathered bytes it is `memory`. None until the end of the
            first gather.
        seen_as: the modules that have the parameter, with its name there. Empty if one of them has
            its own `__setattr__`. Fixed.
    """

    memory: list[Tensor] | None = None
    gathered_into: list[Tensor] | None = None
    seen_as: Sequence[tuple[nn.Module, str]] = ()

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        for module, name in self.seen_as:
            module._parameters[name] = param
        if not self.seen_as:
            super()._setattr_on_modules(param)

    def alloc_all_gather_outputs(self) -> None:
        """Allocate the outputs that FSDP2 is about to copy the gathered bytes to."""
        if self.memory is None:
            super().alloc_all_gather_outputs()
            return
        for tensor in self.memory:
            alloc_storage(tensor)
        if self.gathered_into is not None:
            self.all_gather_outputs = self.gathered_into

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The flat tensors that this rank sends."""
        try:
            _, weight = _gathered_before(self)
        except AttributeError:
            inputs: list[Tensor] = super().all_gather_inputs
            return inputs
        return weight.send(self.device)  # type: ignore[no-any-return]

    def init_unsharded_param(self) -> None:
        """Called for each weight in turn, once all weights were gathered."""
        try:
            _, weight = _gathered_before(self)
        except AttributeError:
            super().init_unsharded_param()  # type: ignore[no-untyped-call]
            return
        if weight.index == 0:
            for tensor in self._unsharded_inner_tensors:
                alloc_storage(tensor)
            if self.memory is not None:
                self.all_gather_outputs = self.memory
            weight.group.finish_gather()

    # Torch 2.15 calls neither of these two. There autograd adds the gradients of several passes, in
    # the dtype that they have.
    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add the gradient of this pass to that of passes without a reduction, if there is one."""
        if self.unsharded_accumulated_grad is not None:
            self._accumulate()
        super().accumulate_unsharded_grad_if_needed()

    def to_accumulated_grad_if_needed(self) -> None:
        """Keep the gradient of a pass without a reduction in the dtype of reductions."""
        self._accumulate()
        super().to_accumulated_grad_if_needed()

    def _accumulate(self) -> None:
        """Add the gradient to the accumulated one by the backend's kernel, or store it in FP32 if
        it is the first one. If `accumulate` does not support it, FSDP2's own code does this.
        """
        gradient = self._unsharded_param.grad
        if gradient is None or self.reduce_dtype is not torch.float32:
            return
        total = accumulate(gradient, self.unsharded_accumulated_grad)
        if total is not None:
            self.unsharded_accumulated_grad = total
            self._unsharded_param.grad = None


# Gets (the gathered parameter, the FSDPWeight) of an FSDPParam. Raises AttributeError before the
# first gather, and if something has replaced the parameter by a plain one. FSDP2's own code then
# gathers it.
_gathered_before = operator.attrgetter("_unsharded_param", "sharded_param._local_tensor.weight")


def take_over_param(param: Any) -> None:
    """Replace the class of an FSDPParam by GatheredByGroup, so that its weight handles the bytes of
    all gathers after the first.
    """
    param.__class__ = GatheredByGroup
    info = param._module_info
    modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    if all(getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__ for module in modules):
        param.seen_as = list(zip(modules, names, strict=True))


class TrackedGroup(FSDPParamGroup):
    """An FSDPParamGroup in a prepared model, which records when its last gather began.

    Attributes:
        plain_params: the FSDPParams without prepared weights. Fixed.
        plain_versions: the version counters of their parameters at the start of the last gather.
            Autograd counts writes to a parameter and writes to its local tensor separately.
        is_of_this_pass: True if the current forward pass started the last gather. FSDP2 gathers the
            parameters of the prepared model itself, and prefetches other groups, just before the
            model's forward hook looks for gathers of earlier passes. The hook resets this.
    """

    plain_params: list[Any]
    plain_versions: list[tuple[int, int]]
    is_of_this_pass: bool

    @property
    def is_gathered_or_in_flight(self) -> bool:
        """True from the start of a gather until the group is resharded."""
        return self._all_gather_result is not None or self.is_unsharded

    def count_plain_writes(self) -> list[tuple[int, int]]:
        """Return the version counters of the plain parameters. Empty if they were made in inference
        mode, where writes are not counted.
        """
        try:
            return [*map(_plain_versions, self.plain_params)]
        except RuntimeError:
            return []

    def unshard(self, async_op: bool = False) -> None:
        """Begin a gather, unless one has begun."""
        if self._all_gather_result is None and not self.is_unsharded:
            self.is_of_this_pass = self._training_state is TrainingState.FORWARD
            self.plain_versions = self.count_plain_writes()
        super().unshard(async_op)

    def _reset_iter_state(self) -> None:
        """Drop a pass that raised. Called by `FSDPModule.reset_iter_state` of torch 2.13 and later.

        FSDP2 documents that this drops unreduced gradients, but keeps them with the gathered
        parameters, and the next pass would add to them.
        """
        super()._reset_iter_state()
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.fsdp_params:
                if vars(param).get("unsharded_accumulated_grad") is not None:
                    param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


_plain_versions = operator.attrgetter("sharded_param._version", "sharded_param._local_tensor._version")


def track_gathers(
    group: Any, prepared: Sequence[Any], is_of_this_pass: bool, kind: type[TrackedGroup] = TrackedGroup
) -> None:
    """Make an FSDPParamGroup a TrackedGroup of class `kind`. Its `prepared` FSDPParams hold
    prepared weights.
    """
    group.__class__ = kind
    group.plain_params = [param for param in group.fsdp_params if param not in prepared]
    group.plain_versions = group.count_plain_writes()
    group.is_of_this_pass = is_of_this_pass


class GroupOfWeights(TrackedGroup):
    """An FSDPParamGroup of prepared weights. It notifies their ParamGroup when the products of a
    pass have ended.

    From the second gather on, FSDP2 gathers all prepared weights as one parameter: the first one,
    which then has the inputs and outputs of all. Otherwise FSDP2 would look for hooks, inputs and
    memory of each parameter.

    FSDP2 reads the parameters of a group from `fsdp_params`, also to reshard them and to reduce
    their gradients. So `fsdp_params` is `merged_params` in the two calls that gather (`unshard`,
    `wait_for_unshard`), and `all_params` at all other times.

    FSDP2 reads the gradient of each gathered parameter. `__torch_function__` of their class is
    disabled meanwhile, since it has nothing to do there and costs CPU time.

    Attributes:
        param_group: a weak reference to zerocast's ParamGroup, which knows whether weights are
            merged. Fixed.
        all_params: all FSDPParams of the group. Fixed.
        prepared: the FSDPParams of prepared weights. Fixed.
        merged_params: `all_params` without the prepared ones other than the first. Fixed.
    """

    param_group: Callable[[], Any]
    all_params: list[Any]
    prepared: Sequence[Any]
    merged_params: list[Any]

    def unshard(self, async_op: bool = False) -> None:
        """Begin a gather, unless one has begun. Raises RuntimeError for a master that something has
        replaced, which the first weight would gather as it was before.
        """
        param_group = self.param_group()
        if param_group is not None and param_group.is_merged:
            try:
                list(map(_master_of, self.prepared))
            except AttributeError:
                param_group.check_masters()
            self.fsdp_params = self.merged_params
        try:
            super().unshard(async_op)
        finally:
            self.fsdp_params = self.all_params

    def wait_for_unshard(self) -> None:
        """Take the gathered bytes out of the buffer of the gather."""
        param_group = self.param_group()
        if param_group is not None and param_group.is_merged:
            self.fsdp_params = self.merged_params
        try:
            super().wait_for_unshard()
        finally:
            self.fsdp_params = self.all_params

    def _to_unsharded(self) -> None:
        # `wait_for_unshard` calls this once all bytes have arrived. FSDP2 then sets the gathered
        # parameter of each FSDPParam on its modules.
        self.fsdp_params = self.all_params
        with torch._C.DisableTorchFunctionSubclass():
            super()._to_unsharded()  # type: ignore[no-untyped-call]

    def _to_sharded(self) -> None:
        super()._to_sharded()  # type: ignore[no-untyped-call]
        self._end_round()

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients, and shard the parameters unless they stay gathered."""
        runs_hooks = self._all_reduce_hook is not None or any(map(_gradient_hooks, self.fsdp_params))
        reduce_scatter: Any = self._reduce_scatter_comm
        self._reduce_scatter_comm: Any = LaidOutReduceScatter(reduce_scatter)
        try:
            # Hooks of users may call functions on the class of the weights.
            with contextlib.nullcontext() if runs_hooks else torch._C.DisableTorchFunctionSubclass():
                super().post_backward(*unused)
        finally:
            self._reduce_scatter_comm = reduce_scatter
        self._end_round()

    def _end_round(self) -> None:
        param_group = self.param_group()
        if param_group is not None:
            param_group.end_round()


class GroupOfInnerShards(GroupOfWeights):
    """A GroupOfWeights in which some weights are sharded along a dimension other than the first.

    To join such shards, FSDP2 views each gathered tensor in the shape of the parameter, but codes
    of 4 bits and metadata have other sizes. So FSDP2 is shown a sharding of the first dimension,
    leaves the gathered bytes in the order of ranks, and zerocast joins the shards
    (`zerocast.distributed.row_shards.InnerShards`).

    Attributes:
        placements: the actual placements of these weights, by FSDPParam. Fixed.
    """

    placements: Mapping[Any, Shard]

    def wait_for_unshard(self) -> None:
        """Take the gathered bytes out of the buffer of the gather."""
        for param in self.placements:
            param.fsdp_placement = Shard(0)
        try:
            super().wait_for_unshard()
        finally:
            for param, placement in self.placements.items():
                param.fsdp_placement = placement


_gradient_hooks = operator.attrgetter("sharded_param._post_accumulate_grad_hooks")
# Raises AttributeError for a plain tensor.
_master_of = operator.attrgetter("sharded_param._local_tensor.weight")


def take_over_group(group: Any, param_group: Any, params: Sequence[Any]) -> bool:
    """Make an FSDPParamGroup a GroupOfWeights that notifies `param_group`, the ParamGroup of the
    FSDPParams `params`. Return True if these are all prepared weights of the FSDPParamGroup. It has
    others if `prepare` was called twice, for two modules in it.
    """
    prepared = [param for param in group.fsdp_params if hasattr(param._sharded_local_tensor, "weight")]
    _, *others = params
    placements = {param: param.fsdp_placement for param in prepared if param.fsdp_placement.dim}
    # This runs in the first gather of the group.
    track_gathers(group, prepared, True, GroupOfInnerShards if placements else GroupOfWeights)
    group.placements = placements
    group.all_params, group.prepared = group.fsdp_params, params
    group.merged_params = [param for param in group.all_params if param not in others]
    group.param_group = weakref.ref(param_group)
    return len(prepared) == len(params)


def is_plain(group: Any) -> bool:
    """Return whether an FSDPParamGroup has no weight that any model has prepared."""
    return not any(hasattr(param._sharded_local_tensor, "weight") for param in group.fsdp_params)


def has_plain_writes(group: Any) -> bool:
    """Return True if plain parameters of a TrackedGroup were written since its gather began."""
    written: bool = group.count_plain_writes() != group.plain_versions
    return written


def gather_into(params: Iterable[Any], outputs: Iterable[Sequence[Tensor]], memory: Tensor) -> None:
    """Let the first gather of a group write into `outputs`, the tensors of each of its FSDPParams,
    which are views of `memory`.
    """
    for index, (param, param_outputs) in enumerate(zip(params, outputs, strict=True)):
        param.all_gather_outputs = [*param_outputs]
        param.memory = [memory] if index == 0 else []


def merge_params(params: Sequence[Any]) -> None:
    """Make the outputs of all these FSDPParams outputs of the first one."""
    first, *others = params
    outputs = [output for param in params for output in param.all_gather_outputs]
    for param in others:
        param.all_gather_outputs = []
    if first.memory is None:
        first.all_gather_outputs = outputs
    else:
        first.gathered_into, first.all_gather_outputs = outputs, first.memory


def free(tensors: Iterable[Tensor]) -> None:
    """Free the memory of tensors that FSDP2 allocates again at the next gather."""
    for tensor in tensors:
        free_storage(tensor)


def forget_gathered(param: Any) -> None:
    """Let the next gather of an FSDPParam allocate memory and parameter as the first one did."""
    outdate_gathered(param)
    vars(param).pop("_unsharded_param", None)
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
    param.memory = param.gathered_into = None


def outdate_gathered(param: Any) -> None:
    """Let a backward pass of an earlier forward pass raise, as after any other write in place."""
    gathered = vars(param).get("_unsharded_param")
    saved_by_autograd = [gathered, getattr(gathered, "_local_tensor", None), *param.all_gather_outputs]
    for tensor in (*saved_by_autograd, *getattr(param, "_unsharded_inner_tensors", ())):
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def unversioned(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes to `tensors` from autograd, as FSDP2 hides its own. They fill memory again that
    autograd has saved for a backward pass.
    """
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    context: AbstractContextManager[None] = getattr(torch.autograd, "_unsafe_preserve_version_counter")(counted)  # noqa: B009
    return context


def key_graphs_by_local_tensors() -> None:
    """Add the local tensor to the key of a DTensor in torch's cache of compiled graphs. Torch's own
    key has the mesh and placements only.

    Otherwise a step or a layer that was compiled for plain FSDP2 would be taken from the cache for
    masters and quantized weights, or vice versa, and its kernels would read memory that does not
    exist. Torch 2.13 has that cache on disk by default.

    This replaces a method of torch for the process, since the cache asks the class. A test fails
    once torch needs it no longer (`tests/fsdp2/test_optimizers.py`).
    """
    hashed = getattr(DTensor, _KEY, None)
    if hashed is None or hasattr(hashed, "looks_into"):
        return

    @functools.wraps(hashed)
    def of_both(tensor: DTensor) -> str:
        own = getattr(tensor._local_tensor, _KEY, None)
        key: str = hashed(tensor)
        return key if own is None else f"{key} {own()}"

    of_both.looks_into = True  # type: ignore[attr-defined]
    setattr(DTensor, _KEY, of_both)


def replicate_as_plain(kind: type[Tensor]) -> None:
    """Let replicated DTensors hold plain tensors if their shards are of class `kind`, for example
    the result of `full_tensor`.

    Over one rank torch gathers nothing and returns the shard itself. After this call it returns a
    copy, as it does over several ranks.

    This replaces a method of torch for the process: `full_tensor` and torch's own getters of full
    states call it, and a shard cannot distinguish their call from one that wants the master. A test
    fails once torch needs it no longer (`tests/fsdp2/test_full_state.py`).
    """
    redistribute = DTensor.redistribute
    if hasattr(redistribute, "makes_plain"):
        return

    @functools.wraps(redistribute)
    def redistributed(tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        result: Any = redistribute(tensor, *args, **kwargs)
        is_whole = all(placement.is_replicate() for placement in result.placements)
        if is_whole and isinstance(result._local_tensor, kind):
            result = result.clone()
        return cast("DTensor", result)

    redistributed.makes_plain = True  # type: ignore[attr-defined]
    setattr(DTensor, "redistribute", redistributed)  # noqa: B010


_KEY = "_stable_hash_for_caching"
