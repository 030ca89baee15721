"""zerocast: FP32 master shards to NVFP4 and FP8 weights after each optimizer step.

The bytes do not depend on how the masters are sharded. `help` of any of these names says more.

    quantize_, Recipe, get_format, FormatSpec   which weights of a model take which format
    ZeroAdamW, ZeroConfig                       AdamW over sharded masters that casts and gathers
    ZeroMuon                                    Muon over matrices that ranks own in whole
    fsdp2                                       the same weights under torch's fully_shard
    CastPlan                                    a cast of masters that your optimizer steps
    switch                                      other formats in the middle of a run
    quantize_master_weights,
    post_all_gather_processing                  TransformerEngine's calls
    QuantizedWeight, set_debug                  a weight in its format; every read of it checked
    verify, VerifyReport, VerificationError     live bytes against an unsharded cast
    export, serve                               files, and live bytes, for inference
    metrics                                     what a run measures
    backends, gemm                              who casts here; how products are computed

What needs torch's DTensors, FSDP2 or checkpoints is imported when it is first asked for: these
take two seconds, which a script that only casts need not wait for.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from zerocast import backends, gemm
from zerocast.cast.plan import CastPlan
from zerocast.cast.switch import switch
from zerocast.formats import FormatSpec, get_format
from zerocast.formats.recipe import Recipe
from zerocast.master_weights import post_all_gather_processing, quantize_master_weights
from zerocast.quantize import quantize_
from zerocast.verification.report import VerificationError, VerifyReport
from zerocast.verification.verify import verify
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import set_debug

if TYPE_CHECKING:
    from zerocast import export, fsdp2, metrics
    from zerocast.optim import ZeroAdamW, ZeroConfig, ZeroMuon

__version__ = "0.1.0"

__all__ = [
    "CastPlan",
    "FormatSpec",
    "QuantizedWeight",
    "Recipe",
    "VerificationError",
    "VerifyReport",
    "ZeroAdamW",
    "ZeroConfig",
    "ZeroMuon",
    "backends",
    "export",
    "fsdp2",
    "gemm",
    "get_format",
    "metrics",
    "post_all_gather_processing",
    "quantize_",
    "quantize_master_weights",
    "set_debug",
    "switch",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The optimizers, and any module of the package that nothing has imported yet."""
    if name in ("ZeroAdamW", "ZeroConfig", "ZeroMuon"):
        return getattr(importlib.import_module("zerocast.optim"), name)
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """The public names, for `help` and completion; the rooms of the package are found by import."""
    return [*__all__, "serve", *(name for name in globals() if name.startswith("__"))]
