"""The table of adapters: for each quantizer class of TransformerEngine, the format that it casts
into and the attributes in which its tensors have their buffers.

No other file here names a class of TransformerEngine. Classes that the installed TransformerEngine
does not have are left out of the table.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocast import FormatSpec, get_format

from . import host


def nothing(of: Any) -> None:
    """Do nothing: the format needs no such step."""


def always() -> bool:
    """Return True: every GPU needs this copy."""
    return True


def never(tensor: Any) -> bool:
    """Return False: no tensor of the format has this state."""
    return False


@dataclass(frozen=True)
class Option:
    """An option of a quantizer that must have one value where it exists.

    A tensor has the same option with an underscore.
    """

    name: str
    needed: Any
    reason: str

    def check(self, quantizer: Any, tensor: Any) -> None:
        """Raise ValueError with the reason unless the value is the supported one."""
        for owner, name in ((quantizer, self.name), (tensor, f"_{self.name}")):
            value = getattr(owner, name, self.needed)
            if value != self.needed:
                raise ValueError(f"{name} is {value} and {self.needed} is needed: {self.reason}")


@dataclass(frozen=True)
class Shown:
    """How to construct a tensor of TransformerEngine over the gathered buffers of a weight.

    Attributes:
        tensor: the name of the tensor's class.
        quantizer: makes the quantizer of a FormatSpec on a device.
        arguments: a dict from a name in `layout.BUFFERS` to the constructor's argument for that
            buffer.
        options: further arguments of the constructor.
        derived: the attributes of the copies that TransformerEngine makes of the buffers, with
            their values while no copy exists.
        codes: the constructor's argument for the dtype of the codes.
    """

    tensor: str
    quantizer: Callable[[FormatSpec, torch.device], Any]
    arguments: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)
    codes: str = "fp8_dtype"


@dataclass(frozen=True)
class Adapter:
    """One format in TransformerEngine's terms.

    Attributes:
        format: makes the FormatSpec of a quantizer.
        of_tensor: a dict from a name in `layout.BUFFERS` to the tensor's attribute for that buffer.
        of_quantizer: the quantizer's attribute for each buffer that the quantizer has.
        options: options that must have one value for a tensor to be cast.
        chooses: the attributes of a quantizer that `format` reads, besides the element type.
        outdate: drops the columnwise copy of a tensor, or marks it as outdated. TransformerEngine's
            next forward pass then makes it.
        outdated: True for a tensor whose columnwise copy is marked so.
        copies: True if this GPU's products read a columnwise copy.
        copied: is called with the tensors whose copies were made.
        alone: the reason why a Hybrid tensor cannot have this format in one direction; "" if it
            can.
        shares: True for a quantizer whose tensors have one set of codes for both directions.
        shown: how weights that FSDP2 gathers become tensors; None if they cannot.
    """

    format: Callable[[Any], FormatSpec]
    of_tensor: Mapping[str, str]
    of_quantizer: Mapping[str, str] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    chooses: tuple[str, ...] = ()
    outdate: Callable[[Any], None] = nothing
    outdated: Callable[[Any], bool] = never
    copies: Callable[[], bool] = always
    copied: Callable[[Sequence[Any]], None] = nothing
    alone: str = ""
    shares: Callable[[Any], bool] = never
    shown: Shown | None = None

    def format_of(self, tensor: Any, quantizer: Any) -> FormatSpec:
        """Return the format of a tensor.

        Raises ValueError with the reason if it is not cast, RuntimeError for an unsupported
        TransformerEngine.
        """
        with host.known_api():
            self.buffers(tensor, quantizer)
            self.check(tensor, quantizer)
            return self.format(quantizer)

    def check(self, tensor: Any, quantizer: Any) -> None:
        """Raise ValueError with the reason for options that are not cast.

        Called for every cast, since options may be set at any time.
        """
        for option in self.options:
            option.check(quantizer, tensor)
        stored, made = getattr(tensor, "_fp8_dtype", None), getattr(quantizer, "dtype", None)
        if stored is not None and made is not None and stored != made:
            names = [getattr(dtype, "name", str(dtype)) for dtype in (stored, made)]
            raise ValueError("its codes are {} and its quantizer makes {}".format(*names))

    def choices(self, quantizer: Any) -> tuple[Any, ...]:
        """Return the values of a quantizer that decide the format of its tensors, besides its
        class.
        """
        return tuple(getattr(quantizer, name, None) for name in self.chooses)

    def attribute(self, name: str) -> str:
        """Return the host's name of a buffer."""
        return self.of_tensor.get(name) or f"quantizer's {self.of_quantizer[name]}"

    def places(self, names: Iterable[str]) -> list[str]:
        """Return the attributes of some buffers, seen from the tensor: for example `_data`, or
        `_quantizer.scale` for a buffer that the quantizer has.
        """
        return [self.of_tensor.get(name) or f"_quantizer.{self.of_quantizer[name]}" for name in names]

    def checked(self, tensor: Any, quantizer: Any) -> list[str]:
        """Return the attributes that `check` and `choices` read, seen from the tensor like
        `places`.
        """
        options = [option.name for option in self.options]
        of_tensor = [name for name in ("_fp8_dtype", *(f"_{name}" for name in options)) if hasattr(tensor, name)]
        of_quantizer = ("dtype", *options, *self.chooses)
        return of_tensor + [f"_quantizer.{name}" for name in of_quantizer if hasattr(quantizer, name)]

    def buffers(self, tensor: Any, quantizer: Any) -> dict[str, Tensor | None]:
        """Return a dict from name to current buffer of a tensor or its quantizer, or to None."""
        of_tensor = {name: getattr(tensor, attribute) for name, attribute in self.of_tensor.items()}
        return of_tensor | {name: getattr(quantizer, attribute) for name, attribute in self.of_quantizer.items()}


