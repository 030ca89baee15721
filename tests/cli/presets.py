"""Make the presets of `zerocast plan` from the configs of published models: `python -m tests.cli.presets`.

`presets.json` beside this has the fields of the models' own config.json that shapes depend on. Needs transformers.
"""

import json
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import transformers

from zerocast.footprint.built_model import build
from zerocast.footprint.model_files import PRESET_FILE, ROOT, Model, Parameter

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


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
