"""The extension compares the tensors that it is given with the bytes that a stage accesses. Too few
bytes, another dtype, freed memory and table rows that point outside are errors before any access.

Every case is a recorded call of a cast with one argument changed.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from zerocast import CastPlan, QuantizedWeight, get_format
from zerocast.backends import checks, cpu, extension, ops
from zerocast.backends.descriptor import BUFFER_COLUMNS, Column, Piece
from zerocast.cast.adam_update import AdamUpdate, MomentGroups
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import AmaxPolicy, FormatSpec
from zerocast.formats.layout import moment_groups

FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "identity")
SHAPE = (64, 64)
_C = extension.load()
Call = tuple[str, FormatSpec, dict[str, Any]]  # stage, format, arguments by name


class Recorded(TorchDispatchMode):
    """The stages that run, with copies of their tensors as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("zerocast::").removesuffix(".default")
        if name in ops.STAGES and "format" in func._schema.arguments[1].name and func is getattr(ops, name).op:
            _, fmt, *rest = torch.utils._pytree.tree_map_only(Tensor, torch.clone, args)
            names = [argument.name for argument in ops.arguments_of(name) if argument.kind != "format"]
            self.calls.append((name, get_format(fmt), dict(zip(names, rest, strict=True))))
        return func(*args, **(kwargs or {}))


def recorded(fmt: str, backend: str | None = None) -> list[Call]:
    """The stages of a cast, of a step with FP32 moments and of one with moments in 8 bits, of one whole weight."""
    weight, numel = QuantizedWeight.empty(SHAPE, fmt), 64 * 64
    master, grad, exp_avg, exp_avg_sq = (torch.ones(numel) for _ in range(4))
    plan = CastPlan([weight], [master], [0], ONE_PROCESS, backend=backend)
    scalars, clip, count = torch.ones(1, 8), torch.ones(1), moment_groups(0, numel, 64)
    shared = not get_format(fmt).casts_in_one_pass  # a rank that owns whole rows of blocks shares no group
    pieces = [[0, 0, numel, 0, 0, 64, 0, count, -1, shared - 1, 7]]
    scales, step = [torch.ones(2, count + 8)], torch.ones(1, dtype=torch.int64)  # room for 16 scales behind
    groups = MomentGroups(scales, pieces, step, torch.zeros(2, int(shared)), lambda: None)
    with Recorded() as record:
        plan.cast()
        plan.post_all_gather()
        plan.cast(update=AdamUpdate(grad, exp_avg, exp_avg_sq, scalars, clip), skip=torch.tensor([False]))
        plan.cast(update=AdamUpdate(grad, exp_avg.to(torch.int8), exp_avg_sq.byte(), scalars, clip, groups))
    return record.calls


def run(stage: str, fmt: FormatSpec, told: dict[str, Any]) -> None:
    getattr(_C.cpu, stage)(cpu.format_of(fmt), *told.values(), 1)


