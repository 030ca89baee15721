"""building(): the context in which Megatron-Core lays QuantizedWeights out in its byte buffers and makes their masters.

Megatron asks functions and globals of its modules which parameters live in byte buffers and how they move there. They answer for
QuantizedWeights inside the context only; afterwards every one is the object that it was. TransformerEngine's tensors it knows by
itself: the context gives them the layout, and refuses what `attach` would.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.formats import Columnwise

from . import host, layout, te_tensors
from .construction import Construction, Replacement
from .refusal import two_directions


class _FourBitMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, QuantizedWeight) and instance.format.bits == 4


class FourBit(metaclass=_FourBitMeta):
    """What `isinstance` takes a QuantizedWeight of 4 bits for."""


@contextmanager
def building() -> Iterator[None]:
    """Build DistributedDataParallel and the optimizer in here, over a model whose weights `zerocast.quantize_` replaced.

    Or over one whose weights are tensors of TransformerEngine. Masters start from the values before quantization. An optimizer over
    QuantizedWeights refuses to step and to load until `attach`. RuntimeError for a megatron-core without a name that is needed and
    for weights that another `building()` laid out, ValueError for a weight whose format has no place in a byte buffer (mxfp8,
    identity) and for settings that are not supported.
    """
    construction = Construction()
    moved = construction.moved
    replaced: list[Replacement] = []
    try:
        for owner, name, value in (*_replacements(moved), *construction.replacements()):
            replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)
        for weight in moved:
            weight.high_precision_init_val = None
            for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
                vars(weight).pop(name, None)
        construction.end()


def _replacements(moved: list[QuantizedWeight]) -> list[Replacement]:
    """(owner, name, value) of everything that is other inside the context."""
    fp8, fp4 = host.module(host.FP8), host.module(host.FP4)
    host.require(fp8, ("FP8_TENSOR_CLASS", "HAVE_TE_FP8_TENSOR_CLASS", "_modify_underlying_storage_impl"), host.FP8)
    host.require(fp4, ("FP4_TENSOR_CLASS", "HAVE_TE_FP4_TENSOR_CLASS"), host.FP4)

    def move_with(original: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
        def move(param: Any, storage: Tensor) -> None:
            if isinstance(param, QuantizedWeight):
                _move(param, storage)
                moved.append(param)
            else:
                if te_tensors.is_te_tensor(param):
                    te_tensors.check(param)
                original(param, storage)

        return move

    return [
        (fp8, "FP8_TENSOR_CLASS", _also(fp8.HAVE_TE_FP8_TENSOR_CLASS and fp8.FP8_TENSOR_CLASS, QuantizedWeight)),
        (fp8, "HAVE_TE_FP8_TENSOR_CLASS", True),
        (fp8, "_modify_underlying_storage_impl", move_with(fp8._modify_underlying_storage_impl)),
        *(_of_four_bits(move_with) if host.has_four_bit_buffers() else ()),
    ]


def _of_four_bits(move_with: Callable[[Any], Any]) -> list[Replacement]:
    """What is other where the host's buffers can hold 4-bit weights: also how they are laid out."""
    fp4, buffer = host.module(host.FP4), host.module(host.BUFFER)
    ddp, optimizer = host.module(host.DDP), host.module(host.OPTIMIZER)
    grouped, lay_out = buffer.group_params_for_buffers, optimizer.DistributedOptimizer._compute_per_buffer_param_layout

    def group_by_width(*args: Any, **kwargs: Any) -> Any:
        return layout.by_width(grouped(*args, **kwargs))

    def lay_out_by_width(*args: Any, **kwargs: Any) -> Any:
        return layout.of_one_width(lay_out, *args, **kwargs)

    return [
        (fp4, "FP4_TENSOR_CLASS", _also(fp4.HAVE_TE_FP4_TENSOR_CLASS and fp4.FP4_TENSOR_CLASS, FourBit)),
        (fp4, "HAVE_TE_FP4_TENSOR_CLASS", True),
        (buffer, "modify_nvfp4_rowwise_storage", move_with(buffer.modify_nvfp4_rowwise_storage)),
        (buffer._ParamAndGradBuffer, "_compute_nvfp4_packed_layout", layout.pack),
        *((place, "group_params_for_buffers", group_by_width) for place in (buffer, ddp, optimizer)),
        (optimizer.DistributedOptimizer, "_compute_per_buffer_param_layout", staticmethod(lay_out_by_width)),
    ]


def _also(theirs: Any, ours: type) -> tuple[type, ...]:
    return (theirs, ours) if theirs else (ours,)


def _move(weight: QuantizedWeight, storage: Tensor) -> None:
    """Move the weight's bytes to `storage`, a view of the buffer, and let the optimizer read its initial value."""
    fmt = weight.format
    if fmt.columnwise is Columnwise.OWN_GRID:
        raise two_directions(f"{weight!r}: {fmt}")
    if storage.numel() != weight.rowwise_data.numel():
        raise RuntimeError(
            f"{weight!r} has {weight.rowwise_data.numel()} bytes, and this megatron-core sets {storage.numel()} aside for it: "
            "it knows no buffers of two elements a byte; 0.19 does"
        )
    weight.rebind(rowwise_data=storage.view(weight.rowwise_data.shape))
    host_weight: Any = weight
    host_weight.get_high_precision_init_val = lambda: _initial(weight)
    host_weight.clear_high_precision_init_val = lambda: setattr(weight, "high_precision_init_val", None)


def _initial(weight: QuantizedWeight) -> Tensor:
    return weight.dequantize() if weight.high_precision_init_val is None else weight.high_precision_init_val
