"""`zerocast inspect`: what is in a checkpoint, and what a format makes, or would make, of its weights."""

import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from zerocast import interrupts
from zerocast.cli.files import written
from zerocast.cli.wishes import DTYPES, Dtype
from zerocast.inspection import CastStatistics, Chosen, Contents, choose, measure
from zerocast.inspection.cast_statistics import LOWEST
from zerocast.inspection.contents import nbytes_of
from zerocast.inspection.plot import plot


@dataclass(frozen=True)
class InspectConfig:
    """What to look at."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint of zerocast or of torch.distributed.checkpoint, safetensors (file, index or folder), or a file of torch.save."""
    format: str | None = None
    """Format to cast to, options inline as in fp8_block:power_of_2_scale=False. By default those stored with the checkpoint."""
    weights: tuple[str, ...] = ("*",)
    """With --format: globs on names of parameters of two or more dimensions."""
    dtype: Dtype = "bfloat16"
    """With --format: the nominal dtype, to which masters are rounded first."""
    png: Path | None = None
    """Also draw masters and casts by power of two."""
    json: bool = False
    """Print JSON."""


def inspect(config: tyro.conf.OmitArgPrefixes[InspectConfig]) -> int:
    """Show what is in a checkpoint, and by weight the amax, the shares that saturate and that are flushed to zero, and the error.

    Reads a million elements at a time, or of checkpoint folders a weight at a time. Files with hashes are compared with them first.

    Example: zerocast inspect run/checkpoints/step_00001000 --format nvfp4 --weights "*.mlp.*" --png histogram.png

    Exit status: 0, 1 for files that are damaged and masters that are not finite, 2 for a wish that cannot be met.
    """
    try:
        contents = Contents.of(config.checkpoint)
    except FileNotFoundError as error:
        return _complain(error, 2)
    except (ValueError, ImportError, OSError, pickle.UnpicklingError) as error:
        return _complain(error, 2 if isinstance(error, ImportError) else 1)
    try:
        chosen = choose(contents.entries, contents.stored, config.format, config.weights, DTYPES[config.dtype])
    except (TypeError, ValueError) as error:
        return _complain(error, 2)
    try:
        found = [_measured(contents, chosen, name) for name in contents.entries]
        if config.png and found:
            with written(config.png) as path:
                plot(found, f"{config.checkpoint}", path)
    except (OSError, ValueError) as error:
        return _complain(error, 1)
    report = _as_dict(config, contents, chosen, found)
    print(json.dumps(report, indent=1) if config.json else _text(report))
    return 1 if any(one.nonfinite for one in found) else 0


def _complain(error: Exception, status: int) -> int:
    interrupts.complain(f"zerocast inspect: {error}")
    return status


def _measured(contents: Contents, chosen: Chosen, name: str) -> CastStatistics:
    key, (fmt, dtype) = contents.masters[name], chosen.formats.get(name, (None, torch.bfloat16))
    live = name in contents.stored and fmt is not None and str(fmt) == contents.stored[name].format
    return measure(contents.source, key, fmt, dtype, contents.cast_scale(name) if live else None, name)


def _as_dict(config: InspectConfig, contents: Contents, chosen: Chosen, found: list[CastStatistics]) -> dict[str, Any]:
    manifest = contents.manifest
    masters = {"tensors": len(found), "bytes": sum(nbytes_of(contents.entries[one.name]) for one in found)}
    others = {kind: {"tensors": count, "bytes": nbytes} for kind, (count, nbytes) in contents.other.items()}
    unread = {name: str(contents.source.entries[key]) for name, key in contents.masters.items()}
    for name in contents.entries:
        del unread[name]
    return {
        "checkpoint": str(config.checkpoint),
        "checked_files": len(manifest.files) if manifest else 0,
        "torch": manifest.torch if manifest else None,
        "step": contents.step,
        "masters": masters,
        "other": others,
        "no_masters": unread,
        "kept": list(chosen.kept),
        "first_binade": LOWEST,
        "weights": [asdict(one) for one in found],
    }


def _text(report: dict[str, Any]) -> str:
    checked = (
        f"{report['checked_files']} files as their hashes say" if report["checked_files"] else "no hashes to check"
    )
    lines = [f"{report['checkpoint']}: {checked}"]
    if report["step"] is not None:
        lines.append(f"after {report['step']:,} steps")
    for kind, one in {"masters": report["masters"], **report["other"]}.items():
        lines.append(f"  {kind:<12}{one['tensors']:>8,} tensors {one['bytes'] / 2**20:>12,.1f} MiB")
    lines += [f"  {name} is {what}: not high precision" for name, what in report["no_masters"].items()]
    lines += [f"  {name} is not cast: the format cannot take its shape" for name in report["kept"]]
    width = max([4, *(len(one["name"]) for one in report["weights"])])
    head = f"{'name':<{width}}  {'shape':<16}{'format':<16}{'amax':>11}{'zero':>10}{'saturated':>11}{'flushed':>10}{'error':>10}"
    return "\n".join([*lines, "", head, *(_row(one, width) for one in report["weights"])])


def _row(one: dict[str, Any], width: int) -> str:
    shape = "x".join(map(str, one["shape"]))
    text = f"{one['name']:<{width}}  {shape:<16}{one['format']:<16}{one['amax']:>11.4g}{one['zeros']:>10.3%}"
    if one["saturated"] is not None:
        error = "-" if one["error"] is None else f"{one['error']:.3%}"
        text += f"{one['saturated']:>11.3%}{one['flushed']:>10.3%}{error:>10}"
    return text + (f"  {one['nonfinite']:,} not finite" if one["nonfinite"] else "")
