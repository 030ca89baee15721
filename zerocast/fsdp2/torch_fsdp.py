"""All that zerocast reads of FSDP2's insides, in one place: versions of torch differ there.

`MasterMemory` is where the shards lie that FSDP2 allocates, `MasterAddresses` how a cast finds out
that they moved or were written to.
"""

import contextlib
import functools
import importlib
import math
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
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from zerocast.formats.layout import BUFFER_ALIGNMENT_ELEMENTS, round_up
from zerocast.formats.memory import check_storage

# so many that FSDP2, which frees a parameter once it is cut, never finds the memory of all shards
# taken beforehand
PIECES = 8


def groups(model: nn.Module) -> Iterator[Any]:
    """The parameter groups of all FSDP modules within `model`, each once."""
    seen = set()
    for module in model.modules():
        for group in groups_at(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def groups_at(module: nn.Module) -> Iterator[Any]:
    """The parameter groups of one FSDP module; none of another module."""
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
        yield from (group for group in ([state._fsdp_param_group] if found is None else found) if group is not None)


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """(name, parameter, the dtype that it computes in), each once, sharded also where a forward
    pass has left it gathered.
    """
    held = [param for group in groups(model) for param in group.fsdp_params]
    sharded = {id(getattr(param, "_unsharded_param", param.sharded_param)): param for param in held}
    sharded |= {id(param.sharded_param): param for param in held}
    for name, parameter in model.named_parameters():
        param = sharded.get(id(parameter))
        if param is None:
            yield name, parameter, parameter.dtype
        else:
            yield name, param.sharded_param, param.mp_policy.param_dtype or param.sharded_param.dtype


def reduction_groups(model: nn.Module) -> Iterator[dist.ProcessGroup]:
    """The process groups over which gradients are reduced and scattered."""
    for group in groups(model):
        yield group._reduce_scatter_process_group


def default_reduce_scatter() -> Any:
    """The reduce-scatter that FSDP2 uses by default."""
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    return collectives.DefaultReduceScatter()


def reshard(groups: Iterable[Any]) -> None:
    """Free what is left gathered from an earlier forward pass, so that the next one gathers
    again.
    """
    for group in groups:
        if group.is_unsharded:
            group._to_sharded()


def discard_gathers(groups: Iterable[Any]) -> None:
    """Forget gathers that a pass which broke off has left: the next one would take their bytes
    and not gather again.
    """
    for group in groups:
        left = group._all_gather_result
        if left is not None:
            if left.all_gather_event is not None:
                torch.accelerator.current_stream().wait_event(left.all_gather_event)
            if isinstance(left.all_gather_work, dist.Work):
                left.all_gather_work.wait()
            group._all_gather_result = None


def gather_again(group: Any) -> None:
    """Free and gather a group, whose forward pass may have begun."""
    group._to_sharded()
    group.unshard()
    group.wait_for_unshard()


def is_reading_shard() -> bool:
    """True if FSDP2 is asking for the memory of a shard, from inside of its own parameter.

    It compares that memory with the parameter's, and does so for plain tensors alone; whatever else
    it finds it copies.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").endswith("._fsdp_param"):
            return True
    return False


def backward_pass() -> int | None:
    """The number of the backward pass that autograd is running, as it is for hooks of gradients;
    None outside of any.
    """
    running: int = getattr(torch._C, "_current_graph_task_id")()  # noqa: B009
    return None if running == -1 else running


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Let the backward pass that is running end with this."""
    getattr(torch.autograd.Variable, "_execution_engine").queue_callback(call)  # noqa: B009


def is_idle(group: Any) -> bool:
    """True if a parameter group is in no pass."""
    return bool(group._training_state.name == "IDLE")


@contextlib.contextmanager
def gathered(group: Any) -> Iterator[None]:
    """Gather the parameters of a group for the body, and free them after it unless they were
    gathered before.
    """
    before = group.is_unsharded
    group.lazy_init()
    group.unshard()
    group.wait_for_unshard()
    try:
        yield
    finally:
        if not before:
            group._to_sharded()


def has_unreduced_gradient(param: Any) -> bool:
    """True if passes without a reduction have left a gradient with an FSDPParam."""
    gathered = getattr(param, "_unsharded_param", None)
    # apart from the parameter before torch 2.15, which keeps the name for others
    accumulated = getattr(param, "unsharded_accumulated_grad", None)
    with torch._C.DisableTorchFunctionSubclass():
        return accumulated is not None or (gathered is not None and gathered.grad is not None)


class GatheredByGroup(FSDPParam):
    """The FSDPParam of a prepared weight, whose ParamGroup makes the bytes of a gather, and takes
    what was gathered, for all its weights at once.

    FSDP2's hooks do both for one weight, and around each call of a hook FSDP2 looks its signature
    up and takes sizes and views, which costs the host more than the hook. Only the first gather is
    by hooks: it makes the memory, and the parameter that modules see.
    """

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The flat tensors that this rank sends."""
        try:
            _, weight = _gathered_before(self)
        except AttributeError:
            inputs: list[Tensor] = super().all_gather_inputs
            return inputs
        if weight.place == 0:
            weight.begin_gather(self.device)
        return weight.group.take(weight.place)  # type: ignore[no-any-return]

    def init_unsharded_param(self) -> None:
        """Called for each weight in turn, once those of all were gathered."""
        try:
            _, weight = _gathered_before(self)
        except AttributeError:
            super().init_unsharded_param()  # type: ignore[no-untyped-call]
            return
        if weight.place == 0:
            for tensor in self._unsharded_inner_tensors:
                alloc_storage(tensor)
            weight.receive_group()


# (the gathered parameter, the weight) of an FSDPParam. AttributeError before the first gather, and
# for a parameter that something has replaced by a plain one, which FSDP2 gathers as such.
_gathered_before = operator.attrgetter("_unsharded_param", "sharded_param._local_tensor.weight")


def gather_by_group(param: Any) -> None:
    """Let the weight of an FSDPParam make and take the bytes of its gathers after the first."""
    param.__class__ = GatheredByGroup


class GroupOfWeights(FSDPParamGroup):
    """An FSDPParamGroup of prepared weights. It tells `weights`, a reference to their ParamGroup,
    when products of theirs have ended.

    FSDP2 asks gathered parameters for their gradients, which goes through the override of functions
    of torch for each of them. They have none that matters here.
    """

    weights: Callable[[], Any]

    def _to_sharded(self) -> None:
        super()._to_sharded()  # type: ignore[no-untyped-call]
        self._end_round()

    def _to_unsharded(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super()._to_unsharded()  # type: ignore[no-untyped-call]

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients, and shard the parameters unless they stay gathered."""
        runs_hooks = self._all_reduce_hook is not None or any(map(_gradient_hooks, self.fsdp_params))
        # Hooks of users are not FSDP2's own questions.
        with contextlib.nullcontext() if runs_hooks else torch._C.DisableTorchFunctionSubclass():
            super().post_backward(*unused)
        self._end_round()

    def _end_round(self) -> None:
        weights = self.weights()
        if weights is not None:
            weights.end_round()


_gradient_hooks = operator.attrgetter("sharded_param._post_accumulate_grad_hooks")


def tell_group(group: Any, weights: Any) -> None:
    """Let an FSDPParamGroup tell `weights` (GroupOfWeights)."""
    group.__class__ = GroupOfWeights
    group.weights = weakref.ref(weights)


def forget_gathered(param: Any) -> None:
    """Let the next gather of an FSDPParam be like its first, which makes memory and parameter for
    what is sent then.

    A backward pass of an earlier forward pass raises, as after any other write in place.
    """
    gathered = vars(param).pop("_unsharded_param", None)
    read = [gathered, getattr(gathered, "_local_tensor", None), *param.all_gather_outputs]
    for tensor in (*read, *getattr(param, "_unsharded_inner_tensors", ())):
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []


def unversioned(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes to `tensors` from autograd, as FSDP2 hides its own: what autograd saved for a
    backward pass is filled again.
    """
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    context: AbstractContextManager[None] = getattr(torch.autograd, "_unsafe_preserve_version_counter")(counted)  # noqa: B009
    return context


def key_graphs_by_local_tensors() -> None:
    """Let torch's cache of compiled graphs look into DTensors, whose own key has their mesh and
    placements only.

    A step or a layer compiled for plain FSDP2 was else taken from the cache for masters and
    quantized weights, and the other way about: kernels that read memory which is not there. Torch
    2.13 has that cache on disk by default.

    This replaces a method of torch for the whole process, since the cache asks the class. A test
    fails once torch needs it no longer (`tests/fsdp2/test_optimizers.py`).
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
    """Let what DTensors make of local tensors of class `kind` for every rank hold plain ones, as
    `full_tensor` does.

    Over one rank nothing is gathered: torch hands out the shard itself, which is a copy from now
    on, as it is over several.

    This replaces a method of torch for the whole process: `full_tensor` and torch's own getters of
    full states call it, and a shard cannot tell their call from one that wants the master. A test
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


class MasterMemory:
    """The shards of a model's masters side by side in a few tensors, so that a stage is given few,
    however many weights.

    FSDP2 allocates a shard when it cuts a parameter, and where that was on the meta device when the
    module is given storage. Both ask the parameter for a tensor like it (`parameter.py`), which
    comes from here the first time. A shard that is moved later (to another device, by
    `load_state_dict(assign=True)`) has memory of its own. `sizes` are the elements of whole weights
    by name.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._waiting = dict(sizes)
        self._piece = -(-sum(sizes.values()) // PIECES)
        self._rest: Tensor | None = None
        self._padded: dict[str, int] = {}  # elements of a shard on the meta device

    def take(self, name: str, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Zeros f32 `size` for a shard of a weight; None where the weight has its place already,
        or needs none.
        """
        numel = math.prod(size)
        if device.type == "meta":
            self._padded[name] = numel
        if name not in self._waiting or not numel or device.type == "meta" or numel < self._padded.get(name, 0):
            return None  # a short shard comes again, once FSDP2 pads it
        # no view of a piece: a write to it is no write to the others
        place = torch.empty(0, dtype=torch.float32, device=device)
        room = round_up(numel, BUFFER_ALIGNMENT_ELEMENTS)
        if self._rest is None or self._rest.device != place.device or self._rest.numel() < room:
            piece = self._next_piece(numel / self._waiting[name], room)
            self._rest = torch.empty(piece, dtype=torch.float32, device=device)
        del self._waiting[name]
        offset, storage = self._rest.storage_offset(), self._rest.untyped_storage()
        self._rest = self._rest[room:] if self._waiting else None
        place.set_(storage, offset, (numel,), (1,))
        return place.zero_().view(tuple(size))

    def _next_piece(self, part: float, least: int) -> int:
        """Elements of the shards to come, each the same `part` of its weight, until a piece is
        full.
        """
        whole, elements = 0, 0
        for size in self._waiting.values():
            if whole >= self._piece:
                break
            whole += size
            elements += round_up(math.ceil(size * part), BUFFER_ALIGNMENT_ELEMENTS)
        return max(elements, least)


class MasterAddresses:
    """Addresses and version counters of the masters in `params`, FSDPParams by the name of the
    weight, which are referred to weakly.

    They are kept as lists, so that a refresh needs no Python loop over parameters. Masters know of
    this through their weight, so they are referred to weakly: a view of a master holds its base
    where the garbage collector does not look, and the two would never be freed.
    """

    def __init__(self, params: Mapping[str, Callable[[], Any]]) -> None:
        self._params = list(params.values())
        self._index = {name: index for index, name in enumerate(params)}
        locals_ = list(map(_local_tensor, [param() for param in self._params]))
        plains = [local.plain for local in locals_]
        self._locals = list(map(weakref.ref, locals_))
        self._addresses = list(map(Tensor.data_ptr, plains))
        # One master of each storage, and the bytes of that: a shard shares its storage with many.
        first = {plain.untyped_storage().data_ptr(): index for index, plain in enumerate(plains)}
        self._sizes = {index: plains[index].untyped_storage().nbytes() for index in first.values()}
        self._counters = [[weakref.ref(_counting(t)) for t in tensors] for tensors in (locals_, plains)]
        self.note()

    def moved(self) -> bool:
        """True if a parameter was replaced since, or its memory."""
        found = list(map(_local_tensor, [param() for param in self._params]))
        same = all(map(operator.is_, found, [local() for local in self._locals]))
        return not same or list(map(Tensor.data_ptr, map(_plain, found))) != self._addresses

    def moved_names(self) -> set[str]:
        """The weights whose masters are in other memory now."""
        found = [_local_tensor(param()).plain.data_ptr() for param in self._params]
        return {name for name, index in self._index.items() if found[index] != self._addresses[index]}

    def check_memory(self) -> None:
        """ValueError for a master whose storage was freed or made smaller since."""
        for index, size in self._sizes.items():
            local = self._locals[index]()
            if local is not None and local.plain.untyped_storage().nbytes() < size:
                check_storage(self._params[index]()._param_fqn or "a master", local.plain)

    def note(self) -> None:
        """Writes that autograd has counted so far were cast. Dispatch sees all but those of
        compiled functions, which it counts.
        """
        self._counted = self._count()

    def any_written(self) -> bool:
        """True if autograd has counted a write since `note`."""
        return self._count() != self._counted

    def written(self, names: Sequence[str]) -> set[str]:
        """The weights, of those with these names, to whose masters autograd has counted a write
        since `note`.
        """
        written = set()
        for counters, versions in zip(self._counters, self._counted, strict=True):
            for name in names:
                index = self._index[name]
                tensor = counters[index]()
                if (-1 if tensor is None else tensor._version) != versions[index]:
                    written.add(name)
        return written

    def _count(self) -> list[list[int]]:
        return [_versions(counters) for counters in self._counters]


_local_tensor: Callable[[Any], Any] = operator.attrgetter("sharded_param._local_tensor")
_plain: Callable[[Any], Any] = operator.attrgetter("plain")
_uncounted = torch.empty(0)


def _versions(tensors: Sequence[Callable[[], Tensor | None]]) -> list[int]:
    """The version counters; -1 of a tensor that is no more, which another has replaced."""
    return [-1 if (tensor := reference()) is None else tensor._version for reference in tensors]


def _counting(tensor: Tensor) -> Tensor:
    """The tensor, or one that stays as it is in place of one for which autograd counts nothing."""
    return _uncounted if tensor.is_inference() else tensor
