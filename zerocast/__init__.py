"""zerocast: casts sharded FP32 master weights to FP8 or 4-bit weights after each optimizer step.

The bytes do not depend on how the masters are sharded. `help(name)` describes each of these names.

    quantize_, Recipe, get_format, FormatSpec   which weights of a model take which format
    ZeroAdamW, ZeroConfig                       AdamW over sharded masters that casts and gathers
    ZeroMuon                                    Muon over matrices that are each owned by one rank
    fsdp2                                       the same weights under torch's fully_shard
    CastPlan                                    a cast of masters that your optimizer steps
    switch                                      changes formats in the middle of a run
    quantize_master_weights,
    post_all_gather_processing                  TransformerEngine's calls
    QuantizedWeight, set_debug                  a weight in its format; every read of it checked
    verify, VerifyReport, VerificationError     compares live bytes with an unsharded cast
    export, serve                               files, and live bytes, for inference
    metrics                                     measurements during a run
    backends, gemm                              which code casts; how products are computed

Each name is imported when it is first used, so a script waits only for the modules it uses, and the
command line answers --help immediately.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerocast import backends, export, fsdp2, gemm, metrics
    from zerocast.cast.plan import CastPlan
    from zerocast.cast.switch import switch
    from zerocast.formats import FormatSpec, get_format
    from zerocast.formats.recipe import Recipe
    from zerocast.master_weights import post_all_gather_processing, quantize_master_weights
    from zerocast.optim import ZeroAdamW, ZeroConfig, ZeroMuon
    from zerocast.quantize import quantize_
    from zerocast.verification.verify import VerificationError, VerifyReport, verify
    from zerocast.weight import QuantizedWeight
    from zerocast.weight.validity import set_debug

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


# The modules of the names that are not modules themselves.
_HOMES = {
    "CastPlan": "cast.plan",
    "FormatSpec": "formats",
    "QuantizedWeight": "weight",
    "Recipe": "formats.recipe",
    "VerificationError": "verification.verify",
    "VerifyReport": "verification.verify",
    "ZeroAdamW": "optim",
    "ZeroConfig": "optim",
    "ZeroMuon": "optim",
    "get_format": "formats",
    "post_all_gather_processing": "master_weights",
    "quantize_": "quantize",
    "quantize_master_weights": "master_weights",
    "set_debug": "weight.validity",
    "switch": "cast.switch",
    "verify": "verification.verify",
}


def __getattr__(name: str) -> Any:
    """Return a public name, or a module of the package, that nothing has asked for yet."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        # The next use finds it without this call.
        globals()[name] = value
        return value
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """Return the public names, for `help` and completion. Subpackages are found by import."""
    return [*__all__, "serve", *(name for name in globals() if name.startswith("__"))]
