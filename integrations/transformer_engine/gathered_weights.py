"""present: under FSDP2, TransformerEngine's modules compute with its own tensors.

    zerocast.fsdp2.prepare(model, recipe, present=transformer_engine.present)

The FP32 master stays the parameter. What a module finds as its weight within a pass is the tensor
that TransformerEngine would have for a weight which it cast itself, so that it takes the weight for
quantized already: nothing is cast again and nothing is kept from one microbatch to the next, with
`is_first_microbatch` or without. TransformerEngine makes columnwise copies when its backward pass
asks for them. They are dropped after the input gradient, and at every gather.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zerocast import QuantizedWeight
from zerocast.formats import Columnwise, FormatSpec, layout
from zerocast.fsdp2.prepare import PickledHook
from zerocast.fsdp2.presentation import owner_of_tensors
from zerocast.weight.validity import Use

from . import host
from .adapters import Adapter, adapter_for, is_quantized, same_codes, shown_format


def present(module: nn.Module, name: str, parameter: Tensor) -> "GatheredWeight | None":
    """How `zerocast.fsdp2.prepare` presents a weight: as a tensor of TransformerEngine to its
    modules, as a QuantizedWeight (None) to all others.

    Raises ValueError for a weight that TransformerEngine's modules cannot take so.
    """
    if owner_of_tensors(module) != "transformer_engine":
        return None
    problem = _problem(module, parameter)
    if problem:
        raise ValueError(f"{name} of a {type(module).__name__} {problem}")
    return GatheredWeight()


def _problem(module: Any, parameter: Tensor) -> str | None:
    if not isinstance(module, host.module(host.MODULES).TransformerEngineBaseModule):
        return "is no weight of a module that takes quantized ones: leave it out of the recipe"
    host.require(module, ["primary_weights_in_fp8", "fsdp_group"])
    return next((text for is_met, text in _PROBLEMS.items() if is_met(module, parameter)), None)


_PROBLEMS: Mapping[Callable[[Any, Tensor], bool], str] = {
    lambda module, parameter: is_quantized(parameter) or module.primary_weights_in_fp8: (
        "is quantized by TransformerEngine, and FSDP2 shards FP32 masters here: build the model in float32 and outside of "
        "te.quantized_model_init"
    ),
    lambda module, parameter: len(getattr(module, "weight_names", ())) > 1: (
        "is one of several that the module joins (parameters_split), which TransformerEngine refuses of quantized ones: build one "
        "weight, with fuse_qkv_params=True in a TransformerLayer, or leave it out of the recipe"
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


class GatheredWeight:
    """A weight as the modules of TransformerEngine see it while it is gathered."""

    _weight: QuantizedWeight  # what was gathered last
    _shown: Any  # the tensor that a module has computed with last

    def __init__(self) -> None:
        self._checked: Any = None  # the recipe that was found to compute in the format

    def check(self, fmt: FormatSpec) -> None:
        """ValueError for a format that no tensor of TransformerEngine holds."""
        adapter_for(fmt)

    def attach(self, module: nn.Module, name: str) -> None:
        """Look at the weight and at the recipe before each forward pass of a module."""
        module.register_forward_pre_hook(_BeforeForward(self, name), with_kwargs=True)

    def show(self, weight: QuantizedWeight) -> Tensor:
        """A tensor of TransformerEngine's class over the gathered buffers."""
        adapter, self._weight, self._checked = adapter_for(weight.format), weight, None
        shown = adapter.shown
        assert shown is not None
        held = _gathered(weight)
        made: Tensor = getattr(host.module(host.TENSORS), shown.tensor)(
            shape=tuple(weight.shape),
            dtype=weight.dtype,
            quantizer=(quantizer := shown.quantizer(weight.format, weight.device)),
            device=weight.device,
            requires_grad=False,
            **{shown.codes: quantizer.dtype},
            **{argument: held[name] for name, argument in shown.arguments.items()},
            **shown.options,
        )
        host.require(made, [*adapter.of_tensor.values(), *shown.derived, "_quantizer"])
        self.restore(made)
        return made

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """Hold the gathered buffers and nothing that was derived from earlier ones."""
        self._weight = weight
        self.restore(shown)

    def restore(self, shown: Any) -> None:
        """Undo what a pass did to the tensor: drop the copies that it made, and hold again what it
        let go of.
        """
        adapter, held = _adapter(self._weight.format), _gathered(self._weight)
        assert adapter.shown is not None
        for name in adapter.shown.arguments:
            setattr(shown, adapter.of_tensor[name], held[name])
        for attribute, without in adapter.shown.derived.items():
            setattr(shown, attribute, without)
        # else a forward pass makes the copies that the backward pass asks for
        shown._quantizer.set_usage(rowwise=True, columnwise=not adapter.shown.derived)

    def live(self, shown: Any, weight: QuantizedWeight) -> QuantizedWeight:
        """The buffers that the tensor holds, without copies that TransformerEngine made of them."""
        if not is_quantized(shown):
            raise RuntimeError(
                f"the gathered weight is a {type(shown).__name__}, no tensor of TransformerEngine any more"
            )
        adapter = _adapter(weight.format)
        assert adapter.shown is not None
        expected = layout.buffers(weight.format, weight.matrix_shape, weight.dtype)
        buffers = {name: buffer for name, buffer in weight.state.buffers.items() if buffer is not None}
        for name in adapter.shown.arguments:
            buffer, spec, attribute = getattr(shown, adapter.of_tensor[name]), expected[name], adapter.of_tensor[name]
            if name.startswith("columnwise") and (buffer is None or spec is None):
                continue  # of a backward pass; the next forward pass finds it again
            if buffer is None or spec is None:
                raise RuntimeError(f"the gathered {type(shown).__name__} has no {attribute}: something dropped it")
            buffers[name] = buffer.detach().view(spec.shape)
        return QuantizedWeight.of_buffers(tuple(weight.shape), weight.format, weight.dtype, buffers)

    def before_forward(self, module: nn.Module, name: str) -> None:
        """Prepare the tensor that the module is about to compute with.

        RuntimeError for one that was not gathered, whose master was changed since, or that the
        recipe in use does not compute with.
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
        """Drop the copies that an input gradient was computed with."""
        self.restore(self._shown)

    def _check_recipe(self, module: nn.Module, name: str) -> None:
        state = host.module(host.QUANTIZATION).FP8GlobalStateManager
        if not state.is_fp8_enabled():
            return  # TransformerEngine dequantizes
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
                f"{expected}: give zerocast.fsdp2.prepare that format, or te.autocast the recipe of {fmt}"
            )
        self._checked = recipe


class _BeforeForward:
    """A forward pre-hook of a module that holds the weight as `name`.

    An input may live as long as the model, such as a parameter, so it gets one hook for all passes,
    which does not keep the weight alive.
    """

    def __init__(self, presentation: GatheredWeight, name: str) -> None:
        self._presentation, self._name = presentation, name
        self._inputs = WeakTensorKeyDictionary()  # those that have the hook

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
    """A hook of the gradient of a module's input, for which columnwise copies were made."""

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
    """The gathered buffers in the shapes that TransformerEngine has."""
    held = dict(weight.state.buffers)
    if weight.format.columnwise is Columnwise.SHARED:
        held["columnwise_data"] = held["rowwise_data"]
    if weight.format.elements_per_byte == 1:
        for name in ("rowwise_data", "columnwise_data"):
            buffer = held[name]
            if buffer is not None and buffer.shape == weight.matrix_shape and len(weight.shape) > 2:
                held[name] = buffer.view(tuple(weight.shape))
    return held


def _format_of_recipe(recipe: Any) -> FormatSpec:
    """The format of weights under a recipe; TypeError or ValueError for one that is not
    gathered.
    """
    if recipe.custom():
        raise ValueError("each module asks its factory for quantizers of its own")
    quantization = host.module(host.QUANTIZATION)
    host.require(quantization, ["RecipeState", "QuantizerRole"])
    roles = [quantization.QuantizerRole("linear", tensor) for tensor in ("input", "weight", "output")]
    state = quantization.RecipeState.create(
        recipe, mode="forward", num_quantizers=len(roles), device=torch.device("cpu"), roles=roles
    )
    return shown_format(state.make_quantizers()[1])
