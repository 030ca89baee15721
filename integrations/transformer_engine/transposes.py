"""post_all_gather_processing: columnwise copies of tensors from their gathered rowwise codes.

The tables of addresses that the kernels read are cached per list of tensors. If all buffers are at
the same addresses as in the last call, the kernels are launched without new tables.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast import backends
from zerocast.cast.columnwise import ColumnwiseCopies

from .adapters import is_quantized
from .entry import is_hybrid, parts_of
from .plan_cache import Fingerprint
from .weight_view import WeightView, view_of

# A tensor that needs a copy: (its position in the caller's list, the tensor, its view).
_Copied = tuple[int, Any, WeightView]


class _Copies:
    """The columnwise copies of those tensors of a list that need one.

    Attributes:
        fingerprint: the tensors and buffers of the last call. None if the next call has to inspect
            every tensor.
    """

    def __init__(self, copied: list[_Copied], device: torch.device | None) -> None:
        self._views = [view for _, _, view in copied]
        self.fingerprint: Fingerprint | None = None
        # The positions of the tensors in the caller's list.
        self._indices = [index for index, _, _ in copied]
        # Rows of `_views` by adapter, since `Adapter.copied` handles its tensors in one launch.
        self._by_adapter: dict[int, list[int]] = {}
        for row, view in enumerate(self._views):
            self._by_adapter.setdefault(id(view.adapter), []).append(row)
        if device is not None:
            self._columnwise = ColumnwiseCopies([view.weight for view in self._views], backends.choose(device))

    def are_of(self, copied: list[_Copied]) -> bool:
        """Return True if these are the tensors of this object, at the same list positions."""
        own = zip(self._indices, map(id, self._views), strict=True)
        return list(own) == [(index, id(view)) for index, _, view in copied]

    def make_again(self, weights: Sequence[Any]) -> None:
        """Make the copies of a list that the fingerprint matches."""
        self._make([weights[index] for index in self._indices])

    def make(self, copied: list[_Copied]) -> None:
        """Make the copies in the current buffers. A tensor without a copy gets one."""
        self._make([tensor for _, tensor, _ in copied], gives_copies=True)

    def _make(self, tensors: list[Any], gives_copies: bool = False) -> None:
        if not tensors:
            return
        self._columnwise.make()
        if gives_copies:
            for tensor, view in zip(tensors, self._views, strict=True):
                view.give_columnwise(tensor)
        for rows in self._by_adapter.values():
            self._views[rows[0]].adapter.copied([tensors[row] for row in rows])


# The last _Copies by the first tensor of a list.
_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()


@torch.no_grad()
def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise copies of one tensor or of a list, if this GPU's products read any.

    An existing copy is overwritten in place. Plain tensors are skipped. Raises TypeError or
    ValueError for tensors that are not cast, and for tensors on several devices; nothing is written
    then.
    """
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    cached: _Copies | None = _cache.get(weights[0]) if weights and isinstance(weights[0], Tensor) else None
    if cached is not None and cached.fingerprint is not None and cached.fingerprint.matches(weights):
        cached.make_again(weights)
        return
    copied = list(_copied(weights))
    devices = {view.weight.device for _, _, view in copied}
    if len(devices) > 1:
        raise ValueError(f"the weights of one call are on one device, got {sorted(map(str, devices))}")
    copies = _copies_of(weights, copied, cached, *devices)
    # No fingerprint while the copies are made: if that raises, the next call inspects all tensors.
    copies.fingerprint = None
    copies.make(copied)
    copies.fingerprint = _fingerprint(weights, copied)


def forget_copies() -> None:
    """Drop all references to columnwise copies, so that a tensor that drops its own frees it."""
    _cache.clear()


def _copies_of(
    weights: Sequence[Any], copied: list[_Copied], cached: _Copies | None, device: torch.device | None = None
) -> _Copies:
    """Return the cached copies if they are of these tensors, else new ones."""
    if cached is not None and cached.are_of(copied):
        return cached
    copies = _Copies(copied, device)
    if weights and isinstance(weights[0], Tensor):
        _cache[weights[0]] = copies
    return copies


def _fingerprint(weights: Sequence[Any], copied: list[_Copied]) -> Fingerprint | None:
    """Return a fingerprint by which a later call recognizes these weights.

    None with a Hybrid tensor among them, whose directions come and go.
    """
    for weight in weights:
        if not isinstance(weight, Tensor) or (is_quantized(weight) and is_hybrid(weight)):
            return None
    watched: list[tuple[str, ...]] = [()] * len(weights)
    for index, tensor, view in copied:
        watched[index] = view.copy_attributes(tensor)
    return Fingerprint(weights, watched)


def _copied(weights: Any) -> Iterator[_Copied]:
    """Yield the tensors that need a columnwise copy."""
    # Cached per adapter: `Adapter.copies` asks TransformerEngine about the GPU, and once per call
    # is enough.
    needed: dict[int, bool] = {}
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor) and not is_quantized(weight):
            continue
        try:
            for part in parts_of(weight):
                view = view_of(part, weight.dtype)
                key = id(view.adapter)
                if key not in needed:
                    needed[key] = view.adapter.copies()
                if needed[key] and (view.derives or view.shares) and not view.codes_in_transpose:
                    view.share(part)
                    view.locate_columnwise(part)
                    yield index, part, view
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"model weight {index}: {error}") from error
