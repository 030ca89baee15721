"""Write the folder of a transformers model: weights, config.json with its `quantization_config`,
and tokenizer files.

`quantization_config` lists for readers which modules are quantized, and how; modules that are not
are listed. For compressed-tensors and modelopt it describes weights only. Activations are not
quantized, unless the definition of an algorithm says so.

`check_served` finds out before training whether an engine will read an export. A checkpoint has one
naming, so the formats of a model need one that the engine reads and that has all of them.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.checkpoint.store import AnyPath, Location, read_bounded
from zerocast.formats import FormatSpec, get_format
from zerocast.formats.element import dtype_name
from zerocast.formats.readers import HEAD, NAMELESS_HEADS, check_layers, reader_called
from zerocast.serve.export_files import planned_units
from zerocast.serve.namings import NAMINGS, layout_of
from zerocast.serve.stored_model import StoredModel, check_stored, is_stored_by_transformers
from zerocast.serve.stored_tensor import Names, Piece, named_pieces
from zerocast.serve.weight_source import LazyTensors, WeightSource
from zerocast.serve.write import Contents, check_pieces, write

logger = logging.getLogger(__name__)

FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# The largest size of such a file.
MAX_BYTES = 2**28


def write_hf(
    source: WeightSource,
    model: Any,
    folder: AnyPath,
    naming: str,
    *,
    config: Any = None,
    names: Names | None = None,
    files_from: Path | None = None,
    dtype: torch.dtype | None = None,
    allow_unequal_scales: bool = False,
    shard_bytes: int,
) -> list[Location]:
    """Write the tensors of a source like `zerocast.export.export_hf`; `model` is None, or has the
    config.
    """

    def prepare() -> Contents:
        stored = StoredModel.from_model(model) if config is None else StoredModel.from_config(config)
        pieces = {name: pieces_of(stored, name, shape, names or {}) for name, shape in source.shapes.items()}
        check_stored(stored, pieces)
        quantized = {} if naming == "bf16" else quantized_pieces(stored, source, pieces, naming)
        plain = dtype or (source.nominal if quantized or naming != "bf16" else torch.bfloat16)
        modules, ignore = described_modules(stored, quantized, naming)
        files = {"config.json": _config(stored, plain, quantization_config(naming, modules, ignore))}
        to_json: Callable[..., str] | None = getattr(getattr(model, "generation_config", None), "to_json_string", None)
        if to_json is not None:
            files["generation_config.json"] = to_json().encode()
        if files_from is not None:
            files |= _given_files(files_from)
        return Contents(pieces, partial(_plain_dtype, stored, plain), files)

    return write(source, folder, naming, shard_bytes, prepare, allow_unequal_scales)


def _plain_dtype(stored: StoredModel, chosen: torch.dtype | None, name: str, own: torch.dtype) -> torch.dtype:
    """Return the stored dtype of a tensor that is not quantized: the chosen one, unless readers
    keep its own.
    """
    keeps_own = stored.keeps_dtype(name) or not own.is_floating_point
    return own if chosen is None or keeps_own else chosen


def pieces_of(stored: StoredModel | None, name: str, shape: Sequence[int], names: Names) -> list[Piece]:
    """Return the pieces that store a tensor of the source.

    They are those in `names`, else those of the model's parameter of that name and shape, else the
    whole tensor.
    """
    if stored is not None and name not in names and stored.shapes.get(name) == tuple(shape):
        if name in stored.fused:
            raise ValueError(
                f"{name} is stored together with other parameters, or transposed, by a mapping of transformers that is not "
                "followed here"
            )
        return stored.pieces[name]
    return named_pieces(name, shape, names)


def quantized_pieces(
    stored: StoredModel, source: WeightSource, pieces: Mapping[str, Sequence[Piece]], naming: str
) -> dict[str, list[str]]:
    """Return the names of stored quantized weights by format.

    Raises ValueError for a weight that readers would not find, or would decode to other values.
    """
    by_format: dict[str, list[str]] = {}
    for name, fmt in source.formats.items():
        layout = layout_of(naming, name, fmt)
        for piece in pieces[name]:
            if not layout.reads_experts and stored.is_expert(piece.name):
                raise ValueError(
                    f"{piece.name} is {fmt}: readers of {naming!r} misread experts of this format, or do not load "
                    "them; 'modelopt' has names for nvfp4 and mxfp8 experts, 'deepseek' for fp8_block, 'compressed-tensors' for "
                    "int4 and per-tensor FP8"
                )
            if fmt.name == "fp8_block" and naming == "deepseek":
                _check_blocks(piece)
            if len(piece.shape) == 2 and not stored.is_matrix_product(piece.name):
                raise ValueError(
                    f"{piece.name} is {fmt} and not the weight of a Linear, [out, in]: readers of quantized weights do not "
                    "look for it; match it with 'identity', or export it as bf16"
                )
            by_format.setdefault(fmt.name, []).append(piece.name)
    plain = get_format("identity")
    check_layers(
        {
            piece.name: source.formats.get(name, plain)
            for name, parts in pieces.items()
            for piece in parts
            if len(piece.shape) > 1
        }
    )
    if naming == "modelopt" and len({NAMINGS[naming][fmt].algorithm for fmt in by_format}) > 1:
        raise ValueError(
            f"the weights are {' and '.join(by_format)}: in a model of several algorithms engines know few of modelopt's and "
            "take weights of the others for bf16; 'compressed-tensors' describes several formats"
        )
    return by_format


def described_modules(
    stored: StoredModel, quantized: Mapping[str, Sequence[str]], naming: str
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the names of the modules of quantized weights by format, and of those that config.json
    lists as not quantized. Raises ValueError if such a list cannot have all of them.
    """
    modules = {fmt: stored.modules_of(names) for fmt, names in quantized.items()}
    ignore = stored.modules_besides({name for names in modules.values() for name in names})
    if naming == "modelopt" and quantized and HEAD in ignore and stored.architecture in NAMELESS_HEADS:
        raise ValueError(
            f"vLLM makes the head of {stored.architecture} without a name, and reads it as a quantized one under 'modelopt': "
            "'deepseek' has names for fp8_block experts, 'compressed-tensors' for int4 and per-tensor FP8"
        )
    return modules, ignore


