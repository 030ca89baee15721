"""`zerocast export`: export masters to a folder for engines, to safetensors or to a checkpoint."""

import fnmatch
import json
import pickle
from collections.abc import Sequence
from typing import Any

from zerocast.checkpoint.store import Location, as_location, local_path
from zerocast.checkpoint.whole_folder import sizes_of
from zerocast.cli import print_error
from zerocast.cli.options import ExportConfig
from zerocast.cli.output import Progress
from zerocast.inspection import DTYPES, Chosen, Contents, choose
from zerocast.serve.from_masters import Reading, cast_tensors, write_checkpoint
from zerocast.serve.hugging_face import write_hf
from zerocast.serve.write import SHARD_BYTES, write_safetensors


def export(config: ExportConfig) -> int:
    """Run `zerocast export`; returns the exit status."""
    try:
        report = _exported(config)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        print_error(f"zerocast export: {error}")
        return 2
    print(json.dumps(report, indent=1) if config.json else _text(report))
    return 0


def _exported(config: ExportConfig) -> dict[str, Any]:
    target = as_location(config.target)
    contents = Contents.read(config.source, whole_names=config.to == "hf")
    names = _names(config, contents)
    entries = {name: contents.entries[name] for name in names}
    chosen = choose(entries, contents.stored, config.format, config.weights, DTYPES[config.dtype])
    progress = Progress(len(names))
    try:
        _write(config, target, contents, names, chosen, progress.say)
    finally:
        progress.clear()
    return {
        "source": config.source,
        "target": config.target,
        "to": config.to,
        "naming": None if config.to == "checkpoint" else config.naming,
        "dtype": config.written_dtype,
        "tensors": len(names),
        "quantized": {name: str(fmt) for name, (fmt, _) in chosen.formats.items()},
        "kept": list(chosen.kept),
        "files": dict(sorted(sizes_of(target).items())),
    }


def _names(config: ExportConfig, contents: Contents) -> list[str]:
    """Return the names of the tensors to write.

    Raises ValueError for a tensor that is not a high-precision weight. An export to hf leaves such
    a tensor out, since it compares the others with the model anyway.
    """
    names = [name for name in contents.masters if not any(fnmatch.fnmatchcase(name, glob) for glob in config.ignore)]
    if config.to == "hf":
        return [name for name in names if name in contents.entries]
    for name in names:
        if name not in contents.entries:
            entry = contents.source.entries[contents.masters[name]]
            raise ValueError(f"{name} is {entry}, not a high-precision weight: skip it with --ignore")
    return names


def _write(
    config: ExportConfig, target: Location, contents: Contents, names: Sequence[str], chosen: Chosen, reading: Reading
) -> None:
    dtype = DTYPES[config.written_dtype]
    if config.to == "checkpoint":
        write_checkpoint(contents, names, chosen, target, dtype, reading)
        return
    shard_bytes = SHARD_BYTES if config.shard_bytes is None else config.shard_bytes
    source = cast_tensors(contents, names, chosen, dtype, reading, config.share_amax)
    if config.to == "safetensors":
        write_safetensors(source, target, config.naming, shard_bytes)
        return
    model = config.model or local_path(config.source, "pass the model's config.json with --model")
    write_hf(
        source,
        None,
        target,
        config.naming,
        config=model,
        files_from=model if model.is_dir() else None,
        dtype=dtype,
        allow_unequal_scales=config.allow_unequal_scales,
        shard_bytes=shard_bytes,
    )


def _text(report: dict[str, Any]) -> str:
    count, quantized = report["tensors"], len(report["quantized"])
    if report["to"] == "checkpoint":
        lines = [f"{count:,} masters in {report['dtype']}; formats are recorded for {quantized:,} of them"]
    else:
        lines = [f"{count:,} tensors: {quantized:,} cast to their formats, {count - quantized:,} in {report['dtype']}"]
    lines += [f"{name} is not quantized: the format does not support its shape" for name in report["kept"]]
    lines += [f"  {nbytes:>16,} bytes  {name}" for name, nbytes in report["files"].items()]
    return "\n".join([*lines, f"wrote {report['target']}"])
