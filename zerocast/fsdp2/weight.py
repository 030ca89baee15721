"""FSDPWeight: a prepared weight, from FP32 rows of this rank to the QuantizedWeight of all
ranks.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.cast.partition import MasterShard
from zerocast.distributed.group import Group
from zerocast.distributed.rank_report import Comparison, ShardStatus
from zerocast.formats import AmaxPolicy, FormatSpec, layout
from zerocast.formats.layout import check_shape, matrix_shape
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_cast import GatherCast
from zerocast.fsdp2.gather_layout import GatherLayout, JointLayout, RowFill, ScaleFill, header_of
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.param_groups import ParamGroup
from zerocast.fsdp2.presentation import AS_QUANTIZED_WEIGHT, Presentation
from zerocast.fsdp2.shard import RowShards, ShardGeometry
from zerocast.fsdp2.torch_fsdp import MasterAddresses
from zerocast.weight.validity import Validity
from zerocast.weight.weight import NOMINAL_DTYPES, QuantizedWeight

ADVICE = "call zerocast.fsdp2.refresh(model) on all ranks after parameters were changed outside of an optimizer"


class FSDPWeight:
    """A prepared weight by its parameter `name`. All MasterParameters that are made of it point
    here.

        sharded      `locate` finds the rows of this rank that FSDP2 cut, a cast encodes them
           │ send         fsdp_pre_all_gather: codes, scales and a header of this rank
           ▼
        gathering    FSDP2's all-gather of bytes, prefetched or not
           │ receive      fsdp_post_all_gather: looks at the headers of all ranks
           │ unshard      lays out scales; gathers again if all ranks were written to
           ▼
        unsharded    `unsharded` is the QuantizedWeight over the bytes of all ranks, which the
           │         module sees as what `presentation` makes of it
           │              FSDP2 reshards: it frees the storage of codes and `inner`
           ▼
        freed        sharded again; `unsharded` stays, and the next gather fills the same
                     storage, which autograd or a compiled graph may have saved
    """

    master: Tensor  # f32, this rank's rows, plain
    geometry: ShardGeometry
    layout: GatherLayout
    group: ParamGroup
    header: Tensor  # int32 `[2]` in the side channel that is sent
    status_after_cast: ShardStatus  # that a cast leaves in the header
    param: Callable[[], Any]  # the FSDPParam, referred to weakly, as groups are

    def __init__(self, name: str, fmt: FormatSpec, record: "CastRecord", validity: Validity) -> None:
        self.name, self.format, self.record, self.validity = name, fmt, record, validity
        self.shared_amax: SharedAmax | None = None
        self.presentation: Presentation = AS_QUANTIZED_WEIGHT
        # that of the weight's cast group, if its scaling is delayed
        self.scaling: DelayedScaling | None = None
        self.is_first_of_gather = True
        self.is_cast = False  # whether FSDP2 has sharded the weight and its shard was located
        self._is_written = False
        self._addresses = range(0)  # of the master
        self.gather_cast: GatherCast | None = None  # of its codes, where they are not kept
        # of the weights gathered with it, where all send their side channels as one, and its place
        # among them
        self.joint: JointLayout | None = None
        self.place = 0
        self._outputs: tuple[Tensor, ...] = ()  # to send
        self._header = -1, ShardStatus.CLEAN  # the cast that it is of, and its status
        self._sent = -1  # the cast whose bytes were sent last
        self.sent_status = ShardStatus.CLEAN
        self.unsharded: QuantizedWeight | None = None
        self.inner: list[Tensor] = []
        self._fills: Sequence[ScaleFill | RowFill] = ()

    def __deepcopy__(self, memo: Any) -> "FSDPWeight":
        """Itself: `async_save` copies shards with what they point to, and the copy is a state of
        the same weight.
        """
        return self

    def convert(self, fmt: FormatSpec) -> None:
        """Be cast into another format and gathered in it from now on; delayed scaling begins
        anew.
        """
        self.format, self.scaling = fmt, None
        self.forget_gathered()

    def forget_gathered(self) -> None:
        """Let the next gather be like the first: this weight, or one that is gathered with it, is
        sent in another format.
        """
        self.unsharded, self.inner = None, []
        torch_fsdp.forget_gathered(self.param())

    # -- sharded: this rank's rows, and the bytes that a cast makes of them

    def adopt(self, group: ParamGroup, param: Any) -> None:
        """FSDP2 has sharded the model: `param`, an FSDPParam, holds this weight."""
        self.group, self.param = group, weakref.ref(param)
        self.is_first_of_gather = group.names[0] == self.name

    @property
    def local(self) -> Any:
        """The MasterParameter that is the local tensor of FSDP2's parameter; RuntimeError where
        the wrapper was lost.
        """
        local = self.param()._sharded_local_tensor
        if getattr(local, "weight", None) is self:
            return local
        raise RuntimeError(
            f"{self.name}: something replaced the prepared parameter by a plain tensor, which would be gathered in high precision: "
            "load through load_state_dict, or write into the parameter"
        )

    def trains_instead_of(self, parameter: Tensor) -> bool:
        """True if FSDP2 has another parameter for this weight, and that one has got a gradient."""
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
    def sliced(self) -> bool:
        """True where tensor parallelism gives this rank a slice, which FSDP2 shards."""
        return tuple(self.param().sharded_param.shape) != self.shape

    @property
    def fingerprint(self) -> str:
        """One line that all ranks must have alike."""
        shared = f" with the amax of {self.shared_amax}" if self.shared_amax else ""
        return f"{self.name} {self.format} {self.shape} {self.nominal}{shared}"

    def problem(self, weight_mesh: DeviceMesh | None) -> Exception | None:
        """Why this weight cannot be cast, if so."""
        try:
            self._check(weight_mesh)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error)(f"{self.name}: {error}")
        return None

    def _check(self, weight_mesh: DeviceMesh | None) -> None:
        if problem := self._dtype_problem():
            raise TypeError(problem)
        if self.local.is_meta:
            raise ValueError("the weight is on the meta device: give it storage with to_empty first")
        self.check_format(self.format, weight_mesh)

    def _dtype_problem(self) -> str | None:
        if self.local.dtype != torch.float32:
            return f"masters are float32, this is {self.local.dtype}: leave precision to MixedPrecisionPolicy"
        if self.nominal not in NOMINAL_DTYPES:
            return f"weights compute in one of {', '.join(map(str, NOMINAL_DTYPES))}, not in {self.nominal}"
        return None

    def check_format(self, fmt: FormatSpec, weight_mesh: DeviceMesh | None) -> None:
        """ValueError unless this weight can be gathered in a format."""
        problem = self.group.problem()
        if problem:
            raise ValueError(problem)
        check_shape(fmt, self.shape)
        self.presentation.check(fmt)
        if self.sliced:
            self._check_slice(fmt, weight_mesh)

    def _check_slice(self, fmt: FormatSpec, weight_mesh: DeviceMesh | None) -> None:
        held, whole_weight = matrix_shape(self.shape), matrix_shape(self.param().sharded_param.shape)
        ends = [extent if extent != all_of_it else 0 for extent, all_of_it in zip(held, whole_weight, strict=True)]
        for block in (fmt.exchange_block, fmt.columnwise_block):
            if block and any(end % side for end, side in zip(ends, block, strict=True)):
                raise ValueError(
                    f"a block of {fmt} would span two tensor-parallel slices: a slice is "
                    f"{list(held)} and a block {list(block)}"
                )
        has_one_amax = fmt.has_tensor_amax or fmt.amax_policy is AmaxPolicy.DELAYED
        if has_one_amax and weight_mesh is None:
            raise ValueError(
                f"a tensor-parallel {fmt} weight has one amax over all its slices: give "
                "prepare(..., weight_mesh=) the flattened mesh of all ranks that shard the weight"
            )

    @property
    def must_keep_codes(self) -> bool:
        """True where codes are kept from one cast to the next, whatever was asked for: one rank
        sends all as one output, and masters on the host are cast there.
        """
        return self.shard_mesh.size() == 1 or torch_fsdp.is_offloaded(self.param())

    @property
    def may_share_side(self) -> bool:
        """True where FSDP2 takes several outputs, out of the memory that they are kept in."""
        return self.shard_mesh.size() > 1 and not torch_fsdp.is_offloaded(self.param())

    def locate(self, index: int) -> None:
        """Find the rows of this rank where they lie now; `index` is the place among the
        addresses of all masters. TypeError where `Module.to` has given them another dtype.
        """
        if problem := self._dtype_problem():
            raise TypeError(f"{self.name}: {problem}")
        self._index = index
        rows, columns = matrix_shape(self.shape)
        world, rank = self.shard_mesh.size(), self.shard_mesh.get_local_rank()
        shards = RowShards(rows, -(-self.shape[0] // world) * (rows // self.shape[0]), world)
        self.master = self.local.plain
        self.geometry = ShardGeometry(self.format, self.nominal, shards, columns, rank)
        self.layout, self.gather_cast = GatherLayout(self.geometry), None
        self._header, self.is_cast = (-1, ShardStatus.CLEAN), True
        self.status_after_cast = ShardStatus.CLEAN if self.geometry.span.numel else ShardStatus.EMPTY
        self.validity.watch([self.master], sharded=False)
        first = self.master.data_ptr()
        self._addresses = range(first, first + self.master.nbytes)

    def let_go_of_codes(self) -> None:
        """Keep no codes between gathers, from the coming `bind` on."""
        self.layout = GatherLayout(self.geometry, keep_codes=False)

    def bind(self, buffer: Tensor, scales: Mapping[str, Tensor]) -> MasterShard:
        """Make the small weight over `buffer`, the zero bytes that the layout, or the joint one,
        keeps, and buffers `scales`; what the stages are given.
        """
        if self.joint is None:
            codes, side = self.layout.parts(buffer)
            self._outputs = self.layout.outputs(buffer)
        else:
            codes, side = self.joint.parts(buffer)[self.place]
            self._outputs = self.joint.outputs(self.place, buffer)
        self.header = header_of(side)
        elsewhere = [side[:0]]  # no bytes, which stand for codes that are not kept
        names = "rowwise_data", "columnwise_data"
        buffers = {**scales, **self._scalars(side), **dict(zip(names, codes or elsewhere, strict=False))}
        geometry = self.geometry
        shape = geometry.cast_rows, geometry.columns
        weight = QuantizedWeight.of_part(shape, self.format, geometry.nominal, buffers)
        data = (codes[0], codes[1]) if len(codes) > 1 else codes[0] if codes else None
        return MasterShard(weight, self.master.view(-1) if geometry.span.numel else None, geometry.span, data)

    def _scalars(self, side: Tensor) -> dict[str, Tensor]:
        """The scalars of the tensor by the names of their buffers, in a side channel."""
        offsets = self.layout.scalar_offsets
        return {name: side[at : at + 4].view(torch.float32) for name, at in offsets.items()}

    def note_write(self, data: Tensor) -> None:
        """An operator wrote to `data`, this master or something that FSDP2 or an optimizer made
        like it.
        """
        if torch._guards.TracingContext.try_get() is not None:
            return  # compiled: what runs later is not seen here, the optimizer's hook is
        if data.data_ptr() not in self._addresses:
            return  # also of a view of no elements
        self.record.amaxes_are_old = True
        self.mark_written()

    def mark_written(self) -> None:
        """Say so at the next gather, unless a cast comes before."""
        if not self._is_written:
            self._is_written = True
            self.record.written.append(self)
            self.validity.finish = self._refuse

    def mark_cast(self) -> None:
        """A cast has read the master as it is now."""
        self._is_written = False

    def _refuse(self, weight: Any) -> None:
        raise RuntimeError(
            f"{self.name}: its master was changed after the forward pass that left it gathered: call the prepared model, not a "
            "module in it, or zerocast.fsdp2.refresh(model) on all ranks before"
        )

    @property
    def status(self) -> ShardStatus:
        """The status of this rank's shard."""
        if self.record.validity.partial:
            return ShardStatus.PARTIAL
        if self.record.addresses.is_written(self._index):
            self.mark_written()
        clean = self.status_after_cast
        return ShardStatus.WRITTEN if self._is_written and clean == ShardStatus.CLEAN else clean

    # -- gathering

    def send(self, master: Tensor, mesh: DeviceMesh) -> tuple[Tensor, ...]:
        """The bytes of this rank for a gather over `mesh`, on the device of `master`. Masters
        that are due were cast before.
        """
        if master.data_ptr() != self._addresses.start and master.device == self.master.device:  # else FSDP2's copy
            self.record.rewrapped = True  # the cast looks for it
            self.mark_written()
        outputs = self._outputs_on(master.device)
        self._mesh, self._sent = mesh, self.record.generation
        return outputs

    @property
    def is_sent(self) -> bool:
        """True once the bytes of the last cast were sent."""
        return self._sent == self.record.generation

    def _outputs_on(self, device: torch.device) -> tuple[Tensor, ...]:
        self._write_header()
        outputs = self.outputs()
        if device == self.master.device:
            return outputs
        return tuple(part.to(device, non_blocking=True) for part in outputs)

    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors to send, on the device of the master. Codes that are not kept are cast for
        this gather.
        """
        kept = self._outputs
        return kept if self.gather_cast is None else (*self.gather_cast.take(self.name), *kept)

    def _write_header(self) -> None:
        """Write the status into the header, if another one lies there since the last cast."""
        cast, before = self._header
        if cast != self.record.generation:
            before = self.status_after_cast
        self.sent_status = self.status
        if self.sent_status != before:
            self.header[0].fill_(self.sent_status)
        self._header = self.record.generation, self.sent_status

    def receive(self, outputs: Sequence[Tensor], dtype: torch.dtype, is_first: bool) -> bool:
        """Look at what FSDP2 gathered. True if all ranks must cast again: all were written to.

        RuntimeError on all ranks where only some were. Reading the headers makes the host wait for
        a GPU: only a rank that was written to outside of an optimizer does, since all may have
        been, and one without rows. If not all were, it learns of it with the others, later.
        """
        if dtype != self.geometry.nominal:
            raise RuntimeError(f"{self.name} was cast for {self.geometry.nominal} and is gathered as {dtype}")
        if is_first or self.unsharded is None:
            self._unshard(outputs)
        if self.joint is None:
            everywhere = self._all_written([self], [self._gathered_header])
        else:  # the first one looks at all headers
            everywhere = self.place == 0 and self._all_written(self.group.weights, self.group.headers)
        return everywhere and self.is_sent

    def _all_written(self, received: Sequence["FSDPWeight"], headers: Sequence[Tensor]) -> bool:
        """True if there is a weight that all ranks have written to."""
        status = self.record.status
        if not status.reads_late(headers[0]):
            written = [status.all_written(w.name, header) for w, header in zip(received, headers, strict=True)]
            return any(written)
        self.group.note([weight.name for weight in received], headers)
        read = [header for w, header in zip(received, headers, strict=True) if w.sent_status.may_be_written]
        return any(Comparison.of_headers(header).may_be_written for header in read)

    def _unshard(self, outputs: Sequence[Tensor]) -> None:
        """Make the weight over the `outputs` of FSDP2's first gather.

        Codes and scalars stay where FSDP2 gathered them. Scales are put into `inner`, in the layout
        that products read.
        """
        geometry = self.geometry
        if self.joint is None:
            codes, side = self.layout.gathered(outputs)
            self._gathered_header = header_of(side)
            scales = self._own_scales(side)
        else:
            codes = self.layout.gathered_codes(outputs[: self.layout.directions])
            if self.place == 0:
                self.group.unshard(self.joint, outputs[-1])
            side, scales = self.group.sides[self.place], self.group.fill.buffers[self.place]
            self.inner = self.group.fill.memory if self.place == 0 else []
            # those of all are filled when the last one is received
            self._fills = self.group.fill.fills if self.name == self.group.names[-1] else ()
        specs = layout.buffers(self.format, (geometry.rows, geometry.columns), geometry.nominal)
        names = "rowwise_data", "columnwise_data"
        stored = [spec.dtype for name in names if (spec := specs[name]) is not None]
        buffers = {name: data.view(dtype) for name, data, dtype in zip(names, codes, stored, strict=False)}
        buffers |= self._scalars(side[0]) | scales  # rank 0 always has rows
        self.unsharded = QuantizedWeight.of_buffers(self.shape, self.format, geometry.nominal, buffers)
        self.unsharded.state.columnwise_on_demand, self.unsharded.state.name = True, self.name
        self.unsharded.state.validity, self.unsharded.state.shared_amax = self.validity, self.shared_amax
        self.unsharded.state.host_casts_gradient = True

    def _own_scales(self, side: Tensor) -> dict[str, Tensor]:
        """The scale buffers by name, filled from this weight's own side channels
        `[world, bytes]`.
        """
        found, fills = {}, []
        for region, spec in self.layout.scale_specs():
            found[region.name] = torch.empty(spec.shape, dtype=spec.dtype, device=side.device)
            fills.append(ScaleFill(region, self.geometry.shards, side, found[region.name], spec.padding))
        self.inner, self._fills = list(found.values()), fills
        return found

    # -- unsharded

    @property
    def live(self) -> QuantizedWeight:
        """The gathered weight that a module computes with; there while its group is gathered."""
        live = self.param()._unsharded_param
        assert self.unsharded is not None, self.name
        # of a DTensor the local tensor
        return self.presentation.live(getattr(live, "_local_tensor", live), self.unsharded)

    def unshard(self, outputs: Sequence[Tensor], shown: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """(the weight as its module sees it, buffers that FSDP2 allocates and frees with it) of
        what was gathered, once more after another cast. `shown` is what FSDP2 made of it the first
        time.
        """
        assert self.unsharded is not None
        if not self.is_sent:
            self._gather_again(outputs)
        self.validity.finish = None
        self.group.received += 1
        self.validity.casts += 1  # what was derived from earlier bytes is old
        if self._fills or self.joint is None:
            self.group.put_scales(self.name, self._fills)
        if shown is None:
            return self.presentation.show(self.unsharded), self.inner
        shown = getattr(shown, "_local_tensor", shown)
        self.presentation.refill(shown, self.unsharded)
        return shown, self.inner

    @torch.no_grad()
    def _gather_again(self, outputs: Sequence[Tensor]) -> None:
        """Gather in place of what FSDP2 gathered."""
        group = Group.of(self._mesh)
        for output, part in zip(outputs, self._outputs_on(outputs[0].device), strict=True):
            with torch_fsdp.unversioned([output]):
                group.all_gather_into(output.view(-1), part, what=f"the bytes of {self.name}, which was written to")
        self._sent = self.record.generation


@dataclass(eq=False)
class CastRecord:
    """The casts of one model so far, and what happened to its masters since the last one.

    `generation` counts casts; it is the same on all ranks, or gathers raise. `validity` knows of
    steps and loads that raised half-way.
    """

    validity: Validity
    generation: int = 0
    rewrapped: bool = False  # whether masters may lie elsewhere than they were located
    amaxes_are_old: bool = False  # whether a master was written to since a step left amaxes
    written: list[FSDPWeight] = field(default_factory=list)  # all that say so
    addresses: MasterAddresses = field(default_factory=lambda: MasterAddresses([]))
    status: GatherStatus = field(init=False)

    def __post_init__(self) -> None:
        self.status = GatherStatus(self.validity)
