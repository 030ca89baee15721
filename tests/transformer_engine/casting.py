"""What every rank does with a case: TransformerEngine's tensors cast, gathered and transposed by zerocast."""

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests import casts
from tests.sharded import POISON, Outcome, Weight
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from tests.transformer_engine.tensors import buffers, bytes_of, tensor
from zerocast import get_format
from zerocast.distributed.group import Group
from zerocast.formats import Columnwise
from zerocast.formats.layout import Span, byte_range


@dataclasses.dataclass
class Casting:
    """The tensors of a case as this rank holds them."""

    cases: tuple[Weight, ...]
    device: str = "cpu"
    columnwise: bool = False
    complaints: list[str] = dataclasses.field(default_factory=list)
    group: Any = None

    def __post_init__(self) -> None:
        self.rank = Group.of(self.group).rank
        self.tensors = [tensor(case, self.device, columnwise=self.columnwise) for case in self.cases]

    def masters(self, step: int = 0) -> tuple[list[Tensor | None], list[int | None]]:
        """Masters, in new tensors at every call, and start offsets."""
        shards = [case.shard(self.rank, step) for case in self.cases]
        return [None if m is None else m.to(self.device) for m, _ in shards], [start for _, start in shards]

    def cast(self, step: int = 0, *arguments: Any, **options: Any) -> None:
        """One call, in TransformerEngine's order of arguments."""
        integration().quantize_master_weights(self.tensors, *self.masters(step), self.group, *arguments, **options)

    def forget_call(self) -> None:
        """The masters of the next call are others, and some contents are not finite."""
        from zerocast.integrations.transformer_engine.plan_cache import plans_of

        for cached in plans_of(self.tensors):
            cached._driver.plan.forget_call()

    def payloads(self, index: int) -> list[Tensor]:
        """The buffers of codes that a gather sends."""
        held, own = buffers(self.tensors[index]), get_format(self.cases[index].fmt).columnwise is Columnwise.OWN_GRID
        return [held["rowwise_data"], held["columnwise_data"]] if own else [held["rowwise_data"]]

    def owned_bytes(self, index: int) -> slice:
        """Of the codes, those that this rank writes."""
        case = self.cases[index]
        return slice(*byte_range(get_format(case.fmt), case.shape, Span(*case.spans[self.rank]), case.nominal))

    def check_others_untouched(self) -> None:
        """Complain of codes that were written and are not owned."""
        for index, case in enumerate(self.cases):
            for data in self.payloads(index):
                if (np.delete(casts.raw(data), self.owned_bytes(index)) != POISON).any():
                    self.complaints.append(f"{case} was written outside its shard")

    def gather(self) -> None:
        """Every owner's bytes to every rank; complains of owners that disagree on a byte that they share."""
        mine = [
            [(self.owned_bytes(i).start, casts.raw(data)[self.owned_bytes(i)].copy()) for data in self.payloads(i)]
            for i in range(len(self.cases))
        ]
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        for index in range(len(self.cases)):
            for direction, data in enumerate(self.payloads(index)):
                flat, seen = casts.raw(data).copy(), np.zeros(data.nbytes, bool)
                for first, part in (theirs[index][direction] for theirs in everyone):
                    where = slice(first, first + part.size)
                    if (flat[where][seen[where]] != part[seen[where]]).any():
                        self.complaints.append(f"two owners of {self.cases[index]} disagree from byte {first} on")
                    flat[where], seen[where] = part, True
                data.view(torch.uint8).view(-1).copy_(torch.from_numpy(flat))


def cast_and_gather(
    cases: tuple[Weight, ...], steps: int = 1, device: str = "cpu", manual: bool = True, columnwise: bool = False
) -> Outcome:
    """Cast, gather, transpose; the bytes of all tensors after each step."""
    with host_on_cpu():
        casting = Casting(cases, device, columnwise)
        outcome = Outcome([], casting.complaints)
        for step in range(steps):
            casting.forget_call()
            casting.cast(step, manual_post_all_gather_processing=manual)
            if step == 0:
                casting.check_others_untouched()
            casting.gather()
            if manual:
                integration().post_all_gather_processing(casting.tensors)
            outcome.steps.append([bytes_of(one) for one in casting.tensors])
        return outcome


def count_collectives(cases: tuple[Weight, ...]) -> list[dict[str, int]]:
    """Of a first and a second call, whose masters are new tensors, and of the processing after the gather."""
    with host_on_cpu():
        casting, counts = Casting(cases), []
        after = lambda: integration().post_all_gather_processing(casting.tensors)  # noqa: E731
        for run in (casting.cast, lambda: casting.cast(1), lambda: casting.cast(2), after):
            with CommDebugMode() as mode:
                run()
            counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
        return counts


def grow_amax(cases: tuple[Weight, ...], before: tuple[float, ...]) -> list[Any]:
    """A cast with delayed scaling where `before[rank]` is the amax so far: (amax, scale, history around the amax, bytes)."""
    with host_on_cpu():
        casting = Casting(cases)
        (weight,), rank = casting.tensors, casting.rank
        history = torch.full((4, 3), -1.0)  # as TransformerEngine keeps it: [length, tensors], row 0 is this step's
        history[0, 1] = before[rank]
        weight._quantizer.amax, weight._quantizer.scale = history[0, 1], torch.tensor(4.0)
        casting.cast()
        casting.gather()
        return [history.numpy(), float(weight._quantizer.scale), bytes_of(weight)]
