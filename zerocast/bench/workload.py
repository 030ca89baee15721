"""The values that a benchmark is made of: whose weights are cast (Workload), where (Place), and what is timed (Job).

Nothing is allocated here: a workload is shapes and one rank's share of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerocast.formats.layout import Span, round_up

MULTIPLE = 32  # every format takes rows and columns that are multiples of it


@dataclass(frozen=True)
class Workload:
    """The weights of `layers` equal layers, laid end to end and cut into `world` equal shards; the work is rank `rank`'s.

    `layer` holds the (rows, columns) of the weights of one layer. `flat` puts the masters and every kind of weight buffer into one
    tensor each, as an optimizer with flat buffers does; else each weight has tensors of its own.
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
        """What `rank` owns of each weight, in elements of that weight; an empty span is [0, 0)."""
        shard = Span(self.numel * rank // self.world, self.numel * (rank + 1) // self.world)
        start = 0
        for rows, columns in self.shapes:
            own = shard.intersect(Span(start, start + rows * columns))
            yield Span(own.start - start, own.stop - start) if own.numel else Span(0, 0)
            start += rows * columns

    @property
    def owned(self) -> int:
        """Elements of the shard."""
        return sum(span.numel for span in self.spans(self.rank))

    def scaled(self, scale: int) -> "Workload":
        """The same with rows, columns and layers divided by `scale`; rows and columns are rounded up to a multiple of 32."""
        if scale == 1:
            return self
        layer = tuple((round_up(-(-m // scale), MULTIPLE), round_up(-(-k // scale), MULTIPLE)) for m, k in self.layer)
        return replace(self, name=f"{self.name}/{scale}", layer=layer, layers=-(-self.layers // scale))


EIGHT_BILLION = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
)  # QKV, output, gate and up, down: half of 8B's layers

A = Workload("A", EIGHT_BILLION, 16, rank=4, world=8)  # two whole layers: most weights are not owned at all
C = Workload("C", EIGHT_BILLION, 16, rank=32, world=64)  # two whole weights and a part of a third
B_FLAT = Workload("B flat", ((768, 512),), 1024)
B_SCATTERED = Workload("B scattered", ((768, 512),), 1024, flat=False)


@dataclass(frozen=True)
class Job:
    """`run` does the work once; `written` gives the tensors that it writes, for comparison with another backend's."""

    run: Callable[[], object]
    written: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Place:
    """A device, the backend that works there, and the seed of all inputs."""

    device: torch.device
    backend: str
    seed: int

    def generator(self) -> torch.Generator:
        """Inputs are drawn on the device: equal seeds give equal inputs there, whatever the backend."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def with_backend(self, backend: str) -> "Place":
        """The same inputs for another backend."""
        return replace(self, backend=backend)
