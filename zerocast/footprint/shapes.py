"""The parameters of a model as names and shapes, from the fields of a Hugging Face `config.json`.

Four published models are known by name. A file may hold the config of a model type in FAMILIES, or
a list of parameters:
`{"parameters": [{"name": "up", "shape": [4096, 1024], "quantized": true, "count": 12}, ...]}`.
A config without `model_type` is read as GPT-2's if it has `n_embd`, as Llama's if not.
"""

import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerocast.checkpoint.regular_file import read_bounded

Shape = tuple[int, ...]
ROOT = -1
# The largest config file that is read.
MOST_BYTES = 2**26
# The most parameters of a model, so that a typing error in a count is reported.
MOST_PARAMETERS = 250_000


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    `linear` marks the weight of a product inside a block, which a recipe would quantize. `unit` is
    the number of its block, or ROOT outside of all blocks.
    """

    name: str
    shape: Shape
    linear: bool
    unit: int = ROOT


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama3-405b": {
        "model_type": "llama",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "gpt3-175b": {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_positions": 2048, "vocab_size": 50257},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
# The parts of a model that its preset does not count.
LEFT_OUT = {
    "deepseek-v3": "the layer for multi-token prediction, which its config.json has: num_nextn_predict_layers",
}


def read_model(name: str) -> list[Parameter]:
    """The parameters of a model. `name` is that of a preset, of a JSON file with a config, or of a
    folder with a config.json.

    Raises ValueError for a name that is none of these, for a file that is no such config, and for a
    config that lacks a field.
    """
    if name in PRESETS:
        return model_parameters(PRESETS[name])
    path = Path(name)
    try:
        config = json.loads(read_bounded(path / "config.json" if path.is_dir() else path, MOST_BYTES))
    except FileNotFoundError:
        if path.is_dir():
            raise ValueError(f"{name} has no config.json") from None
        close_matches = difflib.get_close_matches(name, PRESETS, n=1)
        guess = f": did you mean {close_matches[0]!r}?" if close_matches else ""
        raise ValueError(f"{name!r} is no model ({', '.join(PRESETS)}) and no file{guess}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as JSON: {error}") from None
    try:
        return model_parameters(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} is no config that can be planned for: {reason}") from None


def model_parameters(config: Mapping[str, Any]) -> list[Parameter]:
    """All parameters in the order of registration.

    Raises KeyError for a missing field, ValueError for an unknown kind of model.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"it holds a {type(config).__name__}")
    generated = _listed(config["parameters"]) if "parameters" in config else _family(config)(config)
    parameters = list(itertools.islice(generated, MOST_PARAMETERS + 1))
    if len(parameters) > MOST_PARAMETERS:
        raise ValueError(f"it has more than {MOST_PARAMETERS:,} parameters")
    if not parameters or any(min(parameter.shape, default=1) < 1 for parameter in parameters):
        raise ValueError("a model has parameters, and those have elements")
    return parameters


def _family(config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterator[Parameter]]:
    kind = config.get("model_type")
    if kind is None:
        kind = "gpt2" if "n_embd" in config else "llama"
        if any(field in config for field in ("n_routed_experts", "num_local_experts", "num_experts")):
            kind = None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"model_type {kind!r} is not known ({', '.join(FAMILIES)}): list its parameters, or give the model_type "
            "whose layers it has"
        )
    return FAMILIES[kind]


def _listed(entries: list[Mapping[str, Any]]) -> Iterator[Parameter]:
    for unit, entry in enumerate(entries):
        shape = tuple(int(extent) for extent in entry["shape"])
        for number in range(int(entry.get("count", 1))):
            yield Parameter(f"{entry['name']}.{number}", shape, bool(entry.get("quantized", False)), unit)


def _llama(c: Mapping[str, Any]) -> Iterator[Parameter]:
    h, vocabulary, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    yield Parameter("embed_tokens", (vocabulary, h), linear=False)
    for layer in range(layers):
        yield from _grouped_query_attention(c, layer)
        yield from _mlp(c, layer)
        yield from _norms(layer, h, "input_layernorm", "post_attention_layernorm")
    yield Parameter("norm", (h,), linear=False)
    if not c.get("tie_word_embeddings", False):
        yield Parameter("lm_head", (vocabulary, h), linear=False)


def _grouped_query_attention(c: Mapping[str, Any], layer: int) -> Iterator[Parameter]:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"num_attention_heads must be at least 1, got {heads}")
    width = c.get("head_dim") or h // heads
    q, kv = heads * width, (c.get("num_key_value_heads") or heads) * width
    for name, shape in {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}.items():
        yield Parameter(f"layers.{layer}.self_attn.{name}", shape, True, layer)
        if c.get("attention_bias", name in BIASES.get(c.get("model_type", ""), ())):
            yield Parameter(f"layers.{layer}.self_attn.{name}.bias", shape[:1], False, layer)

    if c.get("model_type") in QUERY_NORMS:
        yield from _norms(layer, width, "self_attn.q_norm", "self_attn.k_norm")


def _mlp(c: Mapping[str, Any], layer: int) -> Iterator[Parameter]:
    """One gated MLP, or Mixtral's router and experts."""
    h, inner = c["hidden_size"], c["intermediate_size"]
    if c.get("model_type") != "mixtral":
        yield from _gated_mlp(f"layers.{layer}.mlp", h, inner, layer, c.get("mlp_bias", False))
        return
    moe, experts = f"layers.{layer}.block_sparse_moe", c["num_local_experts"]
    yield Parameter(f"{moe}.gate", (experts, h), False, layer)
    for expert in range(experts):
        yield from _gated_mlp(f"{moe}.experts.{expert}", h, inner, layer)


