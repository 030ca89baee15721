"""Layers: from the tensors that vLLM's loaders fill to those that its kernels read, and back.

After a load vLLM lets the kernel of each layer process its weights. Some kernels read them where
they are, possibly as a transpose; then the engine's bytes are the trainer's, and a delta is written
to them in place. Others lay the weights out again. For these the bytes before that are kept in host
memory, and vLLM's own processing is replayed into the tensors that the kernel has. A digest of what
the processing gave shows later whether the kernel still has that. Addresses stay in both cases.
Kernels that compute with numbers other than the stored ones are not supported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    _copy_and_restore_kernel_tensors,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from zerocast.formats.memory import as_bytes
from zerocast.integrations.vllm.loader_map import DROPPED, SHAPE, not_loaded
from zerocast.serve.engine_weights import Strided
from zerocast.serve.flat_bytes import digest

KERNELS = "vllm.model_executor.kernels.linear"
# By reading vLLM 0.32.0. Kernels that read weights where the loaders put them. A tensor that one of
# them copies after all, for padding, is replayed.
READ_IN_PLACE = {
    "BlockWiseTorchFP8ScaledMMLinearKernel",
    "ChannelWiseTorchFP8ScaledMMLinearKernel",
    "CutlassFP8ScaledMMLinearKernel",
    "CutlassFp8BlockScaledMMKernel",
    "FlashInferFp8BlockScaledMMKernel",
    "PerTensorTorchFP8ScaledMMLinearKernel",
    "TritonFp8BlockScaledMMKernel",
}
# Kernels that lay weights out again without another rounding.
REPLAYED = {
    "CPUWNA16LinearKernel",
    "CPUFp8BlockScaledMMKernel",
    "CPUFp8W8A8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "EmulationMxfp4LinearKernel",
    "EmulationMxfp8LinearKernel",
    "MarlinLinearKernel",
    "MarlinMxFp4LinearKernel",
    "MarlinMxfp8LinearKernel",
    "MarlinNvFp4LinearKernel",
}
REFUSED = {
    "MarlinFP8ScaledMMLinearKernel": "it rounds FP32 scales to the dtype of the model",
}
# The ways to hold a weight that the exports of zerocast lead to. Experts are not among them.
METHODS = {
    "CompressedTensorsLinearMethod",
    "Fp8LinearMethod",
    "ModelOptLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
}


class Layers:
    """The layers of a model with weights, as tensors in model layout.

    Args:
        model: vLLM's model on this rank, loaded in whatever way.
        layers: its layers by name.

    Raises ValueError, naming a layer, for one that cannot be refitted.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        if hasattr(model, "process_weights_after_loading"):
            raise ValueError(
                f"{type(model).__name__} processes its weights as a whole after a load, which is not replayed"
            )
        for name, module in model.named_modules():
            if is_deferred_attention_layer(module) and "MLA" in type(module).__name__:
                raise ValueError(
                    f"{name} is a {type(module).__name__}, which multiplies weights with each other after a load"
                )
        self._layers = {name: _Layer(name, module) for name, module in layers.items()}
        # Tensors of a model that are stored in another layer's parameter, as those of a tied head
        # do.
        self.aliases = self._aliases()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give every layer its tensors and let vLLM process them."""
        for name, layer in self._layers.items():
            layer.load({key: values[self._source(name, key)] for key in layer.keys})

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the engine's bytes in model layout, by name."""
        tensors = {}
        for name, layer in self._layers.items():
            for key in layer.keys:
                if _joined(name, key) not in self.aliases:
                    tensors[_joined(name, key)] = layer.tensor(key)
        return tensors

    def written(self, names: Iterable[str]) -> None:
        """Process the layers again whose kept tensors were written to."""
        changed = set(names)
        values = self.tensors()
        for name, layer in self._layers.items():
            sources = {key: self._source(name, key) for key in layer.keys}
            if any(source in changed and not layer.is_in_place(key) for key, source in sources.items()):
                layer.load({key: values[source].clone() for key, source in sources.items()})

    def check(self) -> None:
        """Raise ValueError unless every kernel has what vLLM's processing made of the kept
        tensors.
        """
        for layer in self._layers.values():
            layer.check()

    def _source(self, name: str, key: str) -> str:
        full = _joined(name, key)
        return self.aliases.get(full, full)

    def _aliases(self) -> dict[str, str]:
        first: dict[int, str] = {}
        aliases = {}
        for name, layer in self._layers.items():
            for key, parameter in layer.module._parameters.items():
                if parameter is not None and parameter.numel():
                    source = first.setdefault(id(parameter), _joined(name, key))
                    if source != _joined(name, key):
                        aliases[_joined(name, key)] = source
        return aliases


@dataclass(frozen=True)
class _View:
    """Where a kernel's tensor has the bytes of a tensor in model layout: the kernel's tensor by
    name, and the dtype and the elements of the other one over its memory.
    """

    kernel: str
    dtype: torch.dtype
    elements: Strided


