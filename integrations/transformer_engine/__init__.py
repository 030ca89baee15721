"""TransformerEngine: zerocast casts its tensors, through calls with its names and arguments.

`redirect()` is a context in which TransformerEngine's functions are replaced by these.
`release(model_weights)` drops the plans that are cached between calls.
`zerocast.verify(masters_of(model_weights))` compares the bytes of the tensors with a cast of their
masters. `present` lets FSDP2 gather the weights of TransformerEngine's modules as its tensors.
"""

from . import host
from .gathered_weights import present
from .master_weights import cast_master_weights_to_fp8, quantize_master_weights, release
from .raw_data import replace_raw_data
from .redirect import redirect
from .sources import masters_of
from .transposes import post_all_gather_processing

# Without TransformerEngine, importing this package raises, and not the first call of it.
host.module(host.TENSORS)

__all__ = [
    "cast_master_weights_to_fp8",
    "masters_of",
    "post_all_gather_processing",
    "present",
    "quantize_master_weights",
    "redirect",
    "release",
    "replace_raw_data",
]
