"""The state of an optimizer as a dictionary of tensors keyed by parameter name. All ranks have the
same keys.

    model.<name>                                   f32 master, logical shape
    optim.state.<name>.{exp_avg,exp_avg_sq,step}   moments in the dtype in use; step is f32[]
    optim.state.<name>.{exp_avg_scale,...}         f32, with codes (ZeroConfig.state="compact")
    optim.state.<name>.momentum_buffer             f32 or codes, for a parameter that Muon updates
    optim.state.<name>.never_stepped               bool[], in place of moments; FSDP2 saves it
    optim.param_groups.<name>.{lr,...}             f64[]
    zerocast.<name>.{scale,amax_history,cast_scale}   delayed scaling; optional on load

With one rank the tensors are ordinary views. With several ranks each tensor has this rank's part
(`TensorShard`). The state has no quantized bytes, since they are cast from the masters. Moments
that were saved in one dtype can be loaded into the other: bf16 into f32 exactly, f32 into bf16 with
rounding to nearest even. Moments in 8 bits are in the state as FP32 copies, which `load_state_dict`
quantizes: those that are codes stay the same codes.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerocast.cast.plan import CastPlan
from zerocast.checkpoint.checkpointed import SavedMoments
from zerocast.checkpoint.moments import SCALES
from zerocast.checkpoint.torch_checkpoint import TensorShard
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.bucket import Bucket, Slot
from zerocast.distributed.group import Group
from zerocast.formats.layout import MOMENT_GROUP, Span
from zerocast.optim.flat_masters import FlatMasters, fields_of
from zerocast.optim.saved_state import (
    NEVER_STEPPED,
    STEP,
    check_moments,
    check_names,
    check_not_kept,
    check_step,
    hyperparameters,
    loaded_hyperparameters,
    never_stepped,
    problem_of,
)
from zerocast.optim.step_counts import StepCounts
from zerocast.optim.update_rule import rule_of

logger = logging.getLogger(__name__)


STATE_WRITTEN = (
    "{} of a ZeroAdamW or ZeroMuon changes nothing, since its moments are in flat shards: to reset or replace moments, call "
    "load_state_dict() with a changed copy of state_dict()"
)


class StateByName(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer that keeps its moments in flat shards.

    `state[parameter]` has copies of its moments and of the step count, as `state_dict` has them
    under its name. Writes to them change nothing. Entries cannot be set or removed. Iteration finds
    no parameter: trainers iterate to move the state to a device.

    torch's `get_optimizer_state_dict` would conclude from an empty state that the optimizer was
    never stepped, and step it. It evaluates `if optimizer.state` first, which raises here.
    """

    def __init__(self, moments_of: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self._moments_of = moments_of

    def __missing__(self, parameter: Any) -> dict[str, Any]:
        """Return the copies for a parameter. Raises KeyError unless it is a parameter of the
        optimizer.
        """
        return self._moments_of(parameter)

    def __bool__(self) -> bool:
        """Raise RuntimeError, since neither True nor False is right."""
        raise RuntimeError(
            "a ZeroAdamW or ZeroMuon keeps no state by parameter: torch's get_optimizer_state_dict and set_optimizer_state_dict "
            "would step it. Call its own state_dict() and load_state_dict(), or zerocast.optim.save and load"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError for a method that sets or removes entries."""
        raise RuntimeError(STATE_WRITTEN.format("a change of optimizer.state"))

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class ZeroState:
    """Reads and writes the state of one optimizer."""

    def __init__(
        self,
        buckets: list[Bucket],
        masters: FlatMasters,
        plan: CastPlan,
        counts: StepCounts,
        param_groups: list[dict[str, Any]],
        group: Group,
        is_compact: bool,
    ) -> None:
        # True if states hold codes and scales of moments in 8 bits, unless a reader asks for FP32.
        self._is_compact = is_compact
        self._slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._masters, self._plan, self._counts = masters, plan, counts
        self._param_groups, self._group = param_groups, group

    def as_dict(self, kept: SavedMoments | None = None) -> dict[str, Any]:
        """Return the current state; tensors are views of it, scalars copies. With the moments
        `kept` of a checkpoint, a parameter that was never stepped there has its mark.
        """
        model, state, groups = {}, {}, {}
        is_compact = self._is_compact if kept is None else _has_scales(kept)
        for name, (bucket, slot) in self._slots.items():
            views = {field: self._leaf(*part) for field, part in self._parts(name, is_compact).items()}
            model[name] = views.pop("master")
            count = {} if bucket.storage.single_owner else {STEP: self._step_of(slot)}
            state[name] = never_stepped() if NEVER_STEPPED in (kept or {}).get(name, {}) else {**views, **count}
            group = self._param_groups[slot.param_group]
            groups[name] = hyperparameters(group, rule_of(group))
        delayed = self._plan.delayed.state_dict()
        return {"model": model, "optim": {"state": state, "param_groups": groups}, "zerocast": delayed}

    def moments_of(self, parameter: Any) -> dict[str, Any]:
        """Return copies of the moments and the step count of a parameter. Raises KeyError for
        others.
        """
        for bucket, slot in self._slots.values():
            if slot.parameter is parameter:
                span, owned = self._masters.state(bucket, slot)
                shape = tuple(slot.parameter.shape)
                copies = {field: self._leaf(flat.clone(), span, shape) for field, flat in owned.items()}
                del copies["master"]
                return copies if bucket.storage.single_owner else {**copies, STEP: self._step_of(slot)}
        raise KeyError(parameter)

    def _step_of(self, slot: Slot) -> Tensor:
        """Return the step count of a parameter, f32[]."""
        return self._counts.of_groups[slot.param_group].float()

    def masters_of(self, flat: Tensor) -> dict[str, Any]:
        """Return views of a flat f32 tensor that has the layout of the masters, by parameter
        name.
        """
        views = {}
        for name, (bucket, slot) in self._slots.items():
            span, start = bucket.owned(slot, self._group.rank)
            views[name] = self._leaf(flat[start : start + span.numel], span, tuple(slot.parameter.shape))
        return views

    def load_masters(self, saved: Mapping[str, Any], flat: Tensor) -> None:
        """Fill a flat f32 tensor, which has the layout of the masters, from a result of
        `masters_of`. Raises ValueError on every rank, with nothing changed, if it does not fit.
        """
        problem = problem_of(lambda: self._check_tensors(saved), "optimizer")
        validate_across_ranks(self._group, [], problem, what="loads an average")
        for name, (bucket, slot) in self._slots.items():
            span, start = bucket.owned(slot, self._group.rank)
            _copy(flat[start : start + span.numel], saved[name], span)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError on every rank if a state does not fit on any rank, or if only some ranks
        load codes. Collective.
        """
        problem = problem_of(lambda: self._check(state), "optimizer")
        settings = {} if problem else {"moments as codes": _has_scales(state["optim"]["state"])}
        validate_across_ranks(self._group, [], problem, "loads a state", settings)

    def check_numbers(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, on this rank only, for impossible step counts or hyperparameters."""
        for steps in self._steps(state).values():
            for name, step in steps.items():
                check_step(name, step)
            if len(counts := set(steps.values())) > 1:
                raise ValueError(
                    f"one step count is needed for all parameters of a group, the state has {sorted(counts)[:4]}: put parameters "
                    "that were added later into a separate group"
                )
        self._loaded_groups(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same parameters that was checked."""
        filled = {}
        is_compact = _has_scales(state["optim"]["state"])
        for name in self._slots:
            parts = self._parts(name, is_compact)
            filled[name] = {field: flat for field, (flat, _, _) in parts.items()}
            moments = state["optim"]["state"][name]
            for field, (flat, span, _) in parts.items():
                if field == "master":
                    _copy(flat, state["model"][name], span)
                elif NEVER_STEPPED in moments:
                    flat.zero_()
                else:
                    _copy(flat, moments[field], span)
        by_group = self._steps(state)
        self._counts.load({index: int(next(iter(steps.values()))) for index, steps in by_group.items()})
        if is_compact and self._masters.eight_bit is not None:
            self._masters.eight_bit.share_scales()
        else:
            self._masters.store(filled, self._counts.of_groups.tolist())
        for index, values in self._loaded_groups(state).items():
            group = self._param_groups[index]
            if isinstance(group["lr"], Tensor):
                values["lr"] = group["lr"].fill_(values["lr"])
            group.update(values)
        lost = self._plan.delayed.load_state_dict(state.get("zerocast", {}))
        if lost and self._group.rank == 0:
            names = f"{lost[0]} and {len(lost) - 1} more" if len(lost) > 1 else lost[0]
            logger.warning("no delayed scaling that fits %s in the state: seeded from the loaded masters", names)

    def _parts(self, name: str, is_compact: bool) -> dict[str, tuple[Tensor, Span, tuple[int, ...]]]:
        """Return the tensors of the state of a parameter, keyed by name, as (the elements of this
        rank, their range in the full tensor, the shape of the full tensor).
        """
        bucket, slot = self._slots[name]
        shape = tuple(slot.parameter.shape)
        is_compact = is_compact and self._masters.eight_bit is not None
        span, owned = (self._masters.owned if is_compact else self._masters.state)(bucket, slot)
        parts: dict[str, tuple[Tensor, Span, tuple[int, ...]]] = {
            field: (flat, span, shape) for field, flat in owned.items()
        }
        if is_compact:
            groups, all_groups, scales = self._masters.compact(bucket, slot)
            parts |= {field: (flat, groups, all_groups) for field, flat in scales.items()}
        return parts

    def _leaf(self, flat: Tensor, span: Span, shape: tuple[int, ...]) -> Tensor:
        return flat.view(shape) if self._group.size == 1 else TensorShard.from_flat(flat, span, shape)

    def _check(self, state: Mapping[str, Any]) -> None:
        saved, moments = state["model"], state["optim"]["state"]
        self._check_tensors(saved)
        check_names(moments, self._slots, self._slots, "optimizer")
        is_compact = _has_scales(moments) and self._masters.eight_bit is not None
        for name, (bucket, _) in self._slots.items():
            fields = fields_of(bucket)
            scales = [f"{field}_scale" for field in fields] if is_compact else []
            check_moments(name, moments[name], {*fields, *scales, *(() if bucket.storage.single_owner else (STEP,))})
            if NEVER_STEPPED in moments[name]:
                continue
            for field in fields:
                self._check_tensor(name, moments[name][field], getattr(self._masters, field).dtype if scales else None)
            for field in scales:
                self._check_scales(name, moments[name][field])
            self._check_own_step(name, saved[name], moments[name])
        self.check_numbers(state)

    def _check_tensors(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError for tensors by name that cannot replace the masters."""
        check_names(saved, self._slots, self._slots, "optimizer")
        for name, tensor in saved.items():
            self._check_tensor(name, tensor)

    def _check_own_step(self, name: str, master: Tensor, moments: Mapping[str, Any]) -> None:
        """Raise ValueError for a result of `state_dict` that was kept during a step."""
        bucket, slot = self._slots[name]
        span, owned = self._masters.owned(bucket, slot)
        kept = master.flat if isinstance(master, TensorShard) else master
        if span.numel and kept.data_ptr() == owned["master"].data_ptr():
            check_not_kept(moments, float(self._step_of(slot)))

    def _steps(self, state: Mapping[str, Any]) -> dict[int, dict[str, float]]:
        """Return the step counts of the parameters that AdamW updates, by parameter group and
        name.
        """
        saved = state["optim"]["state"]
        steps: dict[int, dict[str, float]] = {}
        for name, (bucket, slot) in self._slots.items():
            if not bucket.storage.single_owner:
                step = 0.0 if NEVER_STEPPED in saved[name] else float(saved[name][STEP])
                steps.setdefault(slot.param_group, {})[name] = step
        return steps

    def _check_scales(self, name: str, scales: Tensor) -> None:
        span, shape, _ = self._masters.compact(*self._slots[name])
        if tuple(scales.shape) != shape:
            raise ValueError(
                f"{name} has scales {tuple(scales.shape)} of groups of moments in the state and {shape} in the optimizer, "
                f"where a group has {MOMENT_GROUP} elements"
            )
        if isinstance(scales, TensorShard) and scales.span != span:
            raise ValueError(f"{name} is sharded differently in the state: load it with torch.distributed.checkpoint")

    def _check_tensor(self, name: str, tensor: Tensor, code: torch.dtype | None = None) -> None:
        """Raise ValueError unless a tensor can replace a parameter's masters or moments, or moments
        that are codes of dtype `code`.
        """
        bucket, slot = self._slots[name]
        span, _ = bucket.owned(slot, self._group.rank)
        if tensor.dtype is not code if code else not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {tensor.dtype} in the state and {code or slot.parameter.dtype} in the optimizer"
            )
        if isinstance(tensor, TensorShard) and tensor.span != span:
            raise ValueError(f"{name} is sharded differently in the state: load it with torch.distributed.checkpoint")
        if tuple(tensor.shape) != tuple(slot.parameter.shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the state and {tuple(slot.parameter.shape)} in the optimizer"
            )

    def _loaded_groups(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the saved hyperparameters of each parameter group; none if the state has none."""
        saved = state["optim"].get("param_groups", {})
        names: dict[int, list[str]] = {}
        for name, (_, slot) in self._slots.items():
            names.setdefault(slot.param_group, []).append(name)
        if saved:
            check_names(saved, self._slots, self._slots, "optimizer")
        loaded = {}
        for index, group_names in names.items():
            group = self._param_groups[index]
            values = loaded_hyperparameters(group_names, group, rule_of(group), saved)
            if values:
                loaded[index] = values
        return loaded


def _has_scales(moments: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return True if moments of a state, by parameter, are codes with scales."""
    return any(scale in of_parameter for of_parameter in moments.values() for scale in SCALES)


def _copy(flat: Tensor, value: Tensor, span: Span) -> None:
    """Copy the elements `span` from a shard that has them, or from a full tensor. A view of `flat`
    itself, which a reader has filled in place, is not copied.
    """
    source = value.flat if isinstance(value, TensorShard) else value.detach().reshape(-1)[span.start : span.stop]
    if source.data_ptr() != flat.data_ptr():
        flat.copy_(source)
