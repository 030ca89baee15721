"""TransformerEngine's tensors of a case on a rank: cast, gathered and transposed by zerocast."""

import itertools
from typing import Any

from torch import Tensor

from tests import casts
from tests.sharded import Gathered, Outcome, Weight
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from tests.transformer_engine.tensors import buffers, bytes_of, tensor
from zerocast import get_format
from zerocast.distributed.group import Group
from zerocast.formats import Columnwise

SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
TILES = "mxfp8:block=32x32"


def weights_of(*formats: str, cuts: tuple[int, ...] = ()) -> tuple[Weight, ...]:
    """A weight of each format, cut before these elements: on one rank more than there are cuts."""
    spans = tuple(itertools.pairwise([0, *cuts, NUMEL]))
    return tuple(Weight(fmt, SHAPE, spans) for fmt in formats)


class Casting(Gathered):
    """The tensors of a case as this rank holds them."""

    def __init__(self, cases: tuple[Weight, ...], device: str = "cpu", columnwise: bool = False) -> None:
        self.cases, self.device = cases, device
        self.complaints: list[str] = []
        self.group: Any = None
        self.rank = Group.of(None).rank
        self.tensors = [tensor(case, device, columnwise=columnwise) for case in cases]

    def masters(self, step: int = 0) -> tuple[list[Tensor | None], list[int | None]]:
        """Masters, in new tensors at every call, and start offsets."""
        shards = [case.shard(self.rank, step) for case in self.cases]
        return [None if m is None else m.to(self.device) for m, _ in shards], [start for _, start in shards]

    def cast(self, step: int = 0, *arguments: Any, **options: Any) -> None:
        """One call, in TransformerEngine's order of arguments."""
        integration().quantize_master_weights(self.tensors, *self.masters(step), self.group, *arguments, **options)

    def cast_both_ways(self, step: int = 0) -> None:
        """A call, and the one that makes the columnwise copies after the gather."""
        self.cast(step, manual_post_all_gather_processing=True)
        integration().post_all_gather_processing(self.tensors)

    def forget_call(self) -> None:
        """The masters of the next call are others, and some contents are not finite."""
        from zerocast.integrations.transformer_engine.plan_cache import plans_of

        for cached in plans_of(self.tensors):
            cached._driver.plan.forget_call()

    def payloads(self, index: int) -> list[Tensor]:
        """The buffers of codes that a gather sends."""
        held, own = buffers(self.tensors[index]), get_format(self.cases[index].fmt).columnwise is Columnwise.OWN_GRID
        return [held["rowwise_data"], held["columnwise_data"]] if own else [held["rowwise_data"]]

    def bytes(self) -> list[casts.Bytes]:
        """Copies of the bytes of all tensors."""
        return [bytes_of(one) for one in self.tensors]


def cast_and_gather(
    cases: tuple[Weight, ...], steps: int = 1, device: str = "cpu", columnwise: bool = False
) -> Outcome:
    """Cast, gather, transpose; the bytes of all tensors after each step."""
    with host_on_cpu():
        casting = Casting(cases, device, columnwise)
        outcome = Outcome([], casting.complaints)
        for step in range(steps):
            casting.forget_call()
            casting.cast(step, manual_post_all_gather_processing=True)
            if step == 0:
                casting.check_others_untouched()
            casting.gather()
            integration().post_all_gather_processing(casting.tensors)
            outcome.steps.append(casting.bytes())
        return outcome
