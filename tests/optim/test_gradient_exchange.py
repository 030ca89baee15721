"""Gradients of whole matrices: cut evenly while they are reduced, and sent to the owners in the step.

That the update has the bits of one process is asked in `test_muon.py`, what a plan counts in `tests/cli/test_plan.py`.
"""

import dataclasses
import gc
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.hosts.stopping import FAULTS, Place, check
from tests.optim.memory import live_bytes, settled_bytes
from tests.optim.probe import BF16, FP32, Spec
from tests.optim.runs import DETERMINISTIC, Run, Trainer, snapshot
from tests.optim.runs import check as check_bits
from tests.optim.test_memory import SMALL
from tests.optim.test_muon import MUON, OPTIONS, RUN, TUNED
from tests.optim.traffic import recorded, sent_in_exchanges
from tests.selection import worlds
from tests.workers import Ranks, on_ranks
from zerocast import ZeroAdamW, ZeroConfig, ZeroMuon
from zerocast.distributed.bucket import Layout, flat_numel, lay_out
from zerocast.distributed.group import Group
from zerocast.distributed.owned_matrices import most_sent, rounds
from zerocast.optim.gradient_exchange import GradientExchange

Named = list[tuple[str, Tensor, int]]


def packed(whole: dict[str, Tensor], layout: Layout, rank: int) -> Tensor:
    """A rank's flat shard of these gradients; padding is NaN, which nobody may be sent."""
    flat = torch.full((flat_numel(layout.gradients),), torch.nan)
    for bucket in layout.gradients:
        for slot in bucket.slots:
            span, start = bucket.owned(slot, rank)
            flat[start : start + span.numel] = whole[slot.name].reshape(-1)[span.start : span.stop]
    return flat


class Post:
    """Stands in for a group of several ranks in one process: what all send in a round is there before any receives."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[list[Tensor]] = []  # by round and receiver
        self.inbox: list[list[Tensor]] | None = None  # by round and sender

    def all_to_all(self, out: Tensor, full: Tensor, what: str, lengths: tuple[list[int], list[int]]) -> None:
        if self.inbox is None:
            self.sent.append(list(full.split(lengths[1])))
            return
        arriving = self.inbox.pop(0)
        assert [len(part) for part in arriving] == lengths[0], what
        out.copy_(torch.cat(arriving))


def exchanged(named: Named, costs: dict[str, int], limit: int, ranks: int) -> None:
    """Every owner gets its matrices, in order and unchanged; the most that is sent is what is planned."""
    layout = lay_out(named, limit, ranks, None, costs)
    whole = {
        name: torch.arange(p.numel(), dtype=FP32).view(p.shape) + 1000.0 * i for i, (name, p, _) in enumerate(named)
    }
    posts = [Post(rank, ranks) for rank in range(ranks)]
    exchanges = [GradientExchange(layout, post, limit) for post in posts]  # type: ignore[arg-type]
    shards = [packed(whole, layout, rank) for rank in range(ranks)]
    for exchange, shard in zip(exchanges, shards, strict=True):
        exchange.deliver(shard, lambda gradient: None)
    planned = rounds(layout, ranks, limit)
    assert ranks == 1 or {len(post.sent) for post in posts} == {len(planned)}
    for post in posts:
        post.inbox = [[other.sent[number][post.rank] for other in posts] for number in range(len(post.sent))]
    largest = max((math.prod(p.shape[-2:]) for name, p, _ in named if name in costs), default=0)
    got: dict[str, list[Tensor]] = {name: [] for name in costs}
    for rank, (exchange, shard) in enumerate(zip(exchanges, shards, strict=True)):
        matrices = [matrix for by_rank in planned for matrix in by_rank[rank]]
        delivered: list[Tensor] = []
        exchange.deliver(shard, lambda gradient, kept=delivered: kept.append(gradient.clone()))  # type: ignore[misc]
        for matrix, gradient in zip(matrices, delivered, strict=True):
            got[matrix.slot.name].append(gradient)
        for by_rank in planned:
            assert sum(matrix.span.numel for matrix in by_rank[rank]) <= max(limit, largest)
    for name, parts in got.items():
        assert torch.equal(torch.cat(parts), whole[name].view(-1)), name
    others = [sum(len(p) for by in post.sent for r, p in enumerate(by) if r != post.rank) for post in posts]
    assert most_sent(layout, ranks) == max(others)


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
    """Any shapes, stacks, dtypes, of Muon or not, on any ranks, also more than there are matrices."""
    named = [(f"w{i}", torch.empty(shape, dtype=dtype), 0) for i, (shape, dtype, _) in enumerate(shapes)]
    exchanged(named, {f"w{i}": math.prod(s) for i, (s, _, muon) in enumerate(shapes) if muon}, limit, ranks)


def test_gradients_of_adamw_lie_as_masters() -> None:
    """Adam reads both at one place; Muon's come behind, in either layout."""
    named = [(f"w{i}", torch.empty(16, 40 + i, dtype=(FP32, BF16)[i % 2]), 0) for i in range(9)]
    layout = lay_out(named, 2000, 3, None, {f"w{i}": 1 for i in range(0, 9, 4)})
    places = [
        {slot.name: (bucket.start, bucket.shard_numel, slot.offset) for bucket in buckets for slot in bucket.slots}
        for buckets in layout
    ]
    shared = {f"w{i}" for i in range(9) if i % 4}
    assert {name: places[0][name] for name in shared} == {name: places[1][name] for name in shared}
    cut = max(start + numel for start, numel, _ in (places[0][name] for name in shared))
    assert all(place[name][0] >= cut for place in places for name in places[0].keys() - shared)


