"""FSDPWeight, a prepared weight: from FP32 rows of this rank to the QuantizedWeight of all ranks.

Masters keep their weights alive, and weights their group and their CastManager. All other
references are weak, those to FSDP2's objects too: the garbage collector does not look into all
tensors, so a reference cycle through masters would keep a dropped model alive, or need a second
collection.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerocast.cast.partition import MasterShard
from zerocast.distributed.rank_report import ShardStatus
from zerocast.distributed.row_shards import CODES, InnerShards, RowShards, ShardGeometry
from zerocast.formats import AmaxPolicy, FormatSpec
from zerocast.formats.dtypes import dtype_name
from zerocast.formats.layout import check_shape, matrix_shape, stored_matrices
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2 import torch_fsdp
from zerocast.weight.validity import Validity
from zerocast.weight.weight import NOMINAL_DTYPES, QuantizedWeight

if TYPE_CHECKING:
    from zerocast.fsdp2.manager import CastManager
    from zerocast.fsdp2.param_groups import ParamGroup

ADVICE = "call zerocast.fsdp2.refresh(model) on all ranks after parameters were changed outside of an optimizer"
LOAD = (
    "load a checkpoint (zerocast.optim.load, Checkpoints.load or load_state_dict) through zerocast.fsdp2.TrainingState"
)
NOT_SHARDED = (
    "call fully_shard on the model that was given to zerocast.fsdp2.prepare, or on modules in it, before the first forward pass "
    "(it takes the place of DistributedDataParallel and FullyShardedDataParallel)"
)
REPLACED = (
    "call prepare after the calls that replace parameters (parallelize_module, a tie, a parametrization), and then "
    "call fully_shard on the model or on modules in it (it takes the place of DistributedDataParallel and FullyShardedDataParallel)"
)


class Presentation:
    """The tensor that modules see of one weight. Here it is the QuantizedWeight itself.

    An integration whose layers compute with a different class of tensors overrides this to return
    one over the same bytes.
    """

    def check(self, fmt: FormatSpec) -> None:
        """Raise ValueError for a format that the modules cannot compute with."""

    def attach(self, module: nn.Module, name: str) -> None:
        """Called after all checks, once for each `module` with the weight as parameter `name`."""

    def show(self, weight: QuantizedWeight) -> Tensor:
        """Return a tensor over the buffers of `weight`, for the first gather; nothing is copied.

        FSDP2 makes a parameter of it, a new object, by `as_strided` and `detach`.
        """
        return weight

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """Drop values that were derived from earlier bytes: another gather has filled the memory of
        `shown`, FSDP2's parameter.
        """

    def live(self, shown: Tensor, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the weight that products of `shown` would read now, for `zerocast.verify`."""
        assert isinstance(shown, QuantizedWeight)
        return shown


AS_QUANTIZED_WEIGHT = Presentation()


