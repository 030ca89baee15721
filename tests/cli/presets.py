"""Make `presets.json` from the configs of published models: `python -m tests.cli.presets`.

Fields are those of the models' own config.json that shapes depend on. Needs transformers.
"""

import json
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import transformers

from zerocast.footprint.built_model import build
from zerocast.footprint.shapes import PRESET_FILE, ROOT, Model, Parameter

LLAMA_3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama3-70b": LLAMA_3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "llama3-405b": LLAMA_3
    | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 32000,
    },
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
        "num_nextn_predict_layers": 1,
    },
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
}


def list_of(model: Model) -> dict[str, Any]:
    """Return the list of a model, in which equal blocks that follow each other are one entry."""
    entries: list[dict[str, Any]] = []
    for unit, members in groupby(model.parameters, key=lambda parameter: parameter.unit):
        if unit == ROOT:
            entries += map(_entry, members)
            continue
        block = _block(members)
        if entries and entries[-1] == block | {"count": entries[-1].get("count")}:
            entries[-1]["count"] += 1
        else:
            entries.append(block)
    not_counted = {"not_counted": model.not_counted} if model.not_counted else {}
    return {"parameters": entries, **not_counted}


def _block(members: Iterable[Parameter]) -> dict[str, Any]:
    """Return the entry of one block, whose name is that of its list without its number."""
    entries = [_entry(member) for member in members]
    # Blocks of the models above are `model.layers.<number>`.
    prefix = ".".join(entries[0]["name"].split(".")[:3])
    for entry in entries:
        entry["name"] = entry["name"].removeprefix(f"{prefix}.")
    return {"name": prefix.rpartition(".")[0], "count": 1, "parameters": entries}


def _entry(parameter: Parameter) -> dict[str, Any]:
    quantized = {"quantized": True} if parameter.linear else {}
    return {"name": parameter.name, "shape": list(parameter.shape), **quantized}


def text() -> str:
    """Return the lists of all presets as JSON, with one parameter in a line."""
    models = {name: build(transformers.AutoConfig.for_model(**fields)) for name, fields in CONFIGS.items()}
    spread = json.dumps({name: list_of(model) for name, model in models.items()}, indent=1)
    for innermost in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        spread = re.sub(innermost, lambda found: " ".join(found[0].split()), spread)
    return spread + "\n"


if __name__ == "__main__":
    PRESET_FILE.write_text(text())
