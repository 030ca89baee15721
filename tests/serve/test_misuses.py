"""What a wrong sender, transport or engine does to a refit: its bytes are right all the same, or it is refused and says why.

Headers here have digests of their own, so nothing but their contents tells that they are wrong.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.simulated import Simulated, simulate
from tests.serve.test_engines import Rank, Recorded, Trainer, on_engine, recorded
from tests.serve.test_live import assert_same
from zerocast.formats.memory import as_bytes
from zerocast.serve import Receiver, RefitError, Sender
from zerocast.serve.engine_weights import ModelTensor, Region, Strided
from zerocast.serve.refit_message import BITMAP, BLOCKS_8, WHOLE, with_digest

TRAINER = Trainer()
FULL, FIRST = TRAINER.full(), TRAINER.weights()
DELTA, SECOND = TRAINER.delta(), TRAINER.weights()
LAST = TRAINER.full()
FIELDS = ("numel", "encoding", "count", "digest", "size")


def header(messages: Recorded, place: int = 0, **fields: Any) -> Recorded:
    """The messages with other fields in a header."""
    changed = list(messages)
    before, given = messages[place]
    changed[place] = with_digest({k: v for k, v in {**before, **fields}.items() if k != "header_digest"}), given
    return changed


def tensors(messages: Recorded, change: Callable[[list[Tensor]], list[Tensor]]) -> Recorded:
    """The messages with other tensors in the first of them."""
    return [(messages[0][0], change([tensor.clone() for tensor in messages[0][1]])), *messages[1:]]


def segment(**fields: Any) -> Recorded:
    """A delta whose first message says something else of its changes."""
    first = dict(zip(FIELDS, DELTA[0][0]["segments"][0], strict=True))
    changed = {**first, **{name: value(first[name]) for name, value in fields.items()}}
    return header(DELTA, segments=[list(changed.values())])


def one_position(block: int, *places: int) -> Recorded:
    """A delta of changes at these places of a block of 255 bytes; negative blocks are counted from the end."""
    numel = DELTA[0][0]["segments"][0][0]
    counts = torch.zeros(-(-numel // 255), dtype=torch.uint8)
    counts[block] = len(places)
    payload = torch.cat([counts, torch.tensor([*places, *places], dtype=torch.uint8)])
    changed = header(DELTA, segments=[[numel, BLOCKS_8, len(places), 0, payload.numel()]])
    return tensors(changed, lambda _: [payload])


RIGHT = {
    "a delta of another integer dtype": (1, tensors(DELTA, lambda t: [t[0].view(torch.int8)])),
    "a delta of two dimensions": (1, tensors(DELTA, lambda t: [t[0].view(1, -1)])),
    "a delta with strides": (1, tensors(DELTA, lambda t: [t[0].repeat_interleave(2)[::2]])),
    "a full refit in bytes": (0, tensors(FULL, lambda t: [as_bytes(one) for one in t])),
    "a full refit in other shapes": (0, tensors(FULL, lambda t: [one.reshape(-1, 1) for one in t])),
    "a full refit with strides": (0, tensors(FULL, lambda t: [one.mT.contiguous().mT for one in t])),
}
OTHER_PROTOCOL = "the sender speaks protocol 2 of refits, and this receiver 1: install one version of zerocast"
WRONG = {
    "full of another version": (0, header(FULL, protocol=2), OTHER_PROTOCOL),
    "delta of another version": (1, header(DELTA, protocol=2), OTHER_PROTOCOL),
    "a later message of another version": (1, header(DELTA, 1, protocol=2), OTHER_PROTOCOL),
    "unknown kind": (1, header(DELTA, kind="patch"), "came with tensors of .* bytes, and its header says"),
    "no tensors": (0, tensors(FULL, lambda t: t[:-1]), "came with tensors of .* bytes, and its header says"),
    "truncated delta": (1, tensors(DELTA, lambda t: [t[0][:-1]]), "came with tensors of .* bytes, and its header says"),
    "another encoding": (1, segment(encoding=lambda e: BITMAP if e != BITMAP else WHOLE), "came with other positions"),
    "one change more": (1, segment(count=lambda count: count + 1), "came with other positions"),
    "one change less": (1, segment(count=lambda count: count - 1), "came with other positions"),
    "more changes than bytes": (1, segment(count=lambda count: 10**9), "came with other positions"),
    "a negative count": (1, segment(count=lambda count: -count), "came with other positions"),
    "an index out of range": (1, one_position(-1, 254), "changes of 1 bytes of 49152 came with other positions"),
    "an index twice": (1, one_position(3, 7, 7), "changes of 2 bytes of 49152 came with other positions"),
    "indices that descend": (1, one_position(3, 7, 6), "changes of 2 bytes of 49152 came with other positions"),
    "a larger bucket": (1, segment(numel=lambda numel: numel + 8), "changes of 49160 bytes came for 49152"),
    "no segments": (1, header(DELTA, segments=[]), "came with tensors of .* bytes, and its header says"),
    "tensors stored otherwise": (1, header(DELTA, layout="0" * 32), "is not laid out as the receiver's tensors"),
    "another run": (1, header(DELTA, run="another"), "changes since another run's refit 1 came"),
    "digest of a library of another kind": (1, segment(digest=lambda number: number ^ 1), "differ from the sender's"),
    "digest as text": (1, segment(digest=str), "differ from the sender's"),
    "other digests of a full refit": (0, header(FULL, digests=[1]), "from the sender's|were damaged"),
    "an end without a begin": (1, DELTA[-1:], "message 4 of refit 2 came, and (none of|message 0 of none)"),
    "a message less": (0, [FULL[0], *FULL[2:]], "message 2 of refit 1 came, and message 1 of refit 1 was expected"),
    "an early end": (1, [DELTA[0], *header(DELTA[-1:], index=1)], "a refit ended after 1 of 4 buckets"),
    "the end of another refit": (1, header(DELTA, -1, refit=7), "message 4 of refit 7 came, and message 4 of refit 2"),
}


def accepted(receiver: Receiver, messages: Recorded) -> str:
    """The error of a receiver for messages, or an empty text."""
    try:
        for message in messages:
            receiver.accept(*message)
    except RefitError as error:
        return str(error)
    return ""


def check(receiver: Receiver, wanted: Mapping[str, Tensor]) -> None:
    assert_same(dict(receiver.tensors), dict(wanted))


@pytest.mark.parametrize("case", RIGHT)
def test_bytes_that_come_in_other_tensors(case: str) -> None:
    held, messages = RIGHT[case]
    receiver, rank = Receiver(), on_engine(1, lambda rank: rank)[0]
    for take in (lambda sent: accepted(receiver, sent), rank.accept):
        assert [take(sent) for sent in [*[FULL][:held], messages]] == [""] * (held + 1)
    check(receiver, SECOND if held else FIRST)
    rank.check(SECOND if held else FIRST)


@pytest.mark.parametrize("case", WRONG)
def test_messages_that_are_wrong(case: str) -> None:
    """A receiver gives nothing out that was partly written, an engine goes on with what it has, and a full refit mends both."""
    held, messages, refusal = WRONG[case]
    receiver, rank = Receiver(), on_engine(1, lambda rank: rank)[0]
    for take in (lambda sent: accepted(receiver, sent), rank.accept):
        assert all(take(sent) == "" for sent in [FULL][:held])
        assert re.search(refusal, take(messages))
    if receiver.refit:
        check(receiver, FIRST)
    assert rank.is_servable() == bool(held) and rank.receiver.refit == held
    if held:
        rank.check(FIRST)
    for take in (lambda sent: accepted(receiver, sent), rank.accept):
        assert take(LAST) == ""
    check(receiver, SECOND)
    rank.check(SECOND)


@pytest.mark.parametrize("has_changes", [True, False])
@pytest.mark.parametrize("held_by", ["one rank", "every rank"])
def test_bytes_that_something_else_wrote(held_by: str, has_changes: bool) -> None:
    """A wake-up from sleep level 2, or a reload: the next refit finds it before it writes, also one of no changes."""
    trainer = Trainer("nvfp4")
    first = trainer.full()
    second = trainer.delta() if has_changes else recorded(trainer.sender.named_deltas(1))
    full = trainer.full()

    def run(rank: Rank) -> None:
        assert rank.accept(first) == ""
        if rank.weights.rank == 1:
            dimensions = 0 if held_by == "every rank" else 2
            as_bytes(next(own for own in rank.weights.own.values() if own.dim() == dimensions)).zero_()
        assert "something else wrote to them, such as a reload or a wake-up" in rank.accept(second)
        assert rank.accept(full) == ""
        rank.check(trainer.weights())

    on_engine(2, run)


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_is_told_to_apply_before_the_others(early: int) -> None:
    """They wait for the last message, and it would write alone."""

    def run(rank: Rank) -> None:
        assert rank.accept(FULL) == ""
        assert rank.accept(DELTA[:-1]) == ""
        if rank.weights.rank == early:
            # As if the last message had come to this rank alone.
            rank.receiver._stage.is_complete = True  # type: ignore[union-attr]
            with pytest.raises(RefitError, match=r"rank 1 of 2: its .* came with the .* of rank 0"):
                rank.receiver.apply()
        else:
            assert "rank 1 of 2: its" in rank.accept(DELTA[-1:])
        rank.check(FIRST)
        assert rank.is_servable() and rank.receiver.refit == 1
        assert rank.accept(LAST) == ""
        rank.check(SECOND)

    on_engine(2, run)


@pytest.mark.parametrize("size", [1, 2])
def test_bytes_that_something_wrote_after_they_were_checked(size: int) -> None:
    """A reload, or a sleep of level 2, between the last message and its application: of changes no digest of the result tells."""

    def run(rank: Rank) -> None:
        assert rank.accept(FULL) == ""
        rank.stage(DELTA)
        if rank.weights.rank == size - 1:
            as_bytes(list(rank.weights.own.values())[-1]).zero_()
        with pytest.raises(RefitError, match="since the changes were found to fit, such as a reload"):
            rank.receiver.apply()
        assert not rank.is_servable() and rank.receiver.refit == 0
        assert rank.accept(LAST) == "" and rank.is_servable()
        rank.check(SECOND)

    on_engine(size, run)


def test_a_stored_tensor_that_an_engine_has_twice() -> None:
    """Such as a head that is tied in the trainer and not in the engine: both get its changes, and a write to one is found."""
    layer = nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
    sender = Sender(nn.ModuleDict({"embed": layer}), "bf16")
    first = recorded(sender.named_tensors())
    layer.weight.data[3] += 1
    second = recorded(sender.named_deltas(1))
    layer.weight.data[4] += 1
    third = recorded(sender.named_deltas(2))

    def run(rank: Rank) -> None:
        whole, names = Strided((6, 8), (8, 1), 0), ("embed.weight", "lm_head.weight")
        regions = [Region(whole, name, whole) for name in names]
        rank.place(dict.fromkeys(names, ModelTensor(torch.bfloat16, (6, 8))), {"embed.weight": regions})
        assert [rank.accept(first), rank.accept(second)] == ["", ""]
        embed, head = (rank.weights.own[name] for name in ("embed.weight", "lm_head.weight"))
        assert torch.equal(embed, head) and torch.equal(embed[3], layer.weight.data[3])
        embed[0] += 1  # the first of the two, which the second one would hide
        assert "would differ from the sender's" in rank.accept(third)

    on_engine(1, run)


def test_weights_that_are_tied_after_a_refit() -> None:
    """There is one tensor less, so changes are refused; in full the run has what its readers find in the model."""
    model = nn.ModuleDict({"embed": nn.Linear(8, 6, bias=False), "head": nn.Linear(8, 6, bias=False)})
    sender, receiver = Sender(model, "bf16"), Receiver()
    assert accepted(receiver, recorded(sender.named_tensors())) == ""
    model["head"].weight = model["embed"].weight
    with pytest.raises(RefitError, match="are not those of the last refit"):
        recorded(sender.named_deltas(1))
    assert receiver.refit == 1 and receiver.tensors.keys() == {"embed.weight", "head.weight"}
    assert accepted(receiver, recorded(sender.named_tensors())) == ""
    assert receiver.tensors.keys() == {"embed.weight"}


def test_ranks_of_a_trainer_that_send_different_refits() -> None:
    """One of them in full, another by changes."""
    trainer = Trainer()

    def run(group: Simulated) -> Any:
        sender = Sender(trainer.model, "modelopt", group=group)
        recorded(sender.named_tensors())
        with pytest.raises(RuntimeError) as raised:
            recorded(sender.named_deltas(1) if group.rank else sender.named_tensors())
        return str(raised.value)

    said = "rank 0 sends all live weights, rank 1 sends the changes of live weights"
    assert all(f"ranks make different calls: {said}" in error for error in simulate(2, run)[0])
