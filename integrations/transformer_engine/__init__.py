"""TransformerEngine: zerocast casts its tensors, through calls with its names and arguments.

`redirect()` is a context in which TransformerEngine's functions are replaced by these.
`release(model_weights)` drops the cached plans. `zerocast.verify(masters_of(model_weights))`
compares the bytes of the tensors with a cast of their masters. `present` lets FSDP2 gather the
weights of TransformerEngine's modules as its tensors.
"""

import contextlib
from collections.abc import Iterator

from zerocast.integrations import Patch, Patches

from . import host
from .gathered_weights import present
from .master_weights import cast_master_weights_to_fp8, masters_of, quantize_master_weights, release, replace_raw_data
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

_CALLS = {
    "cast_master_weights_to_fp8": cast_master_weights_to_fp8,
    "post_all_gather_processing": post_all_gather_processing,
    "quantize_master_weights": quantize_master_weights,
    "replace_raw_data": replace_raw_data,
}
_MODULES = (f"{host.TENSORS}.utils", host.TENSORS)


@contextlib.contextmanager
def redirect() -> Iterator[None]:
    """Replace four functions in TransformerEngine's modules while the context is open, for callers
    that import TransformerEngine's functions and cannot be edited.

    Enter it before the caller imports the functions: a name that was imported earlier is still
    TransformerEngine's. Raises RuntimeError for a TransformerEngine without a cast to redirect.
    """
    modules = [host.module(path) for path in _MODULES]
    patches = [
        Patch(module, name, call) for module in modules for name, call in _CALLS.items() if hasattr(module, name)
    ]
    if not any("master_weights" in patch.name for patch in patches):
        raise RuntimeError(
            f"{' and '.join(_MODULES)} have no quantize_master_weights and no cast_master_weights_to_fp8: this "
            "TransformerEngine has an API that zerocast does not support"
        )
    with Patches() as replaced:
        replaced.apply(patches)
        yield
