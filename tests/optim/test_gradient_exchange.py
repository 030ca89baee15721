"""Gradients of whole matrices: cut evenly while they are reduced, and sent to the owners in the step.

That the update has the bits of one process is asked in `test_muon.py`, what a plan counts in `tests/cli/test_plan.py`.
"""

import gc
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zerocast
from tests.distributed.simulated import Simulated, simulate
from tests.observed import Traffic, live_bytes, settled_bytes
from tests.optim.probe import BF16, FP32
from tests.optim.runs import Trainer
from tests.optim.test_muon import RUN
from tests.selection import worlds
from tests.workers import on_ranks
from zerocast import ZeroConfig, ZeroMuon
from zerocast.distributed.bucket import Layout, flat_numel, lay_out
from zerocast.distributed.group import Group
from zerocast.distributed.owned_matrices import most_sent, rounds
from zerocast.formats.layout import SHARD_ALIGNMENT_ELEMENTS
from zerocast.optim.muon_step import GradientExchange

Named = list[tuple[str, Tensor, int]]


def packed(whole: dict[str, Tensor], layout: Layout, rank: int) -> Tensor:
    """Return a rank's flat shard of these gradients. Padding is NaN, which no rank may be sent."""
    flat = torch.full((flat_numel(layout.gradients),), torch.nan)
    for bucket in layout.gradients:
        for slot in bucket.slots:
            span, start = bucket.owned(slot, rank)
            flat[start : start + span.numel] = whole[slot.name].reshape(-1)[span.start : span.stop]
    return flat


def exchanged(named: Named, costs: dict[str, int], limit: int, ranks: int) -> None:
    """Check that every owner gets its matrices, in order and unchanged, and that no more is sent than planned.
    Gradients are reduced in buckets of the usual size, for any number of ranks.
    """
    layout = lay_out(named, limit, ranks, None, costs)
    whole = {
        name: torch.arange(p.numel(), dtype=FP32).view(p.shape) + 1000.0 * i for i, (name, p, _) in enumerate(named)
    }

    def deliver(group: Simulated) -> tuple[list[Tensor], int]:
        delivered: list[Tensor] = []
        shard = packed(whole, layout, group.rank)
        GradientExchange(layout, group, limit).deliver(shard, lambda gradient: delivered.append(gradient.clone()))
        return delivered, sum(group.sent)

    found, log = simulate(ranks, deliver)
    planned = rounds(layout, ranks, limit)
    assert ranks == 1 or len(log) == len(planned)
    largest = max((math.prod(p.shape[-2:]) for name, p, _ in named if name in costs), default=0)
    got: dict[str, list[Tensor]] = {name: [] for name in costs}
    for rank, (delivered, _) in enumerate(found):
        matrices = [matrix for by_rank in planned for matrix in by_rank[rank]]
        for matrix, gradient in zip(matrices, delivered, strict=True):
            got[matrix.slot.name].append(gradient)
        for by_rank in planned:
            assert sum(matrix.span.numel for matrix in by_rank[rank]) <= max(limit, largest)
    for name, parts in got.items():
        assert torch.equal(torch.cat(parts), whole[name].view(-1)), name
    assert most_sent(layout, ranks) == max(sent for _, sent in found)
    padding = ranks * SHARD_ALIGNMENT_ELEMENTS * max(len(bucket.slots) for bucket in layout.gradients)
    assert all(b.numel <= max(limit, *(slot.numel for slot in b.slots)) + padding for b in layout.gradients)


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.tuples(
    st.integers(1, 5), st.integers(1, 20), st.integers(1, 20)
)


@given(
    shapes=st.lists(st.tuples(SHAPES, st.sampled_from([FP32, BF16]), st.booleans()), min_size=1, max_size=9),
    limit=st.sampled_from([1, 300, 1000, 2**20]),
    ranks=st.integers(1, 7),
)
def test_every_owner_gets_its_matrices(
    shapes: list[tuple[tuple[int, ...], torch.dtype, bool]], limit: int, ranks: int
) -> None:
    """Shapes, stacks and dtypes, Muon's or not, may be any, on any number of ranks, even more than matrices."""
    named = [(f"w{i}", torch.empty(shape, dtype=dtype), 0) for i, (shape, dtype, _) in enumerate(shapes)]
    exchanged(named, {f"w{i}": math.prod(s) for i, (s, _, muon) in enumerate(shapes) if muon}, limit, ranks)


WIDTH, LAYERS = 96, 12
LAYER = 4 * WIDTH * WIDTH  # bytes of a gradient
SMALL = 16 * 1024  # activations and scalars


@pytest.mark.parametrize("bucket_layers", [1, 2])
@on_ranks(*worlds(2, slow=(3,)))
def test_a_step_holds_a_round_beside_the_shard(world: int, bucket_layers: int) -> None:
    """The exchange allocates what a round sends and receives. The step then needs the received
    gradients and three tensors of the size of one matrix.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    zerocast.quantize_(model, zerocast.Recipe({"*": "fp8_current"}))
    config = ZeroConfig(bucket_size=bucket_layers * WIDTH * WIDTH)
    optimizer = ZeroMuon([{"params": model.named_parameters(), "use_muon": True}], config=config)
    known = frozenset([optimizer._reducer.gradients.flat.untyped_storage().data_ptr()])
    levels: dict[str, list[int]] = {"exchange": [], "step": []}

    def watched(name: str, call: Any, measure: Callable[[frozenset[int]], int]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            levels[name].append(measure(known))
            return call(*args, **kwargs)

        return run

    model(torch.randn(2, WIDTH)).square().sum().backward()
    gc.collect()
    before = live_bytes(known)
    with (
        mock.patch.object(Group, "all_to_all", watched("exchange", Group.all_to_all, live_bytes)),
        mock.patch.object(torch.optim.Muon, "step", watched("step", torch.optim.Muon.step, settled_bytes)),
    ):
        optimizer.step()
    exchange, step = (max(found) - before for found in levels.values())
    round_ = bucket_layers * LAYER
    assert round_ < LAYERS // world * LAYER, "a shard would be no more"
    assert round_ - SMALL <= exchange <= 2 * round_ + SMALL  # neighbours are sent without a copy
    joined = (bucket_layers > 1) * LAYER  # whose parts arrive among those of others
    assert step <= round_ + joined + 3 * LAYER + SMALL


@on_ranks(3)
def test_initial_values_are_sent_by_owner() -> None:
    """Initial values are sent in one bucket."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with Traffic() as traffic:
        ZeroMuon([{"params": model.named_parameters(), "use_muon": True}])
    assert traffic.sent["broadcast"] == [LAYERS // 3 * LAYER] * 3


def test_one_rank_exchanges_and_copies_nothing() -> None:
    trainer = Trainer(RUN)
    trainer.backward(0)
    flat = trainer.optimizer._reducer.gradients.flat
    delivered: list[Tensor] = []
    trainer.optimizer._device._muon._exchange.deliver(flat, delivered.append)
    assert len(delivered) == len([spec for spec in RUN.specs if not spec.group]) + 2  # a stack of three
    inside = range(flat.data_ptr(), flat.data_ptr() + flat.nbytes)
    assert all(gradient.data_ptr() in inside for gradient in delivered)
    with Traffic() as traffic:
        trainer.optimizer.step()
    assert not traffic.log
