"""`zerocast export`: masters to a folder that transformers and inference engines load."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zerocast.cli import interrupts
from zerocast.cli.progress import Progress
from zerocast.inspection import Contents, choose
from zerocast.inspection.convert import tensors
from zerocast.inspection.format_selection import DTYPES, Dtype
from zerocast.serve.hugging_face import write_hf
from zerocast.serve.safetensors_writer import SHARD_BYTES


@dataclass(frozen=True)
class ExportConfig:
    """The options of `zerocast export`."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint of zerocast or of torch.distributed.checkpoint, safetensors (file, index or
    folder), or a file of torch.save.
    """
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """A new folder to write."""
    naming: Literal["bf16", "compressed-tensors", "modelopt", "deepseek"]
    """What the reader expects; bf16 dequantizes."""
    model: Path | None = None
    """config.json of the model, or a folder with it, whose tokenizer files are copied; by default
    the source.
    """
    format: str | None = None
    """Format to cast --weights to. By default the formats stored with a checkpoint."""
    weights: tuple[str, ...] = ()
    """With --format: globs on names of parameters of two or more dimensions."""
    share_amax: Literal["llama"] | None = None
    """With --format: weights that engines fuse take one tensor amax."""
    dtype: Dtype = "bfloat16"
    """Nominal dtype, in which other tensors are written."""
    allow_unequal_scales: bool = False
    """Log, and do not refuse, global scales that differ among weights which engines fuse."""
    shard_bytes: int = SHARD_BYTES
    """Most bytes in a safetensors file; about as many are held in memory."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        """Raise ValueError for options that need others."""
        if self.format is not None and not self.weights:
            raise ValueError(
                "--format needs --weights, such as --weights '*.mlp.*': embeddings and heads often stay as they are"
            )
        if self.share_amax is not None and self.format is None:
            raise ValueError("--share-amax needs --format: the weights of a run share what they shared in training")


def export(config: ExportConfig) -> int:
    """Write a folder that transformers and inference engines load, from masters.

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
    contents = Contents.of(config.source, whole_names=True)
    chosen = choose(contents.entries, contents.stored, config.format, config.weights, DTYPES[config.dtype])
    described = config.model or config.source
    progress = Progress(len(contents.entries))
    names = list(contents.entries)
    source = tensors(contents, names, chosen, DTYPES[config.dtype], progress.say, config.share_amax)
    try:
        files = write_hf(
            source,
            None,
            config.target,
            config.naming,
            config=described,
            files_from=described if described.is_dir() else None,
            dtype=DTYPES[config.dtype],
            allow_unequal_scales=config.allow_unequal_scales,
            shard_bytes=config.shard_bytes,
        )
    finally:
        progress.clear()
    return {
        "source": str(config.source),
        "target": str(config.target),
        "naming": config.naming,
        "tensors": len(names),
        "quantized": {name: str(fmt) for name, (fmt, _) in chosen.formats.items()},
        "kept": list(chosen.kept),
        "files": {file.name: file.stat().st_size for file in files},
    }


def _text(report: dict[str, Any]) -> str:
    count, quantized = report["tensors"], len(report["quantized"])
    lines = [f"{count:,} tensors: {quantized:,} cast to their formats, {count - quantized:,} as they are"]
    lines += [f"{name} is not quantized: the format cannot take its shape" for name in report["kept"]]
    lines += [f"  {nbytes:>16,} bytes  {name}" for name, nbytes in report["files"].items()]
    return "\n".join([*lines, f"wrote {report['target']}"])
