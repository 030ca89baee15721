"""GatheredOperands: what products read of weights that are gathered together has the bytes of what each would make alone, is
given away once, and is freed with the codes.
"""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import casts
from zerocast import QuantizedWeight
from zerocast.backends import ops
from zerocast.weight import gathered_operands
from zerocast.weight.gathered_operands import GatheredOperands, take_gathered_operand

SHAPES = [(128, 256), (256, 128), (128, 128)]
FORMATS = [
    "fp8_current",
    "fp8_block",
    "nvfp4",
    "nvfp4:exact_in_fp8=True",
    "mxfp4",
    "mxfp4:exact_in_fp8=False",
]
FP8_BLOCK = "fp8_block"


def weights_of(fmt: str) -> list[QuantizedWeight]:
    """Weights as they are after a gather, each in storage of its own, without columnwise copies."""
    weights = [casts.cast_whole(fmt, torch.randn(shape)) for shape in SHAPES]
    for weight in weights:
        weight.state.set_columnwise_on_demand(True)
    return weights


def operands_of(weights: list[QuantizedWeight]) -> GatheredOperands:
    """The one record of weights of a format."""
    (operands,) = GatheredOperands.by_format([weight.state for weight in weights])
    return operands


def after_two_rounds() -> tuple[list[QuantizedWeight], GatheredOperands]:
    """Return weights and their record, of which each operand has been taken in two rounds: the next one makes all at once."""
    weights = weights_of(FP8_BLOCK)
    operands = operands_of(weights)
    for _ in range(2):
        for place in (0, 1, 2):
            operands.pop(place, columnwise=True)
        operands.end_round()
    return weights, operands


def read(weight: QuantizedWeight, columnwise: bool) -> list[Tensor]:
    """What a product reads of one direction."""
    codes, scales = (weight.upcast if weight.format.is_exact_in_fp8 else weight.direction)(columnwise)
    assert scales is not None
    return [codes, scales]


@pytest.mark.parametrize("fmt", FORMATS)
def test_operands_have_the_bytes_of_those_made_alone(fmt: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROCAST_BACKEND", backend)
    weights = weights_of(fmt)
    is_exact = weights[0].format.is_exact_in_fp8
    directions = (False, True) if is_exact else (True,)
    alone = {columnwise: [read(weight, columnwise) for weight in weights] for columnwise in directions}
    operands = operands_of(weights)
    for _ in range(3):  # the first round is one by one
        for columnwise in directions:
            for weight, expected in zip(weights, alone[columnwise], strict=True):
                assert list(map(casts.sha, read(weight, columnwise))) == list(map(casts.sha, expected))
        operands.end_round()


def test_a_round_is_one_launch_of_what_was_asked_for_in_the_last() -> None:
    """What is read twice is made alone the second time."""
    weights = weights_of(FP8_BLOCK)
    operands = operands_of(weights)
    data = [weight.rowwise_data for weight in weights]
    shapes = []
    made = mock.Mock(side_effect=ops.transposed_together)
    with mock.patch.object(ops, "transposed_together", made):
        for asked in ([0, 2], [0, 2], [2, 1, 0], [1, 0, 2], [0, 1, 2], [0, 1, 1, 2, 2]):
            before = made.call_count
            for place in asked:
                assert take_gathered_operand(data[place], columnwise=True) is not None
            shapes.append([call.args[4] for call in made.call_args_list[before:]])
            operands.end_round()
    every = tuple(SHAPES)
    assert shapes == [
        [every[:1], every[2:]],
        [(every[0], every[2])],
        [(every[0], every[2]), every[1:2]],
        [every],
        [every],
        [every, every[1:2], every[2:]],
    ]


def test_each_operand_belongs_to_one_product() -> None:
    """What writes into it, as a compiled graph may, writes into nothing else."""
    weights = weights_of(FP8_BLOCK)
    expected = [casts.sha(read(weight, True)[0]) for weight in weights]
    operands = operands_of(weights)
    for _ in range(3):
        operands.end_round()
        taken = [operands.pop(place, columnwise=True) for place in (0, 1, 2)]
        assert [casts.sha(codes) for codes, _ in taken] == expected
        for codes, scales in taken:
            codes.zero_()
            scales.zero_()


def test_another_gather_makes_the_operands_again() -> None:
    """Operands that no product has taken were made from the overwritten bytes."""
    weights, operands = after_two_rounds()
    operands.pop(0, columnwise=True)  # makes those of all
    weights[1].rowwise_data.fill_(3)
    operands.end_round()
    codes, _ = operands.pop(1, columnwise=True)
    assert (codes == 3).all()


def test_a_copy_into_a_gathered_weight_is_read() -> None:
    """Also where the operand of its last bytes was made with those of others."""
    weights, _ = after_two_rounds()
    other = weights_of(FP8_BLOCK)[1]
    read(weights[0], True)  # makes those of all
    weights[1].copy_(other)
    assert [*map(casts.sha, read(weights[1], True))] == [*map(casts.sha, read(other, True))]


def test_memory_of_another_weight_that_was_freed_is_not_read() -> None:
    weights, operands = after_two_rounds()
    weights[1].rowwise_data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="it was freed or made smaller"):
        operands.pop(0, columnwise=True)


def test_weights_outlive_the_record() -> None:
    """Then each makes its own, and nothing of the record is kept alive by a storage."""
    weights = weights_of(FP8_BLOCK)
    operands = operands_of(weights)
    gone = weakref.ref(operands)
    del operands
    assert gone() is None
    assert take_gathered_operand(weights[0].rowwise_data, columnwise=True) is None
    assert len(read(weights[0], True)) == 2


def test_formats_whose_products_read_gathered_codes_alone_have_none() -> None:
    assert GatheredOperands.by_format([weight.state for weight in weights_of("mxfp8")]) == []
    mixed = [weights_of(fmt)[0].state for fmt in ("fp8_block", "mxfp8", "nvfp4", "fp8_block")]
    assert len(GatheredOperands.by_format(mixed)) == 2


def test_a_graph_launches_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are on a CPU, which stands for a GPU whose stream is captured: a graph may be replayed without earlier ones."""
    weights = weights_of(FP8_BLOCK)
    operands = operands_of(weights)
    for weight in weights:
        read(weight, True)
    operands.end_round()
    made: list[tuple[int, ...]] = []
    make = operands._make

    def recording(places: tuple[int, ...], columnwise: bool) -> Any:
        made.append(places)
        return make(places, columnwise)

    monkeypatch.setattr(operands, "_make", recording)
    monkeypatch.setattr(operands, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for weight in weights:
        read(weight, True)
    assert made == [(place,) for place in range(len(weights))]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gathered_operands, "_current_stream", lambda index: 0)
    read(weights[0], True)
    assert made[-1] == tuple(range(len(weights)))
