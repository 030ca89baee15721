"""What zerocast reads of FSDP2's insides, in one place: torch 2.11 and 2.13 differ in a name, other versions may in more."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def groups(model: nn.Module) -> Iterator[Any]:
    """The parameter groups of all FSDP modules within `model`, each once."""
    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
            for group in [state._fsdp_param_group] if found is None else found:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def reshard(groups: Iterable[Any]) -> None:
    """Free what is left gathered from an earlier forward pass, so that the next one gathers again."""
    for group in groups:
        if group.is_unsharded:
            group._to_sharded()


def discard_gathers(groups: Iterable[Any]) -> None:
    """Forget gathers that a pass which broke off has left: the next one would take their bytes and not gather again."""
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
    """Whether FSDP2 is asking for the memory of a shard, from inside of its own parameter.

    It compares that memory with the parameter's, and does so for plain tensors alone; whatever else it finds it copies.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").endswith("._fsdp_param"):
            return True
    return False


def reshards_after_forward(group: Any) -> bool:
    """Whether a parameter group gathers again for the backward pass."""
    return group.post_forward_mesh_info is not None


def gathers_for_backward(group: Any) -> bool:
    """Whether a gather of now is for a backward pass, prefetched or not."""
    return bool(group._training_state.name == "PRE_BACKWARD")


def backward_pass() -> int | None:
    """The number of the backward pass that autograd is running, as it is for hooks of gradients; None outside of any."""
    running: int = getattr(torch._C, "_current_graph_task_id")()  # noqa: B009
    return None if running == -1 else running


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Let the backward pass that is running end with this."""
    getattr(torch.autograd.Variable, "_execution_engine").queue_callback(call)  # noqa: B009


def is_idle(group: Any) -> bool:
    """Whether a parameter group is in no pass."""
    return bool(group._training_state.name == "IDLE")


@contextlib.contextmanager
def gathered(group: Any) -> Iterator[None]:
    """Within, the parameters of a group are gathered; afterwards again only if they were before."""
    before = group.is_unsharded
    group.lazy_init()
    group.unshard()
    group.wait_for_unshard()
    try:
        yield
    finally:
        if not before:
            group._to_sharded()


def unversioned(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Within, writes to `tensors` go unnoticed by autograd, as FSDP2's own: what it saved for a backward pass is filled again."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    context: AbstractContextManager[None] = getattr(torch.autograd, "_unsafe_preserve_version_counter")(counted)  # noqa: B009
    return context


def key_graphs_by_local_tensors() -> None:
    """Let torch's cache of compiled graphs look into DTensors, whose own key has their mesh and placements only.

    A step or a layer compiled for plain FSDP2 was else taken from the cache for masters and quantized weights, and the other way
    about: kernels that read memory which is not there. Torch 2.13 has that cache on disk by default.
    """
    hashed = getattr(DTensor, _KEY, None)
    if hashed is None or hasattr(hashed, "looks_into"):
        return

    def of_both(tensor: DTensor) -> str:
        own = getattr(tensor._local_tensor, _KEY, None)
        key: str = hashed(tensor)
        return key if own is None else f"{key} {own()}"

    of_both.looks_into = True  # type: ignore[attr-defined]
    setattr(DTensor, _KEY, of_both)


def replicate_as_plain(kind: type[Tensor]) -> None:
    """Let what DTensors make of local tensors of class `kind` for every rank hold plain ones, as `full_tensor` does.

    Over one rank nothing is gathered: torch hands out the shard itself, which is a copy from now on, as it is over several.
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
