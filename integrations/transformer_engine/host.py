"""The modules of TransformerEngine that are read here.

A feature is detected by the presence of its names, never by a version number.
"""

import functools
import importlib
from typing import Any

from zerocast import integrations

TENSORS = "transformer_engine.pytorch.tensor"
UTILS = "transformer_engine.pytorch.utils"
CONSTANTS = "transformer_engine.pytorch.constants"
QUANTIZATION = "transformer_engine.pytorch.quantization"
MODULES = "transformer_engine.pytorch.module.base"

known_api = functools.partial(
    integrations.known_api, "this TransformerEngine has an API that zerocast does not support (supported: 2.20)"
)


def module(path: str) -> Any:
    """Return a module of TransformerEngine. Raises ImportError with the reason if it cannot be
    imported.
    """
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ImportError(f"looked for {path} of TransformerEngine: {error}") from error


def reads_transposes() -> bool:
    """Return True if FP8 products on this GPU read a transposed copy, by TransformerEngine's own
    test.
    """
    with known_api():
        return not module(UTILS).is_non_tn_fp8_gemm_supported()
