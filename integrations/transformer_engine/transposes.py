"""post_all_gather_processing: columnwise copies of tensors from their gathered rowwise codes.

A call that finds every buffer where the call before it left them makes the copies at once, by
tables that are kept.
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
from .fingerprint import Fingerprint
from .weight_view import WeightView, view_of

# the place in the list of a tensor that needs a copy, the tensor, its view
_Found = tuple[int, Any, WeightView]


class _Copies:
    """The copies of some tensors of a list, with tables of where everything lies.

    `fingerprint` is what the last call left behind, None where the next one has to look at every
    tensor.
    """

    def __init__(self, found: list[_Found], device: torch.device | None) -> None:
        self._views = [view for _, _, view in found]
        self.fingerprint: Fingerprint | None = None
        self._places = [place for place, _, _ in found]
        self._by_adapter: dict[int, list[int]] = {}
        for row, view in enumerate(self._views):
            self._by_adapter.setdefault(id(view.adapter), []).append(row)
        if device is not None:
            self._made = ColumnwiseCopies([view.weight for view in self._views], backends.choose(device))

    def are_of(self, found: list[_Found]) -> bool:
        """True if these were the tensors, at these places of the list."""
        before = zip(self._places, map(id, self._views), strict=True)
        return list(before) == [(place, id(view)) for place, _, view in found]

    def make_again(self, weights: Sequence[Any]) -> None:
        """Make the copies of a list that the fingerprint matches."""
        self._make([weights[place] for place in self._places])

    def make(self, found: list[_Found]) -> None:
        """Wherever the buffers lie now; a tensor without a copy is given one."""
        self._make([tensor for _, tensor, _ in found], anew=True)

    def _make(self, tensors: list[Any], anew: bool = False) -> None:
        if not tensors:
            return
        self._made.make()
        if anew:
            for tensor, view in zip(tensors, self._views, strict=True):
                view.give_columnwise(tensor)
        for rows in self._by_adapter.values():
            self._views[rows[0]].adapter.copied([tensors[row] for row in rows])


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the first tensor of a list


@torch.no_grad()
def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise copies of one tensor or of a list, where this GPU reads any.

    A copy that is there is written again, where it lies. Plain tensors are passed over. TypeError
    or ValueError for tensors that are not cast, and for tensors on several devices; nothing is
    written then.
    """
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    before: _Copies | None = _kept.get(weights[0]) if weights and isinstance(weights[0], Tensor) else None
    if before is not None and before.fingerprint is not None and before.fingerprint.matches(weights):
        before.make_again(weights)
        return
    found = list(_copied(weights))
    devices = {view.weight.device for _, _, view in found}
    if len(devices) > 1:
        raise ValueError(f"the weights of one call lie on one device, got {sorted(map(str, devices))}")
    copies = _copies_of(weights, found, before, *devices)
    copies.fingerprint = None
    copies.make(found)
    copies.fingerprint = _fingerprint(weights, found)


def forget_copies() -> None:
    """Hold on to no columnwise copy that a tensor may have dropped."""
    _kept.clear()


def _copies_of(
    weights: Sequence[Any], found: list[_Found], before: _Copies | None, device: torch.device | None = None
) -> _Copies:
    if before is not None and before.are_of(found):
        return before
    copies = _Copies(found, device)
    if weights and isinstance(weights[0], Tensor):
        _kept[weights[0]] = copies
    return copies


def _fingerprint(weights: Sequence[Any], found: list[_Found]) -> Fingerprint | None:
    """A fingerprint by which another call recognises these weights.

    None where one has directions, which come and go.
    """
    if not all(isinstance(weight, Tensor) for weight in weights) or any(map(_has_directions, weights)):
        return None
    watched: list[tuple[str, ...]] = [()] * len(weights)
    for place, tensor, view in found:
        watched[place] = view.copy_attributes(tensor)
    return Fingerprint(weights, watched)


def _has_directions(weight: Any) -> bool:
    return is_quantized(weight) and is_hybrid(weight)


def _copied(weights: Any) -> Iterator[_Found]:
    """Find the tensors that need a columnwise copy."""
    needed: dict[int, bool] = {}  # by adapter
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
