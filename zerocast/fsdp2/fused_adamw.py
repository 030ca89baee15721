"""FusedAdamW: the fused step of ZeroAdamW for FSDP2: AdamW over local shards, with the amaxes of the next cast in the same pass.

Any optimizer works under FSDP2; a step of this one saves the cast a reading of all masters, gives the bits of ZeroAdamW's step, and
keeps its state under the keys of torch.optim.AdamW, so that checkpoints go from one to the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.cast.hyperparameters import Hyperparameters
from zerocast.formats import FormatSpec, get_format
from zerocast.formats.layout import Span
from zerocast.fsdp2.amax_reduction import CastGroup
from zerocast.fsdp2.manager import CastManager, guard_of
from zerocast.fsdp2.parameter import MasterParameter
from zerocast.fsdp2.prepare import managers_behind
from zerocast.weight.write_guard import transaction

Kind = tuple[FormatSpec, torch.dtype]
PLAIN: Kind = get_format("fp8_current"), torch.float32  # a plain parameter takes the same pass; nobody reads its amax


@dataclass(frozen=True)
class AdamShard:
    """What a rank holds of one parameter: flat f32 tensors of the elements `span` of a matrix `shape`.

    `grad` gives the gradient of now, `row` is the parameter's row of the scalars, `place` where its amaxes go, rowwise and of an
    own columnwise grid.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Callable[[], Tensor]
    row: int
    shape: tuple[int, int]
    span: Span
    place: tuple[int, int]


class AdamPass:
    """The shards of weights of one format and nominal dtype, none of them empty."""

    def __init__(self, backend: str, fmt: FormatSpec, nominal: torch.dtype, shards: Sequence[AdamShard]) -> None:
        self._head, self._nominal = (backend, str(fmt)), nominal
        self._grads = [shard.grad for shard in shards]
        self._masters = [shard.master for shard in shards]
        self._exp_avgs, self._exp_avg_sqs = [s.exp_avg for s in shards], [s.exp_avg_sq for s in shards]
        device = shards[0].master.device
        rows = [_row(index, shard) for index, shard in enumerate(shards)]
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        self._groups = torch.tensor([shard.row for shard in shards], dtype=torch.int64).to(device)

    def run(self, scalars: Tensor, clip: Tensor, packed: Tensor) -> None:
        """One step of all shards; their amaxes go into `packed`, which holds zeros there."""
        ops.adam_amax(
            *self._head,
            nominal=self._nominal,
            masters=self._masters,
            grads=[grad() for grad in self._grads],
            exp_avgs=self._exp_avgs,
            exp_avg_sqs=self._exp_avg_sqs,
            table=self._table,
            groups=self._groups,
            scalars=scalars,
            clip=clip,
            packed=packed,
            skip=None,
        )


def _row(index: int, shard: AdamShard) -> list[int]:
    row = [-1] * WIDTH
    row[Column.ROWS], row[Column.COLUMNS] = shard.shape
    row[Column.START], row[Column.NUMEL] = shard.span.start, shard.span.numel
    row[Column.MASTER_BASE], row[Column.MASTER_OFFSET] = index, 0
    row[Column.ROW_AMAX], row[Column.COLUMN_AMAX] = shard.place
    return row


@dataclass(frozen=True)
class _Measured:
    """The passes that leave their amaxes in a cast group, and the names of the weights in them."""

    group: CastGroup
    names: frozenset[str]
    passes: Sequence[AdamPass]


