"""The torch.library ops: schemas say what is written, fakes agree with the real thing, formats and backends go by name."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import casts
from tests.backends.test_memory import recorded
from tests.casts import lcg_matrix
from tests.observed import Dispatched
from zerocast import backends, get_format
from zerocast.backends import extension, ops
from zerocast.formats import Columnwise
from zerocast.formats.layout import GradientMessage

# Of an op that is checked with many arguments: what differs with them. One call of each op is checked in every way, also traced.
IN_PART = {"test_utils": ("test_schema", "test_faketensor")}


def calls_of_a_step(backend: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """What a step with a cast of every format hands to the ops, and what has no table."""
    for fmt in casts.FORMATS:
        for stage, spec, arguments in recorded(fmt, backend):
            yield getattr(ops, stage).op, (backend, str(spec), *arguments.values())
        weight = casts.cast_whole(fmt, torch.from_numpy(lcg_matrix(32, 64, 0)))
        of_weight = backend, fmt, weight.rowwise_data, weight.rowwise_scale_inv, weight.amax, 32, 64
        yield ops.dequantize, (*of_weight, False, torch.float32)
        if weight.format.is_exact_in_fp8:
            yield ops.upcast, (*of_weight, True)
    messages = torch.zeros(2 * GradientMessage(50).nbytes, dtype=torch.uint8)
    yield ops.quantize_gradient.op, (backend, torch.rand(100), 2, messages)
    yield ops.add_gradients.op, (backend, messages, 2, 2, True, torch.rand(50))


def test_every_op_passes_opcheck(backend: str) -> None:
    found: dict[Any, list[tuple[Any, ...]]] = {}
    for op, arguments in calls_of_a_step(backend):
        found.setdefault(op, []).append(arguments)
    assert {op._opname for op in found} == set(ops.STAGES)
    for op, calls in found.items():
        for index, arguments in enumerate(calls[:: max(1, len(calls) // 4)]):
            torch.library.opcheck(op, arguments, **IN_PART if index else {})


def test_the_backends_take_the_arguments_of_the_table(backend_anywhere: str) -> None:
    """By the same names in the same order; those of the compiled backends are made from the table."""
    if backend_anywhere in ("cpu", "cuda"):
        return
    module = backends.load(backend_anywhere)
    for stage in [stage for stage in ops.STAGES if hasattr(module, stage)]:
        expected = [argument.name for argument in ops.arguments_of(stage)]
        assert list(inspect.signature(getattr(module, stage)).parameters) == expected, stage


@pytest.mark.parametrize(
    ("fmt", "on_demand"), [*((fmt, True) for fmt in casts.FORMATS), ("nvfp4", False), ("mxfp8", False)]
)
def test_products_of_buffers_pass_opcheck(fmt: str, on_demand: bool) -> None:
    """And give the bits of the product of the weight."""
    weight = casts.cast_whole(fmt, torch.from_numpy(lcg_matrix(32, 64, 0)))
    weight.state.columnwise_on_demand = on_demand
    x, grad = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(3, 32, dtype=torch.bfloat16)
    y = torch.nn.functional.linear(x, weight)
    expected = y.detach(), *torch.autograd.grad(y, x, grad)
    multiply = torch.ops.zerocast.multiply.default
    for columnwise, operand in enumerate((x.detach(), grad)):
        rest = bool(columnwise), False, None, torch.bfloat16, "dequantize", *weight.as_arguments()
        torch.library.opcheck(multiply, ([operand], *rest), **{} if fmt == "nvfp4" else IN_PART)
        assert torch.equal(multiply([operand], *rest), expected[columnwise])


@pytest.mark.parametrize("fmt", [fmt for fmt in casts.FORMATS if get_format(fmt).columnwise is Columnwise.TRANSPOSE])
def test_columnwise_copies_on_demand(fmt: str, backend: str) -> None:
    weight = casts.cast_whole(fmt, torch.from_numpy(lcg_matrix(64, 160, 0)), backend=backend)
    arguments = backend, fmt, weight.rowwise_data, weight.rowwise_scale_inv, 64, 160
    torch.library.opcheck(ops.transposed, arguments, **{} if fmt == "fp8_block" else IN_PART)
    data, scale = ops.transposed(*arguments)
    assert torch.equal(data, weight.columnwise_data)
    assert torch.equal(scale, weight.columnwise_scale_inv) or weight.format.block is None
    weight.state.columnwise_on_demand = True
    made, _ = weight.direction(columnwise=True)
    assert torch.equal(made, weight.columnwise_data)


def test_the_table_of_a_transposition_is_made_in_another_thread(backend: str) -> None:
    """A compiler that records CUDA graphs has all that its thread allocates in the graphs' memory, which they use again."""
    ops.transposition.cache_clear()
    with Dispatched() as operators:
        ops.transposition(backend, "fp8_current", ((48, 80),), torch.device("cpu"))
    assert not operators.names


def test_schemas_take_tensors_and_never_addresses() -> None:
    for name in ops.STAGES:
        schema = getattr(torch.ops.zerocast, name).default._schema
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written or name in ("dequantize", "upcast"), schema
        ints = {a.name for a in schema.arguments if str(a.type) in ("int", "List[int]")} - {"nominal", "dtype"}
        counts = {
            "dequantize": {"rows", "columns"},
            "upcast": {"rows", "columns"},
            "quantize_gradient": {"parts"},
            "add_gradients": {"parts", "divisor"},
        }
        assert ints == counts.get(name, set()), schema


def test_an_extension_with_other_arguments_is_refused() -> None:
    built = types.SimpleNamespace(__name__="_C.cpu", ARGUMENTS={"transpose": ("fmt", "row_data")})
    with pytest.raises(
        ImportError, match=r"built for transpose\(fmt, row_data\), .* has transpose\(fmt, table\): build it again"
    ):
        extension.stage(built, "transpose", ["fmt", "table"])  # type: ignore[arg-type]


def test_unknown_names_raise() -> None:
    weight = casts.cast_whole("fp8_current", torch.randn(4, 4))
    rest = weight.rowwise_data, weight.rowwise_scale_inv, weight.amax, 4, 4, False, torch.float32
    with pytest.raises(ValueError, match="unknown backend"):
        ops.dequantize("fast", "fp8_current", *rest)
    with pytest.raises(ValueError, match="unknown format"):
        ops.dequantize("reference", "fp9", *rest)
