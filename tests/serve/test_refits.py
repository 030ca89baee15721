"""Refits: a receiver holds the bytes of the run after each of them, or says why not."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import zerocast
from examples.rollout.transport import receive, send
from tests.fsdp2 import models as sharded_models
from tests.fsdp2.models import Net
from tests.observed import Traffic, same_on_all
from tests.serve.models import greedy, in_bf16, logits, made, quantized
from tests.serve.test_export import model
from tests.serve.test_live import assert_same, collected, step
from tests.workers import on_ranks
from zerocast import gemm
from zerocast.serve import Message, Receiver, RefitError, Sender, dequantized
from zerocast.serve.refit_message import BITMAP, BLOCKS_8, BLOCKS_16, WHOLE, ChangedBytes, digest


@given(st.integers(0, 70_000), st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.3, 1.0]), st.integers(0, 9))
def test_changes_lead_from_one_buffer_to_the_other(numel: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(256, (numel,), dtype=torch.uint8, generator=generator)
    new = torch.where(torch.rand(numel, generator=generator) < share, old + 1, old)
    found = ChangedBytes.between(old, new)
    applied = old.clone()
    applied[found.positions()] = found.values()
    assert torch.equal(applied, new) and digest(applied) == found.digest
    if numel:
        assert (digest(old) == found.digest) == torch.equal(old, new)
    # no encoding would have been smaller: positions of at least one byte a change, or of 1/8 byte for each byte
    changed = int((old != new).sum())
    assert found.payload.numel() <= min(numel, -(-numel // 8) + changed)


@pytest.mark.parametrize(
    ("share", "encoding", "most"),
    [(1e-3, BLOCKS_16, 0.0034), (0.02, BLOCKS_8, 0.046), (0.3, BITMAP, 0.43), (0.95, WHOLE, 1.0)],
)
def test_positions_take_the_fewest_bytes(share: float, encoding: int, most: float) -> None:
    old = torch.zeros(300_000, dtype=torch.uint8)
    found = ChangedBytes.between(old, (torch.rand(old.numel()) < share).byte())
    assert found.encoding == encoding
    assert found.payload.numel() / old.numel() <= most


def deliver(messages: Iterator[Message], receiver: Receiver) -> int:
    """Within one process; the bytes that went over."""
    nbytes = 0
    for message in messages:
        nbytes += message.nbytes
        receiver.accept(message.header, message.tensors)
    return nbytes


class Run:
    """A model of two formats that a ZeroAdamW trains."""

    def __init__(self, fmt: str = "fp8_block", naming: str = "modelopt") -> None:
        self.model, self.naming = model(fmt), naming
        self.optimizer = zerocast.ZeroAdamW(self.model.named_parameters(), lr=1e-4)
        self.sender, self.receiver = Sender(self.model, naming, bucket_bytes=30_000), Receiver()

    def step(self) -> None:
        step(self.model, self.optimizer)

    def full(self) -> int:
        return deliver(self.sender.named_tensors(), self.receiver)

    def delta(self) -> int:
        return deliver(self.sender.named_deltas(self.receiver.refit), self.receiver)

    def check(self) -> None:
        assert_same(dict(self.receiver.tensors), collected(self.model, self.naming))


CASES = [
    ("modelopt", "nvfp4"),
    ("modelopt", "nvfp4:exact_in_fp8=True"),
    ("compressed-tensors", "int4"),
    ("compressed-tensors", "mxfp8"),
    ("deepseek", "fp8_block"),
    ("bf16", "fp8_current"),
]


def refit(fmt: str, naming: str) -> list[int]:
    run = Run(fmt, naming)
    sizes = [run.full()]
    run.check()
    for _ in range(2):
        run.step()
        sizes.append(run.delta())
        run.check()
    sizes.append(run.delta())  # nothing has changed
    run.check()
    if dist.is_initialized():
        return sizes
    before = {name: t.clone() for name, t in run.receiver.tensors.items()}
    state = copy.deepcopy(run.optimizer.state_dict())
    run.step()
    run.optimizer.load_state_dict(state)  # as it was: what it undid is no change
    sizes.append(run.delta())
    assert_same(dict(run.receiver.tensors), before)
    return sizes


@pytest.mark.parametrize(("naming", "fmt"), CASES)
def test_deltas_under_zero_adamw(naming: str, fmt: str) -> None:
    full, first, second, none, undone = refit(fmt, naming)
    assert 0 < first < full and 0 < second < full and none == undone == 0


@on_ranks(2)
def test_ranks_share_the_work() -> None:
    """Each keeps its share, and all get the same messages."""
    same_on_all(refit("fp8_block", "modelopt"))


@on_ranks(2)
def test_a_delta_exchanges_no_objects() -> None:
    run = Run()
    run.full()
    run.step()
    with Traffic() as traffic:
        run.delta()
    run.check()
    assert not traffic.sent["objects"]


@on_ranks(2)
def test_deltas_under_fsdp2() -> None:
    net = Net(("nvfp4", "fp8_block"), 64, 96)
    sharded = sharded_models.sharded(net)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)
    sender, receiver = Sender(sharded, "modelopt", bucket_bytes=3000), Receiver()
    deliver(sender.named_tensors(), receiver)
    for _ in range(2):
        sharded(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert deliver(sender.named_deltas(receiver.refit), receiver) > 0
        assert_same(dict(receiver.tensors), collected(sharded, "modelopt"))


def missed(run: Run) -> None:
    for _ in run.sender.named_deltas(1):
        pass
    run.step()
    deliver(run.sender.named_deltas(2), run.receiver)


def not_read_to_the_end(run: Run) -> None:
    next(run.sender.named_deltas(1))
    run.sender.named_deltas(2)


def switched(run: Run) -> None:
    """One weight has another format, and one none."""
    zerocast.switch(run.optimizer, {"up.weight": "nvfp4"})
    run.delta()


def broke_off(run: Run) -> None:
    """A refit ended in the middle: nothing of it is read."""
    run.step()
    messages = run.sender.named_deltas(1)
    first = next(messages)
    run.receiver.accept(first.header, first.tensors)
    _ = run.receiver.tensors


def written_by_another(run: Run) -> None:
    next(iter(run.receiver.tensors.values())).view(-1).view(torch.uint8)[5] += 1
    run.delta()


def send_another_format(run: Run) -> None:
    deliver(Sender(model("nvfp4"), "modelopt").named_tensors(), Receiver(dict(run.receiver.tensors)))


def send_to_one_with_more(run: Run) -> None:
    deliver(run.sender.named_tensors(), Receiver({**run.receiver.tensors, "more": torch.zeros(3)}))


# What happens after a full refit, the error, and whether the receiver still gives its tensors out.
REFUSED: dict[str, tuple[Callable[[Run], Any], str, bool]] = {
    "one was missed": (missed, "changes since refit 2 came to a receiver of refit 1: one was missed, ask", True),
    "since another": (
        lambda run: run.sender.named_deltas(0),
        "since refit 0 were asked for, .* refit 1 are kept",
        True,
    ),
    "not read to the end": (not_read_to_the_end, "refit 2 are kept, which was not read to its end: send", True),
    "a switch": (switched, "are not those of the last refit, as after a switch of formats: send", False),
    "broke off": (broke_off, "not to be read, a refit is in progress or failed: ask the sender", False),
    "written by another": (written_by_another, "differ from the sender's: something else wrote to these", False),
    "an empty receiver": (
        lambda run: deliver(run.sender.named_deltas(1), Receiver()),
        "changes came to a receiver without a complete refit",
        True,
    ),
    "unread": (lambda run: Receiver().tensors, "not to be read, there was no refit yet", True),
    "another format": (send_another_format, "they store weights in different formats", True),
    "more tensors": (send_to_one_with_more, "the sender has no more: its weights are not this receiver's", True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_follow(case: str) -> None:
    """The delta raises and leaves tensors complete unless it has written any; a full refit recovers."""
    act, message, stays_complete = REFUSED[case]
    run = Run()
    run.full()
    with pytest.raises(RefitError, match=message):
        act(run)
    if stays_complete:
        assert run.receiver.refit == 1
        _ = run.receiver.tensors
    run.step()
    run.full()
    run.check()
    run.step()
    run.delta()
    run.check()


def test_tensors_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is not contiguous, strides \(1, 4\)"):
        Receiver({"weight": torch.zeros(4, 4).t()[:2]})


def test_tensors_of_an_engine_are_written_in_place() -> None:
    run = Run()
    own = {name: torch.zeros_like(t) for name, t in collected(run.model, "modelopt").items()}
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    run.receiver = Receiver(own)
    run.full()
    run.step()
    run.delta()
    run.check()
    assert {name: tensor.data_ptr() for name, tensor in run.receiver.tensors.items()} == places


def test_what_changed_is_named() -> None:
    run = Run()
    run.full()
    with torch.no_grad():
        run.model.get_parameter("up.bias")[3] += 1
    names = [run.receiver.accept(message.header, message.tensors) for message in run.sender.named_deltas(1)]
    assert [*itertools.chain(*names)] == ["up.bias"]
    run.check()


@on_ranks(2)
def test_ranks_that_disagree() -> None:
    naming = ("modelopt", "bf16")[dist.get_rank()]
    with pytest.raises(ValueError, match=r"naming is .modelopt. on rank 0 and .bf16. on rank 1"):
        Sender(model("nvfp4"), naming, group=dist.group.WORLD)
    return naming


def plain_product(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return gemm.plain.linear(x, module.weight, module.bias)


def rollout(fmt: str, naming: str) -> Any:
    """Ranks 0 and 1 train a model of transformers; rank 2 generates with a plain one that holds what comes over."""
    trainers = dist.new_group([0, 1])
    ids = torch.arange(24).view(2, 12)
    if dist.get_rank() == 2:
        generator = in_bf16(made("llama"))  # but its buffers, in which rotary embeddings keep frequencies
        parameters, receiver, found = dict(generator.named_parameters()), Receiver(), []
        for name, module in generator.named_modules():
            if name.endswith("_proj"):  # quantized in the trainer, whose products are FP32 on CPUs without bf16 ones
                module.forward = functools.partial(plain_product, module)
        for _ in range(3):
            changed = receive(receiver, 0)
            for name, value in dequantized(receiver.tensors):
                parameters[name].data.copy_(value)
            found.append((logits(generator), greedy(generator), len(changed)))
        return found
    source = in_bf16(quantized("llama", fmt, "llama"))
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=1e-3, group=trainers)
    sender, found = Sender(source, naming, group=trainers, bucket_bytes=10**6), []
    for number in range(3):
        if number:
            source(ids, labels=ids.roll(number, 1)).loss.backward()
            optimizer.step()
        for message in sender.named_deltas(number) if number else sender.named_tensors():
            if dist.get_rank() == 0:
                send(message, 2)
        found.append((logits(source), greedy(source), 0))
    return found


@pytest.mark.parametrize(
    ("naming", "fmt"),
    [
        ("deepseek", "fp8_block"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case[1] != "fp8_block"),
    ],
)
def test_a_generator_in_another_process(ranks: Any, naming: str, fmt: str) -> None:
    """Its logits and tokens are the trainer's own, to the bit, after every step."""
    trainer, _, generator = ranks(3)(rollout, fmt, naming)
    for number, ((wanted, tokens, _), (found, generated, changed)) in enumerate(zip(trainer, generator, strict=True)):
        assert torch.equal(found, wanted), number
        assert torch.equal(generated, tokens) and changed > 0
    assert not torch.equal(trainer[0][0], trainer[1][0])
