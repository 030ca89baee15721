"""Formats of two under FSDP2: both are gathered, forward passes read the first and backward passes the second."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests import casts
from tests.dispatched import Dispatched
from tests.fsdp2 import (
    models,
    test_bits,
    test_captured,
    test_compile,
    test_fused_adamw,
    test_switch,
    test_tensor_parallel,
    test_wire,
    traffic,
)
from tests.fsdp2.models import BF16, DELAYED, Net, slow
from tests.workers import Ranks, error_of
from zerocast import QuantizedWeight, Recipe, verification
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.optim import load, save

PAIR = "fp8_current|nvfp4"
PAIRS = (
    PAIR,
    "fp8_block|mxfp4",
    "nvfp4|fp8_current:element=e5m2",
    "mxfp4|nvfp4",
    "fp8_block|fp8_current",
    "fp8_current|fp8_current:element=e5m2",
)


@pytest.mark.shows(host="FSDP2", parallel="data", formats=lambda pairs: pairs)
@pytest.mark.parametrize(
    ("world", "hidden", "pairs"),
    [(3, 160, PAIRS[:4]), *(slow(*at, PAIRS) for at in ((1, 96), (2, 96), (3, 32), (3, 160), (4, 32), (4, 288)))],
)
def test_bytes_are_those_of_the_unsharded_casts(ranks: Ranks, world: int, hidden: int, pairs: tuple[str, ...]) -> None:
    """With boundaries between blocks of either, within them, and ranks without rows."""
    test_bits.check(ranks, world, pairs, 64, hidden, {})


@pytest.mark.parametrize(
    "options",
    [
        {"keep_codes": True, "reshard_after_forward": False},
        slow({"reshard_after_forward": False}),
        slow({"keep_codes": True}),
        slow({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        slow({"mp_policy": models.MixedPrecisionPolicy()}),
    ],
    ids=str,
)
def test_ways_to_gather(ranks: Ranks, options: dict[str, Any]) -> None:
    test_bits.check(ranks, 2, PAIRS[:3], 64, 96, options)


def both_ways(pair: str, reshard: bool) -> list[bool]:
    """Whether output and gradients of a layer are those of the two dequantized weights."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, bias=False)
    master = layer.weight.detach().clone()
    zerocast.fsdp2.prepare(layer, Recipe({"weight": pair}))
    fully_shard(layer, mesh=models.mesh(), mp_policy=BF16, reshard_after_forward=reshard)
    forward, backward = (casts.cast_whole(fmt, master).dequantize() for fmt in pair.split("|"))
    x, grad = torch.randn(16, 96, dtype=torch.bfloat16, requires_grad=True), torch.randn(16, 64, dtype=torch.bfloat16)
    y = layer(x)
    y.backward(grad)
    assert not torch.equal(forward, backward) and x.grad is not None and layer.weight.grad is not None
    same = layer.weight.grad.full_tensor(), (grad.t() @ x).float()  # type: ignore[attr-defined]
    return [torch.equal(a, b) for a, b in ((y, F.linear(x, forward)), (x.grad, grad @ backward), same)]


@pytest.mark.parametrize("reshard", [True, False])
def test_each_pass_reads_its_own(ranks: Ranks, reshard: bool) -> None:
    for pair in PAIRS[:3]:
        assert ranks(2)(both_ways, pair, reshard) == [[True] * 3] * 2


def test_a_recomputed_forward_pass_reads_the_first(ranks: Ranks) -> None:
    """On weights that were gathered for the backward pass."""
    with mock.patch.object(test_bits, "SOME", (PAIR,)):
        plain, again = (ranks(2)(recomputed, make) for make in (Net, test_bits.Checkpointed))
    assert again == plain


def recomputed(make: type[Net]) -> tuple[list[str], dict[str, str]]:
    with mock.patch.object(test_bits, "SOME", (PAIR,)):
        found, grads = test_bits.gradients(make, True, 1)
    return found, {name: casts.sha(grad) for name, grad in grads.items()}


def fused() -> tuple[list[str], list[int]]:
    """Complaints after steps of FusedAdamW, and passes over masters for amaxes in the cast after each."""
    model = models.sharded(Net((PAIR, "fp8_block|mxfp4"), 64, 96))
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    found, passes = models.complaints(model, "at the start"), []
    for step in range(2):
        test_fused_adamw.fused_step(model, optimizer, step)
        with Dispatched() as operators:
            found += models.complaints(model, f"after step {step}")
        passes.append(operators.stages.count("partial_amax"))
    with torch.no_grad():
        models.masters(model)["blocks.0.1.weight"][0].mul_(3.0)
    return found + models.complaints(model, "written to"), passes


