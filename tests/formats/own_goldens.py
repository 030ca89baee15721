"""Writes own_goldens.json: casts that goldens.json has no values for, from the numpy model alone.

Run `python -m tests.formats.own_goldens` after a deliberate change of the formats, and read the difference.
"""

import hashlib
import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.casts import F32, matrix
from tests.formats import model

PATH = Path(__file__).with_name("own_goldens.json")
CONTENTS = ("lcg", "wide", "nan", "inf", "minus_inf", "zero_blocks", "subnormal", "finite_bits")
NOMINAL = ("bfloat16", "float16", "float32")
CASES: tuple[tuple[str, model.Settings], ...] = (
    ("fp8_delayed", model.Settings(scale=64.0)),
    ("fp8_delayed", model.Settings(element="e5m2", scale=0.5)),
    ("fp8_current", model.Settings()),
    ("fp8_current", model.Settings(element="e5m2", power_of_2_scale=True)),
    ("fp8_block", model.Settings(power_of_2_scale=True)),
    ("fp8_block", model.Settings(element="e5m2", amax_epsilon=2.0)),
    ("mxfp8", model.Settings()),
    ("mxfp8", model.Settings(block="32x32")),
    ("mxfp4", model.Settings()),
    ("mxfp4", model.Settings(scale_rounding="floor", exact_in_fp8=False)),
    ("nvfp4", model.Settings()),
    ("nvfp4", model.Settings(exact_in_fp8=True)),
    ("int4", model.Settings()),
)
SHAPE = (160, 192)
# Experts of which blocks of 128 rows would span two: stored one after another in the first two formats.
EXPERTS = (3, 96, 160)
OF_EXPERTS: tuple[tuple[str, model.Settings], ...] = (
    ("fp8_block", model.Settings(power_of_2_scale=True)),
    ("mxfp4", model.Settings()),
    ("mxfp4", model.Settings(scale_rounding="floor", exact_in_fp8=False)),
    ("mxfp8", model.Settings()),
    ("nvfp4", model.Settings()),
    ("int4", model.Settings()),
)


def master(content: str, shape: tuple[int, ...] = SHAPE) -> F32:
    """Return the input of a golden."""
    return matrix(content, math.prod(shape[:-1]), shape[-1], seed=11).reshape(shape)


def changed(settings: model.Settings) -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    return {key: value for key, value in asdict(settings).items() if value != getattr(model.Settings(), key)}


def golden(
    name: str, nominal: str, content: str, settings: model.Settings, shape: tuple[int, ...] = SHAPE
) -> dict[str, Any]:
    """Return an entry: what to cast, and the sha of each buffer."""
    buffers = model.Cast(name, nominal, settings).of(master(content, shape))
    shas = {key: hashlib.sha256(np.ascontiguousarray(b).tobytes()).hexdigest()[:16] for key, b in buffers.items()}
    what = {"format": name, "nominal": nominal, "content": content, "settings": changed(settings)}
    return {**what, **({} if shape == SHAPE else {"shape": list(shape)}), **shas}


def goldens() -> list[dict[str, Any]]:
    """Return all entries, in the order of the file."""
    drawn = [
        golden(name, nominal, content, settings)
        for (name, settings), nominal, content in itertools.product(CASES, NOMINAL, CONTENTS)
    ]
    return drawn + [golden(name, "bfloat16", "wide", settings, EXPERTS) for name, settings in OF_EXPERTS]


def main() -> None:
    entries = [json.dumps(entry) for entry in goldens()]
    PATH.write_text("[\n " + ",\n ".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
