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
from zerocast.cast.hyperparameters import Hyperparameters
from zerocast.formats import FormatSpec, get_format
from zerocast.formats.layout import Span
from zerocast.fsdp2 import torn
from zerocast.fsdp2.adam_pass import AdamPass, AdamShard
from zerocast.fsdp2.amax_group import AmaxGroup
from zerocast.fsdp2.master_parameter import MasterParameter

Kind = tuple[FormatSpec, torch.dtype]
PLAIN: Kind = get_format("fp8_current"), torch.float32  # a plain parameter takes the same pass; nobody reads its amax


@dataclass(frozen=True)
class _Measured:
    """The passes that leave their amaxes in an amax group, and the names of the weights in them."""

    group: AmaxGroup
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
        self._amax_groups: list[AmaxGroup] = []
        self._casts: list[Any] = []
        self._outside_of_graphs = torch.compiler.disable(FusedAdamW._step)  # here, since it imports the compiler

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of masters and moments; returns what `closure` returned, or None.

        What raises before masters are written changes nothing. What raises later leaves an optimizer and a model that say so at
        every call, and cannot be saved, until a state is loaded through `zerocast.fsdp2.TrainingState`.
        """
        return self._outside_of_graphs(self, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        torn.check_complete([self])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bind()
        if not self._bound:
            return loss
        self._hyperparameters.refresh([self.param_groups[index] for index in self._groups_of_rows])
        for casts in self._casts:
            casts.make_due(self)  # also of a step that raises half-way: all ranks cast before they gather, and are told
        with torn.writing("an optimizer step", [self, *self._casts]):
            self._update()
        return loss

    def _update(self) -> None:
        """The device's part of a step."""
        for casts in self._casts:
            casts.before_measuring()
        self._clocks += 1
        scalars = self._hyperparameters.scalars(self._clocks)
        for measured in self._measured:
            packed = measured.group.measuring(measured.names)
            for one in measured.passes:
                one.run(scalars, self._clip, packed)
        for one in self._plain:
            one.run(scalars, self._clip, self._unread)
        for casts in self._casts:
            casts.after_measuring()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's. RuntimeError after a step or a load that raised half-way."""
        torn.check_complete([self])
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
        all_casts = {id(t.owner.casts): t.owner.casts for _, t in locals_ if isinstance(t, MasterParameter)}
        for casts in all_casts.values():
            casts.bind()
            casts.measuring.add(self)
        self._casts = list(all_casts.values())
        groups = [group for casts in self._casts for group in casts.groups]
        if self._places(locals_) != self._bound or groups != self._amax_groups:
            self._bound = []  # whatever raises from here on is begun anew
            self._rows(indexed)
            self._build(locals_, groups)
            self._amax_groups, self._bound = groups, self._places(locals_)

    def _places(self, locals_: list[tuple[Any, Tensor]]) -> list[list[int]]:
        """What the tables depend on: parameters, where they lie, and the tensors of their state."""
        return [[id(p), _plain(t).data_ptr(), *map(id, self.state[p].values())] for p, t in locals_]

    def _rows(self, indexed: list[tuple[int, Any]]) -> None:
        """A row of scalars for each parameter group and number of steps taken, with a clock that its parameters share."""
        rows: dict[tuple[int, float], int] = {}
        self._row = {}
        for index, parameter in indexed:
            state = self.state[parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)
            taken = float(state.get("step", 0.0))
            self._row[parameter] = rows.setdefault((index, taken), len(rows))
        device = indexed[0][1].device if indexed else torch.device("cpu")
        self._clocks = torch.tensor([taken for _, taken in rows], device=device)
        for parameter, row in self._row.items():
            self.state[parameter]["step"] = self._clocks[row]
        self._groups_of_rows = [index for index, _ in rows]
        self._hyperparameters = Hyperparameters(len(rows), device)
        self._clip = torch.ones(1, device=device)

    def _build(self, locals_: list[tuple[Any, Tensor]], groups: list[AmaxGroup]) -> None:
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
            owner: Any = local.owner
            weight = owner.shard
            kinds, place = found[id(group_of[id(weight)])], group_of[id(weight)].places[weight.name]
            if weight.span.numel:
                shape = weight.cast_rows, weight.columns
                shard = self._shard(parameter, weight.master, shape, weight.span, place)
                kinds.setdefault((weight.format, weight.nominal), []).append((weight.name, shard))
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


def _plain(local: Tensor) -> Tensor:
    return local.plain if isinstance(local, MasterParameter) else local


def _flat(tensor: Any) -> Tensor:
    """The local part of a tensor, which DTensor may still be waiting for."""
    local = getattr(tensor, "_local_tensor", tensor)
    return _plain(local if type(local) in (Tensor, MasterParameter) else tensor.to_local()).view(-1)
