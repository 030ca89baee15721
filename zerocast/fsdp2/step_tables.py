"""StepTables: the launches of a step of FusedAdamW, made for the memory of its tensors."""

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends.descriptor import Piece
from zerocast.cast.adam_update import Hyperparameters
from zerocast.cast.tables import StorageSnapshot, TableKey
from zerocast.formats import AmaxPolicy, get_format
from zerocast.formats.layout import Span
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.adam_passes import Adam8bitPass, AdamPass, SteppedShard
from zerocast.fsdp2.cast_group import CastGroup
from zerocast.fsdp2.moments_8bit import ShardedMoments
from zerocast.fsdp2.parameter import MasterParameter
from zerocast.fsdp2.weight import FSDPWeight

# A plain parameter takes the same pass as this format. Its amax is not read.
PLAIN = get_format("fp8_current"), torch.float32
_version: Callable[[Tensor], int] = operator.attrgetter("_version")

# (index of its parameter group, a parameter with a gradient, its local part).
Stepped = tuple[int, Any, Any]
# The state of an optimizer: moments and step count, by torch's names, of each parameter.
State = Mapping[Any, MutableMapping[str, Any]]


def places_of(stepped: Sequence[Stepped], state: State) -> list[list[Any]]:
    """Return what the tables of a step depend on: parameters with the index of their group, their
    addresses, the dtypes of their gradients, and the tensors of their state.
    """
    return [[index, id(p), local.data_ptr(), p.grad.dtype, *map(id, state[p].values())] for index, p, local in stepped]


