"""redirect: TransformerEngine's own names lead to zerocast's calls, for callers whose import lines
are not ours to change.
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
    """Within, the four names in TransformerEngine's modules are zerocast's; afterwards as before.

    A caller that imported a name before keeps what it has: enter this first. RuntimeError where
    TransformerEngine has no cast to redirect.
    """
    modules = [host.module(path) for path in _MODULES]
    found = [(module, name) for module in modules for name in _CALLS if hasattr(module, name)]
    if not any("master_weights" in name for _, name in found):
        raise RuntimeError(
            f"{' and '.join(_MODULES)} have no quantize_master_weights and no cast_master_weights_to_fp8: this "
            "TransformerEngine has another shape"
        )
    before = [(module, name, getattr(module, name)) for module, name in found]
    for module, name in found:
        setattr(module, name, _CALLS[name])
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