RUNS = {
    "FP8 wire": {"config": ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128", deterministic=True), "accumulate": 2},
    "FP8 wire, stage 1": {
        "config": ZeroConfig(bucket_size=1, grad_wire="fp8_1x128", deterministic=True),
        "stage": 1,
        "accumulate": 2,
        "no_sync": False,
    },
    "clipped, a matrix a round": {"config": dataclasses.replace(DETERMINISTIC, bucket_size=1), "max_norm": 0.1},
    "no_sync, tuned, one round": {
        "config": dataclasses.replace(DETERMINISTIC, bucket_size=2**22),
        "accumulate": 3,
        "options": ({**MUON, **TUNED}, OPTIONS[1]),
    },
    "gradients put on parameters": {"assign": True, "max_norm": 0.1},
}


@pytest.mark.parametrize("name", RUNS)
@on_ranks(*worlds(3, slow=(1, 2, 4)))
def test_equals_torch(name: str) -> None:
    """Masters, momentum, moments and bytes after every step are those of one process."""
    check_bits(dataclasses.replace(RUN, **RUNS[name]))


WIDTH, LAYERS = 96, 12
LAYER = 4 * WIDTH * WIDTH  # bytes of a gradient


def held_in_a_step(optimizer_class: Any, bucket_layers: int) -> tuple[int, int, int, int]:
    """Bytes of gradients and buckets, apart from the shard: the most at any gradient's arrival; when the first reduction begins;
    beside the shard in the step, the most at an exchange, and at a matrix that is stepped.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    zerocast.quantize_(model, zerocast.Recipe({"*": "fp8_current"}))
    config = ZeroConfig(bucket_size=bucket_layers * WIDTH * WIDTH)
    named = list(model.named_parameters())
    group: Any = [{"params": named, "use_muon": True}] if optimizer_class is ZeroMuon else named
    optimizer = optimizer_class(group, config=config)
    flat = optimizer._reducer.gradients.flat
    known = frozenset([flat.untyped_storage().data_ptr()])
    levels: list[int] = []
    first: list[int] = []
    in_step: dict[str, list[int]] = {"exchange": [0], "step": [0]}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: levels.append(settled_bytes(known)))
    scatter, exchange, muon = Group.reduce_scatter_mean, Group.all_to_all, torch.optim.Muon.step

    def scattering(*args: Any, **kwargs: Any) -> Any:
        first.append(live_bytes(known))
        return scatter(*args, **kwargs)

    def exchanging(*args: Any, **kwargs: Any) -> Any:
        in_step["exchange"].append(live_bytes(known))
        return exchange(*args, **kwargs)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        in_step["step"].append(settled_bytes(known))
        return muon(*args, **kwargs)

    loss = model(torch.randn(2, WIDTH)).square().sum()
    gc.collect()
    before = live_bytes(known)
    with mock.patch.object(Group, "reduce_scatter_mean", scattering):
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    gc.collect()
    between = live_bytes(known)
    with mock.patch.object(Group, "all_to_all", exchanging), mock.patch.object(torch.optim.Muon, "step", stepping):
        optimizer.step()
    at_exchange, at_step = (max(found) - between for found in in_step.values())
    return max(levels) - before, first[0] - before, at_exchange, at_step


@pytest.mark.parametrize("bucket_layers", [1, 2])
@pytest.mark.parametrize("world", worlds(4, slow=(2, 3)))
def test_a_backward_pass_holds_what_it_holds_with_adamw(ranks: Ranks, world: int, bucket_layers: int) -> None:
    """A bucket, and what has arrived of the next one; a bucket of whole matrices would be as many as there are ranks."""
    ours = ranks(world)(held_in_a_step, ZeroMuon, bucket_layers)
    adams = ranks(world)(held_in_a_step, ZeroAdamW, bucket_layers)
    for (most, first, _, _), (adams_most, adams_first, _, _) in zip(ours, adams, strict=True):
        assert abs(most - adams_most) <= SMALL / 4 and abs(first - adams_first) <= SMALL / 4
        assert abs(first - bucket_layers * LAYER) <= SMALL / 4


@pytest.mark.parametrize("bucket_layers", [1, 2])
@pytest.mark.parametrize("world", worlds(2, slow=(3,)))
def test_a_step_holds_a_round_beside_the_shard(ranks: Ranks, world: int, bucket_layers: int) -> None:
    """What a round sends and what it gets; then what it got, and three tensors of the matrix that is stepped."""
    for _, _, exchange, step in ranks(world)(held_in_a_step, ZeroMuon, bucket_layers):
        round_ = bucket_layers * LAYER
        assert round_ < LAYERS // world * LAYER, "a shard would be no more"
        assert round_ - SMALL / 4 <= exchange <= 2 * round_ + SMALL / 4  # what lies end to end is sent from there
        joined = (bucket_layers > 1) * LAYER  # whose parts arrive among those of others
        assert step <= round_ + joined + 3 * LAYER + SMALL / 4


@on_ranks(3)
def test_initial_values_are_sent_by_owner() -> None:
    """One bucket holds all of them."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with recorded() as log:
        ZeroMuon([{"params": model.named_parameters(), "use_muon": True}])
    sizes = [nbytes for kind, nbytes in log if kind == "broadcast"]
    assert sizes == [LAYERS // 3 * LAYER] * 3


def test_one_rank_exchanges_and_copies_nothing() -> None:
    trainer = Trainer(RUN)
    trainer.backward(0)
    flat = trainer.optimizer._reducer.gradients.flat
    delivered: list[Tensor] = []
    trainer.optimizer._device._muon._exchange.deliver(flat, delivered.append)
    assert len(delivered) == len([spec for spec in RUN.specs if not spec.group]) + 2  # a stack of three
    inside = range(flat.data_ptr(), flat.data_ptr() + flat.nbytes)
    assert all(gradient.data_ptr() in inside for gradient in delivered)
    with recorded() as log, sent_in_exchanges() as sent:
        trainer.optimizer.step()
    assert not log and not sent


EXCHANGE = "zerocast.optim.gradient_exchange:GradientExchange"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("when", "fault"),
    [
        pytest.param(when, fault, marks=() if (when, fault) == ("before", "SIGKILL") else pytest.mark.slow)
        for when in ("before", "after")
        for fault in FAULTS
    ],
)
def test_a_rank_that_fails_alone_in_a_round(tmp_path: Path, when: str, fault: str) -> None:
    """The others raise in time, and name the round."""
    said = check(tmp_path, "ZeroAdamW", "Muon", Place(EXCHANGE, "_exchange", when), fault, 2)
    assert any("gradients for the owners of matrices, round" in line for line in said) or fault == "SIGSTOP", said


@on_ranks(*worlds(3, slow=(1, 2)))
def test_gradients_between_backward_and_step() -> None:
    """p.grad between a backward pass and a step is the even cut's: whole values, norms, changes in place, which the step takes."""
    trainer, other = Trainer(RUN), Trainer(RUN)
    for each in (trainer, other):
        each.backward(0)
    for spec in RUN.specs:
        ours, theirs = (each.probe.get_parameter(spec.name).grad for each in (trainer, other))
        mean = torch.as_tensor(RUN.rounds(spec, 0, dist.get_world_size())[0]).view(spec.shape)
        assert torch.equal(ours.full_tensor(), mean), spec.name
        ours.mul_(0.5)
        theirs.copy_(0.5 * mean)
    for each in (trainer, other):
        each.optimizer.step()
    casts.assert_same_bytes(snapshot(trainer), snapshot(other), "halved in place, or replaced by the half")


@on_ranks(2)
def test_stacks() -> None:
    """Experts [e, m, n]: one parameter fills a bucket of gradients, and its owner gets them matrix by matrix."""
    specs = (Spec("experts", (5, 24, 40)), Spec("one", (16, 32), "nvfp4"), Spec("norm", (37,), group=1))
    config = dataclasses.replace(DETERMINISTIC, bucket_size=2000)
    with sent_in_exchanges() as sent:
        check_bits(Run(specs, steps=3, options=OPTIONS, optimizer=ZeroMuon, config=config))
    assert len(sent) == 3 * 3, "five of 960 elements, two of them a round"
