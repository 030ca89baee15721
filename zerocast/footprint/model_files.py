"""Reads the parameters of a model: of a preset, of a list in a file, or of a config.

A list is JSON. An entry with `parameters` represents `count` blocks of them; any other entry is one
parameter, or `count` of one shape:

    {"parameters": [
        {"name": "embed", "shape": [32000, 4096]},
        {"name": "layers", "count": 32, "parameters": [
            {"name": "up", "shape": [14336, 4096], "quantized": true}, ...]}, ...]}

`presets.json` holds such lists, which `python -m tests.cli.presets` makes. A config is built by
transformers. Neither presets nor lists need torch.
"""

import difflib
import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zerocast.checkpoint.store import read_bounded

Shape = tuple[int, ...]
ROOT = -1


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


class Model(NamedTuple):
    """The parameters of a model.

    Attributes:
        parameters: in the order of registration.
        not_counted: a description of the other tensors of a published checkpoint; empty if there
            are none.
    """

    parameters: list[Parameter]
    not_counted: str = ""


# The largest file that is read.
MAX_BYTES = 2**26
# The most parameters of a model, so that a typing error in a count is reported.
MAX_PARAMETERS = 250_000
PRESET_FILE = Path(__file__).with_name("presets.json")


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the lists of published models, keyed by their names in `zerocast plan`."""
    lists: dict[str, Mapping[str, Any]] = json.loads(PRESET_FILE.read_text())
    return lists


def read_model(name: str) -> Model:
    """Read a model. `name` is a preset, a JSON file with a list or a config, or a folder with a
    config.json.

    Raises ValueError for a name that is none of these, and for a file that is neither a list nor a
    config of a model that transformers builds; ModuleNotFoundError for a config without
    transformers.
    """
    if name in presets():
        return listed(presets()[name])
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(read_bounded(file, MAX_BYTES))
    except FileNotFoundError:
        if path.is_dir():
            raise ValueError(f"{name} has no config.json") from None
        close_matches = difflib.get_close_matches(name, presets(), n=1)
        guess = f": did you mean {close_matches[0]!r}?" if close_matches else ""
        raise ValueError(f"{name!r} is neither a model ({', '.join(presets())}) nor a file{guess}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as JSON: {error}") from None
    try:
        if not isinstance(content, Mapping):
            raise TypeError(f"it holds a {type(content).__name__}")
        model = listed(content) if "parameters" in content else _built(file)
        _check(model.parameters)
    except (ArithmeticError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} is not a config that can be planned for: {reason}") from None
    return model


def listed(content: Mapping[str, Any]) -> Model:
    """Return the model of a list. KeyError, TypeError or ValueError for one that is malformed."""
    parameters = itertools.islice(_expanded(content["parameters"]), MAX_PARAMETERS + 1)
    return Model(list(parameters), content.get("not_counted", ""))


def _built(file: Path) -> Model:
    # Presets and lists need no torch.
    from zerocast.footprint.built_model import read_config  # noqa: PLC0415

    return read_config(file)


def _check(parameters: Sequence[Parameter]) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise ValueError(f"it has more than {MAX_PARAMETERS:,} parameters")
    if not parameters or any(min(parameter.shape, default=1) < 1 for parameter in parameters):
        raise ValueError("a model has parameters, and those have elements")


def _expanded(entries: Sequence[Mapping[str, Any]]) -> Iterator[Parameter]:
    """Yield the parameters of a list. A quantized weight outside of blocks is a block by itself."""
    units = itertools.count()
    # Entries of the same name number their blocks on.
    numbers: Counter[str] = Counter()
    for entry in entries:
        name = entry["name"]
        for _ in range(int(entry.get("count", 1))):
            number = numbers[name]
            numbers[name] += 1
            if "parameters" in entry:
                if not entry["parameters"]:
                    raise ValueError(f"the blocks of {name!r} have no parameters")
                unit = next(units)
                for member in entry["parameters"]:
                    yield _parameter(member, f"{name}.{number}.{member['name']}", unit)
            else:
                unit = next(units) if entry.get("quantized", False) else ROOT
                yield _parameter(entry, f"{name}.{number}" if "count" in entry else name, unit)


def _parameter(entry: Mapping[str, Any], name: str, unit: int) -> Parameter:
    shape = tuple(int(extent) for extent in entry["shape"])
    return Parameter(name, shape, bool(entry.get("quantized", False)), unit)