_ELEMENTS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}

_PER_TENSOR = {"rowwise_data": "_data", "rowwise_scale_inv": "_scale_inv", "columnwise_data": "_transpose"}
_PER_BLOCK = {
    name: f"_{name}" for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
}
_ONE_DIRECTION = "its directions are cast together, and a Hybrid tensor gathers rowwise codes only"
_SCALED_BY = ("force_pow_2_scales", "amax_epsilon")
_FROM_ROWS = "its columnwise copy is made from the rowwise codes, which a Hybrid tensor keeps elsewhere"


def _element(quantizer: Any) -> str:
    name = getattr(quantizer.dtype, "name", str(quantizer.dtype))
    if name not in _ELEMENTS:
        raise ValueError(f"its quantizer makes {name}, one of {', '.join(_ELEMENTS)} is needed")
    return _ELEMENTS[name]


def _delayed(quantizer: Any) -> FormatSpec:
    return get_format("fp8_delayed", element=_element(quantizer))


def _scaled(name: str, quantizer: Any) -> FormatSpec:
    """Return a format that is scaled by this cast's amaxes to FP32 scales."""
    power, epsilon = bool(quantizer.force_pow_2_scales), float(quantizer.amax_epsilon)
    return get_format(name, element=_element(quantizer), power_of_2_scale=power, amax_epsilon=epsilon)


def _has_tiles(quantizer: Any) -> bool:
    # Older releases do not have this option.
    return bool(getattr(quantizer, "with_2d_quantization", False))


def _mxfp8(quantizer: Any) -> FormatSpec:
    """Blocks of 1x32 and 32x1, or tiles of 32x32."""
    if _element(quantizer) != "e4m3":
        raise ValueError("mxfp8 weights are E4M3, its quantizer makes E5M2")
    return get_format("mxfp8", block="32x32" if _has_tiles(quantizer) else "1x32")


def _invalidate_transpose(tensor: Any) -> None:
    # A tensor without rowwise codes has all of its codes in the transpose.
    tensor._transpose_invalid = tensor._data is not None


def _has_invalid_transpose(tensor: Any) -> bool:
    return bool(tensor._transpose_invalid)


