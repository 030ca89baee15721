"""present: under FSDP2, TransformerEngine's modules compute with its own tensors.

    zerocast.fsdp2.prepare(model, recipe, present=transformer_engine.present)

The FP32 master stays the parameter. Within a pass a module's weight is a quantized tensor of
TransformerEngine over the gathered bytes, which equal the bytes of TransformerEngine's own cast
(except for nvfp4:exact_in_fp8, whose scales it does not choose). So the module casts nothing, and
caches nothing from one microbatch to the next, with or without `is_first_microbatch`.
TransformerEngine makes columnwise copies when its backward pass asks for them. They are dropped
after the input gradient, and at every gather.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zerocast import QuantizedWeight
from zerocast.formats import Columnwise, FormatSpec, layout
from zerocast.fsdp2.prepare import PickledHook, owner_of_tensors
from zerocast.fsdp2.weight import Presentation
from zerocast.weight.validity import Use

from . import host
from .adapters import Adapter, adapter_for, is_quantized, same_codes, shown_format

logger = logging.getLogger(__name__)


def present(module: nn.Module, name: str, parameter: Tensor) -> "GatheredWeight | None":
    """Return the presentation of a module's weight, for `zerocast.fsdp2.prepare`.

    Returns a GatheredWeight for a module of TransformerEngine, and None, which is a
    QuantizedWeight, for all others. Raises ValueError for a weight of TransformerEngine's modules
    that they cannot use as a quantized tensor.
    """
    if owner_of_tensors(module) != "transformer_engine":
        return None
    problem = _problem(module, parameter)
    if problem:
        raise ValueError(f"{name} of a {type(module).__name__} {problem}")
    return GatheredWeight()


def _problem(module: Any, parameter: Tensor) -> str | None:
    if not isinstance(module, host.module(host.MODULES).TransformerEngineBaseModule):
        return "is not a weight of a module that supports quantized weights: leave it out of the recipe"
    with host.known_api():
        return next((problem for applies, problem in _PROBLEMS.items() if applies(module, parameter)), None)


_PROBLEMS: Mapping[Callable[[Any, Tensor], bool], str] = {
    lambda module, parameter: is_quantized(parameter) or module.primary_weights_in_fp8: (
        "is quantized by TransformerEngine, and FSDP2 must shard FP32 masters: build the model in float32 and outside of "
        "te.quantized_model_init"
    ),
    lambda module, parameter: len(getattr(module, "weight_names", ())) > 1: (
        "is one of several that the module joins (parameters_split), which TransformerEngine does not support for quantized ones: "
        "build one weight, with fuse_qkv_params=True in a TransformerLayer, or leave it out of the recipe"
    ),
    lambda module, parameter: getattr(module, "single_grouped_weight", False): (
        "holds all groups as one parameter: build the module with single_grouped_weight=False"
    ),
    lambda module, parameter: getattr(module, "fuse_wgrad_accumulation", False): (
        "has its gradient added to main_grad, which FSDP2 does not have: build it with fuse_wgrad_accumulation=False"
    ),
    lambda module, parameter: module.fsdp_group is not None: (
        "was given to TransformerEngine's prepare_te_modules_for_fsdp, which is for the FSDP before: do not call it"
    ),
}


@functools.cache
def _log_exact_scales() -> None:
    """Log once that TransformerEngine's own cast gives different bytes."""
    logger.info(
        "weights of nvfp4:exact_in_fp8 are gathered as NVFP4Tensors: TransformerEngine reads their bytes, and its own "
        "NVFP4Quantizer would make the scales of plain nvfp4"
    )


