"""`zerocast convert`: weights to a checkpoint of masters, or masters to safetensors."""

import fnmatch
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zerocast.cli import interrupts
from zerocast.cli.progress import Progress
from zerocast.inspection import Contents, choose
from zerocast.inspection.convert import to_checkpoint, to_safetensors
from zerocast.inspection.format_selection import DTYPES, Dtype
from zerocast.serve.safetensors_writer import SHARD_BYTES


@dataclass(frozen=True)
class ConvertConfig:
    """The options of `zerocast convert`."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint of zerocast or of torch.distributed.checkpoint, safetensors (file, index or
    folder), or a file of torch.save.
    """
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """A new folder to write."""
    to: Literal["safetensors", "checkpoint"] = "safetensors"
    """checkpoint: masters for zerocast.optim.load_masters and for any reader of
    torch.distributed.checkpoint.
    """
    masters: Literal["float32", "bfloat16"] | None = None
    """For a checkpoint: dtype of the masters, by default float32; bfloat16 takes half the bytes and
    rounds them.
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

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range, and for an option of the other target."""
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes must be at least 1, got {self.shard_bytes}")
        if self.masters is not None and self.to != "checkpoint":
            raise ValueError("--masters is for --to checkpoint; --dtype is that of tensors in safetensors")

    @property
    def written_dtype(self) -> Dtype:
        """Dtype of the masters, or of the tensors in safetensors that keep a plain dtype."""
        return (self.masters or "float32") if self.to == "checkpoint" else self.dtype


def convert(config: ConvertConfig) -> int:
    """Convert weights: a checkpoint into safetensors for inference, or safetensors and the like
    into a checkpoint of masters.

    Example: zerocast convert run/checkpoints/step_00001000 out --naming modelopt

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
    dtype, progress = DTYPES[config.written_dtype], Progress(len(names))
    try:
        if config.to == "checkpoint":
            to_checkpoint(contents, names, chosen, config.target, dtype, progress.say)
            files = sorted(config.target.iterdir())
        else:
            files = to_safetensors(
                contents, names, chosen, config.target, config.naming, dtype, config.shard_bytes, progress.say
            )
    finally:
        progress.clear()
    return {
        "source": str(config.source),
        "target": str(config.target),
        "to": config.to,
        "dtype": config.written_dtype,
        "tensors": len(names),
        "quantized": {name: str(fmt) for name, (fmt, _) in chosen.formats.items()},
        "kept": list(chosen.kept),
        "files": {file.name: file.stat().st_size for file in files},
    }


def _text(report: dict[str, Any]) -> str:
    count, quantized = report["tensors"], len(report["quantized"])
    if report["to"] == "checkpoint":
        lines = [f"{count:,} masters in {report['dtype']}; formats are recorded for {quantized:,} of them"]
    else:
        lines = [f"{count:,} tensors: {quantized:,} cast to their formats, {count - quantized:,} in {report['dtype']}"]
    lines += [f"{name} is not quantized: the format cannot take its shape" for name in report["kept"]]
    lines += [f"  {nbytes:>16,} bytes  {name}" for name, nbytes in report["files"].items()]
    return "\n".join([*lines, f"wrote {report['target']}"])