class ScalarRows:
    """The rows of Adam's scalars: one for each parameter group and number of steps taken.

    Each parameter has its step count in a separate tensor. All counts of a row are the same, and a
    step reads the first one. A write to another one would be missed, so `any_written` looks at the
    version counters of all.

    Attributes:
        row_of: the row of each parameter. Fixed.
    """

    def __init__(self, stepped: Sequence[Stepped], state: State) -> None:
        """Replace the step counts in `state` by tensors on the device, of the same value."""
        device = stepped[0][1].device
        counts_taken = steps_taken([state[parameter] for _, parameter, _ in stepped])
        rows: dict[tuple[int, float], int] = {}
        self.row_of: dict[Any, int] = {}
        self._counts: list[Tensor] = []
        # The step count that is read, for each row.
        self._counts_of_rows: list[Tensor] = []
        for (group_index, parameter, _), taken in zip(stepped, counts_taken, strict=True):
            # In inference mode it would have no version counter.
            with torch.inference_mode(False):
                count = torch.full((), taken, dtype=torch.float32, device=device)
            state[parameter]["step"] = count
            self._counts.append(count)
            row = rows.setdefault((group_index, taken), len(rows))
            if row == len(self._counts_of_rows):
                self._counts_of_rows.append(count)
            self.row_of[parameter] = row
        # The index of the parameter group of each row.
        self._groups_of_rows = [group_index for group_index, _ in rows]
        self._hyperparameters = Hyperparameters(len(rows), device)
        # The version counters after the last step.
        self._versions = list(map(_version, self._counts))

    def any_written(self) -> bool:
        """Return True if a step count was written since the last step."""
        return list(map(_version, self._counts)) != self._versions

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Read the current hyperparameters (`Hyperparameters.refresh`)."""
        self._hyperparameters.refresh([param_groups[index] for index in self._groups_of_rows])

    def count_step(self) -> tuple[Tensor, Tensor]:
        """Count a step of all parameters. Return (Adam's scalars of it, f32 `[rows, 8]`; its
        number, i64 `[rows]`).
        """
        torch._foreach_add_(self._counts, 1)
        self._versions = list(map(_version, self._counts))
        counts = torch.stack(self._counts_of_rows)
        return self._hyperparameters.scalars(counts), counts.long()


@dataclass(frozen=True)
class MeasuredWeights:
    """The weights of a CastGroup whose amaxes a step leaves there for the next cast.

    Attributes:
        names: the weights.
        coded: the weights whose codes the step can write too.
        passes: the launches of the step over them.
    """

    group: CastGroup
    names: frozenset[str]
    coded: frozenset[str]
    passes: Sequence[AdamPass]


class StepTables:
    """The launches of a step over the local parts of some parameters. They serve until a tensor is
    replaced, or other parameters have gradients (`are_current`).

    Args:
        stepped: the parameters. At least one.
        state: the state of the optimizer. Its step counts are replaced.
        cast_groups: the cast groups of the prepared models that have any of the parameters.
        eight_bit: the moments in 8 bits. None if they are FP32.

    Attributes:
        places: what the tables were made for (`places_of`). Fixed.
        scalars: the scalars of a step.
        passes: all launches of a step. Fixed.
    """

    def __init__(
        self,
        stepped: Sequence[Stepped],
        state: State,
        cast_groups: Sequence[CastGroup],
        eight_bit: ShardedMoments | None,
    ) -> None:
        device = stepped[0][1].device
        self._backend = backends.choose(device)
        self._eight_bit = eight_bit
        self._cast_groups = cast_groups
        self.scalars = ScalarRows(stepped, state)
        # Only now, since the step counts were replaced.
        self.places = places_of(stepped, state)
        group_of_weight = {weight: group for group in cast_groups for weight in group.weights}
        measured: dict[CastGroup, list[Stepped]] = {group: [] for group in cast_groups}
        plain: list[Stepped] = []
        for entry in stepped:
            _, parameter, local = entry
            if not local.numel():
                continue
            if isinstance(local, MasterParameter) and self._can_measure(parameter, local.weight):
                measured[group_of_weight[local.weight]].append(entry)
            else:
                plain.append(entry)
        self._measured = [self._measure(group, entries, state) for group, entries in measured.items()]
        # The launches over parameters whose amaxes no cast reads.
        self._plain = self._step_plainly(plain, state)
        self.passes = [adam for weights in self._measured for adam in weights.passes] + self._plain
        for adam in self.passes:
            adam.freeze()
        self._memory = StorageSnapshot([tensor for adam in self.passes for tensor in adam.written()])
        # The factor of the gradients.
        self._clip = torch.ones(1, dtype=torch.float32, device=device)
        # The plain launches leave amaxes here.
        self._unread = torch.zeros(max(map(len, self._plain), default=0), dtype=torch.float32, device=device)

    def are_current(self, places: object, cast_groups: Sequence[CastGroup]) -> bool:
        """Return True if the tables serve a step of parameters at `places` (`places_of`)."""
        was_changed = places != self.places or self.scalars.any_written()
        return not (was_changed or self._memory.has_moved() or cast_groups != self._cast_groups)

    def launch(self, gradients: Mapping[AdamPass, list[Tensor]]) -> None:
        """Do the device's part of a step. `gradients` replace the gradients of some of its
        passes.
        """
        scalars, steps = self.scalars.count_step()
        if self._eight_bit is not None:
            self._eight_bit.begin()

        def run(adam: AdamPass, packed: Tensor, casts: bool = False) -> None:
            grads = gradients.get(adam)
            adam.run(adam.gradients() if grads is None else grads, scalars, steps, self._clip, packed, casts)

        for weights in self._measured:
            group = weights.group
            # A backward pass may still gather the codes of its forward pass.
            casts = group.keep_codes and torch_fsdp.backward_pass() is None
            packed = group.amaxes.begin_step(weights.names, weights.coded if casts else frozenset())
            for adam in weights.passes:
                run(adam, packed, casts and adam.casts_in_one_pass)
        for adam in self._plain:
            run(adam, self._unread)
        if self._eight_bit is not None:
            self._eight_bit.reduce()
            for adam in self.passes:
                adam.finish()

    # -- construction

    def _can_measure(self, parameter: Any, weight: FSDPWeight) -> bool:
        """Return whether the pass over a weight can leave its amaxes for the next cast."""
        if weight.format.amax_policy is AmaxPolicy.NONE:
            return False
        if self._eight_bit is None:
            return True
        # Groups of 8-bit moments must begin with the rows of the shard, which must be one run. They
        # do where only the first dimension is sharded.
        pieces = self._eight_bit.get(parameter).rows
        return len(pieces) == 1 and pieces[0][Piece.COLUMNS] == weight.geometry.columns

    def _measure(self, group: CastGroup, stepped: Sequence[Stepped], state: State) -> MeasuredWeights:
        """Make the launches over the weights of a cast group that can be measured."""
        passes: dict[object, AdamPass] = {}
        names: set[str] = set()
        coded: set[str] = set()
        for _, parameter, local in stepped:
            weight = local.weight
            name, geometry = weight.name, weight.geometry
            casts_in_one_pass = weight.format.casts_in_one_pass
            names.add(name)
            codes = None
            if casts_in_one_pass and group.keep_codes:
                coded.add(name)
                codes = group.kept_codes(name)
            key = TableKey(self._backend, weight.format, geometry.nominal)
            adam = self._pass_of(passes, parameter, key, casts_in_one_pass)
            adam.add(
                SteppedShard(
                    parameter=parameter,
                    master=_flat_master(local),
                    state=state[parameter],
                    row=self.scalars.row_of[parameter],
                    shape=geometry.shape(geometry.cast_rows),
                    span=geometry.span,
                    amaxes=group.amaxes.offsets[name],
                    flag=group.amaxes.flag_of[name],
                    codes=codes,
                )
            )
        return MeasuredWeights(group, frozenset(names), frozenset(coded), list(passes.values()))

    def _step_plainly(self, stepped: Sequence[Stepped], state: State) -> list[AdamPass]:
        """Make the launches over parameters whose amaxes no cast reads."""
        passes: dict[object, AdamPass] = {}
        for _, parameter, local in stepped:
            master = _flat_master(local)
            adam = self._pass_of(passes, parameter, TableKey(self._backend, *PLAIN), casts=False)
            adam.add(
                SteppedShard(
                    parameter=parameter,
                    master=master,
                    state=state[parameter],
                    row=self.scalars.row_of[parameter],
                    # One row, which has one amax.
                    shape=(1, master.numel()),
                    span=Span(0, master.numel()),
                    amaxes=(len(adam), -1),
                )
            )
        return list(passes.values())

    def _pass_of(self, passes: dict[object, AdamPass], parameter: Any, key: TableKey, casts: bool) -> AdamPass:
        """Return the pass that takes a parameter, and add it to `passes` if it is new."""
        device, kind = parameter.device, (key, casts, parameter.grad.dtype)
        if self._eight_bit is None:
            return passes.setdefault(kind, AdamPass(key, device, casts))
        cut_groups = self._eight_bit.cut_groups(parameter)
        return passes.setdefault((*kind, cut_groups), Adam8bitPass(key, device, casts, self._eight_bit, cut_groups))


def _flat_master(local: Any) -> Tensor:
    """Return the local part of a parameter, flat and plain."""
    plain: Tensor = local.plain if isinstance(local, MasterParameter) else local
    return plain.detach().view(-1)


def steps_taken(states: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the step number of each state. The CPU waits once for each device."""
    steps = [state.get("step", 0.0) for state in states]
    by_device: dict[torch.device, list[int]] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Tensor):
            by_device.setdefault(step.device, []).append(index)
    for indices in by_device.values():
        read = torch.stack([steps[index].float().view(()) for index in indices]).tolist()
        for index, step in zip(indices, read, strict=True):
            steps[index] = step
    return list(map(float, steps))
