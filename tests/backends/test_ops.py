"""The torch.library ops: schemas say what is written, fakes agree with the real thing, formats and backends go by name."""

import inspect
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests import casts, stages
from tests.matrices import lcg_matrix
from zerocast import CastPlan, QuantizedWeight, backends, get_format
from zerocast.backends import extension, ops
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import Columnwise
from zerocast.formats.layout import GradientMessage

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
Recorded = dict[Any, list[Call]]


def copied(call: Call) -> Call:
    """The arguments with tensors of their own."""
    copies: Call = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, call)
    return copies


class Recorder(TorchDispatchMode):
    """Keeps a copy of the arguments of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Recorded = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "zerocast":
            self.calls.setdefault(func, []).append(copied((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def calls_of_a_step(backend: str) -> Recorded:
    """What a plan of every format hands to the ops, skip flag included, and one update of an optimizer."""
    weights = [QuantizedWeight.empty((32, 64), fmt, torch.bfloat16) for fmt in casts.FORMATS]
    masters = [torch.from_numpy(lcg_matrix(32, 64, i)).view(-1)[5:1000] for i in range(len(weights))]
    plan = CastPlan(weights, masters, [7] * len(weights), ONE_PROCESS, backend=backend)
    with Recorder() as recorder:
        plan.cast()
        plan.cast(skip=torch.tensor([False]))
        plan.post_all_gather()
        for weight in weights:
            ops.dequantize(
                backend,
                str(weight.format),
                weight.rowwise_data,
                weight.rowwise_scale_inv,
                weight.amax,
                32,
                64,
                False,
                torch.float32,
            )
            if weight.format.is_exact_in_fp8:
                weight.upcast(columnwise=True)
        flats = {name: torch.rand(100) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
        step = {"scalars": torch.rand(1, 8), "clip": torch.ones(1)}
        codes = {"exp_avg": torch.zeros(100, dtype=torch.int8), "exp_avg_sq": torch.zeros(100, dtype=torch.uint8)}
        pieces = torch.tensor([[0, 0, 100, 0, 64, 100, 0, 2, 0, -1, 7]])
        scales, cut = {"moment_scales": [torch.zeros(2, 2)]}, {"cut_largest": torch.zeros(2, 1), "finishes": False}
        where = {"rows": 2, "columns": 100, "start": 64, "numel": 100, "master_base": 0, "master_offset": 0}
        rest = {"steps": torch.ones(1, dtype=torch.int64), "skip": torch.tensor([False]), "nominal": torch.bfloat16}
        of_bases = {f"{name}s": [flat] for name, flat in {**flats, **codes}.items()} | scales | step | rest
        table = stages.table(stages.row(**where, row_amax=0))
        ops.adam_8bit(backend, "fp8_current", **of_bases, table=table, pieces=pieces, packed=torch.zeros(1), **cut)
        where |= {"rows": 1, "start": 0, "row_data_base": 0, "row_data_offset": 0}
        of_bases |= {"table": stages.table(stages.row(**where, row_amax=0)), "row_data": [torch.zeros(100).byte()]}
        pieces = torch.tensor([[0, 0, 100, 0, 0, 100, 0, 1, -1, -1, 7]])
        ops.adam_8bit_cast(backend, "fp8_block", **of_bases, pieces=pieces, packed=torch.zeros(1))
        where = {
            "rows": 8,
            "columns": 16,
            "start": 9,
            "numel": 100,
            "master_base": 0,
            "master_offset": 0,
            "row_amax": 2,
        }
        state = {f"{name}s": [flat] for name, flat in flats.items()}
        state |= {"nominal": torch.bfloat16, "groups": torch.zeros(1, dtype=torch.int64)}
        table, packed, skip = stages.table(stages.row(**where)), torch.zeros(4), torch.tensor([False])
        ops.adam_amax(backend, "fp8_block", **state, table=table, **step, packed=packed, skip=skip)
        whole = where | {"start": 0, "numel": 96, "rows": 6, "row_data_base": 0, "row_data_offset": 0}
        table, codes = stages.table(stages.row(**whole)), torch.zeros(96, dtype=torch.uint8)
        ops.adam_cast(
            backend,
            "fp8_block",
            **state,
            table=table,
            **step,
            packed=packed,
            row_data=[codes],
            skip=skip,
        )
        messages = torch.zeros(2 * GradientMessage(50).nbytes, dtype=torch.uint8)
        ops.quantize_gradient(backend, grad=flats["grad"], parts=2, messages=messages)
        mean = {"messages": messages, "parts": 2, "divisor": 2}
        ops.add_gradients(backend, **mean, adds=True, out=torch.rand(50))
    return recorder.calls


def test_every_op_passes_opcheck(backend: str) -> None:
    calls = calls_of_a_step(backend)
    assert {op._opname for op in calls} == set(ops.STAGES)
    for op, found in calls.items():
        for index, (args, kwargs) in enumerate(found[:: max(1, len(found) // 4)]):
            which = {"test_utils": ("test_schema", "test_faketensor")} if index else {}  # of one call all there is
            torch.library.opcheck(op, args, kwargs, **which)


def with_elements_outside() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Calls of ops by what they reach, as (stage, arguments). No plan has checked these tables."""
    where = {"rows": 4, "columns": 128, "start": 0, "numel": 512, "master_base": 0, "row_amax": 0}
    masters = stages.table(stages.row(**where, master_offset=8))
    scales = stages.table(stages.row(**where, master_offset=0, row_scale_base=0, row_scale_offset=-1))
    of_scales = [torch.zeros(16)], [], [], []
    stepped = stages.table(stages.row(**where, master_offset=0))
    flats, groups, clip = [[torch.zeros(512)] for _ in range(4)], torch.zeros(1, dtype=torch.int64), torch.ones(1)
    return {
        "masters needs elements 8 to 520": (
            "partial_amax",
            ("fp8_current", torch.bfloat16, [torch.zeros(512)], masters, torch.zeros(1)),
        ),
        "rowwise_scale_inv needs elements -1 to 3": (
            "compute_scales",
            ("fp8_block", torch.zeros(1), scales, *of_scales, None),
        ),
        "scalars have 8 columns, got \\(1, 7\\)": (
            "adam_amax",
            ("fp8_current", torch.bfloat16, *flats, stepped, groups, torch.ones(1, 7), clip, torch.zeros(1), None),
        ),
    }


