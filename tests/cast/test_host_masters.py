"""Masters in host memory of weights on another device: the bytes are those of the unsharded cast, and no kernel of one device is
handed memory of the other.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from tests.casts import Outcome, Weight, lcg_matrix
from tests.workers import Ranks, on_ranks
from zerocast import CastPlan, QuantizedWeight, quantize_master_weights, verify
from zerocast.backends import ops
from zerocast.cast import cpu_masters, partition
from zerocast.cast.adam_update import AdamUpdate
from zerocast.distributed.group import ONE_PROCESS

# No test machine has another device: the reference backend stands for that of the weights.
DEVICE, HOST = "reference", "cpu"


class Apart:
    """The storages that the stages of each backend were handed."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, Tensor]] = {DEVICE: {}, HOST: {}}

    def watching(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def call(stage: str, backend: str, fmt: str | None = None) -> Callable[..., None]:
            run = implementation(stage, backend) if fmt is None else implementation(stage, backend, fmt)

            def watched(*arguments: Any) -> None:
                for argument in arguments:
                    for tensor in argument if isinstance(argument, list) else [argument]:
                        if isinstance(tensor, Tensor) and tensor.numel():
                            self.of[backend][tensor.untyped_storage().data_ptr()] = (
                                tensor  # kept, so that no address is reused
                            )
                run(*arguments)

            return watched

        return call

    @property
    def shared(self) -> int:
        """The number of storages that both backends were handed."""
        return len(self.of[DEVICE].keys() & self.of[HOST].keys())


class EveryOther:
    """A choice of every other master as one on the host, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._seen: dict[int, bool] = {}

    def __call__(self, master: Tensor, device: torch.device) -> bool:
        return self._seen.setdefault(master.data_ptr(), len(self._seen) % 2 == 0)


@contextlib.contextmanager
def apart(piece: int = 1 << 22, mixed: bool = False) -> Iterator[Apart]:
    """Let plans take all masters, or every other, for masters on the host while the context is open, in pieces
    of `piece` elements.
    """
    found, sides = Apart(), {"side_effect": EveryOther()} if mixed else {"return_value": True}
    with (
        mock.patch.object(partition, "is_on_cpu", **sides),
        mock.patch.object(cpu_masters, "PIECE", piece),
        mock.patch.object(ops, "implementation", found.watching(ops.implementation)),
        mock.patch.object(ops, "_implementation", found.watching(ops._implementation)),
    ):
        yield found


def cast_and_gather(
    cases: tuple[Weight, ...], piece: int, steps: int = 1, mixed: bool = False
) -> tuple[Outcome, int, set[str]]:
    """Return the outcome of a plan with masters on the host, the number of storages that both devices were
    handed, and the backends that had any.
    """
    with apart(piece, mixed) as found:
        outcome = casts.cast_and_gather(cases, DEVICE, steps)
        return outcome, found.shared, {name for name, storages in found.of.items() if storages}


def compare_with_the_device(cases: tuple[Weight, ...], piece: int) -> None:
    """Check that buffers are those of masters on the device after three casts, of which the second is skipped.
    Delayed scales and histories are among them.
    """
    pairs = [casts.Sharded(cases, dist.get_rank()) for _ in range(2)]
    plans = [CastPlan(pairs[0].weights, pairs[0].masters, pairs[0].starts, backend=DEVICE)]
    with apart(piece):
        plans.append(CastPlan(pairs[1].weights, pairs[1].masters, pairs[1].starts, backend=DEVICE))
        for step in range(3):
            for held, plan in zip(pairs, plans, strict=True):
                held.set_masters(step)
                with mock.patch.object(partition, "is_on_cpu", return_value=plan is plans[1]):
                    plan.cast(skip=torch.tensor([step == 1]))
            for ours, theirs in zip(pairs[1].weights, pairs[0].weights, strict=True):
                for name, expected in theirs.state.buffers.items():
                    found = ours.state.buffers[name]
                    assert found is expected is None or (casts.raw(found) == casts.raw(expected)).all(), (step, name)


GAPS = ((1, 20), (21, 150), (157, 32 * 32 - 3))


@pytest.mark.parametrize(
    ("world", "piece", "mixed"),
    [(1, 330, False), (1, 1 << 22, False), (2, 1 << 22, True), (3, 330, False), (3, 1 << 22, True)],
)
def test_every_format_at_odd_cuts(ranks: Ranks, world: int, piece: int, mixed: bool, seed: int) -> None:
    """Casts are right with all masters on the host, and with every other one if `mixed`."""
    cases = casts.every_format(world, seed)
    found = ranks(world)(cast_and_gather, cases, piece, 1, mixed)
    for rank, (outcome, shared, backends) in enumerate(found):
        casts.assert_unsharded(outcome, cases, f"rank {rank} of {world}")
        assert shared == 0
        assert backends == {DEVICE, HOST}


@pytest.mark.parametrize("piece", [10, 1 << 22])
def test_what_nobody_owns_stays(ranks: Ranks, piece: int) -> None:
    """Bytes that no rank owns stay, even halves of bytes."""
    cases = tuple(
        Weight(fmt, (32, 32), GAPS, content="lcg", seed=seed)
        for seed, fmt in enumerate(("nvfp4", "mxfp4", "fp8_current"))
    )
    for outcome, shared, _ in ranks(3)(cast_and_gather, cases, piece, 2):
        casts.assert_unsharded(outcome, cases, "gaps", step=1)
        assert shared == 0


@on_ranks(1, 3)
def test_skips_and_histories(world: int, seed: int) -> None:
    compare_with_the_device(casts.every_format(world, seed), 1000)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block", "identity"])
def test_shard_storage_of_the_caller(fmt: str) -> None:
    """A cast fills the caller's storage of elements [33, 700) from masters on the host as from those on the
    device, also after the storage moves, and in both directions of mxfp8.
    """
    master, found = torch.from_numpy(lcg_matrix(32, 64, 1)).view(-1)[33:700].clone(), []
    for on_host in (True, False):
        weight = QuantizedWeight.empty((32, 64), fmt)
        dtype = weight.rowwise_data.dtype
        parts = [torch.full((700,), casts.POISON, dtype=torch.uint8).to(dtype) for _ in range(2)]
        storage = (parts[0], parts[1]) if fmt == "mxfp8" else parts[0]
        with apart(100), mock.patch.object(partition, "is_on_cpu", return_value=on_host):
            plan = CastPlan(
                [weight], [master], [33], ONE_PROCESS, fsdp_shard_model_weights=[storage], backend="reference"
            )
            plan.cast()
            for part in parts:
                part.data = torch.full_like(part, casts.POISON)
            plan.cast()
        found.append(torch.cat(parts).view(torch.uint8))
    assert torch.equal(*found)
    assert (found[0] != found[0][-1]).any()


def test_what_cannot_be_done_is_refused_before_anything_is() -> None:
    with apart():
        weight, master = QuantizedWeight.empty((16, 32), "nvfp4"), torch.randn(16 * 32)
        plan = CastPlan([weight], [master], [0], ONE_PROCESS, backend="reference")
        plan.cast()
        before = casts.bytes_of(weight)
        flat = torch.zeros_like(master)
        with pytest.raises(
            RuntimeError,
            match=r"AdamUpdate is not supported with masters in CPU memory: step these masters, then call cast\(\)",
        ):
            plan.cast(update=AdamUpdate(flat, flat, flat, torch.zeros(1, 8), torch.ones(1)))
        square, whole = QuantizedWeight.empty((256, 128), "mxfp8"), torch.ones(256 * 128)
        with pytest.raises(ValueError, match=r"scale_cuts.*move the masters to the weights' device"):
            CastPlan([square], [whole], [0], ONE_PROCESS, scale_cuts=[range(4096, 32768, 4096)])
        casts.assert_same_bytes(casts.bytes_of(weight), before)
        plan.cast()  # nothing is partial
        assert verify(plan).ok


def test_masters_on_both_sides_that_change_sides() -> None:
    """A move to the other side is followed like any other, and so are weights whose storage moves."""
    weights = [QuantizedWeight.empty((16, 32), "nvfp4") for _ in range(2)]
    first, second = (torch.from_numpy(lcg_matrix(16, 32, seed)).view(-1).clone() for seed in (1, 2))
    hosted = [first]
    with mock.patch.object(partition, "is_on_cpu", side_effect=lambda master, _: any(master is h for h in hosted)):
        plan = CastPlan(weights, [first, second], [0, 0], ONE_PROCESS)
        for masters in ([first, second], [2 * first, second], [first, 3 * second], [first, second]):
            hosted[:] = [masters[1]]
            plan.move_masters(masters)
            weights[1].rebind(rowwise_data=torch.empty_like(weights[1].rowwise_data))
            plan.cast()
            plan.post_all_gather()
            for weight, master in zip(weights, masters, strict=True):
                whole = casts.cast_whole("nvfp4", master.view(16, 32))
                casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(whole))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masters_on_both_sides_of_a_gpu() -> None:
    master = torch.from_numpy(lcg_matrix(256, 512, 3)).view(-1)
    formats = casts.FORMATS
    ours, theirs = (
        [QuantizedWeight.empty((256, 512), fmt, torch.bfloat16, "cuda") for fmt in formats for _ in range(2)]
        for _ in "ab"
    )
    quantize_master_weights(ours, [master, master.cuda()] * len(formats), [0] * len(ours), ONE_PROCESS)
    quantize_master_weights(theirs, [master.cuda()] * len(ours), [0] * len(ours), ONE_PROCESS)
    for one, other in zip(ours, theirs, strict=True):
        casts.assert_same_bytes(casts.bytes_of(one), casts.bytes_of(other), str(one.format))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_never_holds_the_masters_nor_a_graph_their_cast() -> None:
    weight = QuantizedWeight.empty((8192, 4096), "fp8_block", torch.bfloat16, "cuda")
    master = torch.randn(8192 * 4096)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan.cast()
    assert torch.cuda.max_memory_allocated() - before < master.numel()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), torch.cuda.graph(graph):
        plan.launch()
    plan.cast()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
        ),
    ],
)
def test_plain_masters_are_rounded_in_pieces(device: str) -> None:
    """Rounding is torch's, and the master may be written once the call returns."""
    master = torch.from_numpy(lcg_matrix(300, 512, 3)).view(-1)
    expected, rounded = master.bfloat16(), torch.full((master.numel(),), torch.nan, dtype=torch.bfloat16, device=device)
    with mock.patch.object(cpu_masters, "PIECE", 1000):
        cpu_masters.write_rounded(master, rounded)
    master.fill_(torch.nan)
    assert torch.equal(rounded.cpu(), expected)
