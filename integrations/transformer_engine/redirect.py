"""redirect: replace TransformerEngine's functions by zerocast's, for callers that import
TransformerEngine's and cannot be edited.
"""

import contextlib
from collections.abc import Iterator

from . import host
from .master_weights import cast_master_weights_to_fp8, quantize_master_weights
from .raw_data import replace_raw_data
from .transposes import post_all_gather_processing

_CALLS = {
    "cast_master_weights_to_fp8": cast_master_weights_to_fp8,
    "post_all_gather_processing": post_all_gather_processing,
    "quantize_master_weights": quantize_master_weights,
    "replace_raw_data": replace_raw_data,
}
_MODULES = (f"{host.TENSORS}.utils", host.TENSORS)


@contextlib.contextmanager
def redirect() -> Iterator[None]:
    """Replace four functions in TransformerEngine's modules while the context is open.

    Enter it before the caller imports the functions: a name that was imported earlier still is
    TransformerEngine's. RuntimeError for a TransformerEngine without a cast to redirect.
    """
    modules = [host.module(path) for path in _MODULES]
    replaced = [(module, name) for module in modules for name in _CALLS if hasattr(module, name)]
    if not any("master_weights" in name for _, name in replaced):
        raise RuntimeError(
            f"{' and '.join(_MODULES)} have no quantize_master_weights and no cast_master_weights_to_fp8: this "
            "TransformerEngine has another shape"
        )
    before = [(module, name, getattr(module, name)) for module, name in replaced]
    for module, name in replaced:
        setattr(module, name, _CALLS[name])
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
