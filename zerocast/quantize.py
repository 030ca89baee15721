"""quantize_: replace the matched weights of an ordinary module by QuantizedWeight parameters."""

from collections.abc import Container, Iterator, Mapping, Sequence
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
from zerocast.weight.owners import Claim, remember_model

# A cast makes FP32 copies of values in other dtypes. To bound their memory, one plan casts weights
# of about this many elements, and the next plan the next ones.
BATCH_NUMEL = 2**27

# Modules whose weight is not the second operand of a product, with a description of the weight.
NO_PRODUCT = {
    nn.Embedding: "the table of an embedding",
    nn.EmbeddingBag: "the table of an embedding",
    nn.modules.conv._ConvNd: "the kernel of a convolution",
}


def quantize_(
    model: nn.Module, recipe: RecipeLike, dtype: torch.dtype | None = None, *, serve: str | None = None
) -> nn.Module:
    """Replace the weights of `model` that match the recipe by QuantizedWeights, in place, and cast
    their current values.

    A weight is a parameter of two or more dimensions. Other parameters, and weights whose format in
    the recipe is identity, do not change. `dtype` is the nominal dtype, by default the dtype of the
    parameter. An FP32 model with `dtype=torch.bfloat16` computes in bf16 and keeps its FP32 values
    (`high_precision_init_val`) until an optimizer has made masters of them. Shared parameters stay
    shared, and attributes that a host has set on a parameter move to its weight. A delayed scale
    starts from the initial amax. With `Recipe(fast=True)` blocks are compiled in place. `serve` is
    the engine that is to read the trained weights: the recipe is then `recipe.for_reader(serve,
    model)`. Returns `model`.

    Raises ValueError, with nothing changed, for a recipe with a pattern that matches nothing, a
    fast recipe for a model without blocks, and for these weights: of a shape that the format cannot
    take; already quantized in a different format; an embedding or the kernel of a convolution,
    which are no operands of a product; a DTensor (use `zerocast.fsdp2.prepare`); and those that
    `serve` could not read.
    """
    recipe, weights = served_recipe(recipe, serve, model)
    chosen: dict[Tensor, FormatSpec] = {}
    not_in_products = read_without_products(model)
    for name, parameter in weights.items():
        fmt = recipe.format_of(name)
        if isinstance(parameter, QuantizedWeight):
            _check_quantized(name, parameter, fmt, dtype)
            continue
        if fmt.element is None:
            continue
        # A DTensor. The import of its class takes half a second.
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is sharded already: call zerocast.fsdp2.prepare, not quantize_, before fully_shard"
            )
        check_weight(not_in_products, name, parameter, fmt, parameter.shape)
        if chosen.setdefault(parameter, fmt) != fmt:
            raise ValueError(f"{name} is shared and its names match two formats, {chosen[parameter]} and {fmt}")
    blocks = blocks_with(model, chosen) if recipe.fast else []
    # The first name of each parameter.
    names: dict[Tensor, str] = {parameter: name for name, parameter in reversed(weights.items())}
    shared_amaxes = recipe.shared_amaxes(list(names.values())[::-1])
    quantized: dict[Tensor, nn.Parameter] = {}
    for weight, fmt in chosen.items():
        name = names[weight]
        quantized[weight] = _quantized(name, weight, fmt, dtype or weight.dtype, shared_amaxes.get(name), recipe.fast)
    _cast_initially(quantized)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in quantized:
                setattr(module, name, quantized[parameter])
                show_formats(module)
    compile_blocks(blocks)
    remember_model(model)
    return model


def blocks_with(model: nn.Module, weights: Container[Tensor]) -> list[nn.Module]:
    """Return the blocks of a model, as `Recipe.fast` defines them, that have any of `weights`.

    Raises ValueError if the model has any of them and no block does.
    """
    blocks = list(_blocks_in(model, weights))
    if not blocks and any(parameter in weights for parameter in model.parameters()):
        raise ValueError(
            f"a fast recipe compiles the elements of an nn.ModuleList or nn.ModuleDict, and this {type(model).__name__} has no "
            'quantized weight in one: leave out fast=True, and call zerocast.gemm.use(weight_gradients="fp8") and '
            "module.compile() yourself"
        )
    return blocks