def test_a_fused_step_measures_the_first_and_the_cast_the_second(ranks: Ranks) -> None:
    assert ranks(2)(fused) == [([], [2, 2])] * 2


@pytest.mark.parametrize(("world", "keep_codes"), [(1, True), slow(1, False), slow(3, True)])
def test_captured_steps_beside_weights_of_the_first_alone(ranks: Ranks, world: int, keep_codes: bool) -> None:
    """One launch casts weights of one format in the pass of Adam, another measures those of two."""
    formats = (*PAIRS[:4], "fp8_block", "mxfp4")
    assert (
        ranks(world)(test_captured.compared, keep_codes, formats)
        == [["1 graphs, casts {6}, works at 1 addresses"]] * world
    )


@pytest.mark.parametrize("world", [2, slow(3)])
def test_zero_adamw_takes_the_same_step(ranks: Ranks, tmp_path: Any, world: int) -> None:
    """From one checkpoint: masters, moments and all bytes."""
    ((state, weights),) = ranks(1)(stepped, "by_zero", str(tmp_path / "it"))
    for found, gathered in ranks(world)(stepped, "by_fsdp2", str(tmp_path / "it")):
        assert found == state
        for name, held in gathered.items():
            assert held.keys() == weights[name].keys() >= {"rowwise_data", "columnwise_data"}
            casts.assert_same_bytes(held, weights[name], name)


def stepped(how: str, path: str) -> Any:
    with mock.patch.object(test_fused_adamw, "FORMATS", PAIRS[:4]):
        return getattr(test_fused_adamw, how)(path)


def sent(fmt: str, keep_codes: bool) -> tuple[float, float]:
    """Bytes an element of a large weight that ranks put into its gather, and that they keep between gathers."""
    layer = nn.Linear(1024, 1024, bias=False)
    zerocast.fsdp2.prepare(layer, Recipe({"weight": fmt}), keep_codes=keep_codes)
    fully_shard(layer, mesh=models.mesh(), mp_policy=BF16)
    with traffic.Traffic() as seen, torch.no_grad():
        layer(torch.zeros(1, 1024))
    (weight,) = models.masters(layer).values()
    each = models.mesh().size() / 1024**2
    return seen.sent["all-gather"][-1] * each, weight[1].layout.kept_bytes * each


@pytest.mark.parametrize(("fmt", "nbytes"), [(PAIR, 1.504), ("fp8_block|mxfp4", 1.501), ("mxfp4|nvfp4", 1.005)])
def test_bytes_an_element(ranks: Ranks, fmt: str, nbytes: float) -> None:
    """The codes of both; between gathers scales alone, unless codes are kept."""
    for keep_codes in (False, True):
        for wire, kept in ranks(2)(sent, fmt, keep_codes):
            assert wire == pytest.approx(nbytes, abs=1e-3)
            codes = sum((half.bits or 0) / 8 for half in zerocast.get_format(fmt).halves)
            assert kept == pytest.approx(wire - (0 if keep_codes else codes), abs=1e-6)


def test_one_reduction_a_step(ranks: Ranks) -> None:
    for found in ranks(3)(test_wire.reductions, PAIRS, 256, 1):
        assert [len(sizes) for sizes in found] == [1, 1, 1]


def test_switches(ranks: Ranks) -> None:
    """To formats of two, among them and away from them, with the bytes of each."""
    for optimizer in test_switch.OPTIMIZERS:
        assert ranks(2)(switched, optimizer) == [[], []]


def switched(optimizer: str) -> list[str]:
    targets = {"first": PAIRS[:3], "second": (PAIRS[3], DELAYED, "identity")}
    with mock.patch.object(test_switch, "TARGETS", targets):
        return test_switch.check(("first", "second", "first"), optimizer, {})


