"""`zerocast doctor`: shows what is usable here and why, and compares every backend's bytes."""

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro

from zerocast import backends, interrupts
from zerocast.bench.machine import describe
from zerocast.cli.self_test import Outcome, self_test
from zerocast.formats import format_names, get_format
from zerocast.formats.recipe import Recipe
from zerocast.quantize import quantize_


@dataclass(frozen=True)
class DoctorConfig:
    """The options of `zerocast doctor`."""

    json: bool = False
    """Print JSON."""
    seconds: float = 10.0
    """How long to compare backends with the reference; each makes at least one round."""
    seed: int | None = None
    """Seed of the random inputs, by default a new one. A reported problem names the seed that
    repeats it.
    """


def doctor(config: tyro.conf.OmitArgPrefixes[DoctorConfig]) -> int:
    """Show versions, devices, the backends that are chosen and why, and compare every usable
    backend with the reference.

    Example: zerocast doctor --seconds 30

    Exit status: 0 if every usable backend gives the bytes of the reference, 1 if one does not, 2
    for options that cannot be met.
    """
    try:
        report = _examine(config)
    except (RuntimeError, ValueError) as error:  # such as ZEROCAST_BACKEND naming one that cannot run
        interrupts.complain(f"zerocast doctor: {error}")
        return 2
    print(json.dumps(report, indent=2) if config.json else _text(report))
    return 0 if all(outcome["ok"] for outcome in report["self_test"]) else 1


def _examine(config: DoctorConfig) -> dict[str, Any]:
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    found = backends.report(_one_layer_a_format(devices[-1]))
    seed = secrets.randbits(31) if config.seed is None else config.seed
    each = config.seconds / len(devices)
    outcomes = [outcome for device in devices for outcome in self_test(device, each, seed)]
    return {
        "devices": {str(device): describe(device) for device in devices},
        "communication": {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl")},
        "backends": [asdict(row) for row in found.backends],
        "products": [asdict(row) for row in found.layers],
        "seed": seed,
        "self_test": [_as_dict(outcome) for outcome in outcomes],
    }


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "ok": outcome.ok}


def _one_layer_a_format(device: torch.device) -> torch.nn.Module:
    names = [name for name in format_names() if get_format(name).element]
    layers = {name: torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16, device=device) for name in names}
    return quantize_(torch.nn.ModuleDict(layers), Recipe({f"{name}.*": name for name in names}))


def _text(report: dict[str, Any]) -> str:
    lines = []
    for device, properties in report["devices"].items():
        lines += [device, *(f"  {name:<20}{value}" for name, value in properties.items() if value is not None)]
    lines.append("communication: " + ", ".join(name for name, there in report["communication"].items() if there))
    lines.append("backends")
    for row in report["backends"]:
        state = "chosen" if row["chosen"] else "usable" if row["usable"] else f"not usable: {row['reason']}"
        lines.append(f"  {row['device']:<8}{row['backend']:<12}{state}")
    lines.append("products with a bf16 weight of 256 x 256")
    for row in report["products"]:
        reason = f" ({row['reason']})" if row["reason"] else ""
        lines.append(f"  {row['format']:<14}{row['path']}{reason}")
    lines.append(f"self-test against the reference, seed {report['seed']}")
    for o in report["self_test"]:
        said = (
            f"the same bytes in {o['rounds']} rounds, {o['nbytes']:,} compared" if o["ok"] else f"WRONG: {o['problem']}"
        )
        lines.append(f"  {o['device']:<8}{o['backend']:<12}{said}")
    if not report["self_test"]:
        lines.append("  no backend beside the reference is usable")
    return "\n".join(lines)
