"""ShardedMoments: AdamW's moments in 8 bits (`zerocast.optim.moments_8bit`) of parameters that are
separate tensors, unsharded or sharded.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span, cut_moment_groups
from zerocast.fsdp2.parameter import flat_local
from zerocast.optim.flat_masters import MOMENTS
from zerocast.optim.moments_8bit import CutGroups, Moments8bit, OwnedPart


class ShardedMoments:
    """The moments of some parameters. The moments of a parameter are made when they are first read.

    Boundaries between ranks split groups of vectors, and of matrices that are sharded by columns.
    The largest values of these are reduced over the ranks that such a parameter is sharded over.
    """

    def __init__(self) -> None:
        self._parts: dict[Tensor, OwnedPart] = {}
        # By mesh, and its dimensions that parameters are sharded over.
        self._cut_groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], CutGroups] = {}
        self._moments: dict[Tensor, Moments8bit] = {}

    def add(self, name: str, parameter: Tensor) -> None:
        """Lay out the moments of a parameter. All ranks add the same ones in the same order."""
        sharing = mesh, dims = _sharing(parameter)
        if sharing not in self._cut_groups:
            groups = [] if mesh is None else [Group.of(mesh.get_group(dim)) for dim in dims]
            comm_device_type = mesh.device_type if mesh else None
            self._cut_groups[sharing] = CutGroups(0, groups, parameter.device, comm_device_type)
        shape = tuple(parameter.shape) or (1,)
        numbers = _cut_groups(parameter, shape)
        first = self._cut_groups[sharing].grow(len(numbers))
        cut = {number: first + place for place, number in enumerate(numbers)}
        self._parts[parameter] = OwnedPart(name, shape[-1], _spans(parameter, shape), 0, 0, cut)

    def get(self, parameter: Tensor) -> Moments8bit:
        """Return the moments of a parameter. They are zeros before its first step."""
        if parameter not in self._moments:
            part = self._parts[parameter]
            numel = sum(span.numel for span in part.spans)
            self._moments[parameter] = Moments8bit([part], numel, self._cut_groups[_sharing(parameter)])
        return self._moments[parameter]

    def forget(self, parameter: Tensor) -> None:
        """Drop the moments of a parameter. The next `get` makes zeros."""
        self._moments.pop(parameter, None)

    def cut_groups(self, parameter: Tensor) -> CutGroups | None:
        """Return the groups that a parameter shares with other ranks. None if it shares none."""
        return self._cut_groups[_sharing(parameter)] if self._parts[parameter].cut else None

    def codes(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the codes of both moments, keyed by name, sharded like the parameter."""
        moments = self.get(parameter)
        return {name: _cut_like(getattr(moments, name), parameter) for name in MOMENTS}

    def values(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return FP32 copies of both moments, keyed by name, sharded like the parameter."""
        values = self.get(parameter).values(self._parts[parameter].name)
        return {name: _cut_like(value, parameter) for name, value in values.items()}

    def load(self, states: Mapping[Tensor, Mapping[str, Tensor]], counts: Sequence[float]) -> None:
        """Replace all moments by `states`, of parameters that took `counts` steps. Collective."""
        self._moments = {}
        self.begin()
        for finishes in (False, True):
            for (parameter, state), count in zip(states.items(), counts, strict=True):
                flat = {name: flat_local(state[name]) for name in MOMENTS}
                self.get(parameter).load({self._parts[parameter].name: flat}, [int(count)], finishes)
            if not finishes:
                self.reduce()

    def begin(self) -> None:
        """Forget the largest values of the last step."""
        for groups in self._cut_groups.values():
            groups.begin()

    def reduce(self) -> None:
        """Reduce the largest values of groups that ranks share. Collective if there are any."""
        for groups in self._cut_groups.values():
            groups.reduce()


def _sharing(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return (the mesh of a parameter, the dimensions of it that shard the parameter)."""
    if not isinstance(parameter, DTensor):
        return None, ()
    cuts = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return parameter.device_mesh, tuple(cuts)


def _cut_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a flat local tensor as a tensor that is sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return local.view(parameter.shape)
    # DTensor.from_local copies a CPU tensor to the device of the mesh.
    shared: Any = torch.empty_like(parameter.detach(), dtype=local.dtype)
    shared._local_tensor = local.view(parameter._local_tensor.shape)
    whole: Tensor = shared
    return whole


def _spans(parameter: Tensor, shape: tuple[int, ...]) -> list[Span]:
    """Return the runs of elements of the full parameter that this rank has, in order."""
    offsets, sizes = (0,) * len(shape), shape
    if isinstance(parameter, DTensor) and parameter.dim():
        (chunk,) = parameter.__create_chunk_list__()
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    if not math.prod(sizes):
        return []
    # Dimensions after the last sharded one are complete, so their elements are one run.
    last = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last + 1)]
    outer = itertools.product(*(range(offsets[dim], offsets[dim] + sizes[dim]) for dim in range(last)))
    starts = (sum(map(math.prod, zip((*index, offsets[last]), strides, strict=True))) for index in outer)
    return [Span(start, start + sizes[last] * strides[last]) for start in starts]


def _cut_groups(parameter: Tensor, shape: tuple[int, ...]) -> list[int]:
    """Return the numbers of the groups that several ranks have parts of, the same on all ranks.
    Only shards of the last dimension divide rows, and they divide all rows at the same columns.
    """
    columns = shape[-1]
    ends = [columns]
    if isinstance(parameter, DTensor):
        # A strided shard (FSDP2 over tensor parallelism) subdivides the shards of other placements,
        # so it comes last.
        placements = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        for placement, ranks in sorted(placements, key=lambda pair: hasattr(pair[0], "split_factor")):
            if getattr(placement, "dim", None) == len(shape) - 1:
                ends = [*_ends_of_chunks(ends, ranks)]
    rows = range(math.prod(shape[:-1]))
    return cut_moment_groups((row * columns + end for row in rows for end in ends), columns)


def _ends_of_chunks(ends: Iterable[int], chunks: int) -> Iterator[int]:
    """Divide each run of elements as torch.chunk does. Yield the ends of the parts."""
    for start, end in itertools.pairwise((0, *ends)):
        size = -(-(end - start) // chunks)
        yield from (min(start + (chunk + 1) * size, end) for chunk in range(chunks))