def _check_blocks(piece: Piece) -> None:
    """Raise ValueError for a shape whose last block is smaller, if transformers would not notice
    that; a warning if it would.

    Where it dequantizes, it divides a weight into as many equal blocks as there are scales.
    """
    for size in piece.shape:
        count = -(-size // 128)
        if size % count:
            logger.warning(
                "%s has shape %s, whose last blocks are smaller: vLLM raises if it slices or fuses the weight within one, and "
                "transformers where it dequantizes",
                piece.name,
                piece.shape,
            )
        elif count > 1 and size // count != 128:
            raise ValueError(
                f"{piece.name} has shape {piece.shape}: transformers, where it dequantizes, takes {count} blocks of "
                f"{size // count} for those of 128 and does not notice; match it with 'identity', or export another naming"
            )


def _config(stored: StoredModel, dtype: torch.dtype | None, quantization: Mapping[str, Any] | None) -> bytes:
    described = json.loads(stored.config.to_json_string(use_diff=True))
    for key in ("torch_dtype", "quantization_config", "auto_map", "_name_or_path"):
        described.pop(key, None)
    described["architectures"] = [stored.architecture]
    if dtype is not None:
        described["dtype"] = dtype_name(dtype)
    if quantization is not None:
        described["quantization_config"] = dict(quantization)
    return (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()


def _given_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the FILES in a folder, by name. No other file is read.

    Raises ValueError if one is a FIFO, a device or larger than MAX_BYTES.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder of a model: files_from names one")
    return {name: read_bounded(folder / name, MAX_BYTES) for name in FILES if (folder / name).exists()}


# The description of weights of each format for compressed-tensors.
_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "nvfp4": {"num_bits": 4, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"num_bits": 4, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
    "int4": {"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group"},
    "mxfp8": {"num_bits": 8, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
    "fp8_block": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "fp8_current": {"num_bits": 8, "strategy": "tensor"},
    "fp8_delayed": {"num_bits": 8, "strategy": "tensor"},
}
_GROUP_SIZES = {"nvfp4": 16, "mxfp8": 32}
# Names of modules by format.
Modules = Mapping[str, Sequence[str]]


def quantization_config(naming: str, modules: Modules, ignore: Sequence[str]) -> dict[str, Any] | None:
    """Return the entry of config.json for quantized `modules`; None if nothing is quantized."""
    return _CONFIGS[naming](modules, list(ignore)) if modules and naming in _CONFIGS else None


def _compressed_tensors(modules: Modules, ignore: list[str]) -> dict[str, Any]:
    formats = {fmt: NAMINGS["compressed-tensors"][fmt].algorithm for fmt in modules}
    groups = {
        f"group_{number}": {
            # A single format is that of all Linear that are not ignored.
            "targets": ["Linear"] if len(modules) == 1 else sorted(names),
            "weights": {"type": "float", "symmetric": True, "dynamic": False, **_WEIGHTS[fmt]},
            "input_activations": None,
            "output_activations": None,
            "format": formats[fmt],
        }
        for number, (fmt, names) in enumerate(modules.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": next(iter(formats.values())) if len({*formats.values()}) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _modelopt(modules: Modules, ignore: list[str]) -> dict[str, Any]:
    # Formats of one algorithm, which `quantized_pieces` has checked.
    fmt = next(iter(modules))
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "producer": {"name": "zerocast", "version": metadata.version("zerocast")},
        "quant_algo": NAMINGS["modelopt"][fmt].algorithm,
        "ignore": ignore,
    }
    return config | ({"group_size": _GROUP_SIZES[fmt]} if fmt in _GROUP_SIZES else {})


def _deepseek(modules: Modules, ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ignore,
    }


_CONFIGS: Mapping[str, Callable[[Modules, list[str]], dict[str, Any]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "deepseek": _deepseek,
}


def check_served(model: nn.Module, formats: Mapping[str, FormatSpec], reader: str) -> None:
    """Raise ValueError if the engine reads no export of a model of transformers. Of other models
    it is not known how they will be stored.

    Args:
        model: the model, of any size and on any device.
        formats: the formats of the weights that are to be quantized, by name.
        reader: the name of the engine.
    """
    if not formats or not is_stored_by_transformers(model):
        return
    stored, facts = StoredModel.from_model(model), reader_called(reader)
    # Parameters that transformers does not know are stored under names that the export is told.
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name in stored.pieces}
    known = {name: fmt for name, fmt in formats.items() if name in shapes}
    source = LazyTensors({name: tuple(shapes[name]) for name in known}, known, _unread, torch.bfloat16)
    pieces = {name: pieces_of(stored, name, shape, {}) for name, shape in shapes.items()}
    refusals = []
    for naming, readable in facts.namings.items():
        unread = sorted({fmt.name for fmt in known.values()} - readable)
        if unread:
            refusals.append(f"{naming}: {reader} does not read {' and '.join(unread)} in it")
            continue
        try:
            check_pieces(source, naming, pieces)
            described_modules(stored, quantized_pieces(stored, source, pieces, naming), naming)
            deque(planned_units(source, naming, pieces, lambda _, own: own), maxlen=0)
        except ValueError as error:
            refusals.append(f"{naming}: {error}")
        else:
            return
    raise ValueError(f"no export of these weights could be read by {reader} {facts.version}. {'; '.join(refusals)}")


def _unread(name: str) -> Tensor:
    raise AssertionError(f"{name} was read where its layout alone is looked at")
