"""The backends, the choice between them, and a report of both.

A backend is one module of this folder, found by its file name; ../backends/README.md is the
contract. It names the device types that it serves (`DEVICES`, None for any) and its rank among the
usable ones (`PREFERENCE`); an optional `why_not` gives a reason against a device. A backend that
cannot run here raises ImportError with the reason. The environment variable `ZEROCAST_BACKEND`
chooses one for the process; a choice that cannot be met raises.

Another package adds a backend as an entry point of the group `zerocast.backends`. It is used only
when it is requested by its name, and never chosen automatically.
"""

import functools
import importlib
import logging
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from zerocast.plugins import BACKENDS, plugins

__all__ = ["Report", "backend_names", "choose", "load", "report", "why_not"]

logger = logging.getLogger(__name__)
ENVIRONMENT_VARIABLE = "ZEROCAST_BACKEND"
# Modules of this folder that the backends share.
NO_BACKENDS = ("_C", "_cuda", "checks", "descriptor", "extension", "ops")


@functools.cache
def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, whether or not they can run on this machine: of this
    version, and of other packages.
    """
    own = _own_names()
    return *own, *plugins(BACKENDS, own)


@functools.cache
def _own_names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in NO_BACKENDS))


@functools.cache
def load(name: str) -> ModuleType:
    """Import the backend module called `name`.

    Raises ValueError for an unknown name, ImportError with the reason for a backend that cannot
    run.
    """
    own = _own_names()
    if name in own:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in plugins(BACKENDS, own):
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(backend_names())}")
    return plugins(BACKENDS, own)[name].load(needed=["DEVICES"])


def why_not(name: str, device: torch.device) -> str | None:
    """Return the reason why the backend cannot run on this device, or None if it can."""
    try:
        module = load(name)
    except ImportError as error:
        return str(error)
    if module.DEVICES is not None and device.type not in module.DEVICES:
        return f"is for {', '.join(module.DEVICES)} tensors"
    reason: str | None = module.why_not(device) if hasattr(module, "why_not") else None
    return reason


def choose(device: torch.device, preference: str | None = None) -> str:
    """Return the backend for `device`: `preference`, else the environment's, else the most
    preferred one.

    Raises ValueError for an unknown name and RuntimeError for a backend that cannot run here.
    """
    preference = preference or os.environ.get(ENVIRONMENT_VARIABLE)
    if preference:
        reason = why_not(preference, device)
        if reason:
            raise RuntimeError(f"backend {preference!r} was asked for and cannot be used on {device}: {reason}")
        return preference
    return _automatic(device.type)


@functools.cache
def _automatic(device_type: str) -> str:
    device = torch.device(device_type)
    # Finding kernels for GPUs may read the metadata of all packages, which a cast on a CPU need not
    # wait for.
    names = [name for name in _own_names() if name != "cuda" or device_type == "cuda"]
    reasons = {name: why_not(name, device) for name in names}
    usable = sorted((name for name, reason in reasons.items() if reason is None), key=lambda n: -load(n).PREFERENCE)
    if usable[0] == "reference":
        unusable = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        logger.warning("casting on %s with the slow reference backend (%s)", device_type, unusable)
    elif reasons.get(device_type):
        # The backend named after the device type is the fast one. pip hides the output of a build,
        # so this is where a user learns that the build left it out.
        text = "casting on %s with the %s backend, as the %s backend cannot be used: %s"
        logger.warning(text, device_type, usable[0], device_type, reasons[device_type])
    return str(usable[0])


@dataclass(frozen=True)
class BackendRow:
    """One backend on one device type; `reason` is empty if it is usable."""

    device: str
    backend: str
    usable: bool
    chosen: bool
    reason: str


@dataclass(frozen=True)
class LayerRow:
    """One quantized weight and the path that computes its products.

    `reason` says why the path is not one on FP8 tensor cores; it is empty for one that is.
    """

    name: str
    format: str
    path: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of `zerocast.backends.report`; `str()` makes a table of it."""

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
    """Return the backends for each device type of this machine, and the path of each layer of
    `model`.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows = tuple(_row(torch.device(device), name) for device in devices for name in backend_names())
    return Report(rows, tuple(_layers(model.named_parameters() if model else ())))


def _row(device: torch.device, name: str) -> BackendRow:
    reason = why_not(name, device)
    chosen = choose(device) == name
    return BackendRow(device.type, name, reason is None, chosen, reason or "")


def _layers(parameters: Iterable[tuple[str, Any]]) -> Iterable[LayerRow]:
    for name, parameter in parameters:
        # A DTensor wraps the local slice. Under FSDP2 a parameter is the master while its quantized
        # weight is not gathered; a master has no products.
        weight = getattr(parameter, "_local_tensor", parameter)
        if not hasattr(weight, "gemm_choice"):
            continue
        fmt, (path, reason) = weight.format, weight.gemm_choice()
        if path == "dequantize":
            path += f" to {str(weight.dtype).removeprefix('torch.')}, {choose(weight.device)} backend"
        elif path in ("block_128", "per_tensor", "per_row") and fmt.is_exact_in_fp8:
            path += f" after upcast to e4m3, {choose(weight.device)} backend"
        yield LayerRow(name, str(fmt), path or "refused", reason)