class _Layer:
    """One layer.

    Attributes:
        module: the layer of vLLM.
        keys: the names of its parameters before they are processed.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module
        self._name = name
        self._method = getattr(module, "quant_method", None)
        self._reads_in_place = _reads_in_place(name, module, self._method)
        registered = get_layerwise_info(module).restore_metadata[0]
        kept = [key for key, parameter in module._parameters.items() if parameter is not None and key == "bias"]
        names = (*registered, *(key for key in kept if key not in registered))
        self.keys = [key for key in names if key not in not_loaded(module)]
        # The view of each tensor in the kernel's, or else a copy of it, by key. Filled by `load`.
        self._views: dict[str, _View] = {}
        self._copies: dict[str, Tensor] = {}
        # By name the digests of the kernel's other tensors, as processing gave them. From `load`.
        self._processed: dict[str, int] = {}

    def is_in_place(self, key: str) -> bool:
        """Return True if a write to this tensor is one to the kernel's."""
        return key in self._views

    def tensor(self, key: str) -> Tensor:
        """Return the tensor in model layout."""
        if key in self._copies:
            return self._copies[key]
        view = self._views[key]
        return view.elements.view(get_layer_tensors(self.module)[view.kernel].detach().view(view.dtype))

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give the layer these tensors and process it, into the tensors that its kernel has."""
        layer = self.module
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        try:
            restore_layer_on_meta(layer, info)
            materialize_layer(layer, info)
            if DROPPED in not_loaded(layer):
                layer._parameters.pop(DROPPED, None)
            given = {key: getattr(layer, key) for key in values}
            for key, value in values.items():
                given[key].data.copy_(value)
            kernel = {**info.kernel_tensors[0], **info.kernel_tensors[1]}
            # Buffers, and shapes, are not loaded: they keep what they have.
            kept = {key for key in (*info.restore_metadata[1], SHAPE) if key in kernel}
            for key in kept:
                getattr(layer, key).data.copy_(kernel[key])
            self._process()
            processed = get_layer_tensors(layer)
            views = {key: self._view(tensor, processed, kernel) for key, tensor in given.items()}
            _copy_and_restore_kernel_tensors(layer, info)
        except BaseException:
            _place_kernel_tensors(layer, info)
            raise
        finally:
            info.reset()
        self._views = {key: view for key, view in views.items() if view is not None}
        self._copies = {}
        for key, value in values.items():
            # A kernel that reads in place must not have changed what it was given.
            if key in self._views and not _have_equal_bytes(self.tensor(key), value):
                del self._views[key]
            if key not in self._views:
                self._copies[key] = value.cpu()
        apart = kept | {view.kernel for view in self._views.values()}
        self._processed = {key: _digest(tensor) for key, tensor in processed.items() if key not in apart}

    def check(self) -> None:
        """Raise ValueError unless the kernel has the tensors that processing gave."""
        kernel = get_layer_tensors(self.module)
        for key, expected in self._processed.items():
            if key not in kernel or _digest(kernel[key]) != expected:
                raise ValueError(
                    f"{self._name} does not compute with the {key} that vLLM's processing made: something else wrote to it, such "
                    "as a reload or a wake-up from sleep level 2, or vLLM did not keep it"
                )

    def _process(self) -> None:
        layer: Any = self.module
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        if isinstance(self._method, QuantizeMethodBase):
            self._method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()

    def _view(self, given: Tensor, processed: Mapping[str, Tensor], kernel: Mapping[str, Tensor]) -> _View | None:
        """Where the kernel's tensors have a tensor that the layer was given; None if they do not
        have it as it was.
        """
        if not self._reads_in_place:
            return None
        for name, tensor in processed.items():
            if tensor.numel() != given.numel() or tensor.dtype.itemsize != given.dtype.itemsize or name not in kernel:
                continue
            same_memory = tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            laid_out_alike = kernel[name].shape == tensor.shape and kernel[name].stride() == tensor.stride()
            if same_memory and laid_out_alike:
                shift = int(given.storage_offset() - tensor.storage_offset())
                return _View(name, given.dtype, Strided(tuple(given.shape), tuple(given.stride()), shift))
        return None


def _reads_in_place(name: str, module: nn.Module, method: Any) -> bool:
    """Return True if the kernel of a layer reads its weights where they were loaded. Raises
    ValueError for a kernel that is not supported or unknown.
    """
    if not isinstance(method, QuantizeMethodBase):
        return True
    what = type(method).__name__
    if what not in METHODS:
        raise ValueError(f"{name} is held by {what}, which is not refitted; these are: {', '.join(sorted(METHODS))}")
    if what.startswith("Unquantized"):
        # On a CPU their products read copies that are packed outside of any parameter.
        return module._parameters["weight"] is not None and module.weight.device.type != "cpu"
    kernel = _kernel(module, method)
    kind = type(kernel).__name__
    reason = REFUSED.get(kind)
    if what == "Fp8LinearMethod" and not method.block_quant:
        reason = "Fp8LinearMethod quantizes fused weights with one scale a tensor again"
    if kind == "MarlinLinearKernel" and kernel.config.act_type.itemsize == 1:
        reason = "it rounds or multiplies scales for inputs of 8 bits"
    if getattr(kernel, "use_deep_gemm_e8m0", False):
        reason = "DeepGEMM quantizes blocks again, with powers of two as scales"
    if reason is None and kind not in READ_IN_PLACE | REPLAYED:
        reason = f"it is none of {', '.join(sorted(READ_IN_PLACE | REPLAYED))}, whose layouts are known"
    if reason is not None:
        raise ValueError(f"{name} is multiplied by {kind}, which does not support refits: {reason}")
    return kind in READ_IN_PLACE


def _kernel(module: nn.Module, method: Any) -> Any:
    """Return the kernel of a quantized layer, which its method or its scheme holds, else None."""
    for owner in (method, getattr(module, "scheme", None)):
        for value in vars(owner).values() if owner is not None else ():
            if any(base.__module__.startswith(KERNELS) for base in type(value).__mro__):
                return value
    return None


def _have_equal_bytes(tensor: Tensor, value: Tensor) -> bool:
    return torch.equal(as_bytes(tensor), as_bytes(value.to(tensor.device)))


def _digest(tensor: Tensor) -> int:
    return digest(tensor.detach().contiguous())


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
