"""LoaderMap: where vLLM's own loaders put the elements of stored tensors on one rank.

A model's `load_weights` is called with tensors on the meta device, on layers in their state before
weights were loaded, and each copy that its loaders make is noted and not made. So fused
projections, cuts of tensor parallelism and names of checkpoints are vLLM's, and no table here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from zerocast.serve.engine_weights import ModelTensor, Region, Strided
from zerocast.serve.receiving import Layout

# Global scales of fused nvfp4 weights, of which vLLM takes one for all.
SHARED_SCALES = ("weight_global_scale", "weight_scale_2")
# Rows and columns of a stored int4 weight. vLLM keeps those of the last one that it fuses, and no
# kernel reads them.
SHAPE = "weight_shape"
# Of 4-bit weights alone, vLLM makes it for checkpoints of an older ModelOpt, and then drops it.
DROPPED = "input_scale"


class LoaderMap:
    """The map from stored tensors to the tensors of a model, grown bucket by bucket.

    Attributes:
        layers: the layers that have weights, by name.
        model_tensors: the parameters before they are processed, by name, and each stored shape,
            which is kept with the model.
        shapes: the names of these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if get_layerwise_info(layer).restore_metadata[0] and not is_deferred_attention_layer(layer)
        }
        self.model_tensors: dict[str, ModelTensor] = {}
        self.shapes: set[str] = set()

    def regions(self, layout: Layout) -> Mapping[str, list[Region]]:
        """Return where the loaders put each of these stored tensors; none for one that this rank
        skips.

        Raises ValueError for a tensor that a loader computes with or converts.
        """
        probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in layout}
        with self._before_loading() as names:
            copies = _Copies({_storage(probe): name for name, probe in probes.items()}, names)
            try:
                with copies:
                    self._model.load_weights(list(probes.items()))  # type: ignore[operator]
            except _NotCopied:
                raise
            except Exception as error:
                raise ValueError(
                    f"vLLM's loaders do not accept {layout[0][0]} or its message with these settings of quantization and "
                    f"this tensor-parallel size: {type(error).__name__}: {error}"
                ) from error
        for name, padding in copies.padding.items():
            self.model_tensors[name] = replace(self.model_tensors[name], padding=tuple(padding))
        for name, probe in probes.items():
            if name.endswith(f".{SHAPE}"):
                self.shapes.add(name)
                self.model_tensors[name] = ModelTensor(probe.dtype, tuple(probe.shape))
                copies.regions[name] = [Region(_strided(probe), name, _strided(probe))]
        return copies.regions

    @contextmanager
    def _before_loading(self) -> Iterator[dict[int, str]]:
        """Give each layer the parameters that it had before it was loaded, on the meta device,
        while this context is open. Yields their names by storage.
        """
        names: dict[int, str] = {}
        restored = []
        try:
            for prefix, layer in self.layers.items():
                info = get_layerwise_info(layer)
                info.kernel_tensors = get_layer_params_buffers(layer)
                info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
                restored.append((layer, info))
                restore_layer_on_meta(layer, info)
                for key, parameter in layer._parameters.items():
                    if parameter is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        names.setdefault(_storage(parameter), name)
                        if key not in not_loaded(layer):
                            self.model_tensors.setdefault(name, _described(name, key, parameter))
            yield names
        finally:
            for layer, info in restored:
                _place_kernel_tensors(layer, info)
                info.reset()


def not_loaded(layer: nn.Module) -> set[str]:
    """Return the names of parameters of which no kernel reads what a checkpoint has."""
    scheme = getattr(getattr(layer, "quant_method", None), "fmt", None)
    return {SHAPE, DROPPED} if type(scheme).__name__ == "_DropInputScale" else {SHAPE}


class _NotCopied(ValueError):
    """A loader does something else with a stored tensor than to copy it."""


class _Copies(TorchDispatchMode):
    """Notes copies from stored tensors to parameters, and makes none of them.

    Attributes:
        regions: the copies by stored name.
        padding: by parameter the elements that a loader filled with zeros.
    """

    def __init__(self, stored: Mapping[int, str], own: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stored = stored
        self._own = own
        self.regions: dict[str, list[Region]] = {}
        self.padding: dict[str, list[Strided]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
            return args[0]
        for name, parameter in self._written(func, {**dict(enumerate(args)), **(kwargs or {})}):
            is_zeroed = func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)
            if not is_zeroed:
                raise _NotCopied(
                    f"a loader of vLLM writes to {name} by {func}, and only bytes that are copied, and zeros, can be refitted"
                )
            self.padding.setdefault(name, []).append(_strided(parameter))
            return parameter
        return func(*args, **(kwargs or {}))

    def _written(self, func: Any, given: Mapping[Any, Any]) -> list[tuple[str, Tensor]]:
        """Return the parameters that an operator writes to. Its arguments are passed by position or
        by name.
        """
        tensors = [
            given.get(position, given.get(argument.name))
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        named = [(self._own.get(_storage(tensor)), tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        return [(name, tensor) for name, tensor in named if name is not None]

    def _note_copy(self, own: Tensor, stored: Tensor) -> None:
        name, own_name = self._stored.get(_storage(stored)), self._own.get(_storage(own))
        if name is None or own_name is None:
            raise _NotCopied(
                f"a loader of vLLM computes with {name or 'a stored tensor'} on its way to {own_name or 'a parameter'}, and only "
                "bytes that are copied can be refitted"
            )
        if own.dtype != stored.dtype:
            raise _NotCopied(
                f"the engine keeps {own_name} as {own.dtype}, and the sender stores {name} as {stored.dtype}: start vLLM from an "
                "export of this run, with the same formats, naming and dtype"
            )
        if own.shape != stored.shape and own.numel() != stored.numel():
            raise _NotCopied(
                f"a loader of vLLM spreads {name} {tuple(stored.shape)} over {own_name} {tuple(own.shape)}"
            )
        if own.shape != stored.shape:
            stored = stored.expand(own.shape) if own.numel() == 1 else stored.reshape(own.shape)
        self.regions.setdefault(name, []).append(Region(_strided(stored), own_name, _strided(own)))


def _described(name: str, key: str, parameter: Tensor) -> ModelTensor:
    if not parameter.is_contiguous():
        raise ValueError(
            f"vLLM keeps {name} with strides {parameter.stride()}, and only contiguous tensors are refitted"
        )
    return ModelTensor(parameter.dtype, tuple(parameter.shape), is_uniform=key in SHARED_SCALES)


def _strided(view: Tensor) -> Strided:
    return Strided(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
