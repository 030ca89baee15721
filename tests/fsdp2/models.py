"""Prepared and sharded models on the ranks of a case, and their gathered bytes and slices against the unsharded cast."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import zerocast
from tests import casts
from tests.workers import seed_random_numbers
from zerocast import QuantizedWeight
from zerocast.backends import reference
from zerocast.formats import Columnwise
from zerocast.fsdp2 import FusedAdamW, torch_fsdp
from zerocast.fsdp2.manager import CastManager
from zerocast.fsdp2.parameter import MasterParameter
from zerocast.fsdp2.prepare import managers_behind, managers_of
from zerocast.fsdp2.weight import FSDPWeight

DELAYED = "fp8_delayed:amax_history_len=4"
FORMATS = tuple(fmt for fmt in casts.FORMATS if fmt != "identity")
# One of each, with the blocks of mxfp8 that ranks can cut. Other options change the scales alone, and are tested where bytes are.
EACH = (DELAYED, "fp8_current", "fp8_block", "mxfp8", "mxfp8:block=32x32", "mxfp4", "nvfp4", "int4")
# formats for any shape
SMALL = tuple(fmt for fmt in FORMATS if zerocast.get_format(fmt).multiple == (1, 1))
# where the format is not what a test is about
FEW = ("nvfp4", DELAYED, "fp8_block:power_of_2_scale=False")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def with_8bit_moments(model: nn.Module, **options: Any) -> FusedAdamW:
    """Return a FusedAdamW of all parameters that keeps its moments in 8 bits."""
    return FusedAdamW(model.named_parameters(), **options, moment_dtype="8bit")


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    # By one operator: the many of the other kind, which test_optimizers.py takes, have their shardings found at each step.
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "FusedAdamW": lambda model: FusedAdamW(model.parameters(), lr=1e-2),
    "8-bit moments": lambda model: with_8bit_moments(model, lr=1e-2),
}


def slow(*values: Any) -> Any:
    """Mark a test parameter as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Block(nn.Sequential):
    """Layers in a row; with a forward of its own, since torch.compile skips that of nn.Sequential."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers one after another."""
        for layer in self:
            x = layer(x)
        return x


class Grouped(nn.Module):
    """Experts in one weight of this shape and one of its transpose; 8 of the rows for each."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(shape) / 8)
        self.down = nn.Parameter(torch.randn(shape[0], shape[2], shape[1]) / 8)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 1 + len(self.up), dtype=torch.int32, device=x.device) * 8
        hidden = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends).relu()
        return x + torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)


class OfExperts(nn.Module):
    """A block of experts for each format; every row once for each expert."""

    def __init__(self, formats: Sequence[str], shape: tuple[int, int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = shape[0]
        self.blocks = nn.ModuleList(Grouped(shape) for _ in formats)
        self.recipe = {f"blocks.{index}.*": fmt for index, fmt in enumerate(formats)}

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(self.experts, 1).bfloat16()
        for block in self.blocks:
            x = block(x)
        return x


class Net(nn.Module):
    """Blocks of two linear layers and a norm, in and out of `width`; `hidden` rows in between, one
    format each.

    Rows differ in size, so that ranks do not find the amax of the whole weight in their own rows.
    """

    def __init__(self, formats: tuple[str, ...], width: int, hidden: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            seed_random_numbers()
            self.blocks = nn.ModuleList(
                Block(nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width, bias=False))
                for _ in formats
            )
            for parameter in self.parameters():
                if parameter.dim() == 2 and not parameter.is_meta:
                    parameter.data.mul_(torch.randn(parameter.shape[0], 1).exp())
        self.recipe = {f"blocks.{i}.*.weight": fmt for i, fmt in enumerate(formats)}

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of each block to its input."""
        for block in self.blocks:
            x = x + block(x)
        return x


def place() -> str:
    """Return the type of the device that a case runs on: GPUs if the group uses NCCL."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


@functools.cache
def mesh(shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks, made once a process, by default with one dimension."""
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(kind, shape or (dist.get_world_size(),), mesh_dim_names=names)


def sharded(
    model: Any,
    recipe: dict[str, str] | None = None,
    *,
    prepare: bool = True,
    prepared: Mapping[str, Any] | None = None,
    keep_codes: bool | None = False,
    **options: Any,
) -> Any:
    """Prepare `model` with these options and shard it by block and as a whole, in bf16 unless asked otherwise.

    By default its codes are cast at each gather, few as they are.
    """
    options = {"mesh": mesh(), "mp_policy": BF16, **options}
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(place())
    if prepare:
        recipe = model.recipe if recipe is None else recipe
        zerocast.fsdp2.prepare(model, recipe, keep_codes=keep_codes, **prepared or {})
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def largest(parameter: Tensor) -> Shard:
    """Return the placement of a plan that shards the largest dimension of each parameter."""
    return Shard(max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))


