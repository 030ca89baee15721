"""WeightTable: weights of one format and dtype, so that a stage is one call for all of them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import checks, ops
from zerocast.backends.checks import BUFFER_ARGUMENTS
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.descriptor_table import DescriptorTable, TableKey
from zerocast.formats import AmaxPolicy, FormatSpec, ScaleRule, get_format
from zerocast.formats.layout import Span
from zerocast.weight import QuantizedWeight

# A format without amaxes is measured as this one in an optimizer step, for the flags of masters
# that are not finite. Its amax is not read.
MEASURED_AS = get_format("fp8_current")


class WeightTable(DescriptorTable):
    """The stages of a cast, each for all weights of the table at once. Add weights, then `freeze`,
    then call stages.
    """

    def freeze(self) -> "WeightTable":
        """Put the table on the device and prepare the stages."""
        self.put_on_device()
        measured_as = self.key.fmt if self.has_amaxes else MEASURED_AS
        self._partial_amax = self._bind(ops.partial_amax, measured_as)
        self._adam_amax = self._bind(ops.adam_amax, measured_as)
        self._adam_cast = self._bind(ops.adam_cast)
        self._compute_scales = self._bind(ops.compute_scales)
        self._partial_cast = self._bind(ops.partial_cast)
        self._roll_history = self._bind(ops.roll_history)
        self._transpose = self._bind(ops.transpose)
        return self

    @property
    def has_amaxes(self) -> bool:
        """True if the scales or codes of the format depend on amaxes."""
        return self.key.fmt.amax_policy is not AmaxPolicy.NONE

    def _bind(self, stage: ops.Stage, fmt: FormatSpec | None = None) -> Callable[..., None]:
        """The stage with all that is the same in every cast."""
        known: dict[str, Any] = {
            "nominal": self.key.nominal,
            "masters": self.masters.tensors,
            "table": self.table,
            "groups": self._group_rows,
        }
        known |= {argument: self.buffers[name].tensors for argument, name in BUFFER_ARGUMENTS.items()}
        taken = {name: known[name] for name in stage.arguments if name in known}
        return stage.bind(self.key.backend, str(fmt or self.key.fmt), **taken)

    def measure(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """Amaxes of the blocks that this rank owns elements of, after an `update` of the masters if
        there is one. `cast_rest` with the same update writes what codes it leaves.
        """
        if update is None:
            self.partial_amax(packed)
        elif not self.key.takes_updates:
            self._measure_masters(packed)
        elif self.key.fmt.casts_in_one_pass:
            self.adam_cast(update, packed, skip)
        else:
            self.adam_amax(update, packed, skip)

    def cast_rest(self, packed: Tensor, update: AdamUpdate | None, skip: Tensor | None) -> None:
        """The codes that are not written yet, by reduced amaxes."""
        if update is None or not self.key.takes_updates or not self.key.fmt.casts_in_one_pass:
            self.partial_cast(packed, skip)
        else:
            self.cast_cut_rows(packed, skip)

    def partial_amax(self, packed: Tensor) -> None:
        """Amaxes of the blocks that this rank owns elements of."""
        if self.has_amaxes:
            self._measure_masters(packed)

    def _measure_masters(self, packed: Tensor) -> None:
        if self.masters.tensors:
            self._partial_amax(packed=packed)

    def adam_amax(self, update: AdamUpdate, packed: Tensor, skip: Tensor | None) -> None:
        """Adam on the masters owned here, and in the same pass the amaxes of what they become."""
        if self.masters.tensors:
            self._check_update(update)
            lists = [update.grad], [update.exp_avg], [update.exp_avg_sq]
            self.adam_each(*lists, scalars=update.scalars, clip=update.clip, packed=packed, skip=skip)

    def adam_cast(self, update: AdamUpdate, packed: Tensor, skip: Tensor | None) -> None:
        """Adam on the masters owned here and the amaxes of what they become, and the codes of the
        rows of blocks that are owned in whole, in one pass. For `key.fmt.casts_in_one_pass`.

        Of the rows of blocks that a boundary cuts, `cast_cut_rows` writes the codes, once their
        amaxes are reduced.
        """
        if self.masters.tensors:
            self._check_update(update)
            lists = [update.grad], [update.exp_avg], [update.exp_avg_sq]
            self.cast_each(*lists, scalars=update.scalars, clip=update.clip, packed=packed, skip=skip)

    def cast_cut_rows(self, packed: Tensor, skip: Tensor | None) -> None:
        """The codes of the rows of blocks that a boundary cuts, by reduced amaxes."""
        if self.cut_rows:
            self.cut_rows.partial_cast(packed, skip)

    def _check_update(self, update: AdamUpdate) -> None:
        """ValueError or TypeError unless all masters are views of one tensor, beside which those
        of the update lie alike as far as masters take it.
        """
        if len(self.masters.tensors) != 1 or self.key.master is not torch.float32:
            raise ValueError("an AdamUpdate is of masters that are views of one flat float32 tensor")
        (master,) = self.masters.tensors
        for name, tensor in (("grad", update.grad), ("exp_avg", update.exp_avg), ("exp_avg_sq", update.exp_avg_sq)):
            checks.check_plain(f"the {name} of an AdamUpdate", tensor, checks.FLOATS, self._end, master.device)
        checks.check_moments(update.exp_avg, update.exp_avg_sq)
        checks.check_scalars(update.scalars, update.clip, self._group_count, master.device)

    @cached_property
    def _whole_rows(self) -> "WeightTable | None":
        """The rows of exchange blocks that this rank owns in whole."""
        return self._part(lambda span, whole: (whole,))

    @cached_property
    def cut_rows(self) -> "WeightTable | None":
        """What this rank owns of rows of exchange blocks that a boundary cuts, of which `adam_cast`
        and `cast_each` write no codes; None without any.
        """
        return self._part(lambda span, whole: (Span(span.start, whole.start), Span(whole.stop, span.stop)))

    def _part(self, pieces: Callable[[Span, Span], Sequence[Span]]) -> "WeightTable | None":
        """The table of some pieces of the owned spans; None without any."""
        part = WeightTable(self.key, self.device)
        part.add_pieces(self, pieces)
        return part.freeze() if part._rows else None

    def adam_each(
        self,
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        *,
        scalars: Tensor,
        clip: Tensor,
        packed: Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """Adam on masters that have gradients and moments of their own, flat and as large as they
        are; amaxes into `packed`.

        `scalars` and `clip` are those of an AdamUpdate.
        """
        self._adam_amax(
            grads=grads,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            scalars=scalars,
            clip=clip,
            packed=packed,
            skip=skip,
        )

    def cast_each(
        self,
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        *,
        scalars: Tensor,
        clip: Tensor,
        packed: Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """The same, and as `adam_cast` the codes of the rows of blocks that are owned in whole."""
        state: dict[str, Any] = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
        state |= {"scalars": scalars, "clip": clip, "packed": packed, "skip": skip}
        if self._whole_rows:
            self._whole_rows._adam_cast(**state)
        if self.cut_rows:
            self.cut_rows._adam_amax(**state)

    def compute_scales(self, packed: Tensor, skip: Tensor | None) -> None:
        """Scale buffers and tensor amaxes, the same on every rank."""
        if self.key.fmt.scale_rule is not ScaleRule.NONE:
            self._compute_scales(packed=packed, skip=skip)

    def partial_cast(self, packed: Tensor, skip: Tensor | None) -> None:
        """Codes of the owned elements."""
        if self.masters.tensors:
            self._partial_cast(packed=packed, skip=skip)

    def roll_history(self, skip: Tensor | None) -> None:
        """Delayed scaling: the scale of the next cast, unless whoever keeps the history sets it."""
        if self.key.fmt.amax_policy is AmaxPolicy.DELAYED and not self.key.external_scaling_state:
            self._roll_history(skip=skip)

    def transpose(self) -> None:
        """Columnwise copies from the rowwise bytes."""
        self._transpose()


class WeightTables(dict[TableKey, WeightTable]):
    """Tables by key, each made when its first weight arrives."""

    def __init__(
        self,
        device: torch.device,
        backend: str,
        make: "Callable[[TableKey, torch.device], WeightTable]" = WeightTable,
    ) -> None:
        super().__init__()
        self._device, self._backend, self._make = device, backend, make

    def of(
        self, weight: QuantizedWeight, master: torch.dtype = torch.float32, takes_updates: bool = True
    ) -> WeightTable:
        """The table of a weight with masters of this dtype."""
        external = weight.state.external_scaling_state
        key = TableKey(self._backend, weight.format, weight.dtype, master, external, takes_updates)
        if key not in self:
            self[key] = self._make(key, self._device)
        return self[key]

    def freeze(self) -> list[WeightTable]:
        """All tables, ready for their stages."""
        return [table.freeze() for table in self.values()]
