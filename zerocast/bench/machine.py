"""The machine of a measurement: hardware, driver and package versions, as plain data."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("zerocast", "triton", "transformer_engine", "torchao", "numpy")
QUERY = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")


def describe(device: torch.device) -> dict[str, str | int | None]:
    """Return hardware names, sizes in bytes and versions; None for a package that is not
    installed.
    """
    description: dict[str, str | int | None] = {
        "device": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description |= {
            "device": properties.name,
            "host": _processor(),
            "memory": properties.total_memory,
            "l2": properties.L2_cache_size,
            "compute capability": f"{properties.major}.{properties.minor}",
            **_driver(device),
        }
    # This version includes the name of the build, which the package's version lacks.
    description["torch"] = str(torch.__version__)
    return description | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver(device: torch.device) -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [tool, f"--id={identity}", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    values = [value.strip() for value in answer.stdout.split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