class FSDPWeight:
    """A prepared weight by its parameter `name`. All its MasterParameters refer to this object.

        sharded      `locate` finds this rank's rows of the sharded weight, a cast encodes them
           │ send         with the first weight of a gather: casts if that is due; codes, scales
           ▼              and headers
        gathering    FSDP2's all-gather of bytes, prefetched or not
           │ receive_first, at the first gather: makes `unsharded`
           │ receive_group, with the first weight of every gather: compares the headers of
           │              all ranks, casts and gathers again if all were written to, copies scales
           ▼
        unsharded    `unsharded` is the QuantizedWeight over the bytes of all ranks, which the
           │         module sees through `presentation`
           │              FSDP2 reshards: it frees the storage of codes and of scale buffers
           ▼
        freed        sharded again; `unsharded` stays, and the next gather fills the same
                     storage, which autograd or a compiled graph may have saved

    Its tensors:

        local        the MasterParameter inside FSDP2's sharded parameter
        master       the plain FP32 rows inside `local`
        unsharded    the QuantizedWeight over the gathered bytes
        shown        the tensor that modules see, which FSDP2 made of `presentation.show(unsharded)`
        live         the QuantizedWeight that products with `shown` read

    Attributes:
        format: the format that it is gathered in, until a switch.
        shared_amax: the weights that it shares a tensor amax with. None if there are none.
        presentation: makes the tensor that modules see.
        fp8_weight_gradients: the attribute of its WeightState, which `prepare` sets.
        manager: the CastManager that casts it, for as long as the weight lives.
        validity: the validity of the gathered bytes.
        group, index, param: the weights that it is gathered with, its index among them, and its
            FSDPParam. Set once FSDP2 has sharded the model (`adopt`).
        shard_dim: the dimension that FSDP2 shards, set by `adopt`.
        is_located: True once its shard was found. `locate` sets the next four, each time that
            masters have moved.
        master: the rows of this rank, f32, a plain tensor.
        addresses: the addresses of the master's bytes.
        is_written: True if the master has changed since the last cast, as far as this rank knows.
        geometry: the rows of this rank, and the layout of their bytes.
        status_after_cast: the status that a cast leaves in the header.
        unsharded: the weight of all ranks. None before the first gather, and after a switch of
            formats until the next one.
    """

    group: "ParamGroup"
    param: Callable[[], Any]
    shard_dim: int
    master: Tensor
    geometry: ShardGeometry
    status_after_cast: ShardStatus

    def __init__(
        self,
        name: str,
        fmt: FormatSpec,
        manager: "CastManager",
        shared_amax: SharedAmax | None = None,
        presentation: Presentation = AS_QUANTIZED_WEIGHT,
    ) -> None:
        self.name = name
        self.format = fmt
        self.shared_amax = shared_amax
        self.presentation = presentation
        self.fp8_weight_gradients = False
        self.manager = manager
        self.validity = Validity(LOAD, advice=ADVICE)
        self.validity.owner = weakref.ref(manager)
        self.validity.has_masters = True
        # Before `adopt`: the first gather of all finds the other weights if this is 0.
        self.index = 0
        self.is_located = False
        self.addresses = range(0)
        self.is_written = False
        self.unsharded: QuantizedWeight | None = None

    def __deepcopy__(self, memo: Any) -> "FSDPWeight":
        """Return itself: `async_save` copies shards with the objects that they refer to, and the
        copy is a state of the same weight.
        """
        return self

    # -- set by FSDP2

    def adopt(self, group: "ParamGroup", index: int, param: Any) -> None:
        """Called once FSDP2 has sharded the model. `param`, an FSDPParam, holds this weight."""
        self.group = group
        self.index = index
        self.param = weakref.ref(param)
        # Kept, since FSDP2's own attribute is replaced while it copies the gathered bytes out
        # (`GroupOfInnerShards`).
        self.shard_dim = param.fsdp_placement.dim
        torch_fsdp.take_over_param(param)

    @property
    def local(self) -> Any:
        """The MasterParameter that is the local tensor of FSDP2's parameter. Raises RuntimeError if
        something has replaced it.
        """
        self.check_not_replaced()
        return self.param()._sharded_local_tensor

    def check_not_replaced(self) -> None:
        """Raise RuntimeError if something has replaced the MasterParameter by a plain tensor."""
        if getattr(self.param()._sharded_local_tensor, "weight", None) is not self:
            raise RuntimeError(
                f"{self.name}: something replaced the prepared parameter by a plain tensor, which would be gathered in high "
                "precision: load through load_state_dict, or write into the parameter"
            )

    def was_replaced_with_grad(self, parameter: Tensor) -> bool:
        """Return True if `parameter` is no longer FSDP2's parameter of this weight while the
        current one has a gradient.
        """
        param = self.param() if hasattr(self, "param") else None
        return param is not None and param.sharded_param is not parameter and param.sharded_param.grad is not None

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that FSDP2 shards this weight over; replicas hold equal masters."""
        mesh: DeviceMesh = self.param().shard_mesh
        return mesh

    @property
    def nominal(self) -> torch.dtype:
        """The dtype that the weight computes in."""
        dtype: torch.dtype | None = self.param().mp_policy.param_dtype
        return dtype or self.param().sharded_param.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, or of the slice that tensor parallelism gives this rank."""
        return tuple(self.param()._orig_size)

    @property
    def inner_shards(self) -> InnerShards | None:
        """The shards of a weight that FSDP2 shards along another dimension than the first, one for
        each rank. None if it shards the first one, and over one rank.
        """
        world = self.shard_mesh.size()
        return InnerShards(self.shape, self.shard_dim, world) if self.shard_dim and world > 1 else None

    @property
    def sliced(self) -> bool:
        """True if tensor parallelism gives this rank a slice, which FSDP2 shards."""
        return tuple(self.param().sharded_param.shape) != self.shape

    @property
    def must_keep_codes(self) -> bool:
        """True if codes must be kept from one cast to the next, even if `keep_codes` is False: a
        single rank sends all as one output, and masters in CPU memory are cast on the CPU.
        """
        return self.shard_mesh.size() == 1 or bool(self.param().offload_to_cpu)

    # -- checks

    @property
    def fingerprint(self) -> str:
        """One line that must be the same on all ranks."""
        shared = f" with the amax of {self.shared_amax}" if self.shared_amax else ""
        gradients = " with FP8 weight gradients" if self.fp8_weight_gradients else ""
        along = f" sharded along dimension {self.shard_dim}" if self.shard_dim else ""
        return f"{self.name} {self.format} {self.shape} {self.nominal}{along}{shared}{gradients}"

    def problem(self, weight_mesh: DeviceMesh | None) -> Exception | None:
        """Return why this weight cannot be cast, if so."""
        try:
            self._check_dtypes()
            if self.local.is_meta:
                raise ValueError("the weight is on the meta device: call to_empty first")
            if weight_mesh is not None:
                self._check_mesh(weight_mesh)
            self.check_format(self.format, weight_mesh)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error)(f"{self.name}: {error}")
        return None

    def _check_dtypes(self) -> None:
        if self.local.dtype != torch.float32:
            raise TypeError(f"masters are float32, this is {self.local.dtype}: leave precision to MixedPrecisionPolicy")
        if self.nominal not in NOMINAL_DTYPES:
            raise TypeError(f"weights compute in one of {', '.join(map(str, NOMINAL_DTYPES))}, not in {self.nominal}")

    def _check_mesh(self, weight_mesh: DeviceMesh) -> None:
        """Raise ValueError if the ranks of `weight_mesh` are not all that hold the weight."""
        sharding = dist.get_process_group_ranks(self.shard_mesh.get_group())
        reducing = dist.get_process_group_ranks(weight_mesh.get_group())
        if not {*sharding} <= {*reducing}:
            raise ValueError(
                f"FSDP2 shards the weight over ranks {sharding}, and weight_mesh has ranks {reducing}: pass prepare(..., "
                "weight_mesh=) the flattened mesh of all ranks that shard the weight, those of FSDP2 too"
            )

    def check_format(self, fmt: FormatSpec, weight_mesh: DeviceMesh | None) -> None:
        """Raise ValueError unless this weight can be gathered in a format."""
        problem = self.group.problem()
        if problem:
            raise ValueError(problem)
        check_shape(fmt, self.shape)
        self.presentation.check(fmt)
        if self.inner_shards is not None:
            check_shape(fmt, self.local.shape)
            _check_parts(fmt, self.local.shape, self.shape, f"shards of Shard({self.inner_shards.dim})")
        if not self.sliced:
            return
        _check_parts(fmt, self.shape, self.param().sharded_param.shape, "tensor-parallel slices")
        has_one_amax = fmt.has_tensor_amax or fmt.amax_policy is AmaxPolicy.DELAYED
        if has_one_amax and weight_mesh is None:
            raise ValueError(
                f"a tensor-parallel {fmt} weight has one amax over all its slices: pass "
                "prepare(..., weight_mesh=) the flattened mesh of all ranks that shard the weight"
            )

    # -- sharded: this rank's rows

    def locate(self) -> None:
        """Find the rows of this rank in memory. Raises TypeError if `Module.to` has changed their
        dtype.
        """
        try:
            self._check_dtypes()
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        self.master = self.local.plain
        shape, world, rank = self.shape, self.shard_mesh.size(), self.shard_mesh.get_local_rank()
        inner_shards = self.inner_shards
        if inner_shards is not None:
            # The geometry then describes the inner shard of this rank as a weight over one rank.
            # `ShardGeometry.world` is still the number of ranks that FSDP2 shards over.
            shape, world, rank = tuple(self.master.shape), 1, 0
        rows, columns = matrix_shape(shape)
        shards = RowShards(rows, -(-shape[0] // world) * (rows // shape[0]), world)
        count, (matrix_rows, _) = stored_matrices(self.format, shape)
        apart = matrix_rows if count > 1 else None
        self.geometry = ShardGeometry(self.format, dtype_name(self.nominal), shards, columns, rank, apart, inner_shards)
        self.status_after_cast = ShardStatus.CLEAN if self.geometry.span.numel else ShardStatus.EMPTY
        self.is_located = True
        self.validity.watch([self.master], sharded=False)
        first = self.master.data_ptr()
        self.addresses = range(first, first + self.master.nbytes)

    def shard_over(self, codes: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> MasterShard:
        """Return the part that this rank casts as a small weight. Its `codes`, by direction, begin
        with the first element on this rank. Its scales are in `buffers`.
        """
        geometry = self.geometry
        shape = geometry.shape(geometry.cast_rows)
        memory = {**buffers, **dict(zip(CODES, codes, strict=False))}
        weight = QuantizedWeight.of_part(shape, self.format, geometry.nominal, memory)
        data = (codes[0], codes[1]) if len(codes) > 1 else codes[0] if codes else None
        return MasterShard(weight, self.master.view(-1) if geometry.span.numel else None, geometry.span, data)

    # -- written to

    def after_write(self, data: Tensor) -> None:
        """Called after an operator wrote to `data`: this master, or a tensor that FSDP2 or an
        optimizer made like it.
        """
        # Tracing writes nothing, and compiled code does not come here. The optimizer's hook reports
        # its writes.
        if torch._guards.TracingContext.try_get() is not None:
            return
        # A view without elements has no address.
        if data.data_ptr() not in self.addresses:
            return
        self.manager.plan.mark_amaxes_old()
        self.mark_written()

    def mark_written(self) -> None:
        """Report the change in the header of the next gather, unless a cast comes first."""
        if not self.is_written:
            self.is_written = True
            self.manager.plan.record_written(self)
            self.refuse_reads()

    def refuse_reads(self) -> None:
        """Let reads of the gathered bytes raise, which are older than the master."""
        self.validity.before_read = self._refuse

    def mark_readable(self) -> None:
        """Allow reads of a weight that is left gathered: all ranks know of the writes to it."""
        self.validity.before_read = None

    def _refuse(self, weight: Any) -> None:
        raise RuntimeError(
            f"{self.name}: its master, or a plain parameter that is gathered with it, was changed after it was gathered: call the "
            "prepared model, not a module in it, or zerocast.fsdp2.refresh(model) on all ranks before"
        )

    # -- gathered

    @property
    def is_merged(self) -> bool:
        """True once FSDP2 gathers this weight with the others of its group, which calls no hook."""
        return hasattr(self, "group") and self.group.is_merged

    def send(self, device: torch.device) -> list[Tensor]:
        """Return the bytes of this rank for a gather that begins, flat, on `device`."""
        if self.index == 0:
            self.begin_gather(device)
        return self.group.pop_outgoing(self.index)

    def begin_gather(self, device: torch.device) -> None:
        """Called with the first weight of a gather, before FSDP2 takes the bytes of any."""
        self.manager.before_gather()
        self.group.begin_gather(self.manager.plan.generation, device)

    def receive_first(self, outputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Make the weight over the `outputs` of the first gather. Later gathers fill the same
        memory and call only `receive_group`. Return (the weight as its module sees it, buffers that
        FSDP2 allocates and frees with it).
        """
        buffers, freed_with_it = self.group.buffers_over(self.index, outputs)
        unsharded = QuantizedWeight.of_buffers(self.shape, self.format, self.geometry.nominal, buffers)
        unsharded.state.columnwise_on_demand = True
        unsharded.state.name = self.name
        unsharded.state.validity = self.validity
        unsharded.state.shared_amax = self.shared_amax
        unsharded.state.fp8_weight_gradients = self.fp8_weight_gradients
        unsharded.state.host_casts_gradient = True
        self.unsharded = unsharded
        self.group.after_unsharded(self.index)
        if self.index == 0:
            self.receive_group()
        return self.presentation.show(unsharded), freed_with_it

    def receive_group(self) -> None:
        """Finish a gather: compare headers, cast and gather again if all ranks have written, and
        lay out scales. Called with the first weight of every gather, once all bytes have arrived.
        """
        group = self.group
        if group.compare_headers() and group.sent_cast == self.manager.plan.generation:
            self.manager.cast_again()
        if group.sent_cast != self.manager.plan.generation:
            group.gather_bytes_again(self.manager.plan.generation)
            group.compare_headers()
        group.finish_gather()

    def convert(self, fmt: FormatSpec) -> None:
        """Cast into `fmt` in later casts. The next gather is like the first even if the format of
        this weight stays, since the format of another weight of the group changes.
        """
        self.format = fmt
        self.unsharded = None
        torch_fsdp.forget_gathered(self.param())

    @property
    def shown(self) -> Tensor | None:
        """The parameter that FSDP2 made of the presentation's tensor, or its local tensor if that
        is a DTensor. None before the first gather.
        """
        shown = getattr(self.param(), "_unsharded_param", None)
        local: Tensor | None = getattr(shown, "_local_tensor", shown)
        return local

    @property
    def sliced_parameter(self) -> DTensor:
        """The gathered parameter of a weight that tensor parallelism slices. It has the shape of
        the full weight and describes how it is sliced.
        """
        parameter: DTensor = self.param()._unsharded_param
        return parameter

    @property
    def live(self) -> QuantizedWeight:
        """The gathered weight that a module computes with, while its group is gathered."""
        shown = self.shown
        assert shown is not None, self.name
        assert self.unsharded is not None, self.name
        return self.presentation.live(shown, self.unsharded)


def _check_parts(fmt: FormatSpec, of_part: Sequence[int], of_weight: Sequence[int], parts: str) -> None:
    """Raise ValueError if a block would span two `parts` of a weight."""
    # The last two dimensions of experts, since blocks begin again in each of them.
    extents, whole = of_part[-2:], of_weight[-2:]
    for block in filter(None, (fmt.exchange_block, fmt.columnwise_block)):
        dimensions = zip(extents, whole, block, strict=True)
        if any(extent != whole_extent and extent % block_extent for extent, whole_extent, block_extent in dimensions):
            raise ValueError(
                f"a block of {fmt} would span two {parts}: one is {list(extents)} and a block {list(block)}"
            )


def living(references: Iterable["weakref.ref[FSDPWeight]"]) -> list[FSDPWeight]:
    """Return the weights that are referred to, which the model keeps alive."""
    return [weight for reference in references if (weight := reference()) is not None]


def shard_statuses(weights: Sequence[FSDPWeight]) -> list[ShardStatus]:
    """Return the statuses of this rank's shards of one manager's weights: PARTIAL for all if
    masters are partial, REFUSED for all if this rank could not make the last cast.
    """
    plan = weights[0].manager.plan
    if plan.validity.partial:
        return [ShardStatus.PARTIAL] * len(weights)
    if plan.problem is not None:
        return [ShardStatus.REFUSED] * len(weights)
    written = plan.addresses.written([weight.name for weight in weights])
    for weight in weights:
        if weight.name in written:
            weight.mark_written()
    return [
        ShardStatus.WRITTEN if weight.is_written and clean == ShardStatus.CLEAN else clean
        for weight in weights
        for clean in [weight.status_after_cast]
    ]
