"""A receiver cannot be fooled: whatever small thing happens to a refit is noticed, and its state is defined afterwards."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests.serve.test_live import assert_same, collected
from zerocast.formats.layout import Span
from zerocast.serve import Message, Receiver, RefitError, Sender
from zerocast.serve.flat_bytes import _PLACE, _ROUNDS, digest_of_span, flat_bytes, sum_of_mixed
from zerocast.serve.refit_message import digest

NAMING = "modelopt"
Sent = tuple[dict[str, Any], list[Tensor]]


class Recorded:
    """Messages of a full refit, of a delta after it and of a full refit after both, and what each of them leads to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 48, bias=False), nn.Linear(48, 32)]
        self.model = zerocast.quantize_(nn.Sequential(*layers).bfloat16(), {"*.weight": "nvfp4"})
        self.optimizer = zerocast.ZeroAdamW(self.model.named_parameters(), lr=1e-2)
        self.sender = Sender(self.model, NAMING, bucket_bytes=900)
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.full = self.record(self.sender.named_tensors())
        self.step()
        self.delta = self.record(self.sender.named_deltas(1))
        self.step()
        self.later = self.record(self.sender.named_tensors())

    def record(self, messages: Iterable[Message]) -> list[Sent]:
        sent = [(json.loads(json.dumps(message.header)), [t.clone() for t in message.tensors]) for message in messages]
        self.tensors[self.sender.refit] = collected(self.model, NAMING)
        return sent

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
        self.optimizer.step()


RECORDED = Recorded()


def accepted(receiver: Receiver, messages: Iterable[Sent], in_place: bool = False) -> Receiver:
    for header, tensors in messages:
        if in_place:
            room = receiver.buffers(header)
            for own, tensor in zip(room, tensors, strict=False):
                count = min(own.nbytes, tensor.nbytes)
                own.view(-1).view(torch.uint8)[:count] = tensor.view(-1).view(torch.uint8)[:count]
            tensors = room
        receiver.accept(header, tensors)
    return receiver


def at_refit(number: int, **options: Any) -> Receiver:
    """A receiver that holds nothing, refit 1, or refit 2."""
    return accepted(Receiver(**options), [[], RECORDED.full, RECORDED.full + RECORDED.delta][number])


def check(before: int, messages: list[Sent], what: object, in_place: bool = False) -> None:
    """The messages are noticed; then the receiver is complete as before, or gives nothing out; a full refit mends it."""
    receiver, error = at_refit(before), None
    try:
        accepted(receiver, messages, in_place)
    except RefitError as raised:
        error = raised
    assert error or receiver.refit == 0, f"{what} was not noticed"
    if receiver.refit:
        assert receiver.refit in (before, before + 1), what
        assert_same(dict(receiver.tensors), RECORDED.tensors[receiver.refit])
    else:
        with pytest.raises(RefitError, match="are not to be read"):
            _ = receiver.tensors
    accepted(receiver, RECORDED.later)
    assert receiver.refit == 3
    assert_same(dict(receiver.tensors), RECORDED.tensors[3])


REFITS = {"full": (0, RECORDED.full), "delta": (1, RECORDED.delta)}


