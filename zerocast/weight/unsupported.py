"""The advice in the error for an operator that is not defined on a QuantizedWeight: which call to
use instead.

Operators are sorted into families by their schema: which argument is written, whether the result
aliases one, which namespace the operator is in. Names only make the advice more specific. So an
operator that a later torch adds falls into a family as well, at worst into the last one. `METHODS`
are functions that would bypass the dispatcher and reach for memory that a weight does not have.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

VALUES = "call dequantize() for a plain tensor of its values"
PRODUCT = (
    "it is an operand of linear, mm, addmm, matmul, bmm and grouped_mm; match the weights of other layers with 'identity' in "
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
    "call dequantize() for a plain tensor to index; experts in one weight take part in grouped_mm and bmm, and one by one, as "
    "weight[i], in linear and matmul (transformers: experts_implementation='grouped_mm' or 'eager')"
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
    "bytes are in rowwise_data; save with zerocast.export.export_safetensors; masters with the optimizer's state_dict(), "
    "zerocast.optim.full_state_dict(model, optimizer) for save_pretrained or zerocast.integrations.huggingface; for "
    "values call dequantize()"
)

# Namespaces of the collective operators.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_PRODUCTS = re.compile(
    r"_?(\w*conv|bmm|addb?mm|baddbmm|(add)?mv|v?dot|ger|addr|embedding|b?i?linear|trilinear|einsum|\w*mm$|matmul)"
)
# Advice for operators, keyed by name, which precedes the advice for families.
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
    """Return the advice for an operator; `written` is True if it writes a weight."""
    name = operator._schema.name.partition("::")[2]
    # The first rule that holds decides, so special cases come before families. For example,
    # normal_ writes the weight as an update does, but it is random and thus an initialisation.
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
    """Return the error for an operator that is not defined on tensors of `kind`."""
    return RuntimeError(
        f"{operator} is not defined on a {kind.__name__}: {advice(operator, _is_written(operator, args, kwargs, kind))}"
    )


def _is_written(operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any], kind: type) -> bool:
    """Return True if a tensor of `kind` is among the arguments that the operator writes."""
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    # A _foreach operator writes a list of tensors.
    lists = [value if isinstance(value, list | tuple) else (value,) for value in written]
    return any(isinstance(tensor, kind) for tensors in lists for tensor in tensors)


def _returns_a_view(operator: Any) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in operator._schema.arguments)


def _refuse(name: str, text: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name} is not defined on a QuantizedWeight: {text}")

    return refused


def _methods() -> dict[Any, Callable[..., NoReturn]]:
    """Return functions of `torch.Tensor` that raise with advice. Functions that the installed torch
    does not have are left out.

    `untyped_storage` is not among them, since torch.compile calls it. Its result is harmless: torch
    raises for the address and for the bytes of a storage without memory.
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
    methods = {
        getattr(Tensor, name): _refuse(f"Tensor.{name}", text) for name, text in texts.items() if hasattr(Tensor, name)
    }
    # torch passes the getter of a property to `__torch_function__`, not the property.
    interface: Any = Tensor.__cuda_array_interface__
    return {**methods, interface.__get__: _refuse("Tensor.__cuda_array_interface__", STORAGE)}


METHODS = _methods()
