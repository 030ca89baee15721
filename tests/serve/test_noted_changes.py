"""Deltas by what casts have noted: exact after steps, skips, loads, averages and switches, with no codes kept."""

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.fsdp2 import models as sharded_models
from tests.fsdp2.models import Net
from tests.optim.replayed import run_again
from tests.selection import some, worlds
from tests.serve.test_export import model
from tests.serve.test_live import assert_same, collected
from tests.serve.test_refits import CASES, Run, deliver
from tests.workers import error_of
from zerocast import CastPlan
from zerocast.cast import partition
from zerocast.optim import EMA
from zerocast.optim.device_step import CapturedStep
from zerocast.serve import Receiver, Sender


def noted(fmt: str = "fp8_block", naming: str = "modelopt") -> Run:
    return Run(fmt, naming, note_changes=True)


@pytest.mark.parametrize(("naming", "fmt"), CASES)
@pytest.mark.parametrize("steps", [1, 3])
def test_deltas_are_exact(naming: str, fmt: str, steps: int) -> None:
    """After one cast or many: the same bytes as by comparison, and no more than these where a byte did not change back."""
    run = noted(fmt, naming)
    other = Sender(run.model, naming, bucket_bytes=30_000)
    sizes = run.full(), sum(message.nbytes for message in other.named_tensors())
    assert sizes[0] == sizes[1]
    for _ in range(2):
        for _ in range(steps):
            run.step()
        compared = sum(message.nbytes for message in other.named_deltas(other.refit))
        found = run.delta()
        run.check()
        assert (found == compared) if steps == 1 else (compared <= found < sizes[0])
    assert run.delta() == 0


def test_no_codes_are_kept() -> None:
    """Only what is not a view of codes: scales, and what a layout has copied."""
    run = noted("nvfp4")
    run.full()
    codes = {name for name, p in run.model.named_parameters()}
    stored = collected(run.model, "modelopt")
    assert run.sender.kept_bytes == sum(t.nbytes for name, t in stored.items() if name not in codes)
    other = Sender(run.model, "modelopt")
    deliver(other.named_tensors(), Receiver())
    assert other.kept_bytes == sum(t.nbytes for t in stored.values()) > 5 * run.sender.kept_bytes


