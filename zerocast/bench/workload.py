"""The values of a benchmark: Workload, the weights that are cast; BenchEnv, the device, backend and
seed; Job, the call that is timed.

Nothing is allocated here. A workload has shapes and one rank's share of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.formats.layout import Span, round_up, whole_block_rows

# Every format accepts rows and columns that are multiples of this.
MULTIPLE = 32


@dataclass(frozen=True)
class Workload:
    """The weights of `layers` equal layers, concatenated and split into `world` equal shards.

    Attributes:
        layer: (rows, columns) of each weight of one layer.
        rank: the rank whose share of the work is measured.
        flat: the masters, and each kind of weight buffer, share one tensor, as in an optimizer with
            flat buffers; otherwise each weight has its own tensors.
    """

    name: str
    layer: tuple[tuple[int, int], ...]
    layers: int
    rank: int = 0
    world: int = 1
    flat: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every weight."""
        return self.layer * self.layers

    @property
    def numel(self) -> int:
        """Elements of all weights, owned or not."""
        return self.layers * sum(rows * columns for rows, columns in self.layer)

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the span of each weight that `rank` owns, in elements of the weight; [0, 0) if
        none.
        """
        shard = Span(self.numel * rank // self.world, self.numel * (rank + 1) // self.world)
        start = 0
        for rows, columns in self.shapes:
            own = shard.intersect(Span(start, start + rows * columns))
            yield Span(own.start - start, own.stop - start) if own.numel else Span(0, 0)
            start += rows * columns

    def cuts(self) -> Iterator[range]:
        """Yield the boundaries between shards within each weight. `world` must divide the
        workload.
        """
        shard_numel = self.numel // self.world
        start = 0
        for rows, columns in self.shapes:
            yield range(shard_numel - start % shard_numel, rows * columns, shard_numel)
            start += rows * columns

    @property
    def summary(self) -> str:
        """The weights and the rank's share of them in a few words."""
        share = f"shard {self.rank} of {self.world}" if self.world > 1 else "all of them owned"
        storage = "in one buffer" if self.flat else "each in its own"
        return f"{len(self.shapes):,} weights, {self.numel / 1e6:,.3g} M elements, {storage}; {share}"

    @property
    def owned(self) -> int:
        """The number of elements in the shard."""
        return sum(span.numel for span in self.spans(self.rank))

    def cut(self, fmt: FormatSpec) -> int:
        """Return the number of owned elements in block rows that the shard owns only in part."""
        spans = zip(self.shapes, self.spans(self.rank), strict=True)
        return sum(span.numel - whole_block_rows(fmt, shape, span).numel for shape, span in spans if span.numel)

    def scaled(self, scale: int) -> "Workload":
        """Return the workload with rows, columns and layers divided by `scale`; extents are
        multiples of 32.
        """
        if scale == 1:
            return self
        layer = tuple((round_up(-(-m // scale), MULTIPLE), round_up(-(-k // scale), MULTIPLE)) for m, k in self.layer)
        return replace(self, name=f"{self.name}/{scale}", layer=layer, layers=-(-self.layers // scale))


# QKV, output, gate and up, down of a layer of Llama 8B. The workloads have half of its layers.
EIGHT_BILLION = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))

# The shard has two whole layers, so most weights are not owned at all.
A = Workload("A", EIGHT_BILLION, 16, rank=4, world=8)
# The shard has two whole weights and a part of a third.
C = Workload("C", EIGHT_BILLION, 16, rank=32, world=64)
B_FLAT = Workload("B flat", ((768, 512),), 1024)
B_SCATTERED = Workload("B scattered", ((768, 512),), 1024, flat=False)


@dataclass(frozen=True)
class Job:
    """Repeatable work: `run` does it once, `written` returns the tensors that it writes."""

    run: Callable[[], object]
    written: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class BenchEnv:
    """A device, the backend that works there, and the seed of all inputs."""

    device: torch.device
    backend: str
    seed: int

    def generator(self) -> torch.Generator:
        """Return a generator on the device: equal seeds give every backend there the same
        inputs.
        """
        return torch.Generator(self.device).manual_seed(self.seed)
