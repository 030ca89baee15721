"""post_all_gather_processing: columnwise copies of TransformerEngine's tensors from their gathered rowwise codes.

A call that finds every buffer where the call before it left them makes the copies at once, by tables that are kept.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast import backends
from zerocast.cast.columnwise import ColumnwiseCopies

from .adapters import is_quantized
from .entry import parts_of
from .hybrid import is_hybrid
from .seen import Seen
from .twin import Twin, twin_of

_Found = tuple[int, Any, Twin]  # the place in the list of a tensor that needs a copy, the tensor, its twin


class _Copies:
    """The copies of some tensors of a list, with tables of where everything lies.

    `seen` is what the last call found when it was done, None where the next one looks at every tensor.
    """

    def __init__(self, found: list[_Found], device: torch.device | None) -> None:
        self._twins = [twin for _, _, twin in found]
        self.seen: Seen | None = None
        self._places = [place for place, _, _ in found]
        self._by_adapter: dict[int, list[int]] = {}
        for row, twin in enumerate(self._twins):
            self._by_adapter.setdefault(id(twin.adapter), []).append(row)
        if device is not None:
            self._made = ColumnwiseCopies([twin.weight for twin in self._twins], backends.choose(device))

    def are_of(self, found: list[_Found]) -> bool:
        """Whether these were the tensors, at these places of the list."""
        before = zip(self._places, map(id, self._twins), strict=True)
        return list(before) == [(place, id(twin)) for place, _, twin in found]

    def make_again(self, weights: Sequence[Any]) -> None:
        """For a list that `seen` knows."""
        self._make([weights[place] for place in self._places])

    def make(self, found: list[_Found]) -> None:
        """Wherever the buffers lie now; a tensor without a copy is given one."""
        self._make([tensor for _, tensor, _ in found], anew=True)

    def _make(self, tensors: list[Any], anew: bool = False) -> None:
        if not tensors:
            return
        self._made.make()
        if anew:
            for tensor, twin in zip(tensors, self._twins, strict=True):
                twin.hand_over_columnwise(tensor)
        for rows in self._by_adapter.values():
            self._twins[rows[0]].adapter.copied([tensors[row] for row in rows])


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the first tensor of a list


@torch.no_grad()
def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columnwise copies of one tensor or a list of them, where this GPU's products read any.

    A copy that is there is written again, where it lies. Plain tensors are passed over. TypeError or ValueError for tensors that
    are not cast, and for tensors on several devices; nothing is written then.
    """
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    before: _Copies | None = _kept.get(weights[0]) if weights and isinstance(weights[0], Tensor) else None
    if before is not None and before.seen is not None and before.seen.again(weights):
        before.make_again(weights)
        return
    found = list(_copied(weights))
    devices = {twin.weight.device for _, _, twin in found}
    if len(devices) > 1:
        raise ValueError(f"the weights of one call lie on one device, got {sorted(map(str, devices))}")
    copies = _copies_of(weights, found, before, *devices)
    copies.seen = None
    copies.make(found)
    copies.seen = _seen(weights, found)


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


def _seen(weights: Sequence[Any], found: list[_Found]) -> Seen | None:
    """What another call of these weights can recognise; None where one has directions, which come and go."""
    if not all(isinstance(weight, Tensor) for weight in weights) or any(map(_has_directions, weights)):
        return None
    watched: list[tuple[str, ...]] = [()] * len(weights)
    for place, tensor, twin in found:
        watched[place] = twin.watched_by_a_copy(tensor)
    return Seen(weights, watched)


def _has_directions(weight: Any) -> bool:
    return is_quantized(weight) and is_hybrid(weight)


def _copied(weights: Any) -> Iterator[_Found]:
    """What needs a copy."""
    needed: dict[int, bool] = {}  # by adapter
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor) and not is_quantized(weight):
            continue
        try:
            for part in parts_of(weight):
                twin = twin_of(part, weight.dtype)
                key = id(twin.adapter)
                if key not in needed:
                    needed[key] = twin.adapter.copies()
                if needed[key] and twin.derives and not twin.codes_in_transpose:
                    twin.follow_columnwise(part)
                    yield index, part, twin
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"model weight {index}: {error}") from error
