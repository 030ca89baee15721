"""quantize_: swap the matched weights of an ordinary module for QuantizedWeight parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerocast.cast.plan import CastPlan
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import AmaxPolicy, FormatSpec
from zerocast.formats.layout import check_shape
from zerocast.formats.recipe import Recipe
from zerocast.weight import QuantizedWeight


def quantize_(model: nn.Module, recipe: Recipe, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace weights of `model` in place, as `recipe` says, and cast their present values.

    A weight is a parameter of two or more dimensions; other parameters, and weights that the recipe calls identity, stay as
    they are. `dtype` is the nominal dtype, by default each parameter's own: an FP32 model with `dtype=torch.bfloat16`
    computes in bf16 and keeps its FP32 values (`high_precision_init_val`) until an optimizer has made masters of them.
    Shared parameters stay shared, and what a host set on a parameter as an attribute goes over to its weight. A delayed scale
    is seeded from the initial amax. Returns `model`.

    Raises ValueError, with nothing changed, for a pattern that matches nothing, a shape that its format cannot take, a weight
    that is quantized already in another format, and an embedding: looking rows up is not a product.
    """
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.dim() >= 2}
    recipe.check_used(weights)
    chosen: dict[Tensor, FormatSpec] = {}
    for name, parameter in weights.items():
        fmt = recipe.format_of(name)
        if isinstance(parameter, QuantizedWeight):
            _check_quantized(name, parameter, fmt, dtype)
            continue
        if fmt.element is None:
            continue
        check_weight(model, name, parameter, fmt, parameter.shape)
        if chosen.setdefault(parameter, fmt) != fmt:
            raise ValueError(f"{name} is shared and its names match two formats, {chosen[parameter]} and {fmt}")
    names: dict[Tensor, str] = {parameter: name for name, parameter in reversed(weights.items())}
    new = {p: _quantized(names[p], p, fmt, dtype or p.dtype) for p, fmt in chosen.items()}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in new:
                setattr(module, name, new[parameter])
    return model


def _check_quantized(name: str, weight: QuantizedWeight, fmt: FormatSpec, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the recipe leaves a weight as it was quantized before."""
    if fmt.element is not None and (fmt != weight.format or dtype not in (None, weight.dtype)):
        raise ValueError(
            f"{name} is quantized already, as {weight.format} of {weight.dtype}, and the recipe says {fmt} of "
            f"{dtype or weight.dtype}: quantize the high-precision model once"
        )


def check_weight(model: nn.Module, name: str, parameter: Tensor, fmt: FormatSpec, shape: Sequence[int]) -> None:
    """Raise ValueError unless `parameter`, of `shape` on this rank, can be a weight of this format."""
    try:
        check_shape(fmt, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    owners = [m for m in model.modules() if any(p is parameter for p in m.parameters(recurse=False))]
    if any(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in owners):
        raise ValueError(f"{name} is the table of an embedding and cannot be {fmt}: match it with 'identity'")


def _quantized(name: str, parameter: Tensor, fmt: FormatSpec, dtype: torch.dtype) -> nn.Parameter:
    value = parameter.detach()
    weight = QuantizedWeight.empty(value.shape, fmt, dtype, value.device)
    cast_whole(weight, value)
    if fmt.amax_policy is AmaxPolicy.DELAYED:  # the first cast found the amax that scales this one
        cast_whole(weight, value)
    weight.high_precision_init_val, weight.state.name = value, name
    new = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    for key, attribute in vars(parameter).items():
        setattr(new, key, attribute)
    return new


def cast_whole(weight: QuantizedWeight, value: Tensor) -> None:
    """Cast a whole weight from its unsharded value, on this process alone, columnwise copies included."""
    has_masters = weight.state.freshness.has_masters
    plan = CastPlan([weight], [value.reshape(-1).float()], [0], ONE_PROCESS)
    plan.freshness.has_masters = has_masters  # the value is no master: nobody trains it
    plan.cast()
    plan.post_all_gather()
