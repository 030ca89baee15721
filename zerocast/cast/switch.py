"""switch: change the formats of a run's weights between two steps, from the same masters.

Masters do not depend on formats, so one cast makes the bytes in a different format. The owner of
the masters rebuilds everything that depends on the format: buffers, gathers, plans, captured
graphs. Each owner states its part as a `SwitchPart`, and `switch` takes all parts through the same
phases. Until the last phase every rank can still go back, and all do if one of them must.

`share_cast_bytes` gathers the bytes of a plan's switch itself. `SwitchedBytes` detects a caller
that still gathers into the old buffers afterwards. A plan cannot see where its caller gathers. But
a gather leaves equal bytes on all ranks, which differ from the bytes of the previous cast. So the
first casts after a switch begin with one extra collective that compares the bytes, until a gather
has changed them identically on all ranks.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.distributed.agreement import range_over_ranks, validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.formats import FormatSpec
from zerocast.formats.layout import Shape, check_shape
from zerocast.formats.memory import as_bytes
from zerocast.formats.recipe import Recipe, RecipeLike
from zerocast.verification.master_views import owners_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import InvalidWeights, Validity

Formats = Mapping[str, FormatSpec]
CALL = "switches to a different recipe"
# The bytes of ranks are no longer compared after this number of casts that changed no byte or that
# no gather followed.
CASTS = 16


@dataclass(frozen=True)
class SwitchPart:
    """The part of one owner of masters in a switch. Its calls are given the new formats, keyed by
    name, of the weights that change.

    Attributes:
        groups: the ranks that switch together.
        weights: format and shape of each quantized weight, keyed by name.
        plain: the names of its other parameters of two or more dimensions.
        check: raises where a switch would be wrong now. Local.
        convert: gives the weights formats and storage. Local; it may run out of memory.
        recast: makes the bytes and all that depends on their addresses. Collective.
        changed_by_switch: the objects whose attributes `convert` and `recast` set. The attributes
            are restored if anything raises.
    """

    groups: Sequence[Group]
    weights: Mapping[str, tuple[FormatSpec, Shape]]
    plain: Collection[str]
    check: Callable[[Formats], None]
    convert: Callable[[Formats], None]
    recast: Callable[[Formats], None]
    changed_by_switch: Sequence[Any]

    def changes(self, recipe: Recipe) -> dict[str, FormatSpec]:
        """Return the new formats of the weights whose format changes. Raises ValueError for a plain
        parameter that would be quantized, and for a shape that a format cannot take.
        """
        for name in self.plain:
            if recipe.format_of(name).element is not None:
                raise ValueError(
                    f"{name} is a plain parameter and cannot become {recipe.format_of(name)}: match it with 'identity', or "
                    "begin with it quantized and switch it to 'identity' until it is to change"
                )
        changed = {
            name: recipe.format_of(name) for name, (fmt, _) in self.weights.items() if recipe.format_of(name) != fmt
        }
        for name, fmt in changed.items():
            try:
                check_shape(fmt, self.weights[name][1])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return changed


@torch.no_grad()
def switch(model_or_optimizer_or_plan: Any, recipe: RecipeLike) -> None:
    """Give the quantized weights the formats of `recipe`, and cast them from their masters. Call it
    between two steps, on all ranks.

    Accepts a ZeroAdamW, a CastPlan, a model whose weights have such an owner, and a model or
    optimizer under `zerocast.fsdp2`. Afterwards weights, scales and delayed histories equal those
    of a run that has just begun with this recipe from the same masters; masters, moments and step
    counts stay. A weight whose format does not change keeps its bytes and its history. Parameters
    stay the same objects: an `identity` weight is a QuantizedWeight that holds the master rounded
    to its nominal dtype, and can be switched again. Compiled functions are compiled again, captured
    steps are captured again. The old bytes are freed at the end.

    Raises on every rank, with nothing changed:

    * TypeError for an argument that owns no masters or is not a recipe.
    * ValueError for a recipe that differs between ranks, has a pattern that matches nothing, would
      quantize a plain parameter or a shape that its format cannot take, or has `share_amax` or
      `fast`, which a switch does not change.
    * RuntimeError in the middle of a step (unused gradients, `no_sync`, a backward pass), within
      `average.swapped()`, after partial or foreign writes, and for a framework whose buffers are
      laid out for one format.
    """
    recipe = Recipe.of(recipe)
    for name, is_given in (("share_amax", recipe.share_amax), ("fast", recipe.fast)):
        if is_given:
            raise ValueError(
                f"{name} is settled when weights are quantized, and a switch does not change it: leave it out of the recipe"
            )
    parts = _parts_of(model_or_optimizer_or_plan)
    changes: list[Formats] = [{} for _ in parts]
    problem: Exception | None = None
    try:
        recipe.check_used([name for part in parts for name in (*part.weights, *part.plain)])
        changes = [part.changes(recipe) for part in parts]
        for part, formats in zip(parts, changes, strict=True):
            part.check(formats)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    _validate(parts, changes, problem)
    if not any(changes):
        return
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(_restored(part.changed_by_switch))
        try:
            for part, formats in zip(parts, changes, strict=True):
                part.convert(formats)
        except Exception as error:  # Of any kind: the other ranks must raise too.
            problem = error
        _validate(parts, [{} for _ in parts], problem)
        for part, formats in zip(parts, changes, strict=True):
            part.recast(formats)


def _parts_of(what: Any) -> list[SwitchPart]:
    """Return the part of each owner of masters. Owners that can switch have a method
    `switch_part`.
    """
    owners, _, _ = owners_of(what)
    if not owners:
        raise TypeError(
            f"switch takes an optimizer, model or plan that owns masters, got {type(what).__name__}: build the optimizer first"
        )
    parts = []
    for owner in owners:
        switch_part: Callable[[], SwitchPart] | None = getattr(owner, "switch_part", None)
        if switch_part is None:
            raise RuntimeError(
                f"the weights of a {type(owner).__name__} are in buffers that the framework laid out for their current format: "
                "save a checkpoint, which holds no format, build the model with the new recipe and load it"
            )
        parts.append(switch_part())
    return parts


def _validate(parts: Sequence[SwitchPart], changes: Sequence[Formats], problem: Exception | None) -> None:
    """Raise the problem of any rank on every rank, after the ranks of all groups were notified."""
    errors: list[Exception] = []
    for part, formats in zip(parts, changes, strict=True):
        lines = [f"{name}, {fmt}, to become {formats.get(name, fmt)}" for name, (fmt, _) in part.weights.items()]
        for group in part.groups:
            try:
                validate_across_ranks(group, lines, problem, CALL)
            except (RuntimeError, TypeError, ValueError) as error:
                errors.append(error)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _restored(objects: Sequence[Any]) -> Iterator[None]:
    """Restore the current attributes of the objects if the body raises."""
    saved = [dict(vars(changed)) for changed in objects]
    try:
        yield
    except BaseException:
        for changed, attributes in zip(objects, saved, strict=True):
            vars(changed).clear()
            vars(changed).update(attributes)
        for changed in objects:
            if isinstance(changed, Validity):
                changed.moved()
        raise


def convert(weight: QuantizedWeight, fmt: FormatSpec) -> None:
    """Change the format of a weight's storage, for every tensor object over it. The bytes are zeros
    until the cast that its owner makes next.

    A backward pass whose forward pass read the weight before raises, as after any other write in
    place.
    """
    weight.wait()
    weight.state.convert(fmt)
    # New storage below the wrapper does not raise its version counter. Inference tensors have none.
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)


def share_cast_bytes(group: Group, weights: Sequence[QuantizedWeight]) -> None:
    """Give all ranks the codes that each of them has cast into zeros. Collective."""
    for weight in weights:
        names = ("rowwise_data", "columnwise_data") if weight.format.casts_columnwise else ("rowwise_data",)
        for name in names:
            codes = weight.state.buffers[name]
            assert codes is not None, name
            # A rank has zeros where others cast, so the largest byte is the one that was cast.
            group.all_reduce_max(as_bytes(codes), "the bytes of a switched weight")


class SwitchedBytes:
    """Checks that all ranks hold the same codes of `weights`, keyed by name, as they do when this
    is made.

    Only rowwise codes are compared, since a caller that computes no gradients need not gather
    others.
    """

    def __init__(self, group: Group, weights: Mapping[str, QuantizedWeight]) -> None:
        self._group = group
        self._weights = weights
        self._casts_compared = 0
        # The sums of the bytes after the switch, and after the last gather. None before a gather.
        self._switched = self._sums()
        self._gathered: list[int] | None = None

    def note_gathered(self) -> None:
        """Note that the caller has gathered the bytes of the last cast. Waits for the device."""
        self._gathered = self._sums()

    def check(self) -> bool:
        """Return True if there is nothing left to compare. Called before each cast. Collective.

        Raises RuntimeError on every rank for weights that were gathered and differ between ranks.
        """
        gathered, self._gathered = self._gathered, None
        sums = self._switched if gathered is None else gathered
        # The reports of casts cannot carry this. They are compared after masters were written, and
        # have one number of 7 bits for all weights.
        values = [int(gathered is None), *sums]
        (_, *smallest), (any_without_gather, *largest) = range_over_ranks(
            self._group, values, "bytes of switched weights"
        )
        self._casts_compared += 1
        if any_without_gather:
            return self._casts_compared == CASTS
        sums_by_name = zip(self._weights, smallest, largest, strict=True)
        differing = [name for name, smallest_sum, largest_sum in sums_by_name if smallest_sum != largest_sum]
        if differing:
            raise InvalidWeights(
                f"{len(differing)} weights differ between ranks after their all-gather, the first is {differing[0]}",
                "since zerocast.switch gave them new buffers",
                "gather into the new weight.rowwise_data, and drop references to the old one",
            )
        return sums != self._switched or self._casts_compared == CASTS

    def _sums(self) -> list[int]:
        codes = [as_bytes(weight.rowwise_data) for weight in self._weights.values()]
        sums: list[int] = torch.stack([data.sum(dtype=torch.int64) for data in codes]).tolist()
        return sums
