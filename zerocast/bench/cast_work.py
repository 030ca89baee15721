"""The pieces of work around a cast, as jobs: the cast, its stages one by one, and the columnwise copies after the all-gather."""

from collections.abc import Callable

from zerocast.bench.job import Job, Place
from zerocast.bench.shard import Shard
from zerocast.bench.workload import Workload
from zerocast.cast.weight_table import WeightTable


def cast(workload: Workload, fmt: str, place: Place) -> Job:
    """`CastPlan.cast()`: amaxes, scales and codes."""
    shard = Shard(workload, fmt, place)
    return Job(shard.plan.cast, shard.written)


def partial_amax(workload: Workload, fmt: str, place: Place) -> Job:
    """Amaxes of the owned elements, into a buffer that is zero before the first run."""
    shard = Shard(workload, fmt, place)
    table, packed = shard.table(), shard.packed
    shard.plan.packed.begin()
    return Job(lambda: table.partial_amax(packed), lambda: [packed])


def compute_scales(workload: Workload, fmt: str, place: Place) -> Job:
    """Scales of all weights from random amaxes."""
    shard = Shard(workload, fmt, place)
    table, packed = shard.table(), shard.packed
    packed.uniform_(0, 0.1, generator=place.generator())
    return Job(lambda: table.compute_scales(packed, None), shard.written)


def _after_amaxes(stages: Callable[[Shard, WeightTable], None]) -> Callable[[Workload, str, Place], Job]:
    def build(workload: Workload, fmt: str, place: Place) -> Job:
        shard = Shard(workload, fmt, place)
        shard.plan.cast()  # leaves amaxes and scales as the stages need them
        table = shard.table()
        return Job(lambda: stages(shard, table), shard.written)

    return build


partial_cast = _after_amaxes(lambda shard, table: table.partial_cast(shard.packed, None))


@_after_amaxes
def amax_and_cast(shard: Shard, table: WeightTable) -> None:
    """The two stages whose work is the shard's, and not the whole weight's."""
    table.partial_amax(shard.packed)
    table.partial_cast(shard.packed, None)


@_after_amaxes
def transpose(shard: Shard, table: WeightTable) -> None:
    """`CastPlan.post_all_gather()` over all weights; of those owned elsewhere the bytes are random."""
    shard.plan.post_all_gather()
