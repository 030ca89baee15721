"""`zerocast export`: masters to a folder for engines, to safetensors or to a checkpoint."""

import fnmatch
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zerocast.cli import interrupts
from zerocast.cli.output import Progress
from zerocast.inspection import Chosen, Contents, choose
from zerocast.inspection.contents import DTYPES, Dtype
from zerocast.serve.from_masters import Reading, cast_tensors, write_checkpoint
from zerocast.serve.hugging_face import write_hf
from zerocast.serve.write import SHARD_BYTES, write_safetensors

# The targets that use an option. Options that are not listed are used by all targets.
TARGETS = {
    "naming": ("hf", "safetensors"),
    "model": ("hf",),
    "share_amax": ("hf", "safetensors"),
    "allow_unequal_scales": ("hf",),
    "shard_bytes": ("hf", "safetensors"),
    "masters": ("checkpoint",),
}


@dataclass(frozen=True)
class ExportConfig:
    """The options of `zerocast export`."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint of zerocast or of torch.distributed.checkpoint, safetensors (file, index or
    folder), or a file of torch.save.
    """
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """A new folder to write."""
    to: Literal["hf", "safetensors", "checkpoint"] = "hf"
    """hf: a folder that transformers and engines load. safetensors: the weights alone, under their
    own names. checkpoint: masters for zerocast.optim.load_masters and for any reader of
    torch.distributed.checkpoint.
    """
    naming: Literal["bf16", "compressed-tensors", "modelopt", "deepseek"] = "bf16"
    """What the reader of hf or safetensors expects of quantized weights; bf16 dequantizes them."""
    model: Path | None = None
    """For hf: config.json of the model, or a folder with it, whose tokenizer files are copied; by
    default the source.
    """
    format: str | None = None
    """Format to cast --weights to. By default the formats stored with a checkpoint, if any."""
    weights: tuple[str, ...] = ()
    """With --format: globs on names of parameters of two or more dimensions."""
    share_amax: Literal["llama"] | None = None
    """With --format: weights that engines fuse take one tensor amax."""
    ignore: tuple[str, ...] = ()
    """Globs on names of tensors to leave out."""
    dtype: Dtype = "bfloat16"
    """Nominal dtype, in which hf and safetensors hold other tensors."""
    masters: Literal["float32", "bfloat16"] | None = None
    """For a checkpoint: dtype of the masters, by default float32; bfloat16 takes half the bytes and
    rounds them.
    """
    allow_unequal_scales: bool = False
    """For hf: log, and do not refuse, global scales that differ among weights which engines
    fuse.
    """
    shard_bytes: int = SHARD_BYTES
    """Most bytes in a safetensors file; about as many are held in memory."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        """Raise ValueError for options that need others, or that the target does not use."""
        for option, targets in TARGETS.items():
            if getattr(self, option) != getattr(ExportConfig, option) and self.to not in targets:
                named = " and ".join(targets)
                raise ValueError(f"--{option.replace('_', '-')} is for --to {named}, and this is --to {self.to}")
        if self.format is not None and not self.weights:
            raise ValueError(
                "--format needs --weights, such as --weights '*.mlp.*': embeddings and heads often stay as they are"
            )
        if self.share_amax is not None and self.format is None:
            raise ValueError("--share-amax needs --format: the weights of a run share what they shared in training")

    @property
    def written_dtype(self) -> Dtype:
        """The dtype of the masters, or of the tensors that are not quantized."""
        return (self.masters or "float32") if self.to == "checkpoint" else self.dtype


def export(config: ExportConfig) -> int:
    """Export masters: to a folder that transformers and inference engines load, to safetensors, or
    to a checkpoint of masters for a training run.

    Example: zerocast export run/checkpoints/step_00001000 served --model llama-3-8b --naming
    modelopt

    Exit status: 0, or 2 if the source cannot be exported; the target is then not created.
    """
    try:
        report = _exported(config)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        interrupts.complain(f"zerocast export: {error}")
        return 2
    print(json.dumps(report, indent=1) if config.json else _text(report))
    return 0


def _exported(config: ExportConfig) -> dict[str, Any]:
    contents = Contents.of(config.source, whole_names=config.to == "hf")
    names = _names(config, contents)
    entries = {name: contents.entries[name] for name in names}
    chosen = choose(entries, contents.stored, config.format, config.weights, DTYPES[config.dtype])
    progress = Progress(len(names))
    try:
        files = _write(config, contents, names, chosen, progress.say)
    finally:
        progress.clear()
    return {
        "source": str(config.source),
        "target": str(config.target),
        "to": config.to,
        "naming": None if config.to == "checkpoint" else config.naming,
        "dtype": config.written_dtype,
        "tensors": len(names),
        "quantized": {name: str(fmt) for name, (fmt, _) in chosen.formats.items()},
        "kept": list(chosen.kept),
        "files": {file.name: file.stat().st_size for file in files},
    }


def _names(config: ExportConfig, contents: Contents) -> list[str]:
    """The names of the tensors to write.

    ValueError for a tensor that is no high-precision weight. An export to hf leaves such a tensor
    out, since it compares the others with the model anyway.
    """
    names = [name for name in contents.masters if not any(fnmatch.fnmatchcase(name, glob) for glob in config.ignore)]
    if config.to == "hf":
        return [name for name in names if name in contents.entries]
    for name in names:
        if name not in contents.entries:
            entry = contents.source.entries[contents.masters[name]]
            raise ValueError(f"{name} is {entry}: no high-precision weight (--ignore leaves it out)")
    return names


def _write(
    config: ExportConfig, contents: Contents, names: Sequence[str], chosen: Chosen, reading: Reading
) -> Sequence[Path]:
    """Write the target; returns the paths of its files."""
    dtype = DTYPES[config.written_dtype]
    if config.to == "checkpoint":
        write_checkpoint(contents, names, chosen, config.target, dtype, reading)
        return sorted(config.target.iterdir())
    source = cast_tensors(contents, names, chosen, dtype, reading, config.share_amax)
    if config.to == "safetensors":
        return write_safetensors(source, config.target, config.naming, config.shard_bytes)
    model = config.model or config.source
    return write_hf(
        source,
        None,
        config.target,
        config.naming,
        config=model,
        files_from=model if model.is_dir() else None,
        dtype=dtype,
        allow_unequal_scales=config.allow_unequal_scales,
        shard_bytes=config.shard_bytes,
    )


def _text(report: dict[str, Any]) -> str:
    count, quantized = report["tensors"], len(report["quantized"])
    if report["to"] == "checkpoint":
        lines = [f"{count:,} masters in {report['dtype']}; formats are recorded for {quantized:,} of them"]
    else:
        lines = [f"{count:,} tensors: {quantized:,} cast to their formats, {count - quantized:,} in {report['dtype']}"]
    lines += [f"{name} is not quantized: the format cannot take its shape" for name in report["kept"]]
    lines += [f"  {nbytes:>16,} bytes  {name}" for name, nbytes in report["files"].items()]
    return "\n".join([*lines, f"wrote {report['target']}"])