class GatheredWeight(Presentation):
    """A weight that modules of TransformerEngine see as one of its tensors while it is gathered."""

    # The weight over the buffers of the last gather.
    _weight: QuantizedWeight
    # The tensor of the last forward pass, whose copies are dropped after the input gradient.
    _shown: Any

    def __init__(self) -> None:
        # The last recipe that was checked to compute in the weight's format.
        self._checked: Any = None

    def check(self, fmt: FormatSpec) -> None:
        """Raise ValueError for a format that no tensor of TransformerEngine holds."""
        adapter_for(fmt)
        if fmt.exact_scales:
            _log_exact_scales()

    def attach(self, module: nn.Module, name: str) -> None:
        """Prepare the tensor and check the recipe before each forward pass of a module."""
        module.register_forward_pre_hook(_BeforeForward(self, name), with_kwargs=True)

    def show(self, weight: QuantizedWeight) -> Tensor:
        """Return a tensor of TransformerEngine's class over the gathered buffers."""
        self._weight = weight
        self._checked = None
        adapter = adapter_for(weight.format)
        shown = adapter.shown
        assert shown is not None
        buffers = _gathered(weight)
        quantizer = shown.quantizer(weight.format, weight.device)
        tensor: Tensor = getattr(host.module(host.TENSORS), shown.tensor)(
            shape=tuple(weight.shape),
            dtype=weight.dtype,
            quantizer=quantizer,
            device=weight.device,
            requires_grad=False,
            **{shown.codes: quantizer.dtype},
            **{argument: buffers[name] for name, argument in shown.arguments.items()},
            **shown.options,
        )
        with host.known_api():
            # Setting an attribute that the class does not have would have no effect.
            for name in (*adapter.of_tensor.values(), *shown.derived, "_quantizer"):
                getattr(tensor, name)
        self.restore(tensor)
        return tensor

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """Give a tensor the buffers of a new gather, and drop the copies of earlier ones."""
        self._weight = weight
        self.restore(shown)

    def restore(self, shown: Any) -> None:
        """Set a tensor back to the gathered buffers.

        A pass adds columnwise copies, and may drop the buffers that it no longer needs.
        """
        adapter, buffers = _adapter(self._weight.format), _gathered(self._weight)
        assert adapter.shown is not None
        for name in adapter.shown.arguments:
            setattr(shown, adapter.of_tensor[name], buffers[name])
        for attribute, without_copy in adapter.shown.derived.items():
            setattr(shown, attribute, without_copy)
        # With columnwise usage the forward pass would make the copies already, and they would take
        # memory until the backward pass.
        shown._quantizer.set_usage(rowwise=True, columnwise=not adapter.shown.derived)

    def live(self, shown: Any, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the buffers in the tensor, without the copies that TransformerEngine has made of
        them.
        """
        if not is_quantized(shown):
            raise RuntimeError(
                f"the gathered weight is a {type(shown).__name__}, no tensor of TransformerEngine any more"
            )
        adapter = _adapter(weight.format)
        assert adapter.shown is not None
        expected = layout.buffers(weight.format, weight.state.shape, weight.dtype)
        buffers = {name: buffer for name, buffer in weight.state.buffers.items() if buffer is not None}
        for name in adapter.shown.arguments:
            attribute = adapter.of_tensor[name]
            buffer, spec = getattr(shown, attribute), expected[name]
            # A pass may drop columnwise buffers. `restore` gives them back before the next one.
            if name.startswith("columnwise") and (buffer is None or spec is None):
                continue
            if buffer is None or spec is None:
                raise RuntimeError(f"the gathered {type(shown).__name__} has no {attribute}: something dropped it")
            buffers[name] = buffer.detach().view(spec.shape)
        return QuantizedWeight.of_buffers(tuple(weight.shape), weight.format, weight.dtype, buffers)

    def before_forward(self, module: nn.Module, name: str) -> None:
        """Prepare the tensor for a forward pass of the module.

        Raises RuntimeError if the weight was not gathered, if its master has changed since, or if
        its format is not the format of the recipe in use.
        """
        shown = module._parameters[name]
        if not is_quantized(shown):
            raise RuntimeError(
                f"{name} of a {type(module).__name__} was not gathered before its forward pass: call fully_shard on the prepared "
                "model, and the model or an FSDP module in it"
            )
        self._weight.check(Use.READ)
        self._check_recipe(module, name)
        self._shown = shown
        self.restore(shown)

    def after_input_gradient(self) -> None:
        """Drop the columnwise copies, which only the input gradient needs."""
        self.restore(self._shown)

    def _check_recipe(self, module: nn.Module, name: str) -> None:
        state = host.module(host.QUANTIZATION).FP8GlobalStateManager
        # Without te.autocast, TransformerEngine dequantizes the weight.
        if not state.is_fp8_enabled():
            return
        recipe = state.get_fp8_recipe()
        if recipe is self._checked:
            return
        fmt, kind = self._weight.format, type(recipe).__name__
        try:
            expected = _format_of_recipe(recipe)
        except (TypeError, ValueError) as error:
            raise RuntimeError(
                f"{name} of a {type(module).__name__} is gathered as {fmt}, and weights of this {kind} are not gathered: {error}"
            ) from error
        if not same_codes(expected, fmt):
            raise RuntimeError(
                f"{name} of a {type(module).__name__} is gathered as {fmt}, and te.autocast computes by {kind}, whose weights are "
                f"{expected}: pass that format to zerocast.fsdp2.prepare, or to te.autocast the recipe of {fmt}"
            )
        self._checked = recipe


class _BeforeForward:
    """A forward pre-hook of a module whose weight is called `name`.

    It registers a hook for the gradient of each input. An input, such as a parameter, may live as
    long as the model: it gets one hook for all passes, which does not keep the weight alive.
    """

    def __init__(self, presentation: GatheredWeight, name: str) -> None:
        self._presentation = presentation
        self._name = name
        # The inputs that have the hook.
        self._inputs = WeakTensorKeyDictionary()

    def __reduce__(self) -> Any:
        return PickledHook, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._presentation.before_forward(module, self._name)
        if not torch.is_grad_enabled():
            return
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor not in self._inputs:
                self._inputs[tensor] = tensor.register_hook(_AfterInputGradient(self._presentation))


class _AfterInputGradient:
    """A hook of the gradient of a module's input: the columnwise copies have served."""

    def __init__(self, presentation: GatheredWeight) -> None:
        self._presentation = weakref.ref(presentation)

    def __call__(self, gradient: Tensor) -> None:
        presentation = self._presentation()
        if presentation is not None:
            presentation.after_input_gradient()


@functools.cache
def _adapter(fmt: FormatSpec) -> Adapter:
    return adapter_for(fmt)


def _gathered(weight: QuantizedWeight) -> dict[str, Tensor | None]:
    """Return the gathered buffers in the shapes that TransformerEngine expects."""
    buffers = dict(weight.state.buffers)
    if weight.format.columnwise is Columnwise.SHARED:
        buffers["columnwise_data"] = buffers["rowwise_data"]
    # Codes of one byte have all dimensions of the weight there, and are a matrix here.
    if weight.format.elements_per_byte == 1:
        for name in ("rowwise_data", "columnwise_data"):
            buffer = buffers[name]
            if buffer is not None and buffer.shape == weight.matrix_shape and len(weight.shape) > 2:
                buffers[name] = buffer.view(tuple(weight.shape))
    return buffers


def _format_of_recipe(recipe: Any) -> FormatSpec:
    """Return the format of weights under a recipe.

    Raises TypeError or ValueError for a format that is not gathered.
    """
    if recipe.custom():
        raise ValueError("each module asks its factory for separate quantizers")
    quantization = host.module(host.QUANTIZATION)
    # Recipes do not name the format of weights. So make the quantizers of a linear layer, as
    # TransformerEngine's modules do, and look at the one for the weight.
    with host.known_api():
        roles = [quantization.QuantizerRole("linear", tensor) for tensor in ("input", "weight", "output")]
        state = quantization.RecipeState.create(
            recipe, mode="forward", num_quantizers=len(roles), device=torch.device("cpu"), roles=roles
        )
    return shown_format(state.make_quantizers()[1])