def _validate_transposes(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        tensor._transpose_invalid = False


def _rows_only(tensor: Any) -> None:
    tensor.update_usage(rowwise_usage=True, columnwise_usage=False)


def _copy_amaxes(tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if tensor._amax_columnwise is None:
            tensor._amax_columnwise = tensor._amax_rowwise.clone()
    columnwise, rowwise = [t._amax_columnwise for t in tensors], [t._amax_rowwise for t in tensors]
    torch._foreach_copy_(columnwise, rowwise)


def _code_dtype(fmt: FormatSpec) -> Any:
    assert fmt.element is not None
    names = {element: name for name, element in _ELEMENTS.items()}
    return host.module(host.CONSTANTS).DType[names[fmt.element.name]]


def _new(name: str) -> Any:
    """Return the quantizer class of this name."""
    return getattr(host.module(host.TENSORS), name)


def _delayed_quantizer(fmt: FormatSpec, device: torch.device) -> Any:
    scale = torch.ones(1, dtype=torch.float32, device=device)
    amax = torch.zeros_like(scale)
    return _new("Float8Quantizer")(scale, amax, _code_dtype(fmt))


def _current_quantizer(fmt: FormatSpec, device: torch.device) -> Any:
    options = {"force_pow_2_scales": fmt.power_of_2_scale, "amax_epsilon": fmt.amax_epsilon}
    return _new("Float8CurrentScalingQuantizer")(_code_dtype(fmt), device, columnwise=False, **options)


def _block_quantizer(fmt: FormatSpec, device: torch.device) -> Any:
    options = {"force_pow_2_scales": fmt.power_of_2_scale, "amax_epsilon": fmt.amax_epsilon}
    return _new("Float8BlockQuantizer")(_code_dtype(fmt), rowwise=True, columnwise=False, **options)


def _mxfp8_quantizer(fmt: FormatSpec, device: torch.device) -> Any:
    # Only for tiles, since the quantizer of older releases does not have this argument.
    options = {"with_2d_quantization": True} if fmt.block == (32, 32) else {}
    return _new("MXFP8Quantizer")(_code_dtype(fmt), **options)


def _nvfp4_quantizer(fmt: FormatSpec, device: torch.device) -> Any:
    return _new("NVFP4Quantizer")(columnwise=False, with_2d_quantization=True)


_COMPACT = Option(
    "with_gemm_swizzled_scales", False, "scales are written in their compact layout, which products then swizzle"
)

_FLOAT8 = functools.partial(
    Shown,
    "Float8Tensor",
    arguments={"rowwise_data": "data", "rowwise_scale_inv": "fp8_scale_inv"},
    derived={"_transpose": None, "_transpose_invalid": True},
)
_ROWS = {name: name for name in ("rowwise_data", "rowwise_scale_inv")}
_BOTH = {**_ROWS, "columnwise_data": "columnwise_data", "columnwise_scale_inv": "columnwise_scale_inv"}
_NO_COPY = {"_columnwise_data": None, "_columnwise_scale_inv": None}
_NO_ARGUMENT = {"columnwise_data": None, "columnwise_scale_inv": None}

_ADAPTERS = {
    "Float8Quantizer": Adapter(
        _delayed,
        _PER_TENSOR,
        {"scale": "scale", "amax": "amax"},
        outdate=_invalidate_transpose,
        outdated=_has_invalid_transpose,
        copies=host.reads_transposes,
        copied=_validate_transposes,
        shown=_FLOAT8(_delayed_quantizer),
    ),
    "Float8CurrentScalingQuantizer": Adapter(
        functools.partial(_scaled, "fp8_current"),
        _PER_TENSOR,
        chooses=_SCALED_BY,
        outdate=_invalidate_transpose,
        outdated=_has_invalid_transpose,
        copies=host.reads_transposes,
        copied=_validate_transposes,
        shown=_FLOAT8(_current_quantizer),
    ),
    "Float8BlockQuantizer": Adapter(
        functools.partial(_scaled, "fp8_block"),
        _PER_BLOCK,
        options=(
            Option("block_len", 128, "blocks of weights are 128x128"),
            Option("block_scaling_dim", 2, "1x128 blocks have no columnwise copy that derives from rowwise codes"),
            Option("is_2D_scaled", True, "1x128 blocks have no columnwise copy that derives from rowwise codes"),
        ),
        chooses=_SCALED_BY,
        outdate=_rows_only,
        alone=_FROM_ROWS,
        shown=Shown(
            "Float8BlockwiseQTensor", _block_quantizer, _ROWS, {**_NO_ARGUMENT, "is_2D_scaled": True}, _NO_COPY
        ),
    ),
    "MXFP8Quantizer": Adapter(
        _mxfp8,
        _PER_BLOCK,
        options=(_COMPACT,),
        chooses=("with_2d_quantization",),
        alone=_ONE_DIRECTION,
        shares=_has_tiles,
        shown=Shown("MXFP8Tensor", _mxfp8_quantizer, _BOTH, {"with_gemm_swizzled_scales": False}),
    ),
    "NVFP4Quantizer": Adapter(
        lambda quantizer: get_format("nvfp4"),
        {**_PER_BLOCK, "amax": "_amax_rowwise"},
        options=(
            Option("with_2d_quantization", True, "weights are cast in 16x16 tiles"),
            Option(
                "nvfp4_use_4over6", False, "codes are chosen for an E4M3 bound of 448, and read with the tensor's own"
            ),
            Option("nvfp4_e4m3_max", 448, "codes are chosen for this bound of the scales"),
            Option("row_scaled_nvfp4", False, "weights have one FP32 amax per tensor"),
            Option("stochastic_rounding", False, "weights are rounded to nearest"),
            Option("with_rht", False, "the columnwise copy of a weight is its transpose, without a Hadamard transform"),
            _COMPACT,
        ),
        outdate=_rows_only,
        copied=_copy_amaxes,
        alone=_FROM_ROWS,
        shown=Shown(
            "NVFP4Tensor",
            _nvfp4_quantizer,
            {**_ROWS, "amax": "amax_rowwise"},
            {**_NO_ARGUMENT, "amax_columnwise": None, "with_gemm_swizzled_scales": False},
            {**_NO_COPY, "_amax_columnwise": None},
            codes="fp4_dtype",
        ),
    ),
    "IdentityQuantizer": Adapter(lambda quantizer: get_format("identity"), {"rowwise_data": "_hp_data"}),
}
HYBRID = "HybridQuantizer"


@functools.cache
def table() -> dict[type, Adapter]:
    """Return the adapters of the quantizer classes that the installed TransformerEngine has."""
    tensors = host.module(host.TENSORS)
    return {getattr(tensors, name): adapter for name, adapter in _ADAPTERS.items() if hasattr(tensors, name)}


@functools.cache
def hybrid() -> type | None:
    """Return the quantizer class of tensors with two formats; None in a TransformerEngine without
    it.
    """
    kind: type | None = getattr(host.module(host.TENSORS), HYBRID, None)
    return kind


# The quantizer class of each format. TransformerEngine has no tensor for formats not listed.
_QUANTIZERS = {
    "fp8_delayed": "Float8Quantizer",
    "fp8_current": "Float8CurrentScalingQuantizer",
    "fp8_block": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
    "nvfp4": "NVFP4Quantizer",
}


def adapter_for(fmt: FormatSpec) -> Adapter:
    """Return the adapter of a format that tensors of TransformerEngine can hold as they are
    gathered.

    Raises ValueError for any other format.
    """
    adapter = table().get(getattr(host.module(host.TENSORS), _QUANTIZERS.get(fmt.name, ""), type(None)))
    if adapter is None or adapter.shown is None:
        raise ValueError(
            f"TransformerEngine has no tensor that holds {fmt}: use {', '.join(_QUANTIZERS)} or mxfp8:block=32x32, or leave the "
            "weight out of the recipe"
        )
    quantizer = adapter.shown.quantizer(fmt, torch.device("cpu"))
    if not same_codes(shown_format(quantizer), fmt):
        raise ValueError(f"TransformerEngine's {type(quantizer).__name__} casts {shown_format(quantizer)}, not {fmt}")
    return adapter


def shown_format(quantizer: Any) -> FormatSpec:
    """Return the format into which a quantizer casts weights. Raises TypeError or ValueError if no
    gathered weight can be presented in it.
    """
    adapter = adapter_of(quantizer)
    if adapter.shown is None:
        raise ValueError(f"weights of a {type(quantizer).__name__} are not gathered as tensors of TransformerEngine")
    for option in adapter.options:
        option.check(quantizer, None)
    return adapter.format(quantizer)


def same_codes(first: FormatSpec, second: FormatSpec) -> bool:
    """Return True if products read the codes of two formats in the same way.

    The length of the amax history, which is a part of fp8_delayed, makes no difference there. Nor
    do the scales that a cast of NVFP4 may choose.
    """
    if first.name == second.name == "fp8_delayed":
        return first.element == second.element
    return dataclasses.replace(first, exact_scales=False) == dataclasses.replace(second, exact_scales=False)


def quantizer_of(tensor: Any) -> Any:
    """Return the quantizer of a tensor of TransformerEngine, or of a part of one.

    Raises TypeError if `tensor` is anything else.
    """
    quantizer = getattr(tensor, "_quantizer", None)
    if quantizer is not None:
        return quantizer
    if not hasattr(tensor, "_get_quantizer"):
        raise TypeError(f"it is a {type(tensor).__name__}: a quantized tensor of TransformerEngine is needed")
    return tensor._get_quantizer()


def shares_codes(tensor: Any) -> bool:
    """Return True if one set of codes of a tensor serves both directions."""
    quantizer = quantizer_of(tensor)
    adapter = table().get(type(quantizer))
    return adapter is not None and adapter.shares(quantizer)


def is_quantized(tensor: Any) -> bool:
    """Return True for a tensor of TransformerEngine, or a direction of one, of any class."""
    return hasattr(tensor, "_get_quantizer")


def adapter_of(quantizer: Any) -> Adapter:
    """Return the adapter of a quantizer. Raises TypeError for a class that is not in the table.

    That includes subclasses of those in the table, which may cast differently.
    """
    adapter = table().get(type(quantizer))
    if adapter is None:
        known = ", ".join(sorted(kind.__name__ for kind in table()))
        raise TypeError(f"its quantizer is a {type(quantizer).__name__}; known: {known}, and two of them in a Hybrid")
    return adapter
