"""Which backends and product paths are usable here, which are chosen, and why, as a value that prints as a table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zerocast import backends


@dataclass(frozen=True)
class BackendRow:
    """One backend on one device type; `reason` says why not where it is not usable."""

    device: str
    backend: str
    usable: bool
    chosen: bool
    reason: str


@dataclass(frozen=True)
class LayerRow:
    """One quantized weight of the model and how `linear` runs with it; `reason` says why not on tensor cores."""

    name: str
    format: str
    path: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `zerocast.backends.report` found."""

    backends: tuple[BackendRow, ...]
    layers: tuple[LayerRow, ...]

    def __str__(self) -> str:
        lines = ["device  backend     state"]
        for row in self.backends:
            state = "chosen" if row.chosen else "usable" if row.usable else f"not usable: {row.reason}"
            lines.append(f"{row.device:<8}{row.backend:<12}{state}")
        lines += [f"{row.name}  {row.format}  {row.path}{row.reason and f' ({row.reason})'}" for row in self.layers]
        return "\n".join(lines)


def report(model: torch.nn.Module | None = None) -> Report:
    """The backends for each device type of this machine and, for a model, the path that each quantized weight's products take."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows = tuple(_row(torch.device(device), name) for device in devices for name in backends.backend_names())
    return Report(rows, tuple(_layers(model.named_parameters() if model else ())))


def _row(device: torch.device, name: str) -> BackendRow:
    reason = backends.why_not(name, device)
    chosen = backends.choose(device) == name
    return BackendRow(device.type, name, reason is None, chosen, reason or "")


def _layers(parameters: Iterable[tuple[str, Any]]) -> Iterable[LayerRow]:
    for name, parameter in parameters:
        fmt = getattr(parameter, "format", None)
        if fmt is None:
            continue
        path, reason = parameter.gemm_choice()
        if path == "dequantize":
            path += f" to {str(parameter.dtype).removeprefix('torch.')}, {backends.choose(parameter.device)} backend"
        yield LayerRow(name, str(fmt), path or "refused", reason)