def batch(step: int, width: int, rank: int | None = None, rows: int = 8) -> Tensor:
    """Return the inputs of a step, different on every rank."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank)).to(place())


def forward(model: Any, step: int = 0, width: int = 64) -> None:
    """Run a forward pass without gradients."""
    with torch.no_grad():
        model(batch(step, width))


def train(model: Any, optimizer: Any, steps: range, width: int, rank: int | None = None) -> None:
    """Train on the inputs of these steps, and of this rank unless another is given."""
    for step in steps:
        model(batch(step, width, rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module) -> list[DTensor]:
    """Return the sharded parameters that an optimizer holds, also while the model has gathered ones."""
    return [param.sharded_param for group in torch_fsdp.groups(model) for param in group.fsdp_params]


def masters(model: nn.Module) -> dict[str, tuple[DTensor, FSDPWeight]]:
    """Return the prepared parameters by name, with the FSDPWeight of each."""
    locals_ = ((parameter, parameter._local_tensor) for parameter in held(model))
    return {local.weight.name: (p, local.weight) for p, local in locals_ if isinstance(local, MasterParameter)}


def manager(model: nn.Module) -> CastManager:
    """Return the manager that casts a prepared model."""
    (found,) = managers_of(model)
    return found


def unsharded(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield every quantized weight, gathered as for a forward pass, one FSDP module after another."""
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for name, parameter in module.named_parameters(prefix):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if isinstance(local, QuantizedWeight):
                    yield name, local
            module.reshard()


def bytes_of(weight: QuantizedWeight) -> casts.Bytes:
    """Return copies of all bytes that products read. FSDP2 cannot free a storage that numpy has looked at."""
    found = {"rowwise_data": weight.rowwise_data, "rowwise_scale_inv": weight.rowwise_scale_inv, "amax": weight.amax}
    if weight.format.columnwise is not Columnwise.NONE:
        found["columnwise_data"], found["columnwise_scale_inv"] = weight.direction(columnwise=True)
    return {name: casts.raw(tensor.clone()) for name, tensor in found.items() if tensor is not None}


def cast_scale(owner: FSDPWeight) -> float:
    """Return the delayed scale of the last cast, 1 for other formats."""
    (manager,) = managers_behind([owner.local])
    scale = manager.plan.cast_scale(owner.name)
    return 1.0 if scale is None else float(scale)


def expected(master: Tensor, owner: FSDPWeight) -> casts.Bytes:
    """Return the unsharded cast of a whole master, by the scale of the last cast."""
    return casts.unsharded(str(owner.format), master.cpu(), owner.geometry.nominal, cast_scale(owner))


def complaints(model: nn.Module, what: str) -> list[str]:
    """Return the differences between gathered bytes and the unsharded cast of the gathered masters."""
    whole = {name: (parameter.full_tensor(), owner) for name, (parameter, owner) in masters(model).items()}
    found, seen = [], set()
    for name, weight in unsharded(model):
        name = name.replace("_orig_mod.", "")  # of a block that was compiled
        seen.add(name)
        try:
            casts.assert_same_bytes(bytes_of(weight), expected(*whole[name]), f"{what}, {name}")
        except AssertionError as error:
            found.append(str(error))
    if seen != set(whole):
        found.append(f"{what}: gathered {sorted(seen)}, prepared {sorted(whole)}")
    return found


def check(model: nn.Module, what: str) -> None:
    """Check that gathered bytes are the unsharded cast of the gathered masters."""
    found = complaints(model, what)
    assert not found, found


def digests(state: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return digests of every whole tensor."""
    found = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= digests(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else getattr(value, "flat", value)
            found[prefix + key] = casts.sha(whole.detach())
    return found


def complaints_of_slices(model: nn.Module, when: str) -> list[str]:
    """Return the gathered slices that differ from their part of the unsharded cast."""
    found, local = [], dist.get_rank() % 2
    tensors = masters(model)
    whole = {name: (p.full_tensor().cpu(), owner, p.placements[-1]) for name, (p, owner) in tensors.items()}
    for name, weight in unsharded(model):
        master, owner, placement = whole[name.replace("_orig_mod.", "")]
        scale = torch.tensor([cast_scale(owner)])
        expected = reference.quantize(owner.format, master, torch.bfloat16, scale)
        codes = casts.raw(expected.rowwise_data).reshape(*master.shape[:-1], -1)
        codes = np.array_split(codes, 2, placement.dim)[local]
        if not (casts.raw(weight.rowwise_data.clone()).reshape(codes.shape) == codes).all():
            found.append(f"{when}: codes of {name}")
        if weight.amax is not None and not torch.equal(weight.amax.cpu(), expected.amax):
            found.append(f"{when}: amax of {name} is {weight.amax} and {expected.amax} unsharded")
        value = casts.cast_whole(str(owner.format), master, scale=float(scale)).dequantize()
        if not torch.equal(weight.dequantize().cpu(), value.chunk(2, placement.dim)[local]):
            found.append(f"{when}: values of {name}")
    return found
