"""MasterParameter: a thin wrapper around an FP32 shard. It gives FSDP2 the all-gather hooks of the
parameter, and detects writes to it.

Operators compute with the plain FP32 tensor inside. Their results are plain too, with two
exceptions. Torch replaces a parameter by an empty twin at times, which must have the two hooks as
well. And views of a master are wrapped, since a write through a view, or a view of a view, is a
write to the master. A master pickles as the plain tensor, so checkpoints contain no class of
zerocast.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerocast.formats import FormatSpec
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.weight import NOT_SHARDED, FSDPWeight


class _WrapsPlain(Tensor):
    """Slots of a MasterParameter. They are in a base class because torch's staging of asynchronous
    saves copies the attributes that a tensor's own class lists, and the copy of a master is a
    plain tensor without them.
    """

    __slots__ = ("plain", "weight")

    plain: Tensor
    weight: FSDPWeight


class MasterParameter(_WrapsPlain):
    """An FP32 master shard. `plain` is the tensor inside. `weight` is the FSDPWeight that it is a
    shard of.
    """

    __slots__ = ()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: Tensor, weight: FSDPWeight, requires_grad: bool = False) -> "MasterParameter":
        """Wrap `plain`, the shard of `weight`. Nothing is copied."""
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
        master.weight = weight
        # FSDP2 may replace the parameter by this one.
        weight.manager.plan.mark_rewrapped()
        return master

    @property
    def format(self) -> FormatSpec:
        """The format that the weight is gathered in."""
        return self.weight.format

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """Return the quantized bytes, scales and header to gather. FSDP2's hook, before the first
        gather.

        Keep the form with one argument. Given the form with five, FSDP2 compares the size of the
        packed bytes with the size of the unpacked shard, which fails only on ranks with short
        shards.
        """
        self._check_first(self.weight.is_merged)
        return tuple(self.weight.send(self.plain.device)), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the QuantizedWeight of all ranks' bytes, or the tensor that the module sees
        instead of it. FSDP2's hook, after the first gather. Later gathers have no hooks
        (`torch_fsdp.GatheredByGroup`). Raises RuntimeError if FSDP2 passes the tensor of the first
        gather as `out`.
        """
        self._check_first(out is not None)
        return self.weight.receive_first(outputs)

    def _check_first(self, is_later: bool) -> None:
        """Raise if FSDP2 calls a hook in a later gather. The module would still use the first
        tensor, whose scales nothing fills any more.
        """
        if is_later:
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} calls the hook of {self.weight.name} at a gather after the first, which "
                "zerocast.fsdp2 does not know: use a version of torch that `zerocast doctor` accepts"
            )

    @property
    def master_owner(self) -> Any:
        """The CastManager, which casts this master and shows it to `zerocast.verify`."""
        return self.weight.manager

    # FSDP2 compares addresses to see that its flat view is still the parameter's, accelerate to
    # find the parameters of an optimizer again, and others to recognize tied parameters.

    def data_ptr(self) -> int:
        """Return the address of the plain tensor."""
        return self.plain.data_ptr()

    def storage_offset(self) -> Any:
        """Return the first element of the plain tensor in its storage."""
        return self.plain.storage_offset()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the plain tensor."""
        if torch._guards.TracingContext.try_get() is not None:
            return super().untyped_storage()
        return self.plain.untyped_storage()

    def is_set_to(self, tensor: Tensor) -> bool:
        """Return True if both are the same elements of one storage."""
        return self.plain.is_set_to(tensor.plain if isinstance(tensor, MasterParameter) else tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return the text of the plain tensor inside."""
        return f"MasterParameter({self.plain!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain copy of a tensor of a state dict.

        Raises RuntimeError for a parameter of a model: the copy would share the quantized bytes of
        the original, or silently have none.
        """
        if not isinstance(self, nn.Parameter):
            return self.plain.clone()
        raise RuntimeError(
            "a parameter prepared for FSDP2 is not copied: copy the model before zerocast.fsdp2.prepare and prepare the "
            "copy as well, or keep a copy of its state_dict; an average of the weights needs no copied model "
            "(docs/quickstart/ema.md)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor, without the masters in the same memory."""
        return self.plain.clone().__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the parts of the wrapper for torch.compile."""
        return ["plain"], self.weight

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], weight: Any, size: Any, stride: Any) -> "MasterParameter":
        """Build the wrapper from the result of `__tensor_flatten__`."""
        return MasterParameter(inner["plain"], weight)

    def _stable_hash_for_caching(self) -> str:
        """Return a part of the key of a compiled graph
        (`torch_fsdp.key_graphs_by_local_tensors`).
        """
        return f"MasterParameter of {self.dtype} {tuple(self.shape)} {self.stride()}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operator on plain tensors. Note writes to masters, and wrap results that share
        memory with a master or that come from an operator in `_KEEP`.
        """
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            _check_metadata(func, args[0])
        if func in _ALLOCATE and (shard := _allocated(*args, **kwargs)) is not None:
            return shard
        wrappers: dict[int, MasterParameter] = {}
        is_product = func.namespace == "aten" and func._schema.name[6:] in PRODUCTS

        def unwrap(master: MasterParameter) -> Tensor:
            if is_product:
                _check_product(func, master)
            wrappers.setdefault(id(master.plain), master)
            return master.plain

        result = func(*_map(MasterParameter, unwrap, args), **_map(MasterParameter, unwrap, kwargs))
        if func._schema.is_mutable or func.namespace == "c10d":
            for master in _written(func, args, kwargs):
                master.weight.after_write(master.plain)
            return _map(Tensor, lambda tensor: wrappers.get(id(tensor), tensor), result)
        first = args[0] if args else None
        # Operators return views of their first argument only.
        if not isinstance(first, MasterParameter):
            return result
        # The flat view that FSDP2 copies from is plain.
        if func is _aten.view.default and list(args[1]) == [-1] and torch_fsdp.is_reading_shard():
            return result
        return _map(Tensor, functools.partial(_wrapped, func, first), result)