def flipped(tensor: Tensor) -> Iterator[tuple[object, Tensor]]:
    """One bit of a byte in each region of a tensor; the sign bits of two words, wherever words start; two words swapped."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    for place in sorted({*range(0, data.numel(), max(data.numel() // 8, 1)), data.numel() - 1}):
        for bit in (1, 128):
            damaged = data.clone()
            damaged[place] ^= bit
            yield ("bit", place, bit), damaged
    for start in range(min(8, max(data.numel() - 8, 0))):
        damaged = data.clone()
        damaged[start] ^= 128
        damaged[start + 8 * ((data.numel() - 1 - start) // 8)] ^= 128
        yield ("sign bits", start), damaged
    for distance in (1, 2, 4, 8, 16):
        if data.numel() >= 2 * distance and not torch.equal(data[:distance], data[distance : 2 * distance]):
            words = data[:distance], data[distance : 2 * distance], data[2 * distance :]
            yield ("swapped words", distance), torch.cat([words[1], words[0], words[2]])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", REFITS)
def test_damaged_bytes(name: str, in_place: bool) -> None:
    before, messages = REFITS[name]
    count = 0
    for index, (header, tensors) in enumerate(messages):
        for position, tensor in enumerate(tensors):
            for what, damaged in flipped(tensor) if tensor.nbytes else ():
                other = [*tensors]
                other[position] = damaged.view(tensor.dtype).view(tensor.shape)
                sent = [*messages[:index], (header, other), *messages[index + 1 :]]
                check(before, sent, (index, position, what), in_place)
                count += 1
    assert count > 50


def another(value: Any) -> Any:
    """A value like this one."""
    if isinstance(value, list):
        return [*value[:-1], another(value[-1])] if value else [0]
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("name", REFITS)
def test_forged_headers(name: str) -> None:
    """They are told by their digest. Those with a digest of their own: test_misuses.py."""
    before, messages = REFITS[name]
    for index, (header, tensors) in enumerate(messages):
        others = [{**header, key: another(value)} for key, value in header.items()]
        others += [{key: header[key] for key in header if key != gone} for gone in header]
        for other in (*others, {**header, "more": 1}, {}):
            check(before, [*messages[:index], (other, tensors), *messages[index + 1 :]], (index, other))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", REFITS)
def test_messages_in_another_order(name: str, in_place: bool) -> None:
    """Lose, repeat and move every message, and follow it by a message of an earlier refit or of
    another run.
    """
    before, messages = REFITS[name]
    others = Recorded()
    for index, message in enumerate(messages):
        rest = [*messages[:index], *messages[index + 1 :]]
        check(before, rest, ("lost", index), in_place)
        check(before, [*messages[:index], message, *messages[index:]], ("twice", index), in_place)
        for place in range(len(messages)):
            if place != index:
                check(before, [*rest[:place], message, *rest[place:]], ("moved", index, place), in_place)
        for stranger in [*others.full, *others.delta, *(RECORDED.full if before else [])]:
            check(before, [*messages[:index], stranger, *messages[index + 1 :]], ("another's", index), in_place)


SHARED: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "one tensor": lambda t: {"a": t, "b": t},
    "two views of one": lambda t: {"a": t, "b": t.view(torch.uint8)},
    "overlapping": lambda t: {"a": t[:6], "b": t[5:]},
    "inside another": lambda t: {"a": t, "more": torch.zeros(3), "b": t[3:4]},
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_names_that_share_memory(make: Callable[[Tensor], dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match="a and b share memory, so each would overwrite the other"):
        Receiver(make(torch.zeros(8, 4)))


def test_parts_of_one_storage_are_tensors_of_their_own() -> None:
    whole, given = torch.zeros(20_000, dtype=torch.uint8), {}
    start = 0
    for name, tensor in RECORDED.tensors[1].items():
        given[name] = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += -(-tensor.nbytes // 8) * 8
    assert_same(dict(at_refit(1, tensors=given).tensors), RECORDED.tensors[1])


def test_a_refit_that_is_read_on_after_another_began() -> None:
    sender = RECORDED.sender
    for begin in (sender.named_tensors, lambda: sender.named_deltas(sender.refit)):
        for _ in sender.named_tensors():
            pass
        first = begin()
        next(first)
        next(sender.named_tensors())
        with pytest.raises(RefitError, match=r"was read on after refit \d+ had begun"):
            next(first)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, 2**20 + 3, 2**21 + 8])
def test_a_digest_is_that_of_any_pieces(count: int) -> None:
    """Places go on from one chunk to the next, and parts of tensors end anywhere."""
    buffer = torch.randint(256, (count,), dtype=torch.uint8)
    pieces = list(buffer.split([count // 3, 0, count - count // 3]))
    assert digest_of_span(pieces, Span(0, count)) == digest(buffer)
    inner = Span(count // 4, count - count // 5)
    if count % 8 == 0:
        at_once = sum_of_mixed(buffer.view(torch.int64), 0, _PLACE, _ROUNDS)
        assert digest(buffer) == int(at_once + count)
    assert torch.equal(flat_bytes(pieces, inner), buffer[inner.start : inner.stop])
    assert digest_of_span(pieces, inner) == digest(buffer[inner.start : inner.stop].clone())


@pytest.mark.parametrize("count", [1, 4096, 9001])
def test_a_gpu_sums_the_same_number(count: int) -> None:
    """Triton's interpreter, and a GPU where there is one."""
    pytest.importorskip("triton")
    from zerocast.serve import triton_digest

    words = torch.randint(-(2**63), 2**63 - 1, (count,))
    expected = int(sum_of_mixed(words, 2**23, -3, (5, -(2**40) + 1)))
    on = words.cuda() if torch.cuda.is_available() else words
    assert int(triton_digest.sum_of_mixed(on, 2**23, -3, (5, -(2**40) + 1))) == expected


@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_no_two_flipped_bits_cancel(fill: str) -> None:
    """All pairs of words of 64, each bit of a word: where a linear digest has one number, this has as many as pairs."""
    fills = {"zeros": torch.zeros(64), "ones": torch.full((64,), -1), "random": torch.randint(2**62, (64,))}
    words = fills[fill].long()
    seen = {digest(words)}
    for bit in range(64):
        for distance in (1, 9, 32):
            for first in range(0, 64 - distance, 7):
                damaged = words.clone()
                damaged[first] ^= 1 << bit if bit < 63 else -(2**63)
                damaged[first + distance] ^= 1 << bit if bit < 63 else -(2**63)
                number = digest(damaged)
                assert number not in seen, (bit, first, distance)
                seen.add(number)
