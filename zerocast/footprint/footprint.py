"""Footprint: the bytes of one rank in memory and on the wire for a model, format and sharding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerocast.distributed.lpt_assignment import MUON_DIMS, newton_schulz_flops
from zerocast.footprint.fsdp_bytes import fsdp
from zerocast.footprint.model_files import Parameter
from zerocast.footprint.weight_bytes import Collective, Planned, PlannedConfig, amax_bytes
from zerocast.footprint.zero_bytes import zero
from zerocast.formats import FormatSpec, get_format
from zerocast.formats.layout import fits

ZERO = {"zero1": 1, "zero2": 2}
FSDP = ("fsdp2", "hsdp")
OPTIMIZERS = ("adamw", "muon")
# ZeroMuon's default number of Newton-Schulz steps.
NS_STEPS = 5
# With more ranks, the padding of buckets would be most of the memory.
MAX_RANKS = 2**20


@dataclass(frozen=True)
class Setup:
    """The sharding and the optimizer of a training on `ranks` data-parallel ranks.

    `parallel` is zero1, zero2, fsdp2, or hsdp, which shards over groups of `shard_ranks` and
    replicates across them. `optimizer` is adamw, or muon for ZeroMuon under zero1 and zero2, where
    one rank owns each linear weight. Raises ValueError for an unknown `parallel` or `optimizer`,
    for group sizes that do not divide, and for muon under torch's sharding.
    """

    parallel: str = "zero2"
    ranks: int = 8
    shard_ranks: int = 8
    config: PlannedConfig = field(default_factory=PlannedConfig)
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        """Raise ValueError for a combination that is impossible."""
        if self.parallel not in (*ZERO, *FSDP):
            raise ValueError(f"parallel is one of {', '.join((*ZERO, *FSDP))}, got {self.parallel!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.optimizer == "muon" and self.parallel not in ZERO:
            raise ValueError(
                f"muon is planned as ZeroMuon, under {' and '.join(ZERO)}, not under {self.parallel}, "
                "where torch.optim.Muon gathers matrices"
            )
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks must be at most {MAX_RANKS:,}, got {self.ranks:,}")
        if self.parallel == "hsdp" and (self.shard_ranks < 1 or self.ranks % self.shard_ranks):
            raise ValueError(f"hsdp shards {self.ranks} ranks in groups of equal size, not of {self.shard_ranks}")


@dataclass(frozen=True)
class Footprint:
    """The bytes of one rank.

    Attributes:
        format: the format of the linear weights.
        numel: elements of all parameters.
        quantized: elements that are stored in `format`.
        kept: linear weights that stay bf16 because `format` cannot take their shape.
        memory: bytes by purpose.
        collectives: the collectives of a step.
        all_amaxes: bytes that the rank would send in the all-reduce of a cast whose framework
            gathers codes only (Megatron, Apex, TransformerEngine's calls).
        busiest: Muon's operations on the rank with the most, divided by the mean of all ranks; 0
            without Muon.
    """

    format: str
    numel: int
    quantized: int
    kept: int
    memory: dict[str, int]
    collectives: list[Collective]
    all_amaxes: int
    busiest: float

    @property
    def total_memory(self) -> int:
        """Peak bytes of a rank without activations, which it reaches in the backward pass."""
        return sum(self.memory.values())

    @property
    def wire(self) -> dict[str, int]:
        """Bytes that one rank sends in a step, by kind of collective."""
        sent: dict[str, int] = {}
        for collective in self.collectives:
            sent[collective.kind] = sent.get(collective.kind, 0) + collective.sent
        return sent

    @property
    def total_wire(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(self.wire.values())


def footprint(parameters: Sequence[Parameter], fmt: str, setup: Setup) -> Footprint:
    """Return the footprint of `parameters` with linear weights stored in `fmt`; "bf16" quantizes
    nothing.

    Nominal and plain dtypes are bf16. Raises ValueError for an unknown format.
    """
    spec = get_format("identity" if fmt == "bf16" else fmt)
    # One placeholder for all parameters of a shape: there are many experts with few shapes, and the
    # byte counts are cached by placeholder.
    by_shape: dict[tuple[tuple[int, ...], bool], Planned] = {}
    for parameter in parameters:
        if (parameter.shape, parameter.linear) not in by_shape:
            by_shape[parameter.shape, parameter.linear] = _stand_in(parameter, spec)
    placed = [(param.name, by_shape[param.shape, param.linear], param.unit) for param in parameters]
    matrices = [param for param in parameters if param.linear and len(param.shape) in MUON_DIMS]
    of_muon = matrices if setup.optimizer == "muon" else []
    costs = {param.name: newton_schulz_flops(param.shape, NS_STEPS) for param in of_muon}
    busiest = 0.0
    if setup.parallel in ZERO:
        tensors = [(name, tensor, 0) for name, tensor, _ in placed]
        memory, collectives, busiest = zero(tensors, setup.ranks, ZERO[setup.parallel], setup.config, costs)
    else:
        shards = setup.ranks if setup.parallel == "fsdp2" else setup.shard_ranks
        memory, collectives = fsdp(placed, shards, setup.ranks // shards, setup.config)
    quantized = [tensor for _, tensor, _ in placed if tensor.format is not None]
    linear = sum(parameter.linear for parameter in parameters)
    return Footprint(
        fmt,
        sum(tensor.numel() for _, tensor, _ in placed),
        sum(tensor.numel() for tensor in quantized),
        0 if spec.element is None else linear - len(quantized),
        memory,
        collectives,
        2 * amax_bytes((tensor for _, tensor, _ in placed), setup.ranks) * (setup.ranks - 1) // setup.ranks,
        busiest,
    )


def _stand_in(parameter: Parameter, spec: FormatSpec) -> Planned:
    shape = parameter.shape
    is_quantized = parameter.linear and spec.element is not None and len(shape) > 1 and fits(spec, shape)
    return Planned(shape, spec if is_quantized else None)