def skipped(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = torch.full(parameter.shape, torch.inf, dtype=parameter.dtype)
    run.optimizer.step()
    assert run.optimizer.skipped_steps == 1


def loaded(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    run.step()
    run.step()
    run.optimizer.load_state_dict(state)


def averaged(run: Run) -> None:
    """A refit in the middle of a swap, and one after it."""
    average = EMA(run.optimizer, decay=0.5)
    run.step()
    with average.swapped():
        run.delta()
        run.check()


def moved(run: Run) -> None:
    """Somebody gives a weight other storage, which holds other bytes until the next cast."""
    weight = run.model.get_parameter("up.weight")
    weight.data = weight.detach().clone()
    run.step()


BETWEEN = {"skipped": skipped, "loaded": loaded, "averaged": averaged, "moved": moved}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_happens_between_refits(between: Any) -> None:
    run = noted()
    run.full()
    run.step()
    run.delta()
    between(run)
    size = run.delta()
    run.check()
    assert (size == 0) == (between is skipped)
    run.step()
    run.delta()
    run.check()


def fresh(master: torch.Tensor) -> tuple[zerocast.QuantizedWeight, CastPlan]:
    weight = zerocast.QuantizedWeight.empty((64, 64), "fp8_block", torch.bfloat16)
    plan = CastPlan([weight], [master], [0], names=["weight"])
    plan.cast()
    plan.post_all_gather()
    return weight, plan


def other_storage(weight: zerocast.QuantizedWeight, plan: CastPlan, master: torch.Tensor) -> None:
    """It holds what the next cast writes, which then finds nothing changed there."""
    weight.data = fresh(master)[0].data


def other_plan(weight: zerocast.QuantizedWeight, plan: CastPlan, master: torch.Tensor) -> None:
    """It writes what the next cast writes, and gives way to that plan again."""
    CastPlan([weight], [master], [0]).cast()
    plan.attach(torch.optim.SGD([master], lr=0.0)).remove()


@pytest.mark.parametrize("between", [other_storage, other_plan])
def test_codes_that_changed_without_the_plan(between: Any) -> None:
    master = torch.nn.Parameter(torch.randn(64 * 64))
    weight, plan = fresh(master)
    sender, receiver = Sender(plan, "deepseek", note_changes=True), Receiver()
    deliver(sender.named_tensors(), receiver)
    with torch.no_grad():
        master.mul_(-1)
    between(weight, plan, master)
    plan.cast()
    plan.post_all_gather()
    assert deliver(sender.named_deltas(receiver.refit), receiver) > 64 * 64 / 2
    assert_same(dict(receiver.tensors), collected(plan, "deepseek"))


def test_a_plan_that_takes_over() -> None:
    """Its casts note nothing: from the next full refit on, what it casts is compared."""
    master = torch.nn.Parameter(torch.randn(64 * 64))
    weight, plan = fresh(master)
    sender, receiver = Sender(plan, "deepseek", note_changes=True), Receiver()
    deliver(sender.named_tensors(), receiver)
    newer = CastPlan([weight], [master], [0], names=["weight"])
    newer.cast()
    with pytest.raises(RuntimeError, match="are not those of the last refit"):
        deliver(sender.named_deltas(receiver.refit), receiver)
    deliver(sender.named_tensors(), receiver)
    with torch.no_grad():
        master.mul_(-1)
    newer.cast()
    newer.post_all_gather()
    assert deliver(sender.named_deltas(receiver.refit), receiver) > 64 * 64 / 2
    assert_same(dict(receiver.tensors), collected(newer, "deepseek"))


@pytest.mark.parametrize(("before", "after"), [("fp8_block", "nvfp4"), ("nvfp4", "fp8_block")])
def test_a_switch_of_formats(before: str, after: str) -> None:
    """What was stored otherwise is refused, and a full refit goes on from there. Codes take fewer bits then, or more."""
    run = noted(before)
    run.full()
    zerocast.switch(run.optimizer, {"up.weight": after})
    with pytest.raises(RuntimeError, match="are not those of the last refit"):
        run.delta()
    run.full()
    run.check()
    run.step()
    run.delta()
    run.check()


def test_a_switch_to_a_format_that_is_stored_alike() -> None:
    """New storage, whose bytes before the cast nobody was sent: all of them are."""
    run = noted()
    run.full()
    zerocast.switch(run.optimizer, {"up.weight": "fp8_block:power_of_2_scale=False", "zeros.weight": "fp8_block"})
    plan = run.optimizer._plan
    assert all(plan._notes.changed(index, owned).all() for index, (_, owned) in plan._notes.noted().items())
    run.delta()
    run.check()
    run.step()
    run.delta()
    run.check()


def noted_bits(run: Run) -> dict[str, bytes]:
    """By weight which bytes the casts of all ranks have noted, each rank's part where it lies."""
    plan = run.optimizer._plan
    own = {
        plan._names[index]: (owned.start, plan._notes.changed(index, owned).numpy().tobytes())
        for index, (_, owned) in plan._notes.noted().items()
    }
    found: list[Any] = [own]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return {name: b"".join(bits for _, bits in sorted(part[name] for part in found)) for name in own}


def gathered(naming: str, fmt: str) -> tuple[list[bytes], list[dict[str, bytes]]]:
    """What a receiver holds after each of some refits, and what casts had noted before them."""
    run = noted(fmt, naming)
    run.full()
    found, bits = [], []
    for number in range(3):
        for turn in range(1 + number):
            generator = torch.Generator().manual_seed(10 * number + turn)
            for parameter in run.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            run.optimizer.step()
        bits.append(noted_bits(run))
        run.delta()
        run.check()
        found += [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in run.receiver.tensors.values()]
    return found, bits


@pytest.mark.parametrize("world", worlds(2, slow=[1, 4]))  # a mean of three bf16 gradients is not always one of them
@pytest.mark.parametrize(("naming", "fmt"), [("modelopt", "nvfp4"), ("deepseek", "fp8_block"), ("bf16", "mxfp4")])
def test_any_number_of_ranks_notes_the_same(ranks: Any, world: int, naming: str, fmt: str) -> None:
    """What each rank's casts noted, gathered: the bits and the bytes of one rank, whatever rows a boundary cuts."""
    alone = gathered(naming, fmt)
    assert any(any(bits) for of_refit in alone[1] for bits in of_refit.values())
    for found in ranks(world)(gathered, naming, fmt):
        assert found == alone


def cut(fmt: str, ends: list[int]) -> list[bytes]:
    """A CastPlan whose ranks own odd spans: they meet within a byte of 4-bit codes, within a block, within a row."""
    rank, shape = dist.get_rank(), (96, 64)
    span = slice(ends[rank], ends[rank + 1])
    weight = zerocast.QuantizedWeight.empty(shape, fmt, torch.bfloat16)
    weight.state.rowwise_data.view(-1).view(torch.uint8).fill_(0)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).view(-1) * 0.02
    master = whole[span].clone()
    plan = CastPlan([weight], [master], [span.start], names=["weight"])

    def cast() -> None:
        plan.cast()
        data = weight.state.rowwise_data.view(-1).view(torch.uint8)
        first, last = span.start * data.numel() // whole.numel(), -(-span.stop * data.numel() // whole.numel())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (first, last, data[first:last].clone()))
        for start, stop, part in parts:
            data[start:stop] = part
        plan.post_all_gather()

    cast()
    sender, receiver = Sender(plan, "modelopt" if fmt == "nvfp4" else "deepseek", note_changes=True), Receiver()
    deliver(sender.named_tensors(), receiver)
    found = []
    for _ in range(3):
        for _ in range(2):
            whole += torch.randn(whole.shape, generator=generator) * 1e-4
            master.copy_(whole[span])
            cast()
        deliver(sender.named_deltas(receiver.refit), receiver)
        assert_same(dict(receiver.tensors), collected(plan, sender._live.naming))
        found += [t.view(-1).view(torch.uint8).numpy().tobytes() for t in receiver.tensors.values()]
    return found


def own_scales(fmt: str) -> None:
    """Each rank computes the scales of its own rows only, of which the table then speaks as of a whole weight."""
    torch.manual_seed(0)
    net = zerocast.quantize_(torch.nn.Linear(256, 640, bias=False), {"weight": fmt}, dtype=torch.bfloat16)
    optimizer = zerocast.ZeroAdamW(net.named_parameters(), lr=1e-4)
    assert all(shard.cuts for shard in optimizer._plan._partition.shards)
    sender, receiver = Sender(net, "compressed-tensors", note_changes=True), Receiver()
    deliver(sender.named_tensors(), receiver)
    for _ in range(2):
        net.weight.grad = torch.randn(net.weight.shape, dtype=torch.bfloat16)
        optimizer.step()
        assert 0 < deliver(sender.named_deltas(receiver.refit), receiver) < 256 * 640 / 3
        assert_same(dict(receiver.tensors), collected(net, "compressed-tensors"))


@pytest.mark.parametrize("world", worlds(2, slow=[3]))
def test_scales_that_are_gathered(ranks: Any, world: int) -> None:
    ranks(world)(own_scales, "mxfp8")


CUTS = {
    "two": [0, 1001, 96 * 64],
    "three": [0, 1001, 3003, 96 * 64],
    "four, one with nothing": [0, 65, 65, 4097, 96 * 64],
    "four, two with one element": [0, 1001, 1002, 1003, 96 * 64],
    "four, the end": [0, 0, 1, 96 * 64 - 1, 96 * 64],
}


@pytest.mark.parametrize("ends", some(CUTS, "two"))
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block"])
def test_ranks_that_share_a_byte(ranks: Any, fmt: str, ends: list[int]) -> None:
    alone = ranks(1)(cut, fmt, [0, 96 * 64])[0]
    for found in ranks(len(ends) - 1)(cut, fmt, ends):
        assert found == alone


def test_the_noted_bits_are_the_changed_bytes() -> None:
    run = noted("nvfp4")
    plan = run.optimizer._plan
    run.full()
    before = {i: data.clone() for i, (data, _) in plan._notes.noted().items()}
    run.step()
    for index, (data, owned) in plan._notes.noted().items():
        found = plan._notes.changed(index, owned)
        assert torch.equal(found, (data != before[index])[owned.start : owned.stop])


def newer_sender(run: Run) -> None:
    """It takes the notes over; the older one has none to go by."""
    Sender(run.model, "modelopt", note_changes=True)
    run.delta()


def closed(run: Run) -> None:
    run.sender.close()
    run.delta()


def not_cast_by_us(_: Run) -> None:
    Sender(model("identity"), "modelopt", note_changes=True)


def one_rank_of_two() -> None:
    optimizer = zerocast.ZeroAdamW(model("fp8_block").named_parameters())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    sender = Sender(optimizer, "modelopt", group=alone, note_changes=True)
    with pytest.raises(ValueError, match="the 1 ranks of this Sender do not cast all bytes of these weights"):
        next(sender.named_tensors())


def test_a_rank_that_asks_alone(ranks: Any) -> None:
    ranks(2)(one_rank_of_two)


def masters_on_the_host_of_one_rank() -> tuple[str, bool]:
    """What a Sender says where the other rank owns nothing, and whether casts note anything then."""
    master = torch.randn(512) if dist.get_rank() == 0 else None
    with mock.patch.object(partition, "lies_on_host", return_value=True):
        plan = CastPlan([zerocast.QuantizedWeight.empty((16, 32), "nvfp4")], [master], [0], names=["weight"])
        plan.cast()
        return error_of(lambda: Sender(plan, "modelopt", note_changes=True)), plan._notes is not None


def test_what_one_rank_cannot_note_raises_on_all(ranks: Any) -> None:
    for said, notes in ranks(2)(masters_on_the_host_of_one_rank):
        assert re.match("ValueError: rank 0: masters on the host .* compare with a copy", said) and not notes


def on_fsdp2() -> None:
    sharded = sharded_models.sharded(Net(("nvfp4", "fp8_block"), 64, 96))
    with pytest.raises(ValueError, match="under FSDP2 codes are cast as they are gathered"):
        Sender(sharded, "modelopt", note_changes=True)


def test_under_fsdp2(ranks: Any) -> None:
    ranks(2)(on_fsdp2)


REFUSED: dict[Any, tuple[type[Exception], str]] = {
    newer_sender: (RuntimeError, "since it was closed or a newer one asked for it: send named_tensors"),
    closed: (RuntimeError, "since it was closed or a newer one asked for it: send named_tensors"),
    not_cast_by_us: (ValueError, "only ZeroAdamW, ZeroMuon and a CastPlan can note what a cast changes"),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_refused(case: Any) -> None:
    run = noted()
    run.full()
    run.step()
    error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        case(run)


def test_a_closed_sender_costs_nothing() -> None:
    run = noted()
    assert all(table.changed is not None for table in run.optimizer._plan.tables)
    run.sender.close()
    assert all(table.changed is None for table in run.optimizer._plan.tables)
    run.step()
    run.full()
    run.check()


def test_captured_steps() -> None:
    """They are recorded again once casts note changes, and once they do not."""
    run = Run()
    o = run.optimizer
    captured = CapturedStep(o._device, o._weights, o._prepare, o._finish, None, run_again)
    o._captured.add(captured)
    run.sender = Sender(run.model, "modelopt", bucket_bytes=30_000, note_changes=True)
    run.full()
    for _ in range(2):
        random_gradients(run)
        captured()
        assert run.delta() > 0
        run.check()
    run.sender.close()
    random_gradients(run)
    captured()
    run.full()
    run.check()


def random_gradients(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)


def test_off_unless_asked_for() -> None:
    run = Run()
    assert all(table.changed is None for table in run.optimizer._plan.tables)


def test_codes_that_somebody_else_wrote_are_noticed() -> None:
    run = noted()
    run.full()
    run.model.get_parameter("up.weight").state.rowwise_data.view(-1).view(torch.uint8)[7] += 1
    with pytest.raises(RuntimeError, match="are not those of the sender"):
        run.delta()
    run.full()
    run.check()
