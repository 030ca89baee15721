"""Primary weights: the parameters in Megatron's byte buffers, of zerocast or TransformerEngine.

A tensor of TransformerEngine is cast through a view: a QuantizedWeight over the tensor's own
buffers. No other file of this integration knows these views. zerocast's integration of
TransformerEngine, and so TransformerEngine itself, is imported only for a model with such a tensor.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.integrations import replaced
from zerocast.weight.buffers import into_flat_buffer

from . import host

_INTEGRATION = "zerocast.integrations.transformer_engine"
# The attribute of TransformerEngine's recipe for MXFP8 that asks for tiles, since 2.20.
_TILES = "enable_2d_quantization"


def is_primary(param: Any) -> bool:
    """Return True if Megatron gathers the quantized bytes of a parameter."""
    return isinstance(param, QuantizedWeight) or is_te_tensor(param)


def is_te_tensor(param: Any) -> bool:
    """Return True if a parameter is a quantized tensor of TransformerEngine."""
    return is_of_te(param) and hasattr(param, "_get_quantizer")


def is_of_te(instance: Any) -> bool:
    """Return True for a tensor or a module of TransformerEngine. Imports nothing."""
    return any(kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(instance).__mro__)


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
    view = castable_view(param)
    view.locate(param)
    weight: QuantizedWeight = view.weight
    return weight


def castable_view(param: Any) -> Any:
    """Return the view of a tensor of TransformerEngine, without the current addresses of its
    buffers.

    Raises TypeError or ValueError for a tensor that cannot be cast in a byte buffer, such as one
    with more than one set of codes.
    """
    if _module(".entry").is_hybrid(param):
        raise ValueError(f"a {type(param).__name__} has codes of two formats, and a byte buffer gathers one")
    view = _view(param)
    if view.weight.format.casts_columnwise:
        raise two_directions(f"a {type(param).__name__} of 1x32 blocks")
    return view


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
        f"{what} needs both directions gathered, and a byte buffer of Megatron holds one: use mxfp8:block=32x32 (in layers of "
        "TransformerEngine build and train inside square_mxfp8()), or mxfp8 under zerocast.ZeroAdamW or zerocast.fsdp2"
    )


@contextmanager
def square_mxfp8() -> Iterator[None]:
    """Let Megatron's recipe for MXFP8 (`--fp8-recipe mxfp8`) cast weights in tiles of 32x32.

    It sets TransformerEngine's `enable_2d_quantization`, for which Megatron has no setting.

        with square_mxfp8():
            pretrain(...)

    Every rank builds the model and trains it inside: a forward pass under the recipe of 1x32 blocks
    replaces the quantizers of the weights, and the next step raises. Activations and gradients keep
    their blocks. One set of codes then serves both directions of a weight, so Megatron gathers one
    byte per element. Without zerocast it gathers bf16.

    Raises RuntimeError for a megatron-core without `get_fp8_recipe`, and for a TransformerEngine
    that has no such tiles.
    """
    fp8 = host.module(host.FP8)
    with host.known_api():
        recipe = _recipe_of_tiles(fp8.get_fp8_recipe)
    with replaced(fp8, "get_fp8_recipe", recipe):
        yield


def _recipe_of_tiles(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `get_fp8_recipe`: an MXFP8 recipe quantizes weights in tiles of 32x32.

    Megatron has no setting for that. The wrapped function raises RuntimeError for a
    TransformerEngine without such tiles.
    """

    @functools.wraps(original)
    def get_fp8_recipe(config: Any) -> Any:
        recipe = original(config)
        if recipe is None or not recipe.mxfp8():
            return recipe
        if not hasattr(recipe, _TILES):
            raise RuntimeError(
                f"{type(recipe).__name__} of this TransformerEngine has no {_TILES}, which 2.20 has: use a different recipe, or "
                "leave out square_mxfp8()"
            )
        return dataclasses.replace(recipe, **{_TILES: True})

    return get_fp8_recipe


class TETensors:
    """The tensors of TransformerEngine among some weights.

    TransformerEngine may give a tensor new buffers between steps, so `locate` points the views at
    the current ones before a cast or a read.
    """

    def __init__(self, weights: Iterable[tuple[str, Any, QuantizedWeight]]) -> None:
        # (name, tensor, view of it). For a QuantizedWeight the parameter is the weight itself.
        self._tensors = [(name, param, weight) for name, param, weight in weights if param is not weight]
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


def _view(param: Any) -> Any:
    return _module(".weight_view").view_of(param, param.dtype)


def _module(name: str) -> Any:
    return importlib.import_module(_INTEGRATION + name)