def flat_local(tensor: Any) -> Tensor:
    """Return the local part of a tensor, flat and unwrapped. Waits if a collective fills it."""
    local = getattr(tensor, "_local_tensor", tensor)
    local = local if type(local) in (Tensor, MasterParameter) else tensor.to_local()
    return (local.plain if isinstance(local, MasterParameter) else local).view(-1)


def _map(kind: type, call: Callable[[Any], Any], value: Any) -> Any:
    """Replace each instance of `kind` in `value`, the arguments or the result of an operator, by
    what `call` returns for it. An optimizer passes lists of all masters, for which torch's trees
    are slow.
    """
    if isinstance(value, kind):
        return call(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map(kind, call, item) for item in value])
    if isinstance(value, dict):
        return {key: _map(kind, call, item) for key, item in value.items()}
    return value


def _allocated(like: MasterParameter, size: Any = None, **options: Any) -> MasterParameter | None:
    """Return a shard in the memory of the model's masters, or None for another request. FSDP2 asks
    for a slice of a parameter, and a module that leaves the meta device for a full one.
    """
    size = like.shape if size is None and like.is_meta else size
    if size is None or len(size) != like.dim():
        return None
    if sum(extent != whole for extent, whole in zip(size, like.shape, strict=True)) > 1:
        return None
    device = torch.device(options.get("device") or like.device)
    plain = like.weight.manager.memory.allocate(like.weight.name, size, device)
    return None if plain is None else MasterParameter(plain, like.weight)


def _check_metadata(func: Any, master: Any) -> None:
    """Raise on operators that give a master a different shape or storage in place: the wrapper
    would no longer fit the tensor inside.
    """
    if isinstance(master, MasterParameter) and func is not _aten.detach_.default:
        raise RuntimeError(
            f"{master.weight.name}: {func} changes shape or memory of a prepared master in place: write values into it, or use the "
            "operator that returns a new tensor"
        )


def _check_product(func: Any, master: MasterParameter) -> None:
    """Raise on a product with a master that was never cast: FSDP2 does not manage the weight, or
    the model would see a QuantizedWeight. Shapes may be probed on the meta device.
    """
    if not master.weight.is_located and not master.is_meta:
        raise RuntimeError(
            f"{master.weight.name} is prepared, and {func} would compute with its FP32 master, since FSDP2 did not gather it: "
            f"{NOT_SHARDED}"
        )


def _wrapped(func: Any, source: MasterParameter, tensor: Tensor) -> Tensor:
    """Wrap the result of an operator on `source` if a write to it is a write to the master."""
    if tensor is source.plain:
        return source
    is_traced = torch._guards.TracingContext.try_get() is not None
    is_inference = torch.is_inference_mode_enabled() or source.is_inference()
    if func is _aten.detach.default and not is_traced and not is_inference:
        # DTensor detaches beneath autograd, which would give the result a version counter of its
        # own. An alias shares the counter of its base, which writes of compiled functions move too.
        with _ExcludeGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias: Tensor = _aten.alias.default(source)
            return alias
    if func is _aten.alias.default and not is_traced:
        return MasterParameter(source.plain, source.weight)
    # A twin has the same number of dimensions as the parameter. Tensors that torch's staging is
    # going to fill have none yet.
    is_twin = func in _KEEP and tensor.dim() == source.dim()
    if is_twin or _is_alias_of(tensor, source.plain):
        return MasterParameter(tensor, source.weight)
    return tensor


def _written(func: Any, args: Any, kwargs: Any) -> list[MasterParameter]:
    """Return the masters among the arguments that an operator writes to."""
    masters: list[MasterParameter] = []
    for index, name in _written_arguments(func):
        _map(MasterParameter, masters.append, args[index] if index < len(args) else kwargs.get(name))
    return masters


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the index and name of each argument that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    # Collectives do not declare the tensors that they write to.
    if func.namespace == "c10d":
        return [(index, argument.name) for index, argument in arguments]
    return [(i, argument.name) for i, argument in arguments if argument.alias_info and argument.alias_info.is_write]


_is_alias_of = getattr(torch._C, "_is_alias_of")  # noqa: B009
_ExcludeGuard = getattr(torch._C, "_SetExcludeDispatchKeyGuard")  # noqa: B009

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

# The functions by which torch's layers compute with weights. tests/fsdp2/test_unsharded.py has each
# layer.
_NAMES = """
    mm addmm _addmm_activation bmm baddbmm addbmm mv addmv matmul linear einsum tensordot bilinear _trilinear mkldnn_linear
    linalg_multi_dot chain_matmul _grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2
    convolution convolution_overrideable _convolution _convolution_mode _slow_conv2d_forward mkldnn_convolution
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
    miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn
    _native_multi_head_attention _transformer_encoder_layer_fwd _triton_multi_head_attention
"""
PRODUCTS = frozenset(_NAMES.split())
