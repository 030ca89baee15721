"""DelayedScaling: the scales and amax histories of weights whose scale comes from earlier casts.

A cast scales with `scale`, then rolls its amax into `amax_history` and computes the `scale` of the
next cast from the history (docs/formats/fp8_delayed.md). This class remembers the scale of the live
bytes (`advance`), repeats a cast (`replay`), computes the first scale (`seed`), restores the state
if a cast raises (`saved`), and saves and loads.

The tensors stay in the memory of their owner, such as the buffers of a QuantizedWeight. If they are
at equal distances in one storage (`into_flat_buffer`), each operation is one launch for any number
of weights.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from zerocast.distributed.group import Group

Buffers = Mapping[str, Tensor | None]

NOTHING = nullcontext()


class DelayedScaling:
    """The state of delayed scaling of a set of weights.

    Args:
        weights: a dict from name to a mapping with `scale`, f32[1], and `amax_history`,
            f32[amax_history_len], such as the buffers of a weight. If `amax_history` is None a host
            keeps the state, whose scale is read and never written, saved or rolled.
        device: the device of all tensors.
        unseeded: the names of weights whose scale was never set.

    Attributes:
        unseeded: the names of the weights whose next cast computes the scale from its own amax.
    """

    def __init__(self, weights: Mapping[str, Buffers], device: torch.device, unseeded: Iterable[str] = ()) -> None:
        self.unseeded = set(unseeded)
        self._cast_scale = torch.ones(len(weights), dtype=torch.float32, device=device)
        self.bind(weights)
        self.advance()

    def bind(self, weights: Mapping[str, Buffers]) -> None:
        """Use the tensors of the same weights in different storage."""
        self._weights = {name: buffers for name, buffers in weights.items() if buffers["amax_history"] is not None}
        external = {name: buffers for name, buffers in weights.items() if buffers["amax_history"] is None}
        order = [*self._weights, *external]
        self._cast_scale_of = {name: self._cast_scale[index : index + 1] for index, name in enumerate(order)}
        self._scales = _runs(self._weights.values(), "scale")
        self._histories = _runs(self._weights.values(), "amax_history")
        self._external_scales = _runs(external.values(), "scale")

    def follow_codes(self, names: Sequence[str]) -> None:
        """Find the scales with which the live codes of these weights were cast, by an earlier plan,
        so that a repeated cast gives the same bytes. Call it before the first cast.
        """
        if not names:
            return
        cast_scales = [self._cast_scale_of[name] for name in names]
        inverse = torch.cat([self._weights[name]["rowwise_scale_inv"] for name in names])  # type: ignore[misc]
        scales = found = torch.cat(cast_scales)
        # The reciprocal of a reciprocal may be a neighbour of the number.
        near = inverse.reciprocal()
        below, above = (torch.nextafter(near, torch.full_like(near, bound)) for bound in (0.0, torch.inf))
        # The last one that fits is taken: the scale itself, unless it has moved on since that cast.
        for candidate in (below, above, near, scales):
            found = torch.where(candidate.reciprocal() == inverse, candidate, found)
        torch._foreach_copy_(cast_scales, list(found.split(1)))

    def __bool__(self) -> bool:
        return bool(self._cast_scale_of)

    def cast_scale(self, name: str) -> Tensor | None:
        """Return the scale, f32[1], of the last cast of a weight; None without delayed scaling."""
        return self._cast_scale_of.get(name)

    def advance(self, skip: Tensor | None = None) -> None:
        """Record the current scales as the scales of the next cast, unless `skip`, bool[1], holds
        True.
        """
        if not self._cast_scale_of:
            return
        scales = _read([*self._scales, *self._external_scales])
        if skip is None:
            self._cast_scale.copy_(scales)
        else:
            torch.where(skip, self._cast_scale, scales, out=self._cast_scale)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Scale with the scales of the last cast while the context is open."""
        scales = _read(self._scales) if self._scales else None
        if scales is not None:
            _write(self._scales, self._cast_scale[: scales.numel()])
        try:
            yield
        finally:
            if scales is not None:
                _write(self._scales, scales)

    def saved(self) -> Callable[[], None]:
        """Return a function that restores the current state, to call if a cast raises.

        This is no context manager. Ctrl-C can arrive in the exit of one, after the cast is complete
        and before the exit has found out how the body ended.
        """
        if not self._cast_scale_of:
            return lambda: None
        tensors = [*self._scales, *self._histories, self._cast_scale]
        values, unseeded = _read(tensors), set(self.unseeded)

        def restore() -> None:
            _write(tensors, values)
            self.unseeded = set(unseeded)

        return restore

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drop the state of these weights, by default of all. Their next cast seeds it."""
        for name in self._weights if names is None else names:
            for tensor, value in zip(self._tensors(name), (1.0, 0.0, 1.0), strict=True):
                tensor.fill_(value)
            self.unseeded.add(name)

    def seed(self, roll: Callable[[], None]) -> None:
        """Scale the unseeded weights by the amaxes of the current cast. `roll` rolls all weights.
        Then the weights that were seeded before get their values back.
        """
        seeded = [tensor for name in self._weights if name not in self.unseeded for tensor in self._tensors(name)]
        values = _read(seeded) if seeded else None
        roll()
        if values is not None:
            _write(seeded, values)
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
        """Return `scale`, `amax_history` and `cast_scale` by weight: the tensors in use, for a
        reader to fill.
        """
        return {
            name: dict(zip(("scale", "amax_history", "cast_scale"), self._tensors(name), strict=True))
            for name in self._weights
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Load a saved state. Return the names of weights that it lacks, whose state is dropped.

        A history of a different length counts as missing. Without a saved `cast_scale` the live
        bytes count as cast with `scale`.
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
        return scale, history, self._cast_scale_of[name]


def _runs(buffers: Iterable[Buffers], name: str) -> list[Tensor]:
    """Return the buffers `name` as few tensors, flat or `[count, numel]`, one for each run of
    buffers at equal distances.
    """
    runs: list[list[Tensor]] = []
    for of_weight in buffers:
        tensor = of_weight[name]
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
    """Return a copy of their values, flat."""
    return torch.cat(list(map(torch.flatten, tensors)))


def _write(tensors: Sequence[Tensor], values: Tensor) -> None:
    parts = values.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
