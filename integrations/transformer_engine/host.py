"""The modules of TransformerEngine that are read here.

A feature is detected by the presence of its names, never by a version number.
"""

import importlib
from collections.abc import Iterable
from typing import Any

TENSORS = "transformer_engine.pytorch.tensor"
UTILS = "transformer_engine.pytorch.utils"
CONSTANTS = "transformer_engine.pytorch.constants"
QUANTIZATION = "transformer_engine.pytorch.quantization"
MODULES = "transformer_engine.pytorch.module.base"


def module(path: str) -> Any:
    """Return a module of TransformerEngine. Raises ImportError with the reason if it cannot be
    imported.
    """
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ImportError(f"looked for {path} of TransformerEngine: {error}") from error


def require(owner: Any, names: Iterable[str]) -> None:
    """Raise RuntimeError with the missing names, unless `owner` has all of `names`."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(
            f"{type(owner).__name__} has no {', '.join(missing)}: this TransformerEngine has an API that zerocast does not "
            "support (supported: 2.20)"
        )


def reads_transposes() -> bool:
    """Return True if FP8 products on this GPU read a transposed copy, by TransformerEngine's own
    test.
    """
    utils = module(UTILS)
    if not hasattr(utils, "is_non_tn_fp8_gemm_supported"):
        raise RuntimeError(
            f"{UTILS} has no is_non_tn_fp8_gemm_supported: this TransformerEngine has an unsupported API"
        )
    return not utils.is_non_tn_fp8_gemm_supported()
