"""The backends and the choice between them. One module a backend, found by its file name; ../backends/README.md is the contract.

A backend module says for which devices it is (`DEVICES`, None for any), how much it is preferred (`PREFERENCE`) and, where that is
not all, what keeps it from a device (`why_not`). One that cannot run here fails at import and says why. `ZEROCAST_BACKEND` names
one for the whole process; a wish that cannot be met raises.
"""

import functools
import importlib
import logging
import os
import pkgutil
from types import ModuleType

import torch

logger = logging.getLogger(__name__)
ENVIRONMENT_VARIABLE = "ZEROCAST_BACKEND"
NO_BACKENDS = ("_C", "descriptor", "extension", "ops", "report")  # what lies beside them and is shared by them


@functools.cache
def backend_names() -> tuple[str, ...]:
    """The backends that this version has, usable here or not."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in NO_BACKENDS))


@functools.cache
def load(name: str) -> ModuleType:
    """The backend module called `name`; ValueError for an unknown one, ImportError with the reason for an unusable one."""
    if name not in backend_names():
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(backend_names())}")
    return importlib.import_module(f"{__name__}.{name}")


def why_not(name: str, device: torch.device) -> str | None:
    """None when the backend runs on this device, else the reason that it does not."""
    try:
        module = load(name)
    except ImportError as error:
        return str(error)
    if module.DEVICES is not None and device.type not in module.DEVICES:
        return f"is for {', '.join(module.DEVICES)} tensors"
    reason: str | None = module.why_not(device) if hasattr(module, "why_not") else None
    return reason


def choose(device: torch.device, wish: str | None = None) -> str:
    """The backend for tensors on `device`: `wish`, else the environment's, else the most preferred usable one.

    Raises ValueError for an unknown wish and RuntimeError for one that cannot run here.
    """
    wish = wish or os.environ.get(ENVIRONMENT_VARIABLE)
    if wish:
        reason = why_not(wish, device)
        if reason:
            raise RuntimeError(f"backend {wish!r} was asked for and cannot be used on {device}: {reason}")
        return wish
    return _automatic(device.type)


@functools.cache
def _automatic(device_type: str) -> str:
    device = torch.device(device_type)
    reasons = {name: why_not(name, device) for name in backend_names()}
    usable = sorted((name for name, reason in reasons.items() if reason is None), key=lambda n: -load(n).PREFERENCE)
    if usable[0] == "reference":
        unusable = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        logger.warning("casting on %s with the slow reference backend (%s)", device_type, unusable)
    return str(usable[0])


from zerocast.backends.report import Report, report  # noqa: E402  (it asks the functions above)

__all__ = ["Report", "backend_names", "choose", "load", "report", "why_not"]
