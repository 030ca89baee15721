"""Workloads: the shapes and cuts that the targets are about, spans that tile every weight, and shrinking."""

import pytest

from zerocast.bench.workload import B_FLAT, B_SCATTERED, A, C, Workload
from zerocast.formats.layout import Span


def test_the_workloads_are_those_of_the_targets():
    assert A.numel == C.numel == 3_489_660_928
    assert A.owned == 436_207_616
    assert C.owned == 54_525_952
    assert B_FLAT.owned == B_FLAT.numel == B_SCATTERED.owned == 1024 * 768 * 512
    assert len(A.shapes) == 64 and len(B_FLAT.shapes) == 1024
    assert B_FLAT.flat and not B_SCATTERED.flat


def test_a_owns_whole_layers_and_c_cuts_a_weight():
    owned = [span.numel for span in A.spans(A.rank)]
    assert [i for i, numel in enumerate(owned) if numel] == list(range(32, 40))
    assert all(numel == rows * columns for numel, (rows, columns) in zip(owned[32:40], A.shapes[32:40], strict=True))
    owned = [span.numel for span in C.spans(C.rank)]
    assert [i for i, numel in enumerate(owned) if numel] == [32, 33, 34]
    assert owned[32:35] == [6144 * 4096, 4096 * 4096, 54_525_952 - (6144 + 4096) * 4096]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_spans_of_all_ranks_tile_every_weight(world: int):
    workload = Workload("w", ((32, 96), (64, 32)), 3, world=world)
    by_rank = [list(workload.spans(rank)) for rank in range(world)]
    for index, (rows, columns) in enumerate(workload.shapes):
        held = sorted((s[index].start, s[index].stop) for s in by_rank if s[index].numel)
        assert held[0][0] == 0 and held[-1][1] == rows * columns
        assert all(a[1] == b[0] for a, b in zip(held, held[1:], strict=False))
    assert all(span == Span(0, 0) for spans in by_rank for span in spans if not span.numel)


def test_shrinking_divides_every_extent():
    small = A.scaled(32)
    assert small.layer == ((192, 128), (128, 128), (896, 128), (128, 448)) and small.layers == 1
    assert (small.rank, small.world, small.name) == (4, 8, "A/32")
    assert B_FLAT.scaled(64).layer == ((32, 32),) and B_FLAT.scaled(64).layers == 16
    assert A.scaled(1) is A
