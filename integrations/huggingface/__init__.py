"""Hugging Face: accelerate's Accelerator and transformers' Trainer with ZeroAdamW.

Importing this package imports accelerate; `Trainer` imports transformers where it is first used.
"""

import importlib
from typing import Any

from .accelerator import Accelerator

__all__ = ["Accelerator", "Trainer"]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return importlib.import_module(".trainer", __name__).Trainer  # transformers takes seconds to import