@pytest.mark.parametrize(("said", "call"), with_elements_outside().items())
def test_an_op_checks_for_every_backend(said: str, call: tuple[str, tuple[Any, ...]]) -> None:
    """The reference checks nothing itself."""
    stage, arguments = call
    with pytest.raises(ValueError, match=said):
        getattr(torch.ops.zerocast, stage)("reference", *arguments)


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
        torch.library.opcheck(multiply, ([operand], *rest))
        assert torch.equal(multiply([operand], *rest), expected[columnwise])


@pytest.mark.parametrize("fmt", [fmt for fmt in casts.FORMATS if get_format(fmt).columnwise is Columnwise.TRANSPOSE])
def test_columnwise_copies_on_demand(fmt: str, backend: str) -> None:
    weight = casts.cast_whole(fmt, torch.from_numpy(lcg_matrix(64, 160, 0)), backend=backend)
    arguments = backend, fmt, weight.rowwise_data, weight.rowwise_scale_inv, 64, 160
    torch.library.opcheck(ops.transposed, arguments)
    data, scale = ops.transposed(*arguments)
    assert torch.equal(data, weight.columnwise_data)
    assert torch.equal(scale, weight.columnwise_scale_inv) or weight.format.block is None
    weight.state.columnwise_on_demand = True
    made, _ = weight.direction(columnwise=True)
    assert torch.equal(made, weight.columnwise_data)


class Counter(TorchDispatchMode):
    """Counts the operators that this thread calls."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_table_of_a_transposition_is_made_in_another_thread(backend: str) -> None:
    """A compiler that records CUDA graphs has all that its thread allocates in the graphs' memory, which they use again."""
    ops.transposition.cache_clear()
    with Counter() as counter:
        ops.transposition(backend, "fp8_current", ((48, 80),), torch.device("cpu"))
    assert counter.count == 0


def test_a_compiled_cast_writes_the_same_bytes(backend: str) -> None:
    """What an op mutates is declared: functionalised and compiled, it still arrives in the caller's storage."""
    run = torch.compile(lambda op, args, kwargs: op(*args, **kwargs), backend="aot_eager", fullgraph=True)
    for op, calls in calls_of_a_step(backend).items():
        torch._dynamo.reset()
        for call in calls[:1]:
            eager, compiled = copied(call), copied(call)
            expected = op(*eager[0], **eager[1])
            found = run(op, *compiled)
            leaves = zip(
                *(torch.utils._pytree.tree_leaves(x) for x in ([compiled, found], [eager, expected])), strict=True
            )
            for mine, theirs in leaves:
                if isinstance(mine, torch.Tensor):
                    assert casts.sha(mine) == casts.sha(theirs), op


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


def test_a_stage_takes_each_argument_of_its_table_entry_once() -> None:
    with pytest.raises(AssertionError, match=r"expects .*masters.*, got .'packed'."):
        ops.partial_amax("reference", "fp8_block", packed=torch.zeros(1))
    bound = ops.partial_amax.bind("reference", "fp8_block", nominal=torch.bfloat16, masters=[])
    with pytest.raises(AssertionError, match=r"got .'nominal', 'masters', 'fmt', 'packed'."):
        bound(fmt="fp8_block", packed=torch.zeros(1))


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


def test_fakes_of_a_product() -> None:
    """A quantized layer on fake tensors: shapes and dtypes without a byte read."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        data, scale = torch.empty(32, 64, dtype=torch.uint8), torch.empty(1)
        w = ops.dequantize("reference", "fp8_current", data, scale, scale, 32, 64, False, torch.bfloat16)
        y = F.linear(torch.empty(3, 64, dtype=torch.bfloat16), w)
    assert mode is not None
    assert (w.shape, w.dtype, y.shape) == ((32, 64), torch.bfloat16, (3, 32))
