"""Optimizer CPU offload: masters that Megatron's HybridDeviceOptimizer updates on the host, and that are cast there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.megatron import attaching
from tests.megatron.attaching import offloaded
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.test_checkpoints import KINDS
from tests.megatron.training import FORMATS, MIXED, NARROW, Case, check_loaded, saved
from tests.selection import worlds
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks
from zerocast.integrations.megatron.offload import CpuMaster

pytestmark = needs_megatron
SLOW = pytest.mark.slow


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=FORMATS[MIXED].values())
@pytest.mark.parametrize("world", worlds(3, slow=[1, 2, 4]))
@pytest.mark.parametrize(
    ("fraction", "streams"),
    [(1.0, False), (0.5, True), pytest.param(0.5, False, marks=SLOW), pytest.param(1.0, True, marks=SLOW)],
)
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, fraction: float, streams: bool) -> None:
    case = offloaded(fraction=fraction, streams=streams, overlap=True, experts=True, bucket_size=10_000)
    assert any(ranks(world)(attaching.train_offloaded, case))


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=("nvfp4", "fp8_block", "fp8_current"))
@pytest.mark.parametrize(
    ("world", "formats"),
    [(1, "fp8_block"), (2, NARROW), (3, "fp8_current"), (2, "square"), (3, "delayed")]
    + [pytest.param(*case, marks=SLOW) for case in [(3, NARROW), (2, "fp8_current"), (3, "fp8_block"), (2, "delayed")]],
)
@pytest.mark.parametrize("fraction", [1.0, pytest.param(0.5, marks=SLOW)])
def test_all_is_as_with_masters_on_the_device(ranks: Ranks, world: int, formats: str, fraction: float) -> None:
    """Losses, masters, moments and the bytes of every parameter, to the bit."""
    case = offloaded(formats, fraction, in_fp32=formats == "fp8_block")
    ranks(world)(attaching.compare_with_the_device, case)


@pytest.mark.parametrize("fraction", [0.5, *(pytest.param(fraction, marks=SLOW) for fraction in (1.0, 0.2))])
def test_masters_are_made_one_by_one(ranks: Ranks, fraction: float) -> None:
    ranks(2)(attaching.build_one_by_one, offloaded(fraction=fraction, experts=True))


@pytest.mark.parametrize(
    ("fraction", "precise"),
    [
        pytest.param(1.0, False, id="torch's Adam"),
        pytest.param(0.5, False, id="torch's Adam for a half"),
        pytest.param(0.5, True, marks=needs_te, id="FusedAdam for a half"),
        pytest.param(1.0, True, marks=[needs_te, SLOW], id="FusedAdam"),
    ],
)
def test_detached_and_attached_again(ranks: Ranks, fraction: float, precise: bool) -> None:
    case = offloaded(fraction=fraction, precise=precise, streams=True, experts=True, in_fp32=True)
    ranks(2)(attaching.reattach, case)


@pytest.mark.parametrize(
    ("written", "read", "before", "after", "kind"),
    [
        ("offloaded", "on the GPU", 2, 3, KINDS[0]),
        ("on the GPU", "offloaded", 2, 3, KINDS[0]),
        ("offloaded", "offloaded", 3, 2, KINDS[1]),
    ],
)
def test_other_numbers_of_ranks_with_and_without_offload(
    ranks: Ranks, tmp_path: Path, written: str, read: str, before: int, after: int, kind: str
) -> None:
    cases = {"offloaded": offloaded(fraction=0.5, overlap=True), "on the GPU": Case(MIXED, overlap=True)}
    state = ranks(before)(saved, cases[written], str(tmp_path), kind)[0]
    ranks(after)(check_loaded, cases[read], str(tmp_path), kind, state)


def test_moments_stay_on_their_side_when_masters_return_from_the_host(ranks: Ranks) -> None:
    """Megatron's restore_from_cpu asks no HybridDeviceOptimizer which moments a step reads on the host."""
    ranks(2)(attaching.restore_offloaded, offloaded(fraction=0.5))


DEVICE = torch.device("meta")  # where whatever an operator computes is told from host memory


@pytest.mark.parametrize(
    "write",
    [
        lambda master: master.mul_(0).add_(7),
        lambda master: master.fill_(7),
        lambda master: master.copy_(torch.full((3,), 7.0)),
        lambda master: master.data.copy_(torch.full((3,), 7.0)),
        lambda master: setattr(master, "data", torch.full((3,), 7.0)),
        lambda master: master.detach().view(3, 1)[:, 0].zero_().add_(7),
        lambda master: master[:].fill_(7),
        lambda master: torch._foreach_copy_([master], [torch.full((3,), 7.0)]),
        lambda master: torch.full((3,), 7.0, out=master),
        lambda master: [part.fill_(7) for part in master.chunk(3)],
    ],
)
def test_what_is_written_by_hand_is_in_host_memory(write: Callable[[torch.Tensor], object]) -> None:
    memory = torch.zeros(3)
    master = CpuMaster(memory, DEVICE)
    write(master)
    assert memory.tolist() == [7.0] * 3
    assert master.memory is memory and isinstance(master, CpuMaster)


def test_a_master_of_one_element_is_written_too() -> None:
    memory = torch.zeros(1)
    CpuMaster(memory, DEVICE).fill_(7)
    assert memory.item() == 7


def test_what_reads_a_master_in_host_memory() -> None:
    memory = torch.arange(4.0)
    master = CpuMaster(memory, DEVICE)
    assert (master.device, master.dtype, master.shape, master.is_leaf) == (DEVICE, torch.float32, (4,), True)
    assert torch.equal(master.cpu(), memory) and master.cpu().data_ptr() != memory.data_ptr()
    assert torch.equal(torch.zeros(4).copy_(master), memory)
    for computed in (master.clone(), master.norm(), master + 1, torch.zeros_like(master), master.new_zeros(2)):
        assert type(computed) is torch.Tensor and computed.device == DEVICE
    part = master[1:3]
    assert isinstance(part, CpuMaster) and torch.equal(part.memory, memory[1:3]) and part.device == DEVICE
    master.grad = torch.empty(4, device=DEVICE)
    assert "CpuMaster((4,), torch.float32" in repr(master)


def test_a_tensor_that_a_master_in_host_memory_is_copied_to_stays_on_the_host() -> None:
    """torch drops what such an operator returns, so that a copy of it on the device would be memory for nothing."""
    master, written = CpuMaster(torch.arange(4.0), DEVICE), torch.zeros(4)
    for operator, args in (
        (torch.ops.aten.copy_.default, (written, master)),
        (torch.ops.aten.add_.Tensor, (written, master)),
    ):
        assert CpuMaster.__torch_dispatch__(operator, (CpuMaster,), args) is written
    assert written.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_what_a_master_in_host_memory_refuses() -> None:
    memory = torch.zeros(3)
    master = CpuMaster(memory, DEVICE)
    with pytest.raises(RuntimeError, match="data pointer"):
        master.data_ptr()
    for values in (torch.ones(1), torch.ones(3).bfloat16()):
        with pytest.raises(ValueError, match="can be set to values of that shape and dtype"):
            master.data = values
    assert memory.tolist() == [0.0] * 3