def _blocks_in(module: nn.Module, weights: Container[Tensor]) -> Iterator[nn.Module]:
    holds_blocks = isinstance(module, nn.ModuleList | nn.ModuleDict)
    for child in module.children():
        if holds_blocks and any(parameter in weights for parameter in child.parameters()):
            yield child
        else:
            yield from _blocks_in(child, weights)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block in place; its parameters keep their names."""
    for block in blocks:
        block.compile(fullgraph=True)


def show_formats(module: nn.Module) -> None:
    """Let `print(module)` show the formats of its quantized parameters."""
    setattr(module, extra_repr.__name__, MethodType(extra_repr, module))


def extra_repr(module: nn.Module) -> str:
    """Return the text of the class's own `extra_repr`, with the format of each quantized
    parameter.
    """
    parts = [type(module).extra_repr(module)]
    for name, parameter in module.named_parameters(recurse=False):
        # A DTensor has the weight inside.
        fmt = getattr(getattr(parameter, "_local_tensor", parameter), "format", None)
        if fmt is not None:
            parts.append(f"{name}={fmt}")
    return ", ".join(filter(None, parts))


def served_recipe(recipe: RecipeLike, serve: str | None, model: nn.Module) -> tuple[Recipe, dict[str, nn.Parameter]]:
    """Return the recipe whose weights the engine `serve` can read, and the parameters that it is
    for, keyed by each of their names. Raises ValueError for an engine that reads none, and for a
    pattern that matches nothing.
    """
    recipe = Recipe.of(recipe).for_reader(serve, model)
    if serve is not None:
        # It imports what reads and writes checkpoints.
        from zerocast.serve.hugging_face import check_served  # noqa: PLC0415

        formats = {name: recipe.format_of(name) for name, p in model.named_parameters() if p.dim() >= 2}
        check_served(model, {name: fmt for name, fmt in formats.items() if fmt.element is not None}, serve)
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.dim() >= 2}
    recipe.check_used(weights)
    return recipe, weights


def _check_quantized(name: str, weight: QuantizedWeight, fmt: FormatSpec, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the recipe asks for the format that the weight already has."""
    if fmt.element is not None and (fmt != weight.format or dtype not in (None, weight.dtype)):
        raise ValueError(
            f"{name} is quantized already, as {weight.format} of {weight.dtype}, and the recipe says {fmt} of "
            f"{dtype or weight.dtype}: quantize the high-precision model once"
        )


def read_without_products(model: nn.Module) -> dict[int, str]:
    """Return the parameters that are not an operand of a product, keyed by id, with a description
    of each.
    """
    descriptions: dict[int, str] = {}
    for module in model.modules():
        for kind, description in NO_PRODUCT.items():
            if isinstance(module, kind):
                descriptions |= dict.fromkeys(map(id, module.parameters(recurse=False)), description)
    return descriptions


def check_weight(
    not_in_products: Mapping[int, str], name: str, parameter: Tensor, fmt: FormatSpec, shape: Sequence[int]
) -> None:
    """Raise ValueError unless `parameter`, of `shape` on this rank, can be a weight of this format.
    `not_in_products` is the result of `read_without_products`.
    """
    if id(parameter) in not_in_products:
        raise ValueError(f"{name} is {not_in_products[id(parameter)]} and cannot be {fmt}: match it with 'identity'")
    try:
        check_shape(fmt, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _quantized(
    name: str, parameter: Tensor, fmt: FormatSpec, dtype: torch.dtype, shared: SharedAmax | None, fast: bool
) -> nn.Parameter:
    value = parameter.detach()
    weight = QuantizedWeight.empty(value.shape, fmt, dtype, value.device)
    weight.state.name = name
    weight.state.shared_amax = shared
    weight.state.fp8_weight_gradients = fast
    quantized = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    for key, attribute in vars(parameter).items():
        setattr(quantized, key, attribute)
    return quantized


def _cast_initially(quantized: Mapping[Tensor, nn.Parameter]) -> None:
    """Cast the values of parameters into their weights. One plan casts many weights, and all
    weights that share a tensor amax.
    """
    groups: dict[object, list[tuple[QuantizedWeight, Tensor]]] = {}
    for parameter, weight in quantized.items():
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
                batch = []
                numel = 0
    for parameter, weight in quantized.items():
        weight.high_precision_init_val = parameter.detach()  # type: ignore[attr-defined]


def cast_whole(weight: QuantizedWeight, value: Tensor, *, claim: Claim | None = None) -> None:
    """Cast an unsharded weight from its value in this process, columnwise copies included.

    A weight that has an owner can only be written with the owner's `claim`.
    """
    cast_together([weight], [value], claim=claim)


def cast_together(
    weights: Sequence[QuantizedWeight], values: Sequence[Tensor], *, seed: bool = False, claim: Claim | None = None
) -> None:
    """Cast unsharded weights of one device like `cast_whole`. Weights that share a tensor amax must
    be cast together.

    With `seed`, delayed scales are computed from the amaxes of these values.
    """
    has_masters = weights[0].state.validity.has_masters
    masters = [value.reshape(-1).float() for value in values]
    plan = CastPlan(weights, masters, [0] * len(masters), ONE_PROCESS, claim=claim)
    # The values are not masters, and no optimizer trains them.
    plan.validity.has_masters = has_masters
    if seed:
        plan.delayed.forget()
    plan.cast()
    plan.post_all_gather()
