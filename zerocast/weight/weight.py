"""QuantizedWeight: a tensor subclass that holds the codes, scales and amaxes of one weight and
shows its logical shape and nominal dtype to torch.

Linear products read the rowwise copy, their input gradients the columnwise copy (`linear.py`).
Copies and moves of a full weight (`tensor_ops.py`, deepcopy, pickling) take its own bytes, not the
flat buffer that the bytes may be a part of. Every other operator raises: nothing dequantizes
silently.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends, gemm
from zerocast.backends import ops
from zerocast.formats import Block, Columnwise, FormatSpec, get_format, layout
from zerocast.formats.layout import BUFFERS
from zerocast.formats.shared_amax import SharedAmax
from zerocast.gemm import scaling
from zerocast.weight import compiled_ops, linear, owners, unsupported
from zerocast.weight.buffers import Dequantize, WeightBuffers, WeightReader
from zerocast.weight.experts import ExpertOf
from zerocast.weight.state import WeightState
from zerocast.weight.validity import Use, described

NOMINAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Buffer name -> the attribute through which a compiled graph gets the buffer, if the names differ.
# A graph gets the rowwise data at every call, so that attribute is where the weight is checked.
_READ = {"rowwise_data": "readable_rowwise_data", "columnwise_data": "readable_columnwise_data"}
_READ_BY_PRODUCTS = BUFFERS[:5]
# Handlers by operator, called by `__torch_dispatch__` below autograd.
_HANDLERS: dict[Any, Callable[..., Any]] = {}
# Handlers by function of torch, called by `__torch_function__` above autograd.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {**linear.PRODUCTS, **unsupported.METHODS}


class QuantizedWeight(WeightReader, WeightBuffers):
    """A weight in a low-precision format. `shape` is logical, `dtype` nominal; the storage is uint8
    codes and scales.

    Make one with `empty`, or by `zerocast.quantize_` on a model. `WeightBuffers` has its buffers.

    Attributes:
        state: the storage, shared by all objects over it. `weight.data = other` replaces it.
        transposed_of: the weight that this object is a transposed reading of; None for a weight as
            stored. Fixed for the lifetime of the object.
        expert_of: the weight of three dimensions that this object is one expert of, and its number;
            None for an independent weight. Fixed for the lifetime of the object.
    """

    transposed_of: "QuantizedWeight | None"

    @staticmethod
    def __new__(cls, shape: Sequence[int], state: WeightState, requires_grad: bool = False) -> "QuantizedWeight":
        """Make a tensor object over existing storage; nothing is copied."""
        weight: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=state.dtype, device=state.rowwise_data.device, requires_grad=requires_grad
        )
        owners.refuse_steps(QuantizedWeight)
        # The wrapper has no memory. C++ code that takes its address raises instead of reading
        # through a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(weight)
        weight.state = state
        weight.transposed_of = None
        weight.expert_of = None
        return weight

    @staticmethod
    def empty(
        shape: Sequence[int],
        fmt: FormatSpec | str,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> "QuantizedWeight":
        """Return a weight whose bytes are zero and whose scale, for delayed scaling, is 1.

        `shape` is logical, `dtype` the nominal dtype (bf16, fp16 or fp32). Raises ValueError for a
        shape that the format cannot take, and TypeError for a nominal dtype that is not supported.
        """
        fmt = get_format(fmt)
        _check_nominal(dtype)
        layout.check_shape(fmt, shape)
        return QuantizedWeight(shape, WeightState.empty(fmt, tuple(shape), dtype, torch.device(device)))

    @staticmethod
    def of_buffers(
        shape: Sequence[int],
        fmt: FormatSpec,
        dtype: torch.dtype,
        buffers: Mapping[str, Tensor],
        requires_grad: bool = False,
    ) -> "QuantizedWeight":
        """Return a weight over existing buffers, keyed by the names in `layout.BUFFERS`. Nothing is
        copied.

        Raises TypeError or ValueError, naming the buffer, for one that is missing, whose shape,
        dtype or device is not the one that the format stores, or that has less memory.
        """
        fmt, shape = get_format(fmt), _checked_shape(shape)
        _check_nominal(dtype)
        layout.check_shape(fmt, shape)
        return QuantizedWeight(shape, WeightState(fmt, shape, dtype, {**buffers}), requires_grad)

    @staticmethod
    def of_part(
        shape: Sequence[int], fmt: FormatSpec, dtype: torch.dtype, buffers: Mapping[str, Tensor]
    ) -> "QuantizedWeight":
        """Return a weight over the part of a larger weight's buffers that a cast or a reader has.
        For internal use.

        The buffers may have any size. The descriptor table or op that uses them checks them.
        """
        state = WeightState(fmt, tuple(shape), dtype, {**buffers}, is_part=True)
        return QuantizedWeight(shape, state)

    def as_arguments(self) -> tuple[Any, ...]:
        """Return the arguments that an op takes in place of a weight, as the constructor of
        `StoredWeight` takes them.
        """
        state = self.state
        buffers = [state.buffers[name] for name in _READ_BY_PRODUCTS]
        return list(self.shape), str(state.format), state.dtype, state.columnwise_on_demand, *buffers

    @property
    def is_traced(self) -> bool:
        """True while a compiler traces: the buffers are fake tensors, in place of the buffers of a
        later call.
        """
        data = self.state.rowwise_data
        # Every product asks, and nearly all data are plain tensors.
        return type(data) is not Tensor and scaling.is_traced(data)

    def dequantize(self) -> Tensor:
        """Return the weight as a plain tensor of its shape and nominal dtype, from the rowwise
        copy. It is a constant for autograd.
        """
        value = self.read(columnwise=False, dtype=self.dtype)
        if self.format.element is None:
            # The identity format stores nominal values, and `read` returned the storage itself. A
            # caller that writes the result must not write the weight.
            value = value.clone()
        if self.transposed_of is None:
            return value.view(self.shape)
        return value.view(self.transposed_of.shape).transpose(-2, -1)

    def direction(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Return (data, scale_inv) of one direction. Raises RuntimeError for a stale or missing
        columnwise copy, and for bytes for which `check` raises.
        """
        self.check(Use.READ)
        return super().direction(columnwise) if columnwise else self.stored(columnwise)

    def stored(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Return (data, scale_inv) of one direction as stored. Waits for a gather in flight. Raises
        RuntimeError for a stale or missing columnwise copy.
        """
        # Every product asks, so the buffers are read without their properties.
        if columnwise:
            return self._fresh_columnwise(), self.state.buffers["columnwise_scale_inv"]
        self.wait()
        buffers = self.state.buffers
        data = buffers["rowwise_data"]
        assert data is not None
        return data, buffers["rowwise_scale_inv"]

    def _dequantization(self, matrix: Block, columnwise: bool, dtype: torch.dtype) -> Dequantize:
        # The fake tensors of a compiler need the op.
        if type(self.state.buffers["rowwise_data"]) is not Tensor or ops.is_observed():
            backend, fmt = backends.choose(self.device), str(self.format)
            return lambda *buffers: ops.dequantize(backend, fmt, *buffers, *matrix, columnwise, dtype)
        choices, key = self.state.choices, (columnwise, dtype)
        dequantization: ops.Dequantization | None = choices.get(key)
        if dequantization is None:
            backend, fmt = backends.choose(self.device), str(self.format)
            dequantization = choices[key] = ops.Dequantization(backend, fmt, *matrix, columnwise, dtype)
        return dequantization

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the value that `make` derives from the bytes of the last cast, kept until the next
        one (`WeightState.cached_per_cast`).
        """
        return self.state.cached_per_cast(name, make)

    def direction_in_graph(self, columnwise: bool, after: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return (data, scale_inv) of one direction as values of a graph, in FP8 for formats that
        are exact there; None for a columnwise copy that is kept, since the graph would save a view
        of it for the backward pass.

        `after` is the other operand of the product. A copy that is made on demand takes it as an
        input, so that it cannot be made before. Otherwise the forward graph would make the copy of
        the backward pass and save it.
        """
        # No check here: the graph gets its buffers through `readable_rowwise_data`, which checks.
        data, row_scale = self.state.rowwise_data, self.state.buffers["rowwise_scale_inv"]
        if not columnwise and not self.format.is_exact_in_fp8:
            return data, row_scale
        if columnwise and not self.makes_columnwise:
            return None
        made_data, made_scale = torch.ops.zerocast.operand(
            str(self.format), data, row_scale, self.amax, *self.matrix_shape, columnwise, after
        )
        # Only block scales are transposed. A scale per tensor stays as it is.
        return made_data, made_scale if self.format.block else row_scale

    def check(self, use: Use, moment: object = None) -> None:
        """Raise RuntimeError unless the bytes may be used in this way (`Validity.check`). Every
        product and `dequantize` call it with `Use.READ`.
        """
        self.state.validity.check(use, self, moment)
        if use is Use.READ:
            owners.note_read(self)

    @property
    def readable_rowwise_data(self) -> Tensor:
        """The rowwise data, checked. A compiled function reads this attribute twice at every call,
        in its guards and for the graph.
        """
        state = self.state
        if not (state.has_master and state.validity.all_clean):
            self.check(Use.READ)
        if state.validity.before_read is not None:
            self.wait()
        data = state.buffers["rowwise_data"]
        assert data is not None
        return data

    @property
    def readable_columnwise_data(self) -> Tensor | None:
        """The columnwise data for a compiled graph, whose backward pass reads it without a check.

        Raises RuntimeError for a stale copy while gradients are recorded.
        """
        return self._fresh_columnwise() if torch.is_grad_enabled() else self.columnwise_data

    @property
    def makes_columnwise(self) -> bool:
        """True if a columnwise copy is made at each use and not kept."""
        state = self.state
        return state.columnwise_on_demand and state.format.columnwise is Columnwise.TRANSPOSE

    @property
    def product_grad_dtype(self) -> torch.dtype:
        """The dtype in which products make the weight gradient: `grad_dtype` if it is set, unless a
        host that accumulates gradients has set it; otherwise the nominal dtype.
        """
        # Only leaves have a `grad_dtype`. The fake weight of a compiler is not one.
        is_set = self.is_leaf and not self.state.host_casts_gradient
        return (self.grad_dtype if is_set else None) or self.dtype

    def gemm_choice(self) -> gemm.Choice:
        """Return the GEMM path of `linear` with this weight and an input of the nominal dtype, with
        the reason if it does not run on FP8 or FP4 tensor cores.
        """
        return gemm.choice_of(self, self.dtype)

    def _fresh_columnwise(self) -> Tensor:
        """Return the columnwise data of the last cast. A stale copy is rebuilt first if the
        weight's owner has given a way to (`Validity.rebuild`); otherwise RuntimeError.
        """
        self.wait()
        if not self.state.columnwise_is_fresh():
            if self.state.validity.rebuild is None:
                raise RuntimeError(
                    f"the columnwise copy of {described(self)} is older than its last cast: "
                    "call post_all_gather_processing (or plan.post_all_gather()) after the all-gather"
                )
            self.state.validity.rebuild(self)
        # With SHARED, one code tensor serves both directions and only the scales differ.
        data = self.rowwise_data if self.format.columnwise is Columnwise.SHARED else self.columnwise_data
        assert data is not None
        return data

    def rebind(self, rowwise_data: Tensor | None = None, columnwise_data: Tensor | None = None) -> None:
        """Move the bytes unchanged into new storage, such as a part of a flat buffer.

        A given tensor has the shape, dtype and device of the tensor that it replaces and is
        contiguous; else ValueError, nothing moved.
        """
        targets = {"rowwise_data": rowwise_data, "columnwise_data": columnwise_data}
        self.wait()
        self.state.move_to({name: tensor for name, tensor in targets.items() if tensor is not None})

    def restate(self, state: WeightState) -> None:
        """Replace the storage by another one of the same shape, format and device, as `weight.data
        = other` does.
        """
        # Told to the old validity, so that the plan which had this weight notices the loss.
        self.state.validity.moved()
        self.state = state

    def share(self) -> "QuantizedWeight":
        """Return a new tensor object over the same storage, as `detach` returns."""
        other = QuantizedWeight(self.shape, self.state)
        other.transposed_of = self.transposed_of
        other.expert_of = self.expert_of
        return other

    def transposed(self) -> "QuantizedWeight":
        """Return a reading of the same weight as the `[..., K, M]` operand of a product. Gradients
        go to the weight itself.
        """
        if self.transposed_of is not None:
            return self.transposed_of
        view = QuantizedWeight((*self.shape[:-2], self.shape[-1], self.shape[-2]), self.state)
        view.transposed_of = self
        return view

    def expert(self, index: int) -> "QuantizedWeight":
        """Return one expert `[M, K]` of a weight `[E, M, K]` as an operand of products. Nothing
        moves. Gradients go to the weight of all experts.
        """
        self.check(Use.READ)
        self.wait()
        expert = QuantizedWeight(self.shape[1:], self.state.matrix(index))
        expert.expert_of = ExpertOf(self, index)
        return expert

    def matrices(self) -> "list[QuantizedWeight]":
        """Return the matrices that are stored consecutively, as weights over their part of the
        buffers; this weight itself if there is one. For code that casts and reads bytes, which
        checks the full weight.
        """
        count, matrix = self.state.matrices
        if count == 1:
            return [self]
        matrices = [QuantizedWeight(matrix, self.state.matrix(index)) for index in range(count)]
        for index, part in enumerate(matrices):
            part.expert_of = ExpertOf(self, index)
        return matrices

    def share_memory_(self) -> "QuantizedWeight":
        """Raise RuntimeError: pickling copies a weight's bytes, so another process would never see
        a later cast.
        """
        raise RuntimeError("a QuantizedWeight cannot be shared between processes: send each of them a copy")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return the shape, format, dtype and device. Contents would have to be dequantized."""
        return f"QuantizedWeight(shape={tuple(self.shape)}, format={self.format}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedWeight":
        """Copy this weight's own bytes, not the flat buffer that they may be a part of."""
        copy = memo[id(self)] = self.copied(Tensor.clone)
        return copy

    def copied(self, copy: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """Return a new weight with its own storage: `copy` of each buffer of this weight."""
        return _restore(*self._payload(copy))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a call of `_restore` with plain tensors and names, which
        `torch.load(weights_only=True)` accepts.
        """
        # Some versions of torch pickle the fake weight to make the key of a compiled graph. They
        # do not call `_stable_hash_for_caching`, so it is pickled here in place of the weight.
        if self.is_traced:
            return str, (self._stable_hash_for_caching(),)
        return _restore, self._payload(Tensor.clone)

    def _payload(self, copy: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        """Return the arguments with which `_restore` makes this weight from `copy` of its
        tensors.
        """
        if self.transposed_of is not None:
            raise RuntimeError("a transposed reading is not copied or saved: copy the weight itself")
        self.wait()
        state = self.state
        is_parameter = isinstance(self, torch.nn.Parameter)
        initial = self.high_precision_init_val
        initial = None if initial is None else copy(initial)
        fixed = tuple(self.shape), str(self.format), self.dtype, self.requires_grad, is_parameter, state.ever_cast
        shared = None if state.shared_amax is None else state.shared_amax.names
        flags = state.fp8_weight_gradients, state.is_cast_from_masters
        return *fixed, state.copies(copy), initial, state.columnwise_on_demand, shared, *flags

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors, and the constants that rebuild the wrapper, for
        torch.compile and swap_tensors.

        torch compares the constants to decide whether a graph fits. So they include the settings
        that decide how products of this weight are computed.
        """
        state = self.state
        is_transposed = self.transposed_of is not None
        # A compiled function asks three times at every call, so the answer is kept.
        key = gemm.settings.now, self.requires_grad, state.columnwise_on_demand, is_transposed
        if key not in state.choices:
            names = [_READ.get(name, name) for name in state.names_read_by_products()]
            fixed = tuple(self.shape), state.format, state.dtype, self.requires_grad, state.columnwise_on_demand
            state.choices[key] = names, (*fixed, state.fp8_weight_gradients, gemm.settings_of(self))
        flat: tuple[list[str], Any] = state.choices[key]
        return flat

    def read_by_graphs(self) -> tuple[Tensor, ...]:
        """Return the inner tensors that `__tensor_flatten__` names, checked."""
        choices = self.state.choices
        if "readers" not in choices:
            names, _ = self.__tensor_flatten__()
            # A getter of one attribute would not return a tuple.
            choices["readers"] = operator.attrgetter(*names, "state")
        read: tuple[Any, ...] = choices["readers"](self)
        return read[:-1]

    def _stable_hash_for_caching(self) -> str:
        """Return the key of this weight in torch's cache of compiled graphs. It has everything that
        a graph depends on, the code of this package included. The bytes are not among it.
        """
        _, context = self.__tensor_flatten__()
        buffers = self.state.buffers.items()
        inner = [(name, tuple(b.shape), b.stride(), b.dtype) for name, b in buffers if b is not None]
        return f"QuantizedWeight of {self.device} {context} {inner} by {compiled_ops.digest_of_sources()}"

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedWeight":
        """Make a weight from the result of `__tensor_flatten__` and its inner tensors."""
        compiled_ops.take_apart_at_once(QuantizedWeight)
        shape, fmt, dtype, requires_grad, on_demand, fp8_weight_gradients, _ = context
        buffers = {name: inner[key] for name in BUFFERS if (key := _READ.get(name, name)) in inner}
        weight = QuantizedWeight.of_buffers(shape, fmt, dtype, buffers, requires_grad)
        weight.state.columnwise_on_demand = on_demand
        weight.state.fp8_weight_gradients = fp8_weight_gradients
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the handler for a product (`linear.py`), raise on functions that read memory, and
        send the rest to the dispatcher.

        Overrides are disabled during the call. Results are then not wrapped as subclasses, and the
        dozen attributes that a product reads from its weight do not come back here.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the handler given to `define`. An operator without one raises, with advice."""
        handler = _HANDLERS.get(func)
        if handler is None:
            raise unsupported.refusal(func, args, kwargs or {}, cls)
        return handler(*args, **(kwargs or {}))


def _check_nominal(dtype: object) -> None:
    if dtype not in NOMINAL_DTYPES:
        raise TypeError(f"the nominal dtype is one of {', '.join(map(str, NOMINAL_DTYPES))}, got {dtype!r}")


def _checked_shape(shape: object) -> tuple[int, ...]:
    """Return the shape as a tuple. Raises TypeError or ValueError unless it is a sequence of
    integers of zero or more.
    """
    if not isinstance(shape, tuple | list):
        raise TypeError(f"a shape is a tuple of ints, got a {type(shape).__name__}")
    if any(isinstance(extent, bool) or not isinstance(extent, int | torch.SymInt) for extent in shape):
        raise TypeError(f"a shape is a tuple of ints, got {shape!r:.100}")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"a shape has no negative extent, got {shape!r:.100}")
    return tuple(shape)


def _restore(
    shape: tuple[int, ...],
    key: str,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    cast: bool,
    buffers: dict[str, Tensor],
    initial: Tensor | None,
    columnwise_on_demand: bool,
    shared_amax: tuple[str, ...] | None = None,
    fp8_weight_gradients: bool = False,
    had_masters: bool = False,
) -> QuantizedWeight:
    """Make a weight from `_payload`. It comes from a file, which may be corrupt or forged, so every
    argument is checked.
    """
    flags = requires_grad, is_parameter, cast, columnwise_on_demand, fp8_weight_gradients, had_masters
    _check_saved(flags, buffers, initial, shared_amax)
    weight = QuantizedWeight.of_buffers(shape, get_format(key), dtype, buffers, requires_grad)
    if initial is not None and (initial.shape != weight.shape or not initial.is_floating_point()):
        raise ValueError(
            f"the initial value of a weight of {tuple(weight.shape)} is {initial.dtype} {tuple(initial.shape)}"
        )
    weight.state.was_cast = cast
    weight.state.columnwise_on_demand = columnwise_on_demand
    weight.state.shared_amax = None if shared_amax is None else SharedAmax(shared_amax)
    weight.state.fp8_weight_gradients = fp8_weight_gradients
    weight.state.had_masters = had_masters
    weight.high_precision_init_val = initial
    if is_parameter:
        # nn.Parameter marks a tensor subclass as a parameter by this attribute.
        weight._is_param = True
    return weight


def _check_saved(flags: Sequence[object], buffers: object, initial: object, shared_amax: object) -> None:
    """Raise TypeError for arguments of types that `_payload` never returns."""
    if not all(isinstance(flag, bool) for flag in flags):
        raise TypeError("a saved weight says True or False where this file says something else")
    if not isinstance(buffers, dict) or not all(isinstance(name, str) for name in buffers):
        raise TypeError(f"a saved weight has its buffers by name, this file has a {type(buffers).__name__}")
    if initial is not None and (not isinstance(initial, Tensor) or isinstance(initial, QuantizedWeight)):
        raise TypeError(
            f"the initial value of a saved weight is a plain tensor, this file has a {type(initial).__name__}"
        )
    names = () if shared_amax is None else shared_amax
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"a saved weight shares its amax with names, this file has {shared_amax!r:.100}")


# Lets torch.load(weights_only=True), the default of torch, read files with weights.
torch.serialization.add_safe_globals([_restore])


def define(op: Any, handler: Callable[..., Any]) -> None:
    """Register the handler of an operator for calls with a QuantizedWeight among the arguments."""
    _HANDLERS[op] = handler


def define_function(function: Any, handler: Callable[..., Any]) -> None:
    """Register the handler of a torch function that never becomes an operator, such as a setter."""
    _FUNCTIONS[function] = handler


def _keep_out_of_frames() -> None:
    """Let torch.compile run products that it does not trace as they are.

    Within a compiled call it compiles each Python function that is called, except those of torch.
    So of a module of torch that was compiled by itself, such as an `nn.Sequential`, it would
    compile the inside of each product in place of the module.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    strategy = dynamo._FrameExecStrategy(skip, skip)
    function: Any = QuantizedWeight.__torch_function__
    dynamo.set_code_exec_strategy(function.__func__.__code__, strategy)


_keep_out_of_frames()
