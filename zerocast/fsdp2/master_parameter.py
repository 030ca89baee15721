"""MasterParameter: a thin wrapper around an FP32 shard, which makes it FSDP2's parameter and tells when it is written to.

Everything that computes gets the plain FP32 tensor inside. The wrapper is kept where torch replaces a parameter by a part, a
view or an empty twin of it, so that FSDP2 still finds the two all-gather hooks; whatever else comes out is plain. It pickles as
the plain tensor: checkpoints hold no class of ours.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only


class Owner(Protocol):
    """The weight behind a shard."""

    casts: Any

    @property
    def is_cast(self) -> bool:
        """Whether FSDP2 has sharded the weight and its shard was cast."""

    def wrapped(self) -> None:
        """There is another wrapper of a shard, which may take the place of the first."""

    def memory(self, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Zeros for the shard that FSDP2 or a module allocates; None leaves that to torch."""

    def written(self, data: Tensor) -> None:
        """An operator wrote to the FP32 tensor of a shard, or of something that FSDP2 made from it."""

    def send(self, master: Tensor, mesh: DeviceMesh) -> tuple[Tensor, ...]:
        """The bytes to gather."""

    def receive(self, outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Tensor | None) -> Any:
        """Make the weight of gathered bytes."""


class MasterParameter(Tensor):
    """An FP32 master shard. `plain` is the tensor inside, `owner` the weight that it is a shard of."""

    plain: Tensor
    owner: Owner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: Tensor, owner: Owner, requires_grad: bool = False) -> "MasterParameter":
        """Stand for `plain`; nothing is copied.

        The wrapper lies at no offset, wherever the shard does: a DTensor takes it over, and torch's staging of checkpoints takes a
        tensor of no memory that lies somewhere for one that has some.
        """
        master: MasterParameter = Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            dtype=plain.dtype,
            layout=plain.layout,
            device=plain.device,
            requires_grad=requires_grad,
        )
        master.plain = plain
        master.owner = owner
        owner.wrapped()
        return master

    # One argument: with five FSDP2 asserts on short ranks alone that packed bytes have the size of the unpacked shard.
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """FSDP2's hook: quantized bytes, scales and a header."""
        return self.owner.send(self.plain, mesh), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """FSDP2's hook: the QuantizedWeight of all ranks' bytes, refilled in place after the first time."""
        return self.owner.receive(outputs, dtype, out)

    @property
    def master_owner(self) -> Any:
        """Who shows this master to `zerocast.verify`."""
        return self.owner.casts

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the plain tensor, by which FSDP2 sees that its flat view is still the parameter's memory."""
        if torch._guards.TracingContext.try_get() is not None:
            return super().untyped_storage()
        return self.plain.untyped_storage()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """The plain tensor's."""
        return f"MasterParameter({self.plain!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refused: the copy would share the quantized bytes of the original, or silently have none."""
        raise RuntimeError(
            "a parameter prepared for FSDP2 is not copied: copy the model before zerocast.fsdp2.prepare and prepare the "
            "copy as well, or keep its state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain tensor, without the masters that lie beside it."""
        return self.plain.clone().__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch.compile."""
        return ["plain"], self.owner

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], owner: Any, size: Any, stride: Any) -> "MasterParameter":
        """The inverse of `__tensor_flatten__`."""
        return MasterParameter(inner["plain"], owner)

    def _stable_hash_for_caching(self) -> str:
        """Part of the key of a compiled graph (`torch_fsdp.key_graphs_by_local_tensors`)."""
        return f"MasterParameter of {self.dtype} {tuple(self.shape)} {self.stride()}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run on the plain tensors; note what is written, keep the wrapper where `_KEEP` says so."""
        kwargs = kwargs or {}
        if func is _aten.split.Tensor:
            _check_split(*args, **kwargs)
        if func in _ALLOCATE and (shard := _allocated(*args, **kwargs)) is not None:
            return shard
        wrappers: dict[int, MasterParameter] = {}

        def unwrap(master: MasterParameter) -> Tensor:
            wrappers[id(master.plain)] = master
            return master.plain

        result = func(*tree_map_only(MasterParameter, unwrap, args), **tree_map_only(MasterParameter, unwrap, kwargs))
        if func._schema.is_mutable or func.namespace == "c10d":
            for master in _written(func, args, kwargs):
                master.owner.written(master.plain)
            return tree_map_only(Tensor, lambda tensor: wrappers.get(id(tensor), tensor), result)
        if func not in _KEEP or (func is _aten.view.default and list(args[1]) == [-1]):
            return result  # FSDP2's flat view is plain: it is memory, not a parameter
        owner = args[0].owner
        return tree_map_only(Tensor, lambda tensor: MasterParameter(tensor, owner), result)


# FSDP2 asks how many arguments its hook takes at every gather of every weight, and to find out costs more than the hook.
setattr(MasterParameter.fsdp_pre_all_gather, "__signature__", inspect.signature(MasterParameter.fsdp_pre_all_gather))  # noqa: B010


def _allocated(like: MasterParameter, size: Any = None, **options: Any) -> MasterParameter | None:
    """The memory of a shard: FSDP2 asks for rows like those of a parameter, a module that leaves the meta device for all of it."""
    size = like.shape if size is None and like.is_meta else size
    if size is None or list(size[1:]) != list(like.shape[1:]):
        return None
    plain = like.owner.memory(size, torch.device(options.get("device") or like.device))
    return None if plain is None else MasterParameter(plain, like.owner)


def _check_split(master: MasterParameter, size: int, dim: int = 0) -> None:
    """Refuse the cut by which fully_shard would shard columns."""
    if dim % master.dim() and not master.owner.is_cast:
        raise ValueError(
            "FSDP2 shards quantized weights by rows only: let shard_placement_fn give Shard(0) or None for prepared weights, "
            f"not Shard({dim})"
        )


def _written(func: Any, args: Any, kwargs: Any) -> list[MasterParameter]:
    """The wrappers among the arguments that an operator writes to; collectives on tensors do not declare theirs."""
    found: list[MasterParameter] = []
    for index, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if func.namespace != "c10d" and (info is None or not info.is_write):
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tree_map_only(MasterParameter, found.append, value)
    return found


_aten = torch.ops.aten
_ALLOCATE = {_aten.new_zeros.default, _aten.empty_like.default}
_KEEP = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.split.Tensor,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.new_zeros.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
