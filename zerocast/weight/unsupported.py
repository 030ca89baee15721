"""The table of what to do instead of an operator that is not defined on a QuantizedWeight.

Operators are sorted into families by their schema: who is written, what aliases an argument, which
namespace they belong to. Names are looked at last, and only to say more. An operator that a later
torch adds therefore falls into a family too, at worst into the last one. `METHODS` are the
functions that would pass below the dispatcher, to memory that a weight does not have.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

VALUES = "call dequantize() for a plain tensor of its values"
PRODUCT = (
    "it is the second operand of linear, mm, addmm, matmul and grouped_mm; match the weights of other layers with 'identity' in "
    "the Recipe, or call dequantize()"
)
WRITE = (
    "its FP32 masters are updated instead, by zerocast.ZeroAdamW or under a zerocast.CastPlan; to merge something into it, add to "
    "weight.dequantize() and quantize_ the sum"
)
INITIALISE = "initialise before zerocast.quantize_, or load values with zerocast.optim.load_masters"
OPTIMIZER = (
    "step its FP32 masters with zerocast.ZeroAdamW, or masters of your own with any optimizer and a zerocast.CastPlan"
)
AVERAGE = (
    "zerocast.optim.EMA(optimizer) averages the FP32 masters and casts them into the weights, since a format does not resolve "
    "what a step adds to an average; for a look call dequantize()"
)
LIKE = (
    "an optimizer's state is made for masters, by zerocast.ZeroAdamW; for a mask or a buffer call dequantize(), or torch.zeros "
    "with its shape"
)
VIEW = (
    "call dequantize() for a plain tensor to index; experts in one weight take part in torch.nn.functional.grouped_mm, or have a "
    "weight each"
)
SPLIT = "to shard the model call zerocast.fsdp2.prepare, not quantize_, before fully_shard; to split values call dequantize()"
FLAT = (
    "zerocast.ZeroAdamW takes the place of DDP, zerocast.fsdp2.prepare that of quantize_ before fully_shard; Megatron's model is "
    "built inside zerocast.integrations.megatron.quantized_params(); for the values call dequantize()"
)
COLLECTIVE = (
    "zerocast.ZeroAdamW sends weights as bytes and takes the place of DDP, zerocast.fsdp2.prepare comes before fully_shard; to "
    "send values call dequantize()"
)
CONVERT = "call dequantize() for a plain tensor to convert; quantize_(model, recipe, dtype=...) sets the nominal dtype"
STORAGE = (
    "its bytes are in rowwise_data; save with zerocast.export.export_safetensors(model, folder), or masters with the state_dict() "
    "of the optimizer; for values call dequantize()"
)

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_PRODUCTS = re.compile(
    r"_?(\w*conv|bmm|addb?mm|baddbmm|(add)?mv|v?dot|ger|addr|embedding|b?i?linear|trilinear|einsum|\w*mm$|matmul)"
)
_NAMED = (
    (
        AVERAGE,
        {"lerp", "lerp_", "sub", "sub_", "_foreach_lerp", "_foreach_lerp_", "_foreach_sub", "_foreach_sub_"},
    ),
    (INITIALISE, {"fill_", "zero_", "eye_"}),
    (SPLIT, {"split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}),
    (LIKE, {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}),
    (
        STORAGE,
        {"set_", "resize_", "resize_as_", "is_pinned", "_pin_memory", "pin_memory", "record_stream", "is_set_to"},
    ),
    (STORAGE, {"_local_scalar_dense", "_lazy_clone", "set_data"}),
    (CONVERT, {"to_mkldnn", "_to_sparse", "_to_dense", "quantize_per_tensor", "quantize_per_channel", "_to_copy"}),
)


def advice(operator: Any, written: bool) -> str:
    """Advice in place of an operator; `written` is True if it writes a weight."""
    name = operator._schema.name.partition("::")[2]
    rules = (
        (operator.namespace in _COLLECTIVES, COLLECTIVE),
        *((name in names, text) for text, names in _NAMED),
        (written and name.startswith(("_fused_", "_foreach_")), OPTIMIZER),
        (written and torch.Tag.nondeterministic_seeded in operator.tags, INITIALISE),
        (written, WRITE),
        (name.endswith("_like"), LIKE),
        ((name, operator._overloadname) == ("view", "dtype"), CONVERT),
        (name.startswith("index") or _returns_a_view(operator), VIEW),
        (_PRODUCTS.match(name) is not None, PRODUCT),
    )
    return next((text for holds, text in rules if holds), VALUES)


def refusal(operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any], kind: type) -> RuntimeError:
    """The error for an operator that is not defined on tensors of `kind`."""
    return RuntimeError(
        f"{operator} is not defined on a {kind.__name__}: {advice(operator, _is_written(operator, args, kwargs, kind))}"
    )


def _is_written(operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any], kind: type) -> bool:
    """True if a tensor of `kind` is among the arguments that the operator writes."""
    arguments = operator._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    values = (given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return any(
        isinstance(v, kind) for value in values for v in (value if isinstance(value, list | tuple) else (value,))
    )


def _returns_a_view(operator: Any) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in operator._schema.arguments)


def _refuse(name: str, text: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name} is not defined on a QuantizedWeight: {text}")

    return refused


def _methods() -> dict[Any, Callable[..., NoReturn]]:
    """By function of `torch.Tensor`; those that this torch does not have are left out.

    `untyped_storage` is not here, since torch.compile asks for it; the address and the bytes of
    what it gives raise in torch.
    """
    texts = {
        "data_ptr": STORAGE,
        "const_data_ptr": STORAGE,
        "storage": STORAGE,
        "storage_type": STORAGE,
        "numpy": VALUES,
        "tolist": VALUES,
        "__array__": VALUES,
        "__dlpack__": VALUES,
        "__dlpack_device__": VALUES,
        "apply_": VALUES,
        "map_": VALUES,
        "map2_": VALUES,
    }
    found = {
        getattr(Tensor, name): _refuse(f"Tensor.{name}", text) for name, text in texts.items() if hasattr(Tensor, name)
    }
    interface: Any = Tensor.__cuda_array_interface__
    return {**found, interface.__get__: _refuse("Tensor.__cuda_array_interface__", STORAGE)}


METHODS = _methods()
