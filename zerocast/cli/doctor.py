"""`zerocast doctor`: shows the usable backends and formats and why others are not, and compares
every backend's bytes.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from zerocast import backends, torch_names
from zerocast.bench.machine import describe
from zerocast.cli import print_error
from zerocast.cli.options import DoctorConfig
from zerocast.cli.self_test import Outcome, self_test
from zerocast.formats import format_names, get_format
from zerocast.formats.recipe import Recipe
from zerocast.quantize import quantize_


def doctor(config: DoctorConfig) -> int:
    """Run `zerocast doctor`; returns the exit status."""
    report: dict[str, Any] = {}
    try:
        for section, content in _examine(config):
            report[section] = content
            if not config.json:
                print("\n".join(LINES[section](content)), flush=True)
    except (RuntimeError, ValueError) as error:
        # For example, ZEROCAST_BACKEND names a backend that cannot run.
        print_error(f"zerocast doctor: {error}")
        return 2
    if config.json:
        print(json.dumps(report, indent=2))
    return 0 if all(outcome["ok"] for outcome in report["self_test"]) else 1


def _examine(config: DoctorConfig) -> Iterator[tuple[str, Any]]:
    """Yield the sections of the report, each as soon as it is known."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    yield "devices", {str(device): describe(device) for device in devices}
    yield "no_gpu", _why_no_gpu() if len(devices) == 1 else None
    yield "communication", {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl")}
    problems = _problems_of_torch()
    if problems:
        yield "torch", problems
    names, unusable = _usable_formats()
    if unusable:
        yield "formats", unusable
    report = backends.report(_one_layer_a_format(names, devices[-1]))
    yield "backends", [asdict(row) for row in report.backends]
    yield "products", [asdict(row) for row in report.layers]
    seed = secrets.randbits(31) if config.seed is None else config.seed
    yield "seed", seed
    outcomes: list[Outcome] = []
    for device in devices:
        outcomes += self_test(device, config.seconds / len(devices), seed)
    yield "self_test", [{**asdict(outcome), "ok": outcome.ok} for outcome in outcomes]
    yield "verdict", _verdict({row.device: row.backend for row in report.backends if row.chosen}, outcomes)


def _problems_of_torch() -> list[str]:
    """List the private names that the installed torch lacks, and whether this release was never
    tested.
    """
    missing = torch_names.missing_names((*torch_names.FSDP2, *torch_names.OTHERS))
    untested = torch_names.untested_release()
    return [*(f"this torch lacks {name}" for name in missing), *([untested] if untested else [])]


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} with CUDA {torch.version.cuda} sees no device"


def _verdict(chosen: dict[str, str], outcomes: list[Outcome]) -> str:
    wrong = [f"{outcome.backend} on {outcome.device}" for outcome in outcomes if not outcome.ok]
    if wrong:
        return f"do not train with {', '.join(wrong)}: its bytes differ from the reference"
    used = ", ".join(f"{backend} on {device}" for device, backend in chosen.items())
    return f"right bytes; casts run with {used}"


def _usable_formats() -> tuple[list[str], list[str]]:
    """Return the names of the formats that have codes, and the reasons why formats of other
    packages cannot be used.
    """
    usable = []
    reasons = []
    for name in format_names():
        try:
            if get_format(name).element:
                usable.append(name)
        except Exception as error:
            # A format of another package can raise anything.
            reasons.append(f"the format {name} cannot be used: {error}")
    return usable, reasons


def _one_layer_a_format(names: list[str], device: torch.device) -> torch.nn.Module:
    layers = {name: torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16, device=device) for name in names}
    return quantize_(torch.nn.ModuleDict(layers), Recipe({f"{name}.*": name for name in names}))


def _devices(properties_of: dict[str, dict[str, Any]]) -> Iterator[str]:
    for device, properties in properties_of.items():
        yield device
        yield from (f"  {name:<20}{value}" for name, value in properties.items() if value is not None)


def _backends(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "backends"
    for row in rows:
        state = "chosen" if row["chosen"] else "usable" if row["usable"] else f"not usable: {row['reason']}"
        yield f"  {row['device']:<8}{row['backend']:<12}{state}"


def _products(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "products with a bf16 weight of 256 x 256"
    for row in rows:
        reason = f" ({row['reason']})" if row["reason"] else ""
        yield f"  {row['format']:<14}{row['path']}{reason}"


def _outcomes(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        rounds = f"{row['rounds']} round{'s' if row['rounds'] > 1 else ''}"
        result = f"the same bytes in {rounds}, {row['nbytes']:,} compared" if row["ok"] else f"WRONG: {row['problem']}"
        yield f"  {row['device']:<8}{row['backend']:<12}{result}"
    if not rows:
        yield "  no backend other than the reference is usable"


# The text of each section of the report.
LINES: dict[str, Callable[[Any], Iterable[str]]] = {
    "devices": _devices,
    "no_gpu": lambda reason: [f"no GPU was found: {reason}"] if reason else ["GPUs were found"],
    "communication": lambda available: ["communication: " + ", ".join(name for name in available if available[name])],
    "torch": lambda problems: problems,
    "formats": lambda reasons: reasons,
    "backends": _backends,
    "products": _products,
    "seed": lambda seed: [f"self-test against the reference, seed {seed}"],
    "self_test": _outcomes,
    "verdict": lambda verdict: [f"verdict: {verdict}"],
}