def _gated_mlp(prefix: str, hidden: int, inner: int, layer: int, bias: bool = False) -> Iterator[Parameter]:
    for name, shape in {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.items():
        yield Parameter(f"{prefix}.{name}", shape, True, layer)
        if bias:
            yield Parameter(f"{prefix}.{name}.bias", shape[:1], False, layer)


def _norms(layer: int, width: int, *names: str) -> Iterator[Parameter]:
    for name in names:
        yield Parameter(f"layers.{layer}.{name}", (width,), False, layer)


def _gpt2(c: Mapping[str, Any]) -> Iterator[Parameter]:
    h = c["n_embd"]
    inner = c.get("n_inner") or 4 * h
    # The head shares this weight.
    yield Parameter("wte", (c["vocab_size"], h), linear=False)
    yield Parameter("wpe", (c["n_positions"], h), linear=False)
    for layer in range(c["n_layer"]):
        shapes = {"attn.c_attn": (3 * h, h), "attn.c_proj": (h, h), "mlp.c_fc": (inner, h), "mlp.c_proj": (h, inner)}
        yield from _biased(f"h.{layer}.", layer, shapes)
        yield from _biased_norms(f"h.{layer}.", layer, h, "ln_1", "ln_2")
    yield from _biased_norms("", ROOT, h, "ln_f")


def _bloom(c: Mapping[str, Any]) -> Iterator[Parameter]:
    h = c.get("hidden_size") or c["n_embed"]
    # The head shares this weight.
    yield Parameter("word_embeddings", (c["vocab_size"], h), linear=False)
    yield from _biased_norms("", ROOT, h, "word_embeddings_layernorm")
    for layer in range(c.get("n_layer") or c["num_hidden_layers"]):
        shapes = {
            "self_attention.query_key_value": (3 * h, h),
            "self_attention.dense": (h, h),
            "mlp.dense_h_to_4h": (4 * h, h),
            "mlp.dense_4h_to_h": (h, 4 * h),
        }
        yield from _biased(f"h.{layer}.", layer, shapes)
        yield from _biased_norms(f"h.{layer}.", layer, h, "input_layernorm", "post_attention_layernorm")
    yield from _biased_norms("", ROOT, h, "ln_f")


def _biased(prefix: str, unit: int, shapes: Mapping[str, Shape]) -> Iterator[Parameter]:
    for name, shape in shapes.items():
        yield Parameter(f"{prefix}{name}.weight", shape, True, unit)
        yield Parameter(f"{prefix}{name}.bias", shape[:1], False, unit)


def _biased_norms(prefix: str, unit: int, width: int, *names: str) -> Iterator[Parameter]:
    for name in names:
        yield from (Parameter(f"{prefix}{name}.{kind}", (width,), False, unit) for kind in ("weight", "bias"))


def _deepseek(c: Mapping[str, Any]) -> Iterator[Parameter]:
    h, vocabulary, experts = c["hidden_size"], c["vocab_size"], c["n_routed_experts"]
    yield Parameter("embed_tokens", (vocabulary, h), linear=False)
    layers = c["num_hidden_layers"]
    for layer in range(layers + (c.get("num_nextn_predict_layers") or 0)):
        if layer >= layers:
            # A layer for multi-token prediction. It uses the embedding and the head of the model.
            yield Parameter(f"layers.{layer}.eh_proj", (h, 2 * h), True, layer)
            yield from _norms(layer, h, "enorm", "hnorm", "shared_head.norm")
        yield from _latent_attention(c, layer)
        if layer < c["first_k_dense_replace"]:
            yield from _gated_mlp(f"layers.{layer}.mlp", h, c["intermediate_size"], layer)
        else:
            inner, mlp = c["moe_intermediate_size"], f"layers.{layer}.mlp"
            for expert in range(experts):
                yield from _gated_mlp(f"{mlp}.experts.{expert}", h, inner, layer)
            yield Parameter(f"{mlp}.gate", (experts, h), False, layer)
            yield Parameter(f"{mlp}.gate.e_score_correction_bias", (experts,), False, layer)
            yield from _gated_mlp(f"{mlp}.shared_experts", h, inner * c["n_shared_experts"], layer)
        yield from _norms(layer, h, "input_layernorm", "post_attention_layernorm")
    yield Parameter("norm", (h,), linear=False)
    yield Parameter("lm_head", (vocabulary, h), linear=False)


def _latent_attention(c: Mapping[str, Any], layer: int) -> Iterator[Parameter]:
    h, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    shapes = {
        "q_a_proj": (q_rank, h),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, h),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (h, heads * value),
    }
    for name, shape in shapes.items():
        yield Parameter(f"layers.{layer}.self_attn.{name}", shape, True, layer)
    yield Parameter(f"layers.{layer}.self_attn.q_a_layernorm", (q_rank,), False, layer)
    yield Parameter(f"layers.{layer}.self_attn.kv_a_layernorm", (kv_rank,), False, layer)


# The projections that have a bias by default, if a config has no field attention_bias.
BIASES = {"qwen2": ("q_proj", "k_proj", "v_proj")}
QUERY_NORMS = ("qwen3",)
FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Parameter]]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "deepseek_v3": _deepseek,
}
