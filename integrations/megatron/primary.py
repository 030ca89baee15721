"""Primary weights: the parameters in Megatron's byte buffers, of zerocast or TransformerEngine.

A tensor of TransformerEngine is cast through a view: a QuantizedWeight over the tensor's own
buffers. No other file of this integration knows these views. zerocast's integration of
TransformerEngine, and so TransformerEngine itself, is imported only for a model with such a tensor.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zerocast import QuantizedWeight
from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.integrations.patches import Patch, Patches

from . import host

_INTEGRATION = "zerocast.integrations.transformer_engine"


def is_primary(param: Any) -> bool:
    """Return True if Megatron gathers the quantized bytes of a parameter."""
    return isinstance(param, QuantizedWeight) or is_te_tensor(param)


def is_te_tensor(param: Any) -> bool:
    """Return True if a parameter is a quantized tensor of TransformerEngine. Imports nothing."""
    of_te = any(kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(param).__mro__)
    return of_te and hasattr(param, "_get_quantizer")


def primary_of(bucket_group: Any) -> list[Any]:
    """Return the parameters of a bucket group whose bytes it gathers."""
    return [param for bucket in bucket_group.buckets for param in bucket.params_list if is_primary(param)]


def weight_of(param: Any) -> QuantizedWeight:
    """Return the QuantizedWeight over the current bytes of a primary weight: the parameter, or a
    view.

    Raises TypeError or ValueError for a tensor of TransformerEngine that cannot be cast in a byte
    buffer.
    """
    if isinstance(param, QuantizedWeight):
        return param
    view = _castable_view(param)
    view.locate(param)
    weight: QuantizedWeight = view.weight
    return weight


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Let errors about a parameter begin with its name while the context is open."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{name}: {error}") from error


def initial_value(param: Any) -> Tensor:
    """Return a primary weight's value before quantization if it is stored, else its dequantized
    value.
    """
    if isinstance(param, QuantizedWeight):
        return param.dequantize() if param.high_precision_init_val is None else param.high_precision_init_val
    stored = param.get_high_precision_init_val() if hasattr(param, "get_high_precision_init_val") else None
    # TransformerEngine stores the value in CPU memory.
    value: Tensor = param.dequantize() if stored is None else stored.to(param.device)
    return value


def release_initial_values(params: Iterable[Any]) -> None:
    """Free the values before quantization that TransformerEngine stores in CPU memory.

    Megatron frees them for a DistributedOptimizer only.
    """
    for param in params:
        if is_te_tensor(param) and hasattr(param, "clear_high_precision_init_val"):
            param.clear_high_precision_init_val()


def check_primary(param: Any) -> None:
    """Raise as `weight_of` does, without reading the addresses of the buffers."""
    if not isinstance(param, QuantizedWeight):
        _castable_view(param)


def shares_codes(param: Any) -> bool:
    """Return True for a tensor of TransformerEngine whose rowwise and columnwise codes are one
    buffer.

    Megatron's own cast would write each direction by itself, into the same memory.
    """
    return is_te_tensor(param) and bool(_module(".adapters").shares_codes(param))


def move_codes(param: Any, storage: Any) -> None:
    """Move the codes of a tensor of TransformerEngine, for both directions, into a view of the
    buffer.
    """
    _module("").replace_raw_data(param, storage)


def two_directions(what: str) -> ValueError:
    """Return the error for a weight that needs both directions gathered."""
    return ValueError(
        f"{what} needs both directions gathered, and a byte buffer of Megatron holds one: use mxfp8:block=32x32 for it, in "
        "layers of TransformerEngine by building and training inside square_mxfp8(), or mxfp8 under zerocast.ZeroAdamW or "
        "zerocast.fsdp2"
    )


@contextmanager
def square_mxfp8() -> Iterator[None]:
    """Let Megatron's recipe for MXFP8 (`--fp8-recipe mxfp8`) cast weights in tiles of 32x32.

    It sets TransformerEngine's `enable_2d_quantization`, for which Megatron has no setting.

        with square_mxfp8():
            pretrain(...)

    Every rank builds the model and trains it inside: a forward pass under the recipe of 1x32 blocks
    replaces the quantizers of the weights, and the next step raises. Activations and gradients keep
    their blocks. One set of codes then serves both directions of a weight, so that Megatron gathers
    one byte per element, where it gathers bf16 without zerocast.

    Raises RuntimeError for a megatron-core without `get_fp8_recipe`, and where a recipe is made by
    a TransformerEngine without such tiles.
    """
    fp8 = host.module(host.FP8)
    with Patches() as patches:
        with host.known_api():
            patches.apply([Patch(fp8, "get_fp8_recipe", host.recipe_of_tiles(fp8.get_fp8_recipe))])
        yield


class TETensors:
    """The tensors of TransformerEngine among some weights.

    TransformerEngine may give a tensor new buffers between steps, so `locate` points the views at
    the current ones before a cast or a read.
    """

    def __init__(self, names: Iterable[str], params: Iterable[Any], weights: Iterable[QuantizedWeight]) -> None:
        named = zip(names, params, weights, strict=True)
        # (name, tensor, view of it). For a QuantizedWeight the parameter is the weight itself.
        self._tensors = [(name, param, weight) for name, param, weight in named if param is not weight]
        # One buffer for all amaxes, so that resetting or reducing them is one launch.
        into_flat_buffer([weight for _, param, weight in self._tensors if _view(param).owns_amax], "amax")

    def locate(self) -> None:
        """Point the views at the current buffers that a cast writes.

        Raises RuntimeError for a tensor whose quantizer now has a different format, ValueError for
        a tensor whose codes were dropped or whose options changed to ones that are not cast.
        """
        for name, param, weight in self._tensors:
            view = _view(param)
            if view.weight is not weight:
                raise RuntimeError(
                    f"{name} was attached as {weight.format} and has a quantizer of {view.weight.format} now: build the model "
                    f"again, and compute by a recipe of {weight.format}"
                )
            view.locate(param)

    def locate_copies(self) -> None:
        """Point the views at all current buffers, including columnwise copies."""
        self.locate()
        for _, param, _ in self._tensors:
            view = _view(param)
            if (view.derives or view.shares) and view.adapter.copies():
                view.locate_columnwise(param)

    def release(self) -> None:
        """Forget the views of the tensors."""
        if self._tensors:
            _module("").release([param for _, param, _ in self._tensors])


def make_te_copies(params: Sequence[Any]) -> None:
    """Make the columnwise copies of gathered tensors, if matrix products on this GPU need any."""
    if params:
        _module("").post_all_gather_processing(params)


def target_of_load(param: Any) -> Any:
    """Return the tensor that `load_state_dict` may copy into a primary weight that is already cast.

    It is the weight itself, or a second tensor of TransformerEngine over the same buffers.
    """
    if isinstance(param, QuantizedWeight):
        return param
    make_te_copies([param])
    return param.detach()


def check_before_forward(chunk: nn.Module, check: Callable[[], None]) -> list[Callable[[], None]]:
    """Let modules with TransformerEngine's tensors call `check` before their forward pass.

    A QuantizedWeight checks by itself when it is read. Returns the functions that remove the hooks.
    """
    return [
        module.register_forward_pre_hook(lambda *_: check()).remove
        for module in chunk.modules()
        if any(map(is_te_tensor, module.parameters(recurse=False)))
    ]


def _castable_view(param: Any) -> Any:
    """Return the view of a tensor. Raises ValueError if it has more than one set of codes."""
    if _module(".entry").is_hybrid(param):
        raise ValueError(f"a {type(param).__name__} has codes of two formats, and a byte buffer gathers one")
    view = _view(param)
    if view.weight.format.casts_columnwise:
        raise two_directions(f"a {type(param).__name__} of 1x32 blocks")
    return view


def _view(param: Any) -> Any:
    return _module(".weight_view").view_of(param, param.dtype)


def _module(name: str) -> Any:
    return importlib.import_module(_INTEGRATION + name)
