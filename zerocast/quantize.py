"""quantize_: replace the matched weights of an ordinary module by QuantizedWeight parameters."""

from collections.abc import Mapping, Sequence
from types import MethodType

import torch
from torch import Tensor, nn

from zerocast.cast.plan import CastPlan
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import FormatSpec
from zerocast.formats.layout import check_shape
from zerocast.formats.recipe import Recipe, RecipeLike
from zerocast.formats.shared_amax import SharedAmax
from zerocast.weight import QuantizedWeight
from zerocast.weight.models import remember
from zerocast.weight.owners import Claim

# A cast holds FP32 copies of the values that it is given in another dtype. Weights of more elements
# than these are cast by several plans.
BATCH_NUMEL = 2**27

NO_PRODUCT = {  # modules that read their weight otherwise than as the second operand of a product
    nn.Embedding: "the table of an embedding",
    nn.EmbeddingBag: "the table of an embedding",
    nn.modules.conv._ConvNd: "the kernel of a convolution",
}


def quantize_(model: nn.Module, recipe: RecipeLike, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace weights of `model` in place, as `recipe` says, and cast their present values.

    A weight is a parameter of two or more dimensions; other parameters, and weights that the recipe
    calls identity, stay as they are. `dtype` is the nominal dtype, by default the parameter's own
    dtype: an FP32 model with `dtype=torch.bfloat16` computes in bf16 and keeps its FP32 values
    (`high_precision_init_val`) until an optimizer has made masters of them. Shared parameters stay
    shared, and attributes that a host set on a parameter move to its weight. A delayed scale is
    seeded from the initial amax. Returns `model`.

    Raises ValueError, with nothing changed, for a pattern that matches nothing, a shape that its
    format cannot take, a weight that is already quantized in another format, an embedding, whose
    rows are looked up and not multiplied, the kernel of a convolution, and a DTensor, whose shards
    `zerocast.fsdp2.prepare` is for.
    """
    recipe = Recipe.of(recipe)
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.dim() >= 2}
    recipe.check_used(weights)
    chosen: dict[Tensor, FormatSpec] = {}
    unfit = read_without_products(model)
    for name, parameter in weights.items():
        fmt = recipe.format_of(name)
        if isinstance(parameter, QuantizedWeight):
            _check_quantized(name, parameter, fmt, dtype)
            continue
        if fmt.element is None:
            continue
        if hasattr(parameter, "device_mesh"):  # a DTensor, whose class takes half a second to import
            raise ValueError(
                f"{name} is sharded already: call zerocast.fsdp2.prepare, not quantize_, before fully_shard"
            )
        check_weight(unfit, name, parameter, fmt, parameter.shape)
        if chosen.setdefault(parameter, fmt) != fmt:
            raise ValueError(f"{name} is shared and its names match two formats, {chosen[parameter]} and {fmt}")
    names: dict[Tensor, str] = {parameter: name for name, parameter in reversed(weights.items())}
    shared = recipe.shared_amaxes(list(names.values())[::-1])
    new = {p: _quantized(names[p], p, fmt, dtype or p.dtype, shared.get(names[p])) for p, fmt in chosen.items()}
    _cast_initially(new)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in new:
                setattr(module, name, new[parameter])
                show_formats(module)
    remember(model)
    return model


def show_formats(module: nn.Module) -> None:
    """Let `print(module)` show the formats of its quantized parameters."""
    setattr(module, extra_repr.__name__, MethodType(extra_repr, module))


def extra_repr(module: nn.Module) -> str:
    """Like the class's own, with the format of each quantized parameter, a DTensor's too."""
    locals_ = {name: getattr(p, "_local_tensor", p) for name, p in module.named_parameters(recurse=False)}
    formats = {name: getattr(local, "format", None) for name, local in locals_.items()}
    shown = [type(module).extra_repr(module), *(f"{name}={fmt}" for name, fmt in formats.items() if fmt is not None)]
    return ", ".join(filter(None, shown))


def _check_quantized(name: str, weight: QuantizedWeight, fmt: FormatSpec, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the recipe asks for the format that the weight already has."""
    if fmt.element is not None and (fmt != weight.format or dtype not in (None, weight.dtype)):
        raise ValueError(
            f"{name} is quantized already, as {weight.format} of {weight.dtype}, and the recipe says {fmt} of "
            f"{dtype or weight.dtype}: quantize the high-precision model once"
        )


def read_without_products(model: nn.Module) -> dict[int, str]:
    """What each parameter is that its module reads otherwise than in a product, by id."""
    return {
        id(parameter): what
        for owner in model.modules()
        for kind, what in NO_PRODUCT.items()
        if isinstance(owner, kind)
        for parameter in owner.parameters(recurse=False)
    }


def check_weight(unfit: Mapping[int, str], name: str, parameter: Tensor, fmt: FormatSpec, shape: Sequence[int]) -> None:
    """Raise ValueError unless `parameter`, of `shape` on this rank, can be a weight of this
    format; `unfit` is of `read_without_products`.
    """
    if id(parameter) in unfit:
        raise ValueError(f"{name} is {unfit[id(parameter)]} and cannot be {fmt}: match it with 'identity'")
    try:
        check_shape(fmt, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _quantized(
    name: str, parameter: Tensor, fmt: FormatSpec, dtype: torch.dtype, shared: SharedAmax | None
) -> nn.Parameter:
    value = parameter.detach()
    weight = QuantizedWeight.empty(value.shape, fmt, dtype, value.device)
    weight.state.name, weight.state.shared_amax = name, shared
    new = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    for key, attribute in vars(parameter).items():
        setattr(new, key, attribute)
    return new


def _cast_initially(new: Mapping[Tensor, nn.Parameter]) -> None:
    """Cast the values of new weights, many by one plan; those that share a tensor amax together."""
    groups: dict[object, list[tuple[QuantizedWeight, Tensor]]] = {}
    for parameter, weight in new.items():
        assert isinstance(weight, QuantizedWeight)
        groups.setdefault(weight.state.shared_amax or id(weight), []).append((weight, parameter.detach()))
    by_device: dict[torch.device, list[list[tuple[QuantizedWeight, Tensor]]]] = {}
    for members in groups.values():
        by_device.setdefault(members[0][1].device, []).append(members)
    for groups_of_device in by_device.values():
        batch: list[tuple[QuantizedWeight, Tensor]] = []
        numel = 0
        for members in groups_of_device:
            batch += members
            numel += sum(value.numel() for _, value in members)
            if numel >= BATCH_NUMEL or members is groups_of_device[-1]:
                cast_together([weight for weight, _ in batch], [value for _, value in batch], seed=True)
                batch, numel = [], 0
    for parameter, weight in new.items():
        weight.high_precision_init_val = parameter.detach()  # type: ignore[attr-defined]


def cast_whole(weight: QuantizedWeight, value: Tensor, *, claim: Claim | None = None) -> None:
    """Cast a whole weight from its unsharded value on this process, columnwise copies included.

    A weight that has an owner is written only for it, with its `claim`.
    """
    cast_together([weight], [value], claim=claim)


def cast_together(
    weights: Sequence[QuantizedWeight], values: Sequence[Tensor], *, seed: bool = False, claim: Claim | None = None
) -> None:
    """Cast whole weights of one device like `cast_whole`, with all that share their tensor amaxes.

    With `seed`, the amaxes of these values also give delayed scales.
    """
    has_masters = weights[0].state.validity.has_masters
    masters = [value.reshape(-1).float() for value in values]
    plan = CastPlan(weights, masters, [0] * len(masters), ONE_PROCESS, claim=claim)
    plan.validity.has_masters = has_masters  # the value that was cast is no master, and no optimizer trains it
    if seed:
        plan.delayed.forget()
    plan.cast()
    plan.post_all_gather()
