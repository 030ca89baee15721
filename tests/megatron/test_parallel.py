"""Megatron's own GPT and schedules, with tensor, pipeline and expert parallelism: live bytes are the cast of gathered masters."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.megatron.gpt import FORMATS, Parallel, save_with_partial_weights, train
from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS, needs_megatron
from tests.workers import Ranks

pytestmark = needs_megatron
NEEDS_EINOPS = pytest.mark.skipif(not find_spec("einops"), reason="Megatron's pipelines and instances need einops")
NEEDS_ROUTING = pytest.mark.skipif(not KNOWS_FOUR_BITS, reason="this megatron-core routes with TransformerEngine only")
PARALLEL = {
    "tensor": (2, Parallel(tensor=2)),
    "tensor and data": (4, Parallel(tensor=2, overlap=True)),
    "pipeline and nothing": (2, Parallel(pipeline=2)),
    "pipeline and data": (4, Parallel(pipeline=2, overlap=True)),
    "tensor and pipeline": (4, Parallel(tensor=2, pipeline=2)),
    "experts": (2, Parallel(expert=2, experts=4)),
    "experts and data": (4, Parallel(expert=2, experts=4, overlap=True)),
    "instances and data": (4, Parallel(instances=2)),
}


def parameters() -> Iterator[Any]:
    """What this megatron-core and its companions can run; most is slow."""
    for name, (_, parallel) in PARALLEL.items():
        marks = [] if name in ("tensor", "experts") else [pytest.mark.slow]
        if parallel.pipeline > 1 or parallel.instances > 1:
            marks.append(NEEDS_EINOPS)
        if parallel.experts:
            marks.append(NEEDS_ROUTING)
        yield pytest.param(name, marks=marks)


def said(name: str) -> str:
    """The kinds of parallelism, for the table of hosts."""
    world, parallel = PARALLEL[name]
    kinds = {**vars(parallel), "data": world // parallel.tensor // parallel.pipeline}
    return ", ".join(kind for kind in ("data", "tensor", "pipeline", "expert", "instances") if kinds[kind] > 1)


@pytest.mark.shows(host="Megatron-Core", parallel=said, formats=FORMATS.values(), ranks=lambda name: PARALLEL[name][0])
@pytest.mark.parametrize("name", list(parameters()))
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, name: str) -> None:
    world, parallel = PARALLEL[name]
    ranks(world)(train, parallel, 2 if parallel.experts else 1)


@pytest.mark.parametrize("name", list(parameters()))
def test_a_save_that_one_rank_refuses(ranks: Ranks, name: str) -> None:
    """The save raises on ranks that share no master with that rank, too, and none waits at a timeout."""
    world, parallel = PARALLEL[name]
    ranks(world)(save_with_partial_weights, parallel)
