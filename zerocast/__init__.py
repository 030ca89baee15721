"""zerocast: FP32 master shards to NVFP4 and FP8 weights after each optimizer step, the same bytes however they are sharded.

The names below are the public surface; each is documented where it is defined.
"""

from zerocast import interrupts as _interrupts  # noqa: F401, I001 - before all that takes time to import
from zerocast import backends, fsdp2, gemm, metrics, products
from zerocast import optimizer_guard as _optimizer_guard  # noqa: F401 - torch's optimizers learn not to step weights
from zerocast import whole_weight as _  # noqa: F401 - torch's operators learn what to do with a weight
from zerocast.formats import FormatSpec, get_format
from zerocast.freshness import set_debug
from zerocast.master_weights import post_all_gather_processing, quantize_master_weights
from zerocast.model import quantize_
from zerocast.optim import ZeroAdamW, ZeroConfig
from zerocast.plan import CastPlan
from zerocast.recipe import Recipe
from zerocast.verification import verify
from zerocast.verify_report import VerificationError, VerifyReport
from zerocast.weight import QuantizedWeight

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
    "backends",
    "fsdp2",
    "gemm",
    "get_format",
    "metrics",
    "post_all_gather_processing",
    "products",
    "quantize_",
    "quantize_master_weights",
    "set_debug",
    "verify",
]
