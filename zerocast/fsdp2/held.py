"""Held: a prepared weight as FSDP2 holds it, and what zerocast cannot serve of it."""

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerocast.formats import AmaxPolicy
from zerocast.formats.layout import check_shape, matrix_shape
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.master import Master
from zerocast.fsdp2.master_parameter import MasterParameter
from zerocast.fsdp2.rows import RowShards
from zerocast.fsdp2.shard_weight import ShardWeight
from zerocast.weight.weight import NOMINAL_DTYPES, QuantizedWeight


class Held:
    """`param`, an FSDPParam of the FSDPParamGroup `group` (torch's names), whose local tensor is a MasterParameter.

    They know their modules, and are known to every master here: were they held, the garbage collector, which does not look
    into all tensors, would never free a model.
    """

    def __init__(self, group: Any, param: Any) -> None:
        self._group: Callable[[], Any] = weakref.ref(group)
        self._param: Callable[[], Any] = weakref.ref(param)
        self.master: Master = param._sharded_local_tensor.owner

    @property
    def local(self) -> MasterParameter:
        """The local tensor of the sharded parameter; RuntimeError where the wrapper was lost."""
        local = self._param()._sharded_local_tensor
        if isinstance(local, MasterParameter):
            return local
        raise RuntimeError(
            f"{self.master.name}: something replaced the prepared parameter by a plain tensor, which would be gathered in "
            "high precision: load through load_state_dict, or write into the parameter"
        )

    @property
    def live(self) -> QuantizedWeight:
        """The gathered weight that a module computes with; there while its group is gathered."""
        live = self._param()._unsharded_param
        weight = getattr(live, "_local_tensor", live)  # that of a DTensor
        assert isinstance(weight, QuantizedWeight), self.master.name
        return weight

    @property
    def group(self) -> Any:
        """Its FSDPParamGroup."""
        return self._group()

    @property
    def is_gathered(self) -> bool:
        """Whether its group is."""
        return bool(self._group().is_unsharded)

    def gather_again(self) -> None:
        """Its group, in the same memory."""
        torch_fsdp.gather_again(self._group())

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that FSDP2 shards this weight over; replicas hold equal masters."""
        mesh: DeviceMesh = self._param().shard_mesh
        return mesh

    @property
    def line(self) -> str:
        """What all ranks must have alike."""
        return f"{self.master.name} {self.master.format} {tuple(self._param()._orig_size)} {self._nominal}"

    @property
    def _nominal(self) -> torch.dtype:
        dtype: torch.dtype | None = self._param().mp_policy.param_dtype
        return dtype or self._param().sharded_param.dtype

    def problem(self, weight_mesh: DeviceMesh | None) -> Exception | None:
        """Why this weight cannot be cast, if so."""
        try:
            self._check(weight_mesh)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error)(f"{self.master.name}: {error}")
        return None

    def _check(self, weight_mesh: DeviceMesh | None) -> None:
        fmt = self.master.format
        if self.local.dtype != torch.float32:
            raise TypeError(f"masters are float32, this is {self.local.dtype}: leave precision to MixedPrecisionPolicy")
        if self._nominal not in NOMINAL_DTYPES:
            raise TypeError(f"weights compute in one of {', '.join(map(str, NOMINAL_DTYPES))}, not in {self._nominal}")
        if self.local.is_meta:
            raise ValueError("the weight is on the meta device: give it storage with to_empty first")
        if self._group()._use_post_forward_mesh:
            raise ValueError(
                "reshard_after_forward=<int> does not work with quantized weights (FSDP2 reshards plain tensors alone): "
                "give True or False"
            )
        if self.master.one_direction and not torch_fsdp.reshards_after_forward(self._group()):
            raise ValueError(
                "one_direction needs a gather for each pass: give fully_shard reshard_after_forward=True for this module, "
                "which the outermost one has not by itself"
            )
        check_shape(fmt, self._param()._orig_size)
        self._check_tensor_parallel(weight_mesh)

    def _check_tensor_parallel(self, weight_mesh: DeviceMesh | None) -> None:
        if not self.master.sliced:
            return
        whole = self.master.format.has_tensor_amax or self.master.format.amax_policy is AmaxPolicy.DELAYED
        held, whole_weight = matrix_shape(self._param()._orig_size), matrix_shape(self._param().sharded_param.shape)
        ends = [extent if extent != all_of_it else 0 for extent, all_of_it in zip(held, whole_weight, strict=True)]
        for block in (self.master.format.block, self.master.format.columnwise_block):
            if block and any(end % side for end, side in zip(ends, block, strict=True)):
                raise ValueError(
                    f"a block of {self.master.format} would span two tensor-parallel slices: a slice is "
                    f"{list(held)} and a block {list(block)}"
                )
        if whole and weight_mesh is None:
            raise ValueError(
                f"a tensor-parallel {self.master.format} weight has one amax over all its slices: give "
                "prepare(..., weight_mesh=) the flattened mesh of all ranks that shard the weight"
            )

    def shard(self) -> ShardWeight:
        """The weight as this rank casts it from where the master lies now."""
        shape, plain = tuple(self._param()._orig_size), self.local.plain
        rows, _ = matrix_shape(shape)
        world = self.shard_mesh.size()
        shards = RowShards(rows, -(-shape[0] // world) * (rows // shape[0]), world)
        rank = self.shard_mesh.get_local_rank()
        delayed = self.master.delayed_on(plain.device)
        one_direction, group = self.master.one_direction, self._group
        self.master.is_backward = lambda: torch_fsdp.gathers_for_backward(group())
        self.master.shard = ShardWeight(
            self.master.name, self.master.format, shape, self._nominal, plain, shards, rank, delayed, one_direction
        )
        return self.master.shard


class Places:
    """Where masters lie. Of a refresh, what is done for each parameter, and so without a loop in Python."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._params = [one._param for one in held]
        self._locals = list(map(_local_tensor, [param() for param in self._params]))
        plains = [local.plain for local in self._locals]
        self._addresses = list(map(Tensor.data_ptr, plains))
        self._counters = [list(map(_counting, tensors)) for tensors in (self._locals, plains)]
        for place, one in enumerate(held):
            one.master.place = place
        self.note()

    def moved(self) -> bool:
        """Whether a parameter was replaced since, or its memory."""
        found = map(_local_tensor, [param() for param in self._params])
        same = all(map(operator.is_, found, self._locals))
        return not same or list(map(Tensor.data_ptr, map(_plain, self._locals))) != self._addresses

    def note(self) -> None:
        """Writes that autograd has counted so far were cast. Dispatch sees all but those of compiled functions, which it counts."""
        self._versions = self._count()

    def any_written(self) -> bool:
        """Whether autograd has counted a write since."""
        return self._count() != self._versions

    def is_written(self, place: int) -> bool:
        """The same of one master, the `place`-th."""
        return any(c[place]._version != v[place] for c, v in zip(self._counters, self._versions, strict=True))

    def _count(self) -> list[list[int]]:
        return [list(map(_version, counters)) for counters in self._counters]


_local_tensor: Callable[[Any], Any] = operator.attrgetter("sharded_param._local_tensor")
_plain: Callable[[Any], Any] = operator.attrgetter("plain")
_version: Callable[[Any], int] = operator.attrgetter("_version")
_uncounted = torch.empty(0)


def _counting(tensor: Tensor) -> Tensor:
    """The tensor, or one that stays as it is in place of one for which autograd counts nothing."""
    return _uncounted if tensor.is_inference() else tensor


def held_by(group: Any, casts: Any) -> list[Held]:
    """The weights of `casts` among the parameters of an FSDPParamGroup."""
    found = []
    for param in group.fsdp_params:
        local: Tensor = param._sharded_local_tensor
        if isinstance(local, MasterParameter) and local.owner.casts is casts:
            found.append(Held(group, param))
    return found
