"""TransformerEngine's tensors in Megatron's byte buffers, each by its twin: a QuantizedWeight over the tensor's own buffers.

The only file here that knows of them. zerocast's integration of TransformerEngine, and so TransformerEngine itself, is imported
when a model has such a tensor.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from zerocast import QuantizedWeight
from zerocast.cast.flat_buffer import into_flat_buffer

from .refusal import two_directions

_INTEGRATION = "zerocast.integrations.transformer_engine"
Named = tuple[str, Any, QuantizedWeight]  # a parameter, with its name and its twin's weight


def is_te_tensor(param: Any) -> bool:
    """Whether a parameter is a quantized tensor of TransformerEngine, of a kind that is cast or not. Imports nothing."""
    theirs = any(kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(param).__mro__)
    return theirs and hasattr(param, "_get_quantizer")


def weight_of(param: Any) -> QuantizedWeight:
    """The weight over a tensor's buffers as they lie now. TypeError or ValueError for what cannot be cast in a byte buffer."""
    twin = _twin(param)
    twin.follow(param)
    weight: QuantizedWeight = twin.weight
    return weight


def check(param: Any) -> None:
    """Raise the same unless the tensor can be cast in a byte buffer."""
    _twin(param)


class TETensors:
    """Those among the weights of one optimizer, followed from step to step: TransformerEngine may move their buffers."""

    def __init__(self, named: Iterable[Named]) -> None:
        self._named = [(name, param, weight) for name, param, weight in named if param is not weight]
        own_amax = [weight for _, param, weight in self._named if _twin(param).keeps_own_amax]
        into_flat_buffer(own_amax, "amax")

    def follow(self) -> None:
        """Look where the buffers that a cast writes are now.

        RuntimeError for a tensor that was given a quantizer of another format, ValueError for one whose codes were dropped or whose
        options changed to what is not cast.
        """
        for name, param, weight in self._named:
            twin = _twin(param)
            if twin.weight is not weight:
                raise RuntimeError(
                    f"{name} was attached as {weight.format} and has a quantizer of {twin.weight.format} now: build the model anew"
                )
            twin.follow(param)

    def follow_copies(self) -> None:
        """Look where all buffers are now, columnwise copies included."""
        self.follow()
        for _, param, _ in self._named:
            twin = _twin(param)
            if twin.derives and twin.adapter.copies():
                twin.follow_columnwise(param)

    def release(self) -> None:
        """Keep nothing of them."""
        if self._named:
            _module("").release([param for _, param, _ in self._named])


def make_copies(params: Sequence[Any]) -> None:
    """The columnwise copies of gathered tensors, where this GPU's products read any."""
    if params:
        _module("").post_all_gather_processing(params)


def loaded(param: Any) -> Any:
    """A tensor that was cast whole, as another object over the same buffers: for its module to copy into it."""
    make_copies([param])
    return param.detach()


def check_before_forward(chunk: nn.Module, check_complete: Callable[[], None]) -> list[Callable[[], None]]:
    """Modules that hold such tensors ask `check_complete` first: TransformerEngine's products do not. Returns what undoes it."""
    return [
        module.register_forward_pre_hook(lambda *_: check_complete()).remove
        for module in chunk.modules()
        if any(map(is_te_tensor, module.parameters(recurse=False)))
    ]


def _twin(param: Any) -> Any:
    if _module(".hybrid").is_hybrid(param):
        raise ValueError(f"a {type(param).__name__} has codes of two formats, and a byte buffer gathers one")
    twin = _module(".twin").twin_of(param, param.dtype)
    if twin.adapter.two_payloads:
        raise two_directions(type(param).__name__)
    return twin


def _module(name: str) -> Any:
    return importlib.import_module(_INTEGRATION + name)