class FusedAdamW(torch.optim.Optimizer):
    """AdamW over FP32 parameters, prepared ones of `zerocast.fsdp2` and others, in one launch a weight format.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.

    Made after `fully_shard`, as any optimizer. A parameter without gradient is left as it is. The update is that of ZeroAdamW, to
    the bit (`zerocast/backends/README.md`); a gradient that is not finite is not looked for. Raises TypeError for parameters that
    are not FP32 and ValueError for parameters on several devices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"masters are float32, a parameter is {parameter.dtype}: leave precision to FSDP2's policy"
                )
        devices = {parameter.device for parameter in parameters}
        if len(devices) > 1:
            raise ValueError(f"the parameters of one optimizer lie on one device, got {sorted(map(str, devices))}")
        self._bound: list[list[int]] = []  # what the tables were made for
        self._cast_groups: list[CastGroup] = []
        self._managers: list[CastManager] = []
        self._outside_of_graphs = torch.compiler.disable(FusedAdamW._step)  # here, since it imports the compiler

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of masters and moments; returns what `closure` returned, or None.

        What raises before masters are written changes nothing. What raises later leaves an optimizer and a model that say so at
        every call, and cannot be saved, until a state is loaded through `zerocast.fsdp2.TrainingState`.
        """
        return self._outside_of_graphs(self, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        guard_of(self).check_complete()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bind()
        if not self._bound:
            return loss
        self._hyperparameters.refresh([self.param_groups[index] for index in self._groups_of_rows])
        for manager in self._managers:
            manager.make_due(
                self
            )  # also of a step that raises half-way: all ranks cast before they gather, and are told
        guards = [guard_of(self), *(manager.guard for manager in self._managers)]
        with transaction(guards, "an optimizer step"):
            self._update()
        return loss

    def _update(self) -> None:
        """The device's part of a step."""
        for manager in self._managers:
            manager.forget_old_amaxes()
        self._clocks += 1
        scalars = self._hyperparameters.scalars(self._clocks)
        for measured in self._measured:
            packed = measured.group.amaxes.begin_step(measured.names)
            for one in measured.passes:
                one.run(scalars, self._clip, packed)
        for one in self._plain:
            one.run(scalars, self._clip, self._unread)
        for manager in self._managers:
            manager.after_step()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's. RuntimeError after a step or a load that raised half-way."""
        guard_of(self).check_complete()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of this class, or of torch.optim.AdamW."""
        self._bound = []
        super().load_state_dict(dict(state_dict))

    def _bind(self) -> None:
        """Tables of where everything lies, made anew when any of it was replaced or other parameters have gradients."""
        indexed = [(index, p) for index, group in enumerate(self.param_groups) for p in group["params"]]
        indexed = [(index, p) for index, p in indexed if p.grad is not None]
        locals_ = [(p, getattr(p, "_local_tensor", p)) for _, p in indexed]
        self._managers = managers_behind(local for _, local in locals_)
        for manager in self._managers:
            manager.bind()
            manager.measuring.add(self)
        groups = [group for manager in self._managers for group in manager.cast_groups]
        if self._places(locals_) != self._bound or groups != self._cast_groups:
            self._bound = []  # whatever raises from here on is begun anew
            self._rows(indexed)
            self._build(locals_, groups)
            self._cast_groups, self._bound = groups, self._places(locals_)

    def _places(self, locals_: list[tuple[Any, Tensor]]) -> list[list[int]]:
        """What the tables depend on: parameters, where they lie, and the tensors of their state."""
        return [[id(p), _plain(t).data_ptr(), *map(id, self.state[p].values())] for p, t in locals_]

    def _rows(self, indexed: list[tuple[int, Any]]) -> None:
        """A row of scalars for each parameter group and number of steps taken, with a clock that its parameters share."""
        states = [self.state[parameter] for _, parameter in indexed]
        for state, (_, parameter) in zip(states, indexed, strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)
        rows: dict[tuple[int, float], int] = {}
        self._row = {}
        for (index, parameter), taken in zip(indexed, _steps_taken(states), strict=True):
            self._row[parameter] = rows.setdefault((index, taken), len(rows))
        device = indexed[0][1].device if indexed else torch.device("cpu")
        self._clocks = torch.tensor([taken for _, taken in rows], device=device)
        for parameter, row in self._row.items():
            self.state[parameter]["step"] = self._clocks[row]
        self._groups_of_rows = [index for index, _ in rows]
        self._hyperparameters = Hyperparameters(len(rows), device)
        self._clip = torch.ones(1, device=device)

    def _build(self, locals_: list[tuple[Any, Tensor]], groups: list[CastGroup]) -> None:
        backend = backends.choose(self._clip.device)
        group_of = {id(weight): group for group in groups for weight in group.weights}
        plain: list[AdamShard] = []
        found: dict[int, dict[Kind, list[tuple[str, AdamShard]]]] = {id(group): {} for group in groups}
        for parameter, local in locals_:
            if not isinstance(local, MasterParameter):
                size = local.numel()
                if size:
                    plain.append(self._shard(parameter, local, (1, size), Span(0, size), (len(plain), -1)))
                continue
            weight, geometry = local.weight, local.weight.geometry
            group = group_of[id(weight)]
            if geometry.span.numel:
                shape = geometry.cast_rows, geometry.columns
                place = group.amaxes.places[weight.name]
                shard = self._shard(parameter, weight.master, shape, geometry.span, place)
                kind = weight.format, geometry.nominal
                found[id(group)].setdefault(kind, []).append((weight.name, shard))
        self._measured = []
        for group in groups:
            kinds = found[id(group)]
            names = frozenset(name for members in kinds.values() for name, _ in members)
            passes = [AdamPass(backend, *kind, [shard for _, shard in members]) for kind, members in kinds.items()]
            self._measured.append(_Measured(group, names, passes))
        self._plain = [AdamPass(backend, *PLAIN, plain)] if plain else []
        self._unread = torch.zeros(len(plain), device=self._clip.device)

    def _shard(
        self, parameter: Any, master: Tensor, shape: tuple[int, int], span: Span, place: tuple[int, int]
    ) -> AdamShard:
        state = self.state[parameter]
        exp_avg, exp_avg_sq = (_flat(state[moment]) for moment in ("exp_avg", "exp_avg_sq"))
        row = self._row[parameter]
        return AdamShard(
            master.detach().view(-1), exp_avg, exp_avg_sq, lambda: _flat(parameter.grad), row, shape, span, place
        )


def _steps_taken(states: Sequence[Mapping[str, Any]]) -> list[float]:
    """The step number of each state, read from each device at once: the host waits for it."""
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


def _plain(local: Tensor) -> Tensor:
    return local.plain if isinstance(local, MasterParameter) else local


def _flat(tensor: Any) -> Tensor:
    """The local part of a tensor, which DTensor may still be waiting for."""
    local = getattr(tensor, "_local_tensor", tensor)
    return _plain(local if type(local) in (Tensor, MasterParameter) else tensor.to_local()).view(-1)
