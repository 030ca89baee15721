"""FSDPWeight: a prepared weight, from the FP32 rows of this rank to the QuantizedWeight over the
gathered bytes of all ranks.

Masters keep their FSDPWeight alive, which keeps its ParamGroup and its CastManager alive. All other
references are weak, also those to FSDP2's objects. The garbage collector does not look into all
tensors, so a reference cycle through masters would keep a dropped model alive, or need a second
collection.
"""

import functools
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
from zerocast.formats.element import dtype_name
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
    """Makes the tensor that modules see as a gathered weight: here the QuantizedWeight itself.

    An integration whose layers compute with a different class of tensors overrides this class, and
    returns such a tensor over the same bytes.
    """

    def check(self, fmt: FormatSpec) -> None:
        """Raise ValueError for a format that the modules cannot compute with."""

    def attach(self, module: nn.Module, name: str) -> None:
        """Called after all checks, once for each `module` that has the weight as parameter
        `name`.
        """

    def show(self, weight: QuantizedWeight) -> Tensor:
        """Return a tensor over the buffers of `weight`. Called in the first gather; copies nothing.

        FSDP2 applies `as_strided` and `detach` to it and makes the result its unsharded parameter,
        so modules see a different object.
        """
        return weight

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """Drop values that were derived from earlier bytes. Called after another gather has filled
        the memory of `shown`, FSDP2's unsharded parameter.
        """

    def live(self, shown: Tensor, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the weight that products of `shown` would read now, for `zerocast.verify`."""
        assert isinstance(shown, QuantizedWeight)
        return shown


AS_QUANTIZED_WEIGHT = Presentation()


class FSDPWeight:
    """A prepared weight. All its MasterParameters refer to this object.

    The stages of its life:

        sharded      `locate` finds this rank's rows of the sharded weight, and a cast encodes them
           │ `send`: returns codes, scales and headers. For the first weight of a gather it first
           ▼         casts all weights if a cast is due.
        gathering    FSDP2's all-gather of bytes, prefetched or not
           │ `receive_first`, in the first gather only: makes `unsharded`
           │ `ParamGroup.finish_gather`, for the first weight of every gather: compares the headers
           │         of all ranks, casts and gathers again if all have written masters, and copies
           │         scales
           ▼
        unsharded    `unsharded` is the QuantizedWeight over the bytes of all ranks, which the
           │         module sees through `presentation`
           │ FSDP2 reshards: it frees the storage of codes and of scale buffers
           ▼
        freed        sharded again. `unsharded` stays, and the next gather fills the same storage,
                     which autograd or a compiled graph may have saved

    The tensors:

        local        the MasterParameter inside FSDP2's sharded parameter
        master       the plain FP32 rows inside `local`
        unsharded    the QuantizedWeight over the gathered bytes
        shown        the tensor that modules see, which FSDP2 made of `presentation.show(unsharded)`
        live         the QuantizedWeight that products with `shown` read

    Attributes:
        name: the name of the parameter. Fixed.
        format: the format that the weight is gathered in. A switch of formats replaces it.
        shared_amax: the weights with which it shares a tensor amax, or None. Fixed.
        presentation: makes the tensor that modules see. Fixed.
        fp8_weight_gradients: copied to the WeightState of `unsharded`. Set by `prepare`.
        manager: the CastManager that casts the weight. Fixed.
        validity: the validity of the gathered bytes, for as long as the weight lives.
        group: the ParamGroup that it is gathered with. Set by `adopt`, once FSDP2 has sharded the
            model.
        index: its position in `group`. Set by `adopt`; 0 before.
        param: a weak reference to its FSDPParam. Set by `adopt`.
        shard_dim: the dimension that FSDP2 shards. Set by `adopt`.
        is_located: True once `locate` has run.
        master: the rows of this rank, f32, a plain tensor. Set by `locate`, again each time that
            masters have moved.
        addresses: the addresses of the bytes of `master`. Set by `locate`.
        geometry: the rows of this rank, and the layout of their bytes. Set by `locate`.
        status_after_cast: the status that a cast writes into the header. Set by `locate`.
        unsharded: the QuantizedWeight over the gathered bytes. None before the first gather, and
            after a switch of formats until the next gather.
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
        # The first gather of all runs before `adopt`. With index 0, `send` calls `before_gather`,
        # which finds the weights and adopts them.
        self.index = 0
        self.is_located = False
        self.addresses = range(0)
        self.unsharded: QuantizedWeight | None = None

    def __deepcopy__(self, memo: Any) -> "FSDPWeight":
        """Return this object. `async_save` copies shards together with the objects that they refer
        to, and a copied shard is a state of the same weight.
        """
        return self

    # -- facts that FSDP2 knows

    def adopt(self, group: "ParamGroup", index: int, param: Any) -> None:
        """Take over `param`, the FSDPParam that holds this weight. Called once FSDP2 has sharded
        the model.
        """
        self.group = group
        self.index = index
        self.param = weakref.ref(param)
        # Copied, since `GroupOfInnerShards` replaces FSDP2's attribute while FSDP2 copies the
        # gathered bytes.
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
        """The ranks that FSDP2 shards this weight over, without replicas."""
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
        """The shards of all ranks, if FSDP2 shards the weight along a dimension other than the
        first. None if it shards the first dimension, or over one rank.
        """
        world = self.shard_mesh.size()
        if self.shard_dim == 0 or world == 1:
            return None
        return InnerShards(self.shape, self.shard_dim, world)

    @functools.cached_property
    def sliced(self) -> bool:
        """True if tensor parallelism gives this rank a slice of the weight, which FSDP2 shards."""
        return tuple(self.param().sharded_param.shape) != self.shape

    @property
    def must_keep_codes(self) -> bool:
        """True if casts must keep codes even if `keep_codes` is False. A single rank sends codes
        and metadata as one output, and masters in CPU memory are cast on the CPU.
        """
        return self.shard_mesh.size() == 1 or bool(self.param().offload_to_cpu)

    # -- checks

    @property
    def fingerprint(self) -> str:
        """One line that must be the same on all ranks."""
        shared = f" with the amax of {self.shared_amax}" if self.shared_amax else ""
        gradients = " with FP8 weight gradients" if self.fp8_weight_gradients else ""
        along = f" sharded along dimension {self.shard_dim}" if self.shard_dim else ""
        frozen = "" if self.param().sharded_param.requires_grad else " frozen"
        return f"{self.name} {self.format} {self.shape} {self.nominal}{along}{shared}{gradients}{frozen}"

    def problem(self, weight_mesh: DeviceMesh | None) -> Exception | None:
        """Return why this weight cannot be cast, or None if it can."""
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
        """Raise ValueError if FSDP2 shards the weight over ranks that `weight_mesh` lacks."""
        shard_ranks = dist.get_process_group_ranks(self.shard_mesh.get_group())
        mesh_ranks = dist.get_process_group_ranks(weight_mesh.get_group())
        if not {*shard_ranks} <= {*mesh_ranks}:
            raise ValueError(
                f"FSDP2 shards the weight over ranks {shard_ranks}, and weight_mesh has ranks {mesh_ranks}: pass prepare(..., "
                "weight_mesh=) the flattened mesh of all ranks that shard the weight, those of FSDP2 too"
            )

    def check_format(self, fmt: FormatSpec, weight_mesh: DeviceMesh | None) -> None:
        """Raise ValueError if this weight cannot be gathered in a format."""
        problem = self.group.problem()
        if problem:
            raise ValueError(problem)
        check_shape(fmt, self.shape)
        self.presentation.check(fmt)
        if self.inner_shards is not None:
            check_shape(fmt, self.local.shape)
            _check_whole_blocks(fmt, self.local.shape, self.shape, f"shards of Shard({self.inner_shards.dim})")
        if not self.sliced:
            return
        _check_whole_blocks(fmt, self.shape, self.param().sharded_param.shape, "tensor-parallel slices")
        has_one_amax = fmt.has_tensor_amax or fmt.amax_policy is AmaxPolicy.DELAYED
        if has_one_amax and weight_mesh is None:
            raise ValueError(
                f"a tensor-parallel {fmt} weight has one amax over all its slices: pass "
                "prepare(..., weight_mesh=) the flattened mesh of all ranks that shard the weight"
            )

    # -- sharded

    def locate(self) -> None:
        """Find the rows of this rank in memory, and compute their geometry. Raises TypeError if
        `Module.to` has changed their dtype.
        """
        try:
            self._check_dtypes()
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        self.master = self.local.plain
        shape, world, rank = self.shape, self.shard_mesh.size(), self.shard_mesh.get_local_rank()
        inner_shards = self.inner_shards
        if inner_shards is not None:
            # Each rank casts its inner shard as if it were a weight over one rank.
            # `ShardGeometry.world` is still the number of ranks that FSDP2 shards over.
            shape, world, rank = tuple(self.master.shape), 1, 0
        rows, columns = matrix_shape(shape)
        # FSDP2 shards the first dimension. A row of it is several rows of the matrix if the weight
        # has more than two dimensions.
        rows_of_first_dim = rows // shape[0]
        rows_per_rank = -(-shape[0] // world) * rows_of_first_dim
        shards = RowShards(rows, rows_per_rank, world)
        matrix_count, (matrix_rows, _) = stored_matrices(self.format, shape)
        self.geometry = ShardGeometry(
            format=self.format,
            nominal_name=dtype_name(self.nominal),
            shards=shards,
            columns=columns,
            rank=rank,
            matrix_rows=matrix_rows if matrix_count > 1 else None,
            inner_shards=inner_shards,
        )
        self.status_after_cast = ShardStatus.CLEAN if self.geometry.span.numel else ShardStatus.EMPTY
        self.is_located = True
        self.validity.watch([self.master], sharded=False)
        start = self.master.data_ptr()
        self.addresses = range(start, start + self.master.nbytes)

    def shard_over(self, codes: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> MasterShard:
        """Return this rank's part of the weight as a small weight, which it casts.

        `codes`, one tensor per direction, begin with the first element that this rank holds.
        `buffers` are the scales, keyed by name.
        """
        geometry = self.geometry
        shape = geometry.shape(geometry.cast_rows)
        memory = {**buffers, **dict(zip(CODES, codes, strict=False))}
        weight = QuantizedWeight.of_part(shape, self.format, geometry.nominal, memory)
        shard_data: Tensor | tuple[Tensor, Tensor] | None = None
        if len(codes) == 1:
            shard_data = codes[0]
        elif codes:
            shard_data = codes[0], codes[1]
        master = self.master.view(-1) if geometry.span.numel else None
        return MasterShard(weight, master, geometry.span, shard_data)

    # -- writes to the master

    def after_write(self, data: Tensor) -> None:
        """Called after an operator wrote to `data`, which is this master or a tensor that FSDP2 or
        an optimizer made like it.
        """
        # Tracing writes nothing. Compiled code does not call this, and the hook of the optimizer
        # step reports its writes.
        if torch._guards.TracingContext.try_get() is not None:
            return
        # A write elsewhere, for example to optimizer state, does not change the master. Neither
        # does one to a view without elements, which has no address.
        if data.data_ptr() not in self.addresses:
            return
        self.manager.plan.forget_amaxes()
        self.mark_written()

    def mark_written(self) -> None:
        """Record that the master has changed since the last cast. The header of the next gather
        reports this, unless a cast comes first.
        """
        written = self.manager.plan.written
        if self.name not in written:
            written.add(self.name)
            self.refuse_reads()

    def refuse_reads(self) -> None:
        """Let reads of the gathered bytes raise, since they are older than the master."""
        self.validity.before_read = self._refuse

    def mark_readable(self) -> None:
        """Allow reads of a weight that is left gathered, once all ranks know of writes to it."""
        self.validity.before_read = None

    def _refuse(self, weight: Any) -> None:
        raise RuntimeError(
            f"{self.name}: its master, or a plain parameter of its group, was changed after it was gathered: call "
            "zerocast.fsdp2.refresh(model) on all ranks first, or call the prepared model and not a module in it"
        )

    # -- gathered

    @property
    def is_merged(self) -> bool:
        """True once FSDP2 gathers the weights of the group as one parameter, without the hooks of
        each.
        """
        return hasattr(self, "group") and self.group.is_merged

    def send(self, device: torch.device) -> list[Tensor]:
        """Return the flat tensors that this rank sends in a gather, on `device`."""
        if self.index == 0:
            self.manager.before_gather()
            self.group.begin_gather(device)
        return self.group.pop_outgoing(self.index)

    def receive_first(self, outputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Make `unsharded` over the `outputs` of the first gather. Later gathers fill the same
        memory, without a call for each weight. Return the tensor that modules see, and the buffers
        that FSDP2 must allocate and free with it.
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
            self.group.finish_gather()
        return self.presentation.show(unsharded), freed_with_it

    def convert(self, fmt: FormatSpec) -> None:
        """Set the format of later casts. The next gather allocates memory as the first one did,
        even if this format is the same, since that of another weight in the group changes.
        """
        self.format = fmt
        self.unsharded = None
        torch_fsdp.forget_gathered(self.param())

    @property
    def shown(self) -> Tensor | None:
        """The parameter that FSDP2 made from the tensor of the presentation; if that is a DTensor,
        its local tensor. None before the first gather.
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


def _check_whole_blocks(fmt: FormatSpec, part_shape: Sequence[int], weight_shape: Sequence[int], parts: str) -> None:
    """Raise ValueError if a block would span two parts of a weight. `parts` is their name."""
    # Each expert begins a new block, so only the last two dimensions count.
    part_sizes, weight_sizes = part_shape[-2:], weight_shape[-2:]
    for block in filter(None, (fmt.exchange_block, fmt.columnwise_block)):
        for part_size, weight_size, block_size in zip(part_sizes, weight_sizes, block, strict=True):
            is_split = part_size != weight_size
            if is_split and part_size % block_size:
                raise ValueError(
                    f"a block of {fmt} would span two {parts}: one is {list(part_sizes)} and a block {list(block)}"
                )


def living(references: Iterable["weakref.ref[FSDPWeight]"]) -> list[FSDPWeight]:
    """Return the weights behind weak references. The model keeps them alive."""
    return [weight for reference in references if (weight := reference()) is not None]


def shard_statuses(weights: Sequence[FSDPWeight]) -> list[ShardStatus]:
    """Return the status of this rank's shard of each weight. All weights have the same manager.

    All are PARTIAL if masters are partial, and REFUSED if this rank could not make the last cast.
    """
    plan = weights[0].manager.plan
    if plan.validity.partial:
        return [ShardStatus.PARTIAL] * len(weights)
    if plan.problem is not None:
        return [ShardStatus.REFUSED] * len(weights)
    counted_writes = plan.addresses.written([weight.name for weight in weights])
    for weight in weights:
        if weight.name in counted_writes:
            weight.mark_written()
    statuses = []
    for weight in weights:
        status = weight.status_after_cast
        # A rank without rows reports EMPTY, also after a write.
        if weight.name in plan.written and status is ShardStatus.CLEAN:
            status = ShardStatus.WRITTEN
        statuses.append(status)
    return statuses