def told_of(stage: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the extension takes them."""
    kinds = {argument.name: argument.kind for argument in ops.arguments_of(stage)}
    told: dict[str, Any] = {}
    for name, value in arguments.items():
        if kinds[name] != "skip":
            told[name] = cpu.CONVERTERS[kinds[name]](value)
    return told


def touched(stage: str, fmt: FormatSpec, told: dict[str, Any]) -> list[str]:
    """The arguments that a stage reaches memory by, as the checks in Python know them."""
    reached = checks._reached(stage, fmt)
    unread = {"packed"} if stage == "partial_cast" and fmt.amax_policy is not AmaxPolicy.CURRENT else set()
    if stage == "transpose" and not fmt.block:
        unread |= {"row_scales", "column_scales"}
    names = [name for name, value in told.items() if isinstance(value, tuple) and name not in unread]
    return [name for name in names if checks.BUFFER_ARGUMENTS.get(name, name) in {*reached, name} - _unreached(reached)]


def _unreached(reached: frozenset[str]) -> set[str]:
    """Arguments of buffers that are not reached."""
    return {name for name, buffer in checks.BUFFER_ARGUMENTS.items() if buffer not in reached}


Told = tuple[int, str, int]
LIES: dict[str, Callable[[Told], Told]] = {
    "no bytes": lambda told: (told[0], told[1], 0),
    "a byte less": lambda told: (told[0], told[1], told[2] - 1),
    "another dtype": lambda told: (told[0], "complex64", told[2]),
    "freed": lambda told: (0, told[1], told[2]),
}


def lies(stage: str, told: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for lie, change in LIES.items():
        addresses, dtype, sizes = told[name]
        if lie == "a byte less" and (name in ("packed", "moment_scales") or name.startswith("column")):
            continue  # there is room beside
        if lie == "no bytes" and name == "table":
            continue  # there is nothing to do
        if not isinstance(addresses, list):
            yield f"{stage} {name}: {lie}", {**told, name: change(told[name])}
            continue
        changed = [change((address, dtype, size)) for address, size in zip(addresses, sizes, strict=True)]
        dtype = changed[0][1]
        yield f"{stage} {name}: {lie}", {**told, name: ([c[0] for c in changed], dtype, [c[2] for c in changed])}
    if isinstance(told[name][0], list):
        yield f"{stage} {name}: none", {**told, name: ([], "", [])}


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_too_short_or_other_is_refused(fmt: str) -> None:
    silent, seen, said = [], set[str](), []
    for stage, spec, arguments in recorded(fmt):
        told = told_of(stage, arguments)
        run(stage, spec, told)
        seen.add(stage)
        for name in touched(stage, spec, told):
            for lie, changed in lies(stage, told, name):
                try:
                    run(stage, spec, changed)
                except ValueError as error:
                    said.append((name, str(error)))
                except IndexError:  # of C++'s own lists, where one has fewer tensors than the others
                    assert lie.endswith("none"), lie
                else:
                    silent.append(lie)
    assert not silent
    words = "as many", "moments", "row", "piece"
    unclear = [found for found in said if not any(word in found[1] for word in (found[0].removesuffix("s"), *words))]
    assert not unclear and "partial_cast" in seen


FAR = 2**40


def columns_of(names: Sequence[str]) -> Iterator[Column]:
    """The columns of a row that say where these arguments are."""
    for name in names:
        if name in checks.BUFFER_ARGUMENTS:
            yield from BUFFER_COLUMNS[checks.BUFFER_ARGUMENTS[name]]
        if name == "masters":
            yield from (Column.MASTER_BASE, Column.MASTER_OFFSET)
        if name == "packed":
            yield Column.ROW_AMAX
    if "masters" in names:
        yield from (Column.START, Column.NUMEL)


def by_the_extension(stage: str, fmt: FormatSpec, arguments: dict[str, Any]) -> None:
    run(stage, fmt, told_of(stage, arguments))


def by_the_op(stage: str, fmt: FormatSpec, arguments: dict[str, Any]) -> None:
    """The stage checks for backends that check nothing themselves, if a plan has not checked these very tables."""
    tables = {name: arguments[name].clone() for name in ("table", "pieces") if name in arguments}
    getattr(ops, stage)("reference", str(fmt), **arguments | tables)


CHECKED = pytest.mark.parametrize("checked", [by_the_extension, by_the_op])
# Beside those of FAR: what is next to what a piece may say.
OF_A_PIECE = [
    *((column, value) for column in Piece for value in (FAR, 2**62) if column not in (Piece.KEY, Piece.START)),
    *((column, -1) for column in (Piece.BASE, Piece.OFFSET, Piece.SCALE, Piece.SECOND_SCALE, Piece.START)),
    *((column, 1) for column in (Piece.BASE, Piece.OFFSET, Piece.NUMEL, Piece.START, Piece.SCALARS)),
    *((column, 0) for column in (Piece.NUMEL, Piece.COLUMNS)),
    *((Piece.SCALE, 81), (Piece.SECOND_SCALE, 81), (Piece.CUT_FIRST, 1), (Piece.CUT_LAST, 1)),
]


def not_refused(checked: Callable[..., None], call: Call, name: str, places: Iterable[tuple[int, int]]) -> list[str]:
    """The places of the first row of a table to which a value could be written that points elsewhere."""
    stage, fmt, arguments = call
    silent = []
    for column, value in places:
        rows = arguments[name].clone()
        rows[0, column] = value
        try:
            checked(stage, fmt, {**arguments, name: rows})
        except ValueError:
            continue
        silent.append(f"{stage} {name} {column!r} {value}")
    return silent


@pytest.mark.parametrize("fmt", FORMATS)
@CHECKED
def test_a_row_that_points_elsewhere_is_refused(fmt: str, checked: Callable[..., None]) -> None:
    """Also of a table that was changed after a plan had built it."""
    silent, seen = [], set()
    for call in recorded(fmt):
        stage, spec, arguments = call
        seen.add(stage)
        columns = list(columns_of(touched(stage, spec, told_of(stage, arguments))))
        values = FAR, -FAR, 2**62, -(2**63)
        silent += not_refused(checked, call, "table", itertools.product(columns, values))
        if "pieces" in arguments:
            silent += not_refused(checked, call, "pieces", OF_A_PIECE)
            with pytest.raises(ValueError, match="1 pieces"):
                checked(stage, spec, {**arguments, "table": arguments["table"][:0]})
    assert not silent
    assert seen >= {"partial_cast"} | ({"adam_8bit_cast", "adam_cast"} if spec.casts_in_one_pass else set())


@CHECKED
@pytest.mark.parametrize("name", ["grads", "exp_avgs", "exp_avg_sqs"])
def test_gradients_and_moments_of_fp16_are_refused(name: str, checked: Callable[..., None]) -> None:
    """They would be read as FP32, beyond their end."""
    steps = [call for call in recorded("fp8_current") if call[0].startswith("adam")]
    assert {stage for stage, _, _ in steps} == {"adam_amax", "adam_8bit"}
    for stage, fmt, arguments in steps:
        halves = [tensor.half() for tensor in arguments[name]]
        with pytest.raises((TypeError, ValueError), match=r"float16|moments"):
            checked(stage, fmt, {**arguments, name: halves})


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_of_no_elements_points_nowhere(fmt: str) -> None:
    """What would be written may be freed: neither the extension nor the checks of an op look there."""
    for stage, spec, arguments in recorded(fmt):
        if stage in ("partial_amax", "partial_cast"):
            table: Tensor = arguments["table"].clone()
            table[0, [Column.NUMEL, Column.START]] = 0
            table[0, [Column.MASTER_OFFSET, Column.ROW_DATA_OFFSET]] = FAR
            changed = {**arguments, "table": table}
            run(stage, spec, told_of(stage, changed))
            getattr(ops, stage)("cpu", str(spec), **changed)


def calls_without_a_table() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Stages without a table: names, and good arguments."""
    big = torch.zeros(4096)
    messages = torch.zeros(2, 2112, dtype=torch.uint8)
    yield "quantize_gradient", (big, 2, messages)
    yield "add_gradients", (messages, 2, 2, False, torch.zeros(2048))
    yield "add_gradients", (big, 2, 2, False, torch.zeros(2048))
    codes, out = torch.zeros(SHAPE, dtype=torch.uint8), torch.zeros(SHAPE)
    yield "dequantize", (get_format("fp8_current"), codes, torch.ones(1), None, *SHAPE, False, out)
    halves, scales = torch.zeros(32, 16, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
    inputs = get_format("nvfp4"), halves, scales, torch.ones(1), 32, 32
    yield "dequantize", (*inputs, False, torch.zeros(32, 32))
    wide, wide_scales = torch.zeros(128, 64, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
    made = torch.zeros(128, 128, dtype=torch.uint8), torch.zeros(1, 4)
    yield "upcast", (get_format("mxfp4"), wide, wide_scales, None, 128, 128, False, *made)
    made = torch.zeros(32, 32, dtype=torch.uint8), torch.zeros(1)
    yield "upcast", (get_format("nvfp4:exact_in_fp8"), *inputs[1:], False, *made)


# tensors whose length says how much is to be done
FREE = {("quantize_gradient", 0), ("add_gradients", 4)}


def test_a_bound_stage_reads_its_tensors_again_where_they_have_moved() -> None:
    """Arguments that stay the same are checked and converted once for each place that their tensors are at."""
    base, checked, taken = torch.zeros(64), [], []
    converters = [(0, str), (1, extension.memories), (3, extension.memory)]
    table = torch.zeros(1, 1)
    made = [lambda fmt, table: (fmt, table)]
    stage = extension.CompiledStage(lambda *told: taken.append(told), converters, id, table_place=2, from_table=made)
    bound = extension.BoundStage(stage, {0: "fmt", 1: [base], 2: table}, lambda *arguments: checked.append(arguments))
    other = torch.zeros(3)
    bound(["text", [base], table, other])
    bound(["text", [base], table, None])
    first, second = taken
    assert first == ("fmt", ([base.data_ptr()], "float32", [256]), extension.memory(other), ("fmt", table), id(table))
    assert second[1] is first[1] and second[2] == extension.memory(None)
    assert len(checked) == 1
    base.untyped_storage().resize_(0)
    bound(["text", [base], table, other])
    assert taken[2][1] == ([0], "float32", [256]) and len(checked) == 2


@pytest.mark.parametrize("observer", ["nothing", "a mode", "a profiler"])
def test_a_cast_calls_ops_only_where_they_are_observed(observer: str) -> None:
    """A cast of the CPU's backend writes the same bytes by ops as directly."""
    master, weight = torch.zeros(64 * 64), QuantizedWeight.empty(SHAPE, "fp8_block")
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    plan.cast()
    master.copy_(torch.randn(64 * 64))
    observers = {
        "nothing": contextlib.nullcontext(),
        "a mode": Recorded(),
        "a profiler": profile(activities=[ProfilerActivity.CPU]),
    }
    through_an_op = mock.patch.object(ops, "_implementation", wraps=ops._implementation)
    with through_an_op as implementation, observers[observer] as found:
        plan.cast()
    expected = QuantizedWeight.empty(SHAPE, "fp8_block")
    CastPlan([expected], [master], [0], ONE_PROCESS, backend="reference").cast()
    assert weight.rowwise_data.equal(expected.rowwise_data) and weight.rowwise_data.any()
    assert implementation.called is (observer != "nothing")
    if observer == "a mode":
        assert "partial_cast" in [stage for stage, _, _ in found.calls]
    if observer == "a profiler":
        assert "zerocast::partial_cast" in {event.key for event in found.key_averages()}


@pytest.mark.parametrize("wrapped", ["grad", "exp_avg", "exp_avg_sq", "scalars", "clip", "skip"])
@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block"])
def test_a_step_takes_tensors_that_are_in_flight(fmt: str, wrapped: str) -> None:
    """Functional collectives return tensors without memory. Ops wait for them; their addresses are null."""
    generator = torch.Generator().manual_seed(0)
    numel = 64 * 64
    grad, master = (torch.randn(numel, generator=generator) for _ in range(2))

    def stepped(wrap: Callable[[str, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        weight, stepped_master = QuantizedWeight.empty(SHAPE, fmt), master.clone()
        plan = CastPlan([weight], [stepped_master], [0], ONE_PROCESS, param_groups=[0])
        given = {"grad": grad.clone(), "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
        given |= {"scalars": torch.tensor([[0.9, 0.9, 0.1, 0.99, 0.01, 0.1, 1.0, 1e-8]]), "clip": torch.ones(1)}
        update = AdamUpdate(**{name: wrap(name, tensor) for name, tensor in given.items()})
        plan.cast(update=update, skip=wrap("skip", torch.tensor([False])))
        return stepped_master, weight.rowwise_data

    plain = stepped(lambda name, tensor: tensor)
    in_flight = stepped(lambda name, tensor: AsyncCollectiveTensor(tensor) if name == wrapped else tensor)
    assert not plain[0].equal(master)
    assert in_flight[0].equal(plain[0]) and in_flight[1].equal(plain[1])


@pytest.mark.parametrize("call", calls_without_a_table(), ids=lambda call: call[0])
def test_tensors_without_a_table(call: tuple[str, tuple[Any, ...]]) -> None:
    """Through the backend too, which takes tensors."""
    stage, arguments = call
    takes_skip = any(argument.kind == "skip" for argument in ops.arguments_of(stage))
    good = (*arguments, None) if takes_skip else arguments
    getattr(cpu, stage)(*good)
    for place, argument in enumerate(arguments):
        if not isinstance(argument, Tensor):
            continue
        flat = argument.view(-1)
        short = () if (stage, place) in FREE else (flat[: flat.numel() // 8],)
        strided = (torch.stack((flat, flat), -1)[:, 0],) if flat.numel() > 1 else ()
        for changed in (*short, *strided, argument.to(torch.complex64), None):
            with pytest.raises(ValueError, match=r"needs|needed|elements|contiguous|columns|rows|moments"):
                getattr(cpu, stage)(*good[:place], changed, *good[place + 1 :])


def test_extents_that_overflow() -> None:
    codes, out = torch.zeros(SHAPE, dtype=torch.uint8), torch.zeros(SHAPE)
    for rows, columns in ((2**62, 4), (2**32, 2**32), (-64, -64), (0, 64), (2**31, 2**31)):
        with pytest.raises(ValueError, match="elements"):
            cpu.dequantize(get_format("fp8_current"), codes, torch.ones(1), None, rows, columns, False, out)
    for parts in (0, -1, 2**62):
        with pytest.raises(ValueError, match="parts"):
            cpu.add_gradients(torch.zeros(2112, dtype=torch.uint8), parts, 1, False, torch.zeros(2048))