def saved(folder: str) -> list[str]:
    """A checkpoint of a run in one recipe, read into another; the outputs and bytes after it."""
    model, adam = test_switch.started((PAIR, "nvfp4", "mxfp4|nvfp4"))
    models.train(model, adam, range(2), 64)
    save(TrainingState(model, adam), folder)
    found = []
    for recipe in ((PAIR, "nvfp4", "mxfp4|nvfp4"), ("nvfp4", PAIR, "fp8_block")):
        fresh, fresh_adam = test_switch.started(recipe)
        load(TrainingState(fresh, fresh_adam), folder)
        found += models.complaints(fresh, "loaded")
        states = (TrainingState(m, a).state_dict() for m, a in ((model, adam), (fresh, fresh_adam)))
        one, other = map(test_fused_adamw.digests, states)
        found += [] if one == other else ["other masters or moments"]
    return found


def test_checkpoints(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(2)(saved, str(tmp_path / "it")) == [[], []]


def verified() -> tuple[bool, list[Any]]:
    """verify's word on a trained model of several pieces, and what it finds in a wrong byte of the second codes."""
    with mock.patch.multiple(verification.verify, PIECE=2**11, ROWS=128):
        model = models.sharded(Net(PAIRS[:4], 64, 384), keep_codes=True)
        models.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(2), 64)
        quiet = zerocast.verify(model)
        weight = models.masters(model)["blocks.0.1.weight"][1]
        if torch.distributed.get_rank() == 1:
            weight.outputs(False)[1].view(-1)[5] ^= 1
        report = zerocast.verify(model)
    return quiet.ok, [(d.name, d.rank, d.buffer, d.wrong, d.offset) for d in report.differences]


def test_verify_compares_both(ranks: Ranks) -> None:
    wrong = [("blocks.0.1.weight", rank, "columnwise_data", 1, 192 * 32 + 5) for rank in (0, 1)]
    assert ranks(2)(verified) == [(True, wrong)] * 2


@pytest.mark.parametrize(("how", "reshard"), [("blocks", True), slow("whole", False)])
def test_compiled_equals_eager(ranks: Ranks, how: str, reshard: bool) -> None:
    eager = ranks(2)(test_compile.losses, "eager", "", PAIRS[:2], reshard)
    assert ranks(2)(test_compile.losses, how, "aot_eager", PAIRS[:2], reshard) == eager


@pytest.mark.parametrize(("hidden", "world"), [(160, 4), slow(160, 2), slow(192, 4)])
def test_slices_of_tensor_parallelism(ranks: Ranks, hidden: int, world: int) -> None:
    assert [found for found, _ in ranks(world)(test_tensor_parallel.slices, PAIR, hidden)] == [[]] * world


def cut_by_slices() -> str:
    """Slices of 64 rows, of formats one of which has blocks of 128."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False))
    mesh = models.mesh((1, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    zerocast.fsdp2.prepare(
        model, Recipe({"0.weight": "fp8_current|mxfp4"}), weight_mesh=mesh["dp", "tp"]._flatten("all")
    )
    fully_shard(model, mesh=mesh["dp"], mp_policy=BF16)
    return error_of(lambda: model(torch.zeros(1, 64)))


def test_a_block_of_the_second_that_slices_would_cut(ranks: Ranks) -> None:
    for text in ranks(2)(cut_by_slices):
        assert "a block of fp8_current|mxfp4 would span two tensor-parallel slices: a slice is [64, 64]" in text


class Experts(nn.Module):
    """Two matrices in one tensor, as experts are stored."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, rows, 32))


@pytest.mark.parametrize("pair", [PAIR, "nvfp4|fp8_current"])
def test_a_block_of_either_that_spans_two_matrices(pair: str) -> None:
    with pytest.raises(ValueError, match=re.escape("a 16-row block of") + ".* would span two matrices"):
        zerocast.fsdp2.prepare(Experts(24), Recipe({"weight": pair}))


def shared() -> None:
    model = Net((PAIR,), 64, 96)
    zerocast.fsdp2.prepare(model, Recipe(model.recipe, share_amax=[("blocks.0.1.weight", "blocks.0.3.weight")]))


def test_amaxes_are_not_shared() -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"are {PAIR}, which cannot share an amax: nvfp4 and fp8_current can")
    ):
        shared()


def test_derived_values_are_those_of_the_last_cast() -> None:
    """What a product keeps of one direction, such as swizzled scales, is made anew after a cast."""
    weight = casts.cast_whole(PAIR, torch.randn(64, 96))
    made: list[Tensor] = []

    def derive() -> Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    for count in (1, 2):
        read: QuantizedWeight = weight.of_direction(columnwise=True)
        for _ in range(2):
            assert read.state.cached_per_cast("a value", derive) is made[-1]
        assert len(made) == count
        weight.state.freshness.cast += 1
