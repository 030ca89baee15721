"""Trainers need no stand-in on the CPU, only to be installed; what they leave in the process is taken back."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist

_PACKAGES = ("accelerate", "lightning", "peft", "transformers")
_MISSING = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
WHY_NOT = f"{', '.join(_MISSING)} not installed: make hosts readers" if _MISSING else ""


@contextlib.contextmanager
def host_on_cpu() -> Iterator[None]:
    """Restore the environment and the process group, which Fabric makes and keeps."""
    from accelerate.state import AcceleratorState

    ours = not dist.is_initialized()
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            if ours and dist.is_initialized():
                dist.destroy_process_group()
