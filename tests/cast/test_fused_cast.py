"""A cast that takes an Adam step on its masters: the bits of the two stages one after the other, each master read by one op."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import casts
from tests.backends import stages
from tests.backends.test_adam_update import scalars
from tests.casts import Outcome, Sharded, Weight
from tests.observed import Dispatched, HostTraffic
from tests.selection import examples_on
from tests.strategies import models
from tests.workers import Ranks, on_ranks
from zerocast import CastPlan, get_format
from zerocast.backends.descriptor import Piece
from zerocast.backends.reference.adam import adamw
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.tables import _piece_of

BF16, FP32 = torch.bfloat16, torch.float32
GROUPS = 3


@dataclass
class Trainee:
    """The weights of a case on one rank, their masters at odd places of one flat tensor, and what Adam needs beside it."""

    cases: tuple[Weight, ...]
    rank: int
    seed: int
    grad: torch.dtype = FP32
    moment: torch.dtype = FP32
    backend: str | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng((self.seed, self.rank))
        self.here, self.segments, end = Sharded(self.cases, self.rank), [], 0
        for index, master in enumerate(self.here.masters):
            end += int(rng.integers(0, 40))
            if master is not None:
                self.segments.append([end, master.numel(), index % GROUPS])
                end += master.numel()
        flats = [torch.from_numpy(rng.standard_normal(end + 5, np.float32)) for _ in range(4)]
        self.master, grad, first, second = flats
        self.grad_shard, self.moments = grad.to(self.grad), [first.to(self.moment), second.square().to(self.moment)]
        places = iter(self.segments)
        for index, master in enumerate(self.here.masters):
            if master is not None:
                offset, numel, _ = next(places)
                self.here.masters[index] = self.master[offset : offset + numel].copy_(master)
        groups = [index % GROUPS for index in range(len(self.cases))]
        plan = self.here.weights, self.here.masters, self.here.starts
        self.plan = CastPlan(*plan, backend=self.backend, param_groups=groups)

    def update(self, rows: Tensor, clip: Tensor) -> AdamUpdate:
        exp_avg, exp_avg_sq = self.moments
        return AdamUpdate(self.grad_shard, exp_avg, exp_avg_sq, rows, clip)

    def step(self, number: int, fused: bool, skip: Tensor | None) -> None:
        """Make an update and its cast, in one pass or in two."""
        rows, clip = torch.from_numpy(scalars(number)), torch.tensor([0.7])
        self.plan.ready()
        if fused:
            self.plan.launch(skip=skip, update=self.update(rows, clip))
        else:
            for offset, numel, group in self.segments if not (skip is not None and skip) else ():
                own = slice(offset, offset + numel)
                kept = [self.master[own], *(moment[own] for moment in self.moments)]
                p, m, v = (flat.float() for flat in kept)
                for old, new in zip(kept, adamw(p, self.grad_shard[own].float(), m, v, rows[group], clip), strict=True):
                    old.copy_(new)
            self.plan.launch(skip=skip)
        self.plan.validity.casts += 1

    def held(self) -> list[casts.Bytes]:
        """Return the masters, the moments and the bytes of all weights."""
        flats = {"master": self.master, "exp_avg": self.moments[0], "exp_avg_sq": self.moments[1]}
        own = {name: casts.raw(torch.where(flat.isnan(), torch.nan, flat)) for name, flat in flats.items()}
        return [own, *(casts.bytes_of(weight) for weight in self.here.weights)]


def steps(
    cases: tuple[Weight, ...], seed: int, grad: torch.dtype, moment: torch.dtype, backend: str | None, fused: bool
) -> Outcome:
    """Return the outcome of three steps, of which the second is skipped."""
    trainee = Trainee(cases, dist.get_rank(), seed, grad, moment, backend)
    outcome = Outcome([], trainee.here.complaints)
    for number in (1, 2, 3):
        trainee.step(number, fused, torch.tensor([number == 2]))
        trainee.here.gather()
        trainee.plan.post_all_gather()
        outcome.steps.append(trainee.held())
    return outcome


@examples_on(3)  # each of which is cast in two ways, in three steps
@given(world=st.sampled_from([1, 2, 3]), data=st.data())
def test_the_bits_of_two_passes(ranks: Ranks, world: int, data: st.DataObject) -> None:
    """One pass gives the bits of two for any format, cut, mix of groups and dtypes, and for a skipped step."""
    cases = tuple(replace(case, nominal_master=False) for case in data.draw(models(world)))
    grad, moment = data.draw(st.sampled_from([FP32, BF16])), data.draw(st.sampled_from([FP32, BF16]))
    how = cases, data.draw(st.integers(0, 2**31)), grad, moment, data.draw(st.sampled_from(["reference", None]))
    for fused, unfused in zip(ranks(world)(steps, *how, True), ranks(world)(steps, *how, False), strict=True):
        assert not fused.complaints
        for number, (found, expected) in enumerate(zip(fused.steps, unfused.steps, strict=True)):
            for index, (a, b) in enumerate(zip(found, expected, strict=True)):
                casts.assert_same_bytes(a, b, f"step {number}, weight {index - 1} of {cases}")


@on_ranks(2)
def test_a_cast_does_not_wait_for_the_device() -> None:
    """A cast does not wait, even if an odd NVFP4 cut sends elements along with the amaxes."""
    cases = tuple(Weight(fmt, (32, 64), ((0, 555), (555, 2048))) for fmt in casts.FORMATS)
    trainee = Trainee(cases, dist.get_rank(), seed=2)
    trainee.step(1, True, None)
    rows, clip, skip = torch.from_numpy(scalars(2)), torch.ones(1), torch.tensor([False])
    with HostTraffic() as traffic:
        trainee.plan.launch(skip=skip, update=trainee.update(rows, clip))
    assert traffic.found == []


def test_each_master_is_read_by_one_op() -> None:
    """Until the cast no other op measures amaxes. For formats with local scales one op reads
    complete block rows and writes their codes, and another op reads the block rows that a boundary
    splits.
    """
    cases = tuple(Weight(fmt, (288, 64), ((5, 18001),), seed=i) for i, fmt in enumerate(casts.FORMATS))
    trainee = Trainee(cases, 0, seed=1)
    with Dispatched() as ops:
        trainee.step(1, True, None)
    in_one_pass = sum(get_format(fmt).casts_in_one_pass for fmt in casts.FORMATS)
    counts = Counter(ops.stages)
    assert (counts["adam_amax"], counts["adam_cast"], counts["partial_amax"]) == (len(casts.FORMATS), in_one_pass, 0)


@pytest.mark.parametrize(("numel", "cut"), [(54, (5, 5)), (54 + 64, (5, -1))])
def test_rows_of_blocks_that_begin_with_a_group_of_two_ranks(numel: int, cut: tuple[int, int]) -> None:
    """A rank owns rows of 64 from element 10 of row 31 on. A part that is in one group begins and ends with it."""
    owned = {"numel": 54 + 2 * 64, "start": 31 * 64 + 10, "columns": 64, "cut_first": 5, "cut_last": -1}
    piece = [owned.get(column.name.lower(), 0) for column in Piece]
    part = _piece_of([piece], stages.row(master_base=0, master_offset=0, numel=numel))
    assert (part[Piece.CUT_FIRST], part[Piece.CUT_LAST]) == cut
