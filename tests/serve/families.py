"""What `export_hf` accepts of every causal family of transformers: naming by format, found without weights.

`python -m tests.serve.families` (`make families`) records it in families.json, and writes the matrix of docs/reference/export.md,
with the table of namings from those of the package.
"""

import functools
import json
import re
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zerocast.formats import get_format
from zerocast.formats.readers import READERS
from zerocast.serve.hugging_face import write_hf
from zerocast.serve.namings import NAMINGS
from zerocast.serve.stored_model import StoredModel
from zerocast.serve.weight_source import LazyTensors

RECORD = Path(__file__).with_name("families.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "export.md"
NOTE = "<!-- begin: made by `make families` from {} -->\n"
END = "<!-- end -->"
CASES = [(naming, fmt) for naming, layouts in NAMINGS.items() for fmt in layouts if fmt != "fp8_delayed"] + [
    ("bf16", "nvfp4")
]
YES = "yes"
# The reasons of refusals by a part of the message.
REASONS = {
    "misread experts of this format": "experts",
    "know matrices only": "one tensor",
    "does not notice": "blocks",
    "by a mapping of transformers that is not followed": "joined",
    "and the weight of a router of experts": "router",
    "in one format": "layers",
    "not the weight of a Linear": "no Linear",
    "without a name": "head",
}

# What the page says of families without outcomes.
WITHOUT = {"not built": "are not built by the rule", "no weight": "have no matrix in a Linear"}


class Accepted(Exception):
    """The export asks for the first tensor."""


def accepted(model: Any, recipe: Mapping[str, str], naming: str) -> str:
    """YES, or the reason why the export of a model on the meta device is refused."""

    def ask(name: str) -> Tensor:
        raise Accepted

    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: tuple(tensor.shape) for name, tensor in named if name in saved}
    source = LazyTensors(shapes, {name: get_format(fmt) for name, fmt in recipe.items()}, ask, torch.bfloat16)
    stored = _stored(model)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(StoredModel, "from_config", return_value=stored):
        try:
            write_hf(source, None, Path(folder) / "out", naming, config=model.config, shard_bytes=2**30)
        except Accepted:
            return YES
        except ValueError as error:
            return next(reason for part, reason in REASONS.items() if part in str(error))
    raise AssertionError("the export has asked for no tensor")


@functools.lru_cache(maxsize=1)
def _stored(model: Any) -> StoredModel:
    return StoredModel(model.config, type(model))


def row(family: str) -> str | dict[str, str]:
    """The outcome of each case of a family; or why there is none."""
    from tests.serve.test_families import matrices, on_meta

    try:
        model = on_meta(family)
    except Exception:  # of any kind, by its family
        return "not built"
    recipes = {fmt: matrices(model, fmt) for _, fmt in CASES}
    if not any(recipes.values()):
        return "no weight"
    return {f"{naming} {fmt}": accepted(model, recipes[fmt], naming) if recipes[fmt] else "" for naming, fmt in CASES}


def namings_table() -> str:
    """Markdown: the name of each format in each naming, and the engines that read the format."""
    formats = list(dict.fromkeys(fmt for _, fmt in CASES))
    lines = [["naming", *(f"`{fmt}`" for fmt in formats)], ["---"] * (len(formats) + 1)]
    for naming, layouts in NAMINGS.items():
        cells = [f"`{layouts[fmt].algorithm}`" if fmt in layouts else "" for fmt in formats]
        experts = [" and experts" if fmt in layouts and layouts[fmt].reads_experts else "" for fmt in formats]
        if layouts:
            lines.append([f"`{naming}`", *map("".join, zip(cells, experts, strict=True))])
    lines.append(["`bf16`", *["dequantized"] * len(formats)])
    for reader in READERS.values():
        read = ["yes" if fmt in reader.formats else "" for fmt in formats]
        lines.append([f"read by {reader.name} {reader.version}", *read])
    return _markdown(lines)


def matrix(record: Mapping[str, str | dict[str, str]]) -> str:
    """Markdown: a row for the families, and a column for the cases, that have the same outcomes."""
    families: dict[tuple[str, ...], list[str]] = defaultdict(list)
    # The families without outcomes, by the reason.
    others: dict[str, list[str]] = defaultdict(list)
    for family, outcomes in record.items():
        if isinstance(outcomes, str):
            others[outcomes].append(family)
        else:
            families[tuple(outcomes.values())].append(family)
    rows = sorted(families.items(), key=lambda item: -len(item[1]))
    columns: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (naming, fmt), *outcomes in zip(CASES, *(row for row, _ in rows), strict=True):
        columns[tuple(outcomes)][naming].append(fmt)
    cases = ["; ".join(f"{naming} {', '.join(fmts)}" for naming, fmts in column.items()) for column in columns.values()]
    lines = [["families", *cases], ["---"] * (len(cases) + 1)]
    for (outcomes, names), *shown in zip(rows, *columns, strict=True):
        label = "all others" if {*outcomes} == {YES} else ", ".join(names)
        lines.append([f"{len(names)}: {label}", *shown])
    rest = [f"* {len(names)} {WITHOUT[reason]}: {', '.join(names)}." for reason, names in sorted(others.items())]
    wrapped = [textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in rest]
    return _markdown(lines) + "\n" + "\n".join(wrapped) + "\n"


def written(page: str, record: Mapping[str, Any]) -> str:
    """The page with the tables of today."""
    for source, table in (("the namings and readers", namings_table()), ("tests/serve/families.json", matrix(record))):
        begin = NOTE.format(source)
        before, found, rest = page.partition(begin)
        assert found, source
        page = f"{before}{begin}\n{table}\n{END}{rest.partition(END)[2]}"
    return page


def _markdown(lines: list[list[str]]) -> str:
    return "".join(re.sub(" +", " ", f"| {' | '.join(line)} |\n") for line in lines)


if __name__ == "__main__":
    from tests.serve.test_families import CAUSAL

    found = {family: row(family) for family in sorted(CAUSAL)}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), found))
