"""`zerocast convert`: weights to a checkpoint of masters, or masters to safetensors."""

import fnmatch
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from zerocast import interrupts
from zerocast.checkpoint.export import SHARD_BYTES
from zerocast.inspection import Contents, choose
from zerocast.inspection.convert import to_checkpoint, to_safetensors
from zerocast.inspection.format_selection import DTYPES, Dtype


@dataclass(frozen=True)
class ConvertConfig:
    """The options of `zerocast convert`."""

    source: tyro.conf.Positional[Path]
    """A checkpoint of zerocast or of torch.distributed.checkpoint, safetensors (file, index or
    folder), or a file of torch.save.
    """
    target: tyro.conf.Positional[Path]
    """A new folder to write."""
    to: Literal["safetensors", "checkpoint"] = "safetensors"
    """checkpoint: FP32 masters for zerocast.optim.load_masters and for any reader of
    torch.distributed.checkpoint.
    """
    naming: Literal["bf16", "compressed-tensors", "modelopt", "deepseek"] = "bf16"
    """For safetensors: the naming of quantized weights; bf16 dequantizes them."""
    format: str | None = None
    """Format to cast --weights to. By default the formats stored with a checkpoint, if any."""
    weights: tuple[str, ...] = ()
    """With --format: globs on names of parameters of two or more dimensions."""
    dtype: Dtype = "bfloat16"
    """Nominal dtype, in which other tensors are written."""
    ignore: tuple[str, ...] = ()
    """Globs on names of tensors to leave out."""
    shard_bytes: int = SHARD_BYTES
    """Most bytes in a safetensors file; about as many are held in memory."""
    json: bool = False
    """Print JSON."""


def convert(config: tyro.conf.OmitArgPrefixes[ConvertConfig]) -> int:
    """Convert weights: a checkpoint into safetensors for inference, or safetensors and the like
    into a checkpoint of masters.

    Example: zerocast convert run/checkpoints/step_00001000 out --naming modelopt --format nvfp4
    --weights "*.mlp.*"

    Exit status: 0, or 2 if the source cannot be converted; the target is then not created.
    """
    try:
        report = _converted(config)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        interrupts.complain(f"zerocast convert: {error}")
        return 2
    print(json.dumps(report, indent=1) if config.json else _text(report))
    return 0


def _converted(config: ConvertConfig) -> dict[str, Any]:
    if config.format is not None and not config.weights:
        raise ValueError(
            "--format needs --weights, such as --weights '*.mlp.*': embeddings and heads often stay as they are"
        )
    contents = Contents.of(config.source)
    names = [name for name in contents.masters if not any(fnmatch.fnmatchcase(name, glob) for glob in config.ignore)]
    for name in names:
        if name not in contents.entries:
            what = contents.source.entries[contents.masters[name]]
            raise ValueError(f"{name} is {what}: no high-precision weight (--ignore leaves it out)")
    entries = {name: contents.entries[name] for name in names}
    chosen = choose(entries, contents.stored, config.format, config.weights, DTYPES[config.dtype])
    if config.to == "checkpoint":
        to_checkpoint(contents, names, chosen, config.target)
        files = sorted(config.target.iterdir())
    else:
        dtype = DTYPES[config.dtype]
        files = to_safetensors(contents, names, chosen, config.target, config.naming, dtype, config.shard_bytes)
    return {
        "source": str(config.source),
        "target": str(config.target),
        "tensors": len(names),
        "quantized": {name: str(fmt) for name, (fmt, _) in chosen.formats.items()},
        "kept": list(chosen.kept),
        "files": {file.name: file.stat().st_size for file in files},
    }


def _text(report: dict[str, Any]) -> str:
    lines = [f"{report['tensors']:,} tensors, {len(report['quantized']):,} of them with a format of their own"]
    lines += [f"{name} is not quantized: the format cannot take its shape" for name in report["kept"]]
    lines += [f"  {nbytes:>16,} bytes  {name}" for name, nbytes in report["files"].items()]
    return "\n".join([*lines, f"wrote {report['target']}"])
