"""DelayedScaling: scales and amax histories of weights that are cast with a scale of their past.

A cast scales with `scale`, then rolls its amax into `amax_history` and computes the `scale` of the
next cast from that (docs/formats/fp8_delayed.md). This class does what has to happen around it:
remember the scale of the live bytes (`advance`), repeat a cast (`replay`), find a first scale
(`seed`), put everything back when a cast raises (`rollback`), save and load.

The tensors stay where their owner has them: in the buffers of a QuantizedWeight, or anywhere. Where
they are at equal distances in one storage (`flat_buffer.py` puts them so), each operation is one
launch for any number of weights.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zerocast.distributed.group import Group

Buffers = Mapping[str, Tensor | None]

NOTHING = nullcontext()


class DelayedScaling:
    """The state of delayed scaling of a set of weights.

    Args:
        weights: by name a mapping with `scale`, f32[1], and `amax_history`, f32[amax_history_len],
            such as the buffers of a weight. Where `amax_history` is None a host keeps the state:
            its scale is read and never written, saved or rolled.
        device: that of all tensors.
        unseeded: the names of weights whose scale was never set.

    `unseeded` names the weights whose next cast computes the scale from its own amax.
    """

    def __init__(self, weights: Mapping[str, Buffers], device: torch.device, unseeded: Iterable[str] = ()) -> None:
        self.unseeded = set(unseeded)
        self._cast_scale = torch.ones(len(weights), dtype=torch.float32, device=device)
        self.bind(weights)
        self.advance()

    def bind(self, weights: Mapping[str, Buffers]) -> None:
        """Use these tensors from now on: the state of the same weights, in other memory."""
        ours = {name: buffers for name, buffers in weights.items() if buffers["amax_history"] is not None}
        self._weights = ours
        external = [buffers for name, buffers in weights.items() if name not in ours]
        order = [*ours, *(name for name in weights if name not in ours)]
        self._places = {name: self._cast_scale[index : index + 1] for index, name in enumerate(order)}
        self._scales = _runs(ours.values(), "scale")
        self._histories = _runs(ours.values(), "amax_history")
        self._external_scales = _runs(external, "scale")

    def __bool__(self) -> bool:
        return bool(self._places)

    def cast_scale(self, name: str) -> Tensor | None:
        """The scale, f32[1], that a weight's bytes were cast with; None without delayed scaling."""
        return self._places.get(name)

    def advance(self, skip: Tensor | None = None) -> None:
        """Note that a cast by the present scales follows, unless `skip`, bool[1], holds True."""
        if not self._places:
            return
        scales = _read([*self._scales, *self._external_scales])
        if skip is None:
            self._cast_scale.copy_(scales)
        else:
            torch.where(skip, self._cast_scale, scales, out=self._cast_scale)

    def replay(self) -> AbstractContextManager[None]:
        """Scale with the scales of the last cast in here; the present ones are there again after
        it.
        """
        return self._replay() if self._places else NOTHING

    @contextlib.contextmanager
    def _replay(self) -> Iterator[None]:
        scales = _read(self._scales)
        _write(self._scales, self._cast_scale[: scales.numel()])
        try:
            yield
        finally:
            _write(self._scales, scales)

    def rollback(self) -> AbstractContextManager[None]:
        """Put everything back if the body raises, as if this cast had never begun."""
        return self._rollback() if self._places else NOTHING

    @contextlib.contextmanager
    def _rollback(self) -> Iterator[None]:
        tensors = [*self._scales, *self._histories, self._cast_scale]
        values, unseeded = _read(tensors), set(self.unseeded)
        try:
            yield
        except BaseException:
            _write(tensors, values)
            self.unseeded = unseeded
            raise

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drop the state of these weights, by default of all: their next cast seeds it."""
        for name in self._weights if names is None else names:
            for tensor, value in zip(self._tensors(name), (1.0, 0.0, 1.0), strict=True):
                tensor.fill_(value)
            self.unseeded.add(name)

    def seed(self, roll: Callable[[], None]) -> None:
        """Scale the unseeded weights by the amaxes of the present cast: `roll` rolls all
        weights, then those that were seeded before get their values back.
        """
        known = [tensor for name in self._weights if name not in self.unseeded for tensor in self._tensors(name)]
        values = _read(known) if known else None
        roll()
        if values is not None:
            _write(known, values)
        for name in self.unseeded:
            scale, _, cast_scale = self._tensors(name)
            cast_scale.copy_(scale)
        self.unseeded.clear()

    def broadcast(self, group: Group) -> None:
        """Give all ranks of `group` the state of its rank 0."""
        if self._weights:
            tensors = [*self._scales, *self._histories, self._cast_scale]
            values = _read(tensors)
            group.broadcast(values, "delayed scales")
            _write(tensors, values)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """`scale`, `amax_history` and `cast_scale` by weight: the tensors in use, for a reader
        to fill.
        """
        return {
            name: dict(zip(("scale", "amax_history", "cast_scale"), self._tensors(name), strict=True))
            for name in self._weights
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Go on from a saved state; returns the names of weights that it lacks, which are
        forgotten.

        A history of another length counts as lacking. Without a saved `cast_scale` the live bytes
        count as cast with `scale`.
        """
        lacking = []
        for name in self._weights:
            saved, (scale, history, cast_scale) = state.get(name, {}), self._tensors(name)
            if "scale" not in saved or "amax_history" not in saved or saved["amax_history"].shape != history.shape:
                lacking.append(name)
                continue
            scale.copy_(saved["scale"])
            history.copy_(saved["amax_history"])
            cast_scale.copy_(saved.get("cast_scale", saved["scale"]))
            self.unseeded.discard(name)
        self.forget(lacking)
        return lacking

    def _tensors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        scale, history = self._weights[name]["scale"], self._weights[name]["amax_history"]
        assert scale is not None and history is not None, name
        return scale, history, self._places[name]


def _runs(buffers: Iterable[Buffers], name: str) -> list[Tensor]:
    """The buffers `name` as few tensors, flat or `[count, numel]`: one for each run at equal
    distances.
    """
    runs: list[list[Tensor]] = []
    for each in buffers:
        tensor = each[name]
        assert tensor is not None
        if runs and _continues(runs[-1], tensor):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return [_as_one(run) for run in runs]


def _continues(run: Sequence[Tensor], tensor: Tensor) -> bool:
    last = run[-1]
    if tensor.untyped_storage().data_ptr() != last.untyped_storage().data_ptr() or tensor.numel() != last.numel():
        return False
    distance = tensor.storage_offset() - last.storage_offset()
    return distance >= tensor.numel() and (
        len(run) == 1 or distance == last.storage_offset() - run[-2].storage_offset()
    )


def _as_one(run: Sequence[Tensor]) -> Tensor:
    first, numel = run[0].detach(), run[0].numel()
    distance = run[1].storage_offset() - first.storage_offset() if len(run) > 1 else numel
    if distance == numel:
        return first.as_strided((len(run) * numel,), (1,))
    together = first.as_strided((len(run), numel), (distance, 1))
    return together.view(-1) if numel == 1 else together


def _read(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of their values, flat."""
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def _write(tensors: Sequence[Tensor], values: Tensor) -> None:
    parts = values.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
