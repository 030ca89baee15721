"""The stages of a cast as torch.library ops, made from one table of their arguments.

Ops take base tensors, declared mutable if a stage writes them, and the descriptor table. An op on
bare addresses would pass opcheck and still compile into wrong results, since the compiler would not
know which memory the op writes. A format is passed as text (`str(fmt)`). The backend is chosen when
a plan is built, and its name is passed.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled

from zerocast import backends
from zerocast.backends import checks
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.backends.extension import DTYPES, BoundStage, CompiledStage
from zerocast.formats import Block, get_format, layout

LIBRARY = torch.library.Library("zerocast", "DEF")

# The arguments of each stage as "kind name"; "!" marks an argument that the stage writes. Schemas,
# fake kernels and the calls of the compiled backends are derived from this table; README.md
# describes the inputs and outputs of each stage.
STAGES = {
    "partial_amax": "format fmt, dtype nominal, typed_bases masters, table table, typed packed!",
    "compute_scales": (
        "format fmt, typed packed, table table, bases row_scales!, bases column_scales!, bases amaxes!, bases scales, skip skip"
    ),
    "partial_cast": (
        "format fmt, dtype nominal, typed_bases masters, typed packed, bases amaxes, bases scales, table table, "
        "bases row_data!, bases column_data!, skip skip"
    ),
    "roll_history": "format fmt, table table, bases amaxes, bases scales!, bases histories!, skip skip",
    "transpose": (
        "format fmt, table table, codes row_data, bases row_scales, codes column_data!, bases column_scales!"
    ),
    "dequantize": (
        "format fmt, data data, optional scale_inv, optional amax, int rows, int columns, bool columnwise, typed out!"
    ),
    "upcast": (
        "format fmt, data data, data scale_inv, optional amax, int rows, int columns, bool transposed, data codes!, "
        "data group_scale_inv!"
    ),
    "adam_8bit": (
        "format fmt, dtype nominal, typed_bases masters!, typed_bases grads, typed_bases exp_avgs!, typed_bases exp_avg_sqs!, "
        "typed_bases moment_scales!, table table, pieces pieces, scalars scalars, clip clip, groups steps, typed packed!, "
        "typed cut_largest!, bool finishes, skip skip"
    ),
    "adam_8bit_cast": (
        "format fmt, dtype nominal, typed_bases masters!, typed_bases grads, typed_bases exp_avgs!, typed_bases exp_avg_sqs!, "
        "typed_bases moment_scales!, table table, pieces pieces, scalars scalars, clip clip, groups steps, typed packed!, "
        "bases row_data!, skip skip"
    ),
    "adam_amax": (
        "format fmt, dtype nominal, typed_bases masters!, typed_bases grads, typed_bases exp_avgs!, typed_bases exp_avg_sqs!, "
        "table table, groups groups, scalars scalars, clip clip, typed packed!, skip skip"
    ),
    "adam_cast": (
        "format fmt, dtype nominal, typed_bases masters!, typed_bases grads, typed_bases exp_avgs!, typed_bases exp_avg_sqs!, "
        "table table, groups groups, scalars scalars, clip clip, typed packed!, bases row_data!, skip skip"
    ),
    "quantize_gradient": "flat grad, int parts, messages messages!",
    "add_gradients": "messages messages, int parts, int divisor, bool adds, flat out!",
}

# The schema type of each kind. What a kind means: "format" and "dtype" are a format's text and a
# nominal dtype; "bases" are base tensors whose dtype follows from the stage, "codes" are base
# tensors of bytes, "typed" and "typed_bases" have one of several dtypes; "flat" is a contiguous
# tensor without a table, "data" the buffer of one weight; "messages" are gradients as they are
# sent, mostly bytes; "table" and "pieces" are int64 rows on the device, "groups" int64 numbers, one
# per row of the table or of the scalars; "scalars" has a row of Adam's scalars per parameter group,
# and "clip" is f32[1]; "skip" is None or a flag on the device.
_TYPES = {"format": "str", "dtype": "ScalarType", "int": "int", "bool": "bool"}
_TYPES |= dict.fromkeys(("optional", "skip"), "Tensor?")
_TYPES |= dict.fromkeys(("bases", "codes", "typed_bases"), "Tensor[]")
_TYPES |= dict.fromkeys(("typed", "flat", "data", "messages", "table", "pieces", "groups", "scalars", "clip"), "Tensor")


@dataclass(frozen=True)
class Argument:
    """One argument of a stage."""

    kind: str
    name: str
    written: bool


@functools.cache
def arguments_of(stage: str) -> tuple[Argument, ...]:
    """Return the arguments of a stage in the order of its table entry."""
    words = [item.split() for item in STAGES[stage].split(", ")]
    return tuple(Argument(kind, name.rstrip("!"), name.endswith("!")) for kind, name in words)


def schema_of(stage: str) -> str:
    """Return the op schema of a stage: the backend, then the arguments of its table entry."""
    aliases = iter("abcdefgh")
    schema = ["str backend"]
    for argument in arguments_of(stage):
        written = f"({next(aliases)}!)" if argument.written else ""
        kind, brackets = re.fullmatch(r"(\w+)(.*)", _TYPES[argument.kind]).groups()  # type: ignore[union-attr]
        schema.append("str format" if argument.kind == "format" else f"{kind}{written}{brackets} {argument.name}")
    return f"({', '.join(schema)}) -> ()"


# The stages that update masters and write their codes in one pass. A backend without such a stage
# takes two passes: the stage on the right, then `partial_cast`.
_IN_ONE_PASS = {"adam_cast": "adam_amax", "adam_8bit_cast": "adam_8bit"}


def implementation(stage: str, backend: str) -> Callable[..., None]:
    """Return the function that runs a stage, by the arguments of its table entry in order. A stage
    in one pass that the backend lacks is made of its other stages.
    """
    module = backends.load(backend)
    if stage not in _IN_ONE_PASS or hasattr(module, stage):
        function: Callable[..., None] = getattr(module, stage)
        return function
    update_stage = _IN_ONE_PASS[stage]
    names = [argument.name for argument in arguments_of(stage)]
    names_of_update = [argument.name for argument in arguments_of(update_stage)]
    update = getattr(module, update_stage)

    def run_in_two_passes(*arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        fmt, table = given["fmt"], given["table"]
        checks.check_whole_blocks(fmt, table)
        # There are no cut groups, since a rank owns full block rows.
        given |= {"cut_largest": _no_cuts(table.device), "finishes": False}
        update(*(given[name] for name in names_of_update))
        masters = given["nominal"], given["masters"], given["packed"]
        module.partial_cast(fmt, *masters, [], [], table, given["row_data"], [], given["skip"])

    return run_in_two_passes


@functools.cache
def _no_cuts(device: torch.device) -> Tensor:
    """Return a `cut_largest` of no cut groups."""
    return torch.zeros(2, 0, dtype=torch.float32, device=device)


@functools.cache
def _implementation(stage: str, backend: str, format: str | None = None) -> Callable[..., None]:
    function = implementation(stage, backend)
    return function if format is None else functools.partial(function, get_format(format))


def _run(stage: str) -> Callable[..., None]:
    """Return the kernel of a stage's op. It checks the arguments, then passes them to the backend
    in the order of the stage's table entry.
    """
    check = _check_of(stage)
    # The format comes first, if the stage takes one.
    head = [argument.kind for argument in arguments_of(stage)].count("format")

    def run(backend: str, *arguments: Any) -> None:
        check(backend, *arguments)
        _implementation(stage, backend, *arguments[:head])(*arguments[head:])

    return run


def _check_of(stage: str) -> Callable[..., None]:
    """Return the check of the arguments of a stage's op.

    A descriptor table that was checked with the same bases is not checked again
    (`checks.was_checked`).
    """
    if stage in _CHECKS:
        return _CHECKS[stage]
    names = [argument.name for argument in arguments_of(stage)[1:]]
    table_index = names.index("table")
    base_names = [name for name in ("masters", *checks.BUFFER_ARGUMENTS) if name in names]
    base_indices = [names.index(name) for name in base_names]

    def check(backend: str, fmt: str, *arguments: Any) -> None:
        if not checks.was_checked(arguments[table_index], base_names, map(arguments.__getitem__, base_indices)):
            checks.check_stage(stage, backend, get_format(fmt), dict(zip(names, arguments, strict=True)))

    return check


def _check_adam_8bit(stage: str) -> Callable[..., None]:
    """Return the check of a stage of Adam with moments in 8 bits."""
    names = [argument.name for argument in arguments_of(stage)[1:]]
    read_by_table = [name for name in ("nominal", "masters", "table", "packed", "row_data") if name in names]
    base_names = [name for name in ("masters", "row_data") if name in names]

    def check(backend: str, fmt: str, *arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        bases = [[given["table"]], *(given[name] for name in base_names)]
        if not checks.was_checked(given["pieces"], ["tables", *base_names], bases):
            checks.check_stage(stage, backend, get_format(fmt), {name: given[name] for name in read_by_table})
            checks.check_pieces(given)

    return check


def _check_quantize(backend: str, grad: Tensor, parts: int, messages: Tensor) -> None:
    if parts < 1 or grad.numel() % parts:
        raise ValueError(f"a gradient of {grad.numel():,} elements has no {parts} equal parts")
    checks.check_messages(backend, messages, grad, parts, grad.numel() // parts)


def _check_add(backend: str, messages: Tensor, parts: int, divisor: int, adds: bool, out: Tensor) -> None:
    if parts < 1 or divisor < 1:
        raise ValueError(
            f"add_gradients needs at least one part and a divisor of at least 1, got {parts} and {divisor}"
        )
    if messages.dtype is torch.uint8:
        checks.check_messages(backend, messages, out, parts, out.numel())
    else:
        checks.check_parts(backend, messages, out, parts)


# The checks of the stages whose elements are not, or not only, described by a descriptor table,
# made at every call.
_CHECKS: dict[str, Callable[..., None]] = {
    "adam_8bit": _check_adam_8bit("adam_8bit"),
    "adam_8bit_cast": _check_adam_8bit("adam_8bit_cast"),
    "quantize_gradient": _check_quantize,
    "add_gradients": _check_add,
}


def is_observed() -> bool:
    """Return True while calls of ops are traced, transformed, recorded or profiled. Stages must be
    called as ops then.
    """
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    is_recorded = _len_torch_dispatch_stack() > 0 or _profiler_enabled()
    return is_traced or is_recorded or torch._C._are_functorch_transforms_active()


# The types of arguments that a compiled backend is called with directly.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, list, bool, type(None)}


class Stage:
    """A stage as a function: the backend and the format by position, all other arguments of its
    table entry by keyword.

    The op itself is called with positions, since torch takes 5 µs longer for keywords.

    Attributes:
        op: the op `zerocast::name`.
        arguments: the names of its arguments behind the backend and the format.
    """

    def __init__(self, name: str) -> None:
        self.op = define(name, schema_of(name), _run(name))
        self.arguments = [argument.name for argument in arguments_of(name) if argument.kind != "format"]
        self._name = name
        self._check = _check_of(name)
        # The functions that `__call__` has made with no argument fixed, keyed by its `head`.
        self._unfixed: dict[tuple[str, ...], Callable[..., None]] = {}

    def __call__(self, *head: str, **arguments: Any) -> None:
        """Run the stage once, with the backend and the format as `head`."""
        if head not in self._unfixed:
            self._unfixed[head] = self.bind(*head)
        self._unfixed[head](**arguments)

    def bind(self, *head: str, **fixed: Any) -> Callable[..., None]:
        """Fix the arguments that stay the same from call to call; a call gives the others by
        keyword.

        A compiled backend is called without torch's dispatcher, which converts each tensor of a
        list twice. The op is called while something observes ops, and for tensors of a subclass,
        which the dispatcher unwraps.
        """
        op = self.op
        names = self.arguments
        assert fixed.keys() <= {*names}, f"{op} expects {names}, got {[*fixed]}"
        template = [*head, *(fixed.get(name) for name in names)]
        open_places = [(name, len(head) + i) for i, name in enumerate(names) if name not in fixed]
        open_names = {name for name, _ in open_places}
        bound: BoundStage | None = None

        def call(**arguments: Any) -> None:
            nonlocal bound
            assert {*arguments} == open_names, f"{op} expects {names}, got {[*fixed, *arguments]}"
            # The cast of each gather comes here, so little else is called.
            values = [*template]
            for name, place in open_places:
                values[place] = arguments[name]
            # As in `is_observed`, in line. Nothing differentiates or traces the bytes of a cast.
            if torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0 or _profiler_enabled():
                op(*values)
                return
            bound = bound or self._bound(head, fixed)
            types = {*map(type, arguments.values())}
            if list in types:
                for value in arguments.values():
                    if type(value) is list:
                        types.update(map(type, value))
            # A tensor of a subclass may have no memory, as one whose collective is in flight.
            if bound is None or not types <= _PLAIN_TYPES:
                op(*values)
                return
            if self._name in _CHECKS:
                self._check(*values)
            bound(values[1:])

        return call

    def _bound(self, head: Sequence[str], fixed: Mapping[str, Any]) -> BoundStage | None:
        """Return the stage with its fixed arguments. None for a backend that is not compiled, and
        where the table is not fixed.
        """
        if "table" not in fixed:
            return None
        backend, fmt = head
        stage = implementation(self._name, backend)
        if not isinstance(stage, CompiledStage):
            return None
        places = {1 + self.arguments.index(name): value for name, value in fixed.items()}
        return BoundStage(stage, {0: get_format(fmt), **places}, functools.partial(self._check, backend))


# Transposes weights: (rowwise codes, their scales, columnwise codes, their scales). A format with
# one scale per tensor has no scales here.
Transposer = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


class Transposition(NamedTuple):
    """The transposition of weights of one format.

    Attributes:
        run: transposes the weights.
        dtypes: the dtypes that the rowwise codes may have.
        numel: the number of elements of the rowwise codes of the first weight.
        made: (shape of the columnwise codes, shape of their scales, dtype of the scales) of each
            weight.
    """

    run: Transposer
    dtypes: tuple[torch.dtype, ...]
    numel: int
    made: list[tuple[layout.Shape, layout.Shape, torch.dtype]]


def transposed_copy(
    backend: str, format: str, row_data: Tensor, row_scale: Tensor | None, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Make the columnwise data and scales of one weight; the kernel of the op `transposed`.

    The scales are empty if the format has one scale per tensor, which serves both directions.
    """
    if get_format(format).block is None:
        data = transposed_codes(backend, format, row_data, rows, columns)
        return data, row_data.new_empty(0, dtype=torch.float32)
    checks.check_direction(backend, format, row_data, row_scale, rows, columns)
    assert row_scale is not None
    (copy,) = transposed_together(backend, format, [row_data], [row_scale], ((rows, columns),))
    return copy


def transposed_codes(backend: str, format: str, row_data: Tensor, rows: int, columns: int) -> Tensor:
    """Make the columnwise codes of one weight with one scale per tensor, in the dtype of its
    rowwise codes.
    """
    of_one = transposition(backend, format, ((rows, columns),), row_data.device)
    checks.check_plain("data", row_data, of_one.dtypes, of_one.numel, row_data.device)
    ((shape, _, _),) = of_one.made
    # `new_empty` calls `empty`. Every product allocates such an operand.
    data = torch.empty(shape, dtype=row_data.dtype, device=row_data.device)
    of_one.run([row_data], [], [data], [])
    return data


def transposed_together(
    backend: str, format: str, row_data: Sequence[Tensor], row_scales: Sequence[Tensor], shapes: tuple[Block, ...]
) -> list[tuple[Tensor, Tensor]]:
    """Make the results of `transposed_copy` for weights of these `shapes`, by one call of the
    stage. `row_scales` is not read if the format has one scale per tensor.

    The caller has checked the tensors.
    """
    of_all = transposition(backend, format, shapes, row_data[0].device)
    dtype, device = row_data[0].dtype, row_data[0].device
    data = [torch.empty(shape, dtype=dtype, device=device) for shape, _, _ in of_all.made]
    if get_format(format).block is None:
        of_all.run(row_data, [], data, [])
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        return [(codes, nothing) for codes in data]
    scales = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in of_all.made]
    of_all.run(row_data, row_scales, data, scales)
    return list(zip(data, scales, strict=True))


def transposed_fake(
    backend: str, format: str, row_data: Tensor, row_scale: Tensor | None, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Allocate the results of `transposed_copy`."""
    data_shape, scale_shape, scale_dtype = _columnwise_shapes(format, rows, columns)
    return row_data.new_empty(data_shape), row_data.new_empty(scale_shape, dtype=scale_dtype)


@functools.lru_cache(maxsize=1024)
def _columnwise_shapes(format: str, rows: int, columns: int) -> tuple[layout.Shape, layout.Shape, torch.dtype]:
    """Return the shapes of columnwise data and scales, and the dtype of the scales."""
    fmt = get_format(format)
    data, scale = layout.columnwise_data(fmt, rows, columns), layout.columnwise_scale_inv(fmt, rows, columns)
    assert data and scale
    return data.shape, scale.shape if fmt.block else (0,), scale.dtype


@functools.lru_cache(maxsize=1024)
def transposition(backend: str, format: str, shapes: tuple[Block, ...], device: torch.device) -> Transposition:
    """Bind the stage `transpose` for weights of these shapes, whose offsets are all 0. A step calls
    it for every gather and every input, so all that does not depend on addresses is made once.

    It is made in a separate thread. Before torch's compiler records a CUDA graph, it runs the
    function with a setting of the calling thread by which tensors are allocated in the memory of
    graphs. A later graph may overwrite that memory, so tensors that are kept must not be there.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_bind_transposition, backend, format, shapes, device).result()


def _bind_transposition(backend: str, format: str, shapes: tuple[Block, ...], device: torch.device) -> Transposition:
    fmt = get_format(format)
    checks.check_serves("transpose", fmt)
    checks.check_backend(backend, device)
    dtypes, numel, *_ = checks.sizes_of_direction(format, *shapes[0], columnwise=False)
    made = [_columnwise_shapes(format, rows, columns) for rows, columns in shapes]
    bases = [Column.ROW_DATA_BASE, Column.ROW_SCALE_BASE, Column.COLUMN_DATA_BASE, Column.COLUMN_SCALE_BASE]
    table = torch.zeros(len(shapes), WIDTH, dtype=torch.int64)
    table[:, [Column.ROWS, Column.COLUMNS]] = torch.tensor(shapes)
    table[:, bases] = torch.arange(len(shapes)).unsqueeze(1)
    table = table.to(device)
    stage = implementation("transpose", backend)
    if isinstance(stage, CompiledStage):
        bound = BoundStage(stage, {0: fmt, 1: table}, check=_writes_only)
        # This thread also makes the device memory that a launch needs besides its tensors.
        bound.convert_fixed()
        return Transposition(lambda *codes_and_scales: bound((fmt, table, *codes_and_scales)), dtypes, numel, made)

    def run(
        row_data: Sequence[Tensor], row_scales: Sequence[Tensor], data: Sequence[Tensor], scales: Sequence[Tensor]
    ) -> None:
        row_codes, codes = ([one.view(-1).view(torch.uint8) for one in tensors] for tensors in (row_data, data))
        # A stage takes the dtype from its bases.
        column_scales = [scale.view(-1) for scale in scales] or [table.new_empty(0, dtype=torch.float32)]
        stage(fmt, table, row_codes, [scale.view(-1) for scale in row_scales], codes, column_scales)

    return Transposition(run, dtypes, numel, made)


class Dequantization:
    """Decodes one direction of one weight. The weight keeps it, as products decode twice a step.

    A compiled backend is called with arguments that were converted before. Buffers are checked, and
    converted again, when one of them is at another address or of another size than in the last
    call.
    """

    def __init__(
        self, backend: str, format: str, rows: int, columns: int, columnwise: bool, dtype: torch.dtype
    ) -> None:
        checks.check_value_dtype(dtype)
        self._backend = backend
        self._format = get_format(format)
        self._shape = (rows, columns)
        self._columnwise = columnwise
        self._dtype = dtype
        # What `memory` returns behind the address of a result.
        self._memory_of_out = DTYPES[dtype], rows * columns * dtype.itemsize
        self._stage: Any = implementation("dequantize", backend)
        # (places of the buffers, converted arguments) of the last call, as one object because of
        # other threads.
        self._last: tuple[tuple[Any, ...], list[Any]] = (), []

    def __call__(self, data: Tensor, scale_inv: Tensor | None, amax: Tensor | None) -> Tensor:
        """Return the decoded buffers in a new tensor."""
        # With sizes, since memory that was freed may have become a smaller tensor.
        places = (
            (data.data_ptr(), data.numel()),
            None if scale_inv is None else (scale_inv.data_ptr(), scale_inv.numel()),
            None if amax is None else amax.data_ptr(),
        )
        stage, last = self._stage, self._last
        is_compiled = isinstance(stage, CompiledStage)
        if places != last[0]:
            key = str(self._format)
            checks.check_direction(self._backend, key, data, scale_inv, *self._shape, self._columnwise)
            checks.check_amax(key, amax, data.device)
            arguments = self._format, data, scale_inv, amax, *self._shape, self._columnwise
            # The last argument, `out`, is new in each call.
            converters = stage.converters[:-1] if is_compiled else ()
            last = self._last = places, [convert(arguments[place]) for place, convert in converters]
        out = torch.empty(self._shape, dtype=self._dtype, device=data.device)
        if is_compiled:
            stage.entry(*last[1], (out.data_ptr(), *self._memory_of_out), stage.last(data))
        else:
            stage(self._format, data, scale_inv, amax, *self._shape, self._columnwise, out)
        return out


def dequantized(
    backend: str,
    format: str,
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Decode one direction of one weight into a new tensor `[rows, columns]` of `dtype`; the kernel
    of the op `dequantize`.

    Unlike those of a weight, its buffers may be any tensors, so they are checked in every call.
    """
    checks.check_value_dtype(dtype)
    checks.check_direction(backend, format, data, scale_inv, rows, columns, columnwise)
    checks.check_amax(format, amax, data.device)
    out = torch.empty((rows, columns), dtype=dtype, device=data.device)
    _implementation("dequantize", backend, format)(data, scale_inv, amax, rows, columns, columnwise, out)
    return out


def upcast_codes(
    backend: str,
    format: str,
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None,
    rows: int,
    columns: int,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Make E4M3 codes and f32 scales of the same values as a weight has, or its transpose; the
    kernel of the op `upcast`.
    """
    if not get_format(format).is_exact_in_fp8:
        raise ValueError(f"{format} is not exact in FP8, so it has no upcast")
    checks.check_direction(backend, format, data, scale_inv, rows, columns)
    checks.check_amax(format, amax, data.device)
    codes, group_scale_inv = upcast_fake(format, data, rows, columns, transposed)
    _implementation("upcast", backend, format)(data, scale_inv, amax, rows, columns, transposed, codes, group_scale_inv)
    return codes, group_scale_inv


def upcast_together(
    backend: str,
    format: str,
    data: Sequence[Tensor],
    scale_inv: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    shapes: tuple[Block, ...],
    transposed: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Make the results of `upcast_codes` for weights of these `shapes`, by one call of the backend
    if it has one for several weights. `amaxes` is empty if the format decodes without.

    The caller has checked the tensors.
    """
    made_shapes = [_upcast_shapes(format, rows, columns, transposed) for rows, columns in shapes]
    dtype, device = data[0].dtype, data[0].device
    codes = [torch.empty(shape, dtype=dtype, device=device) for shape, _ in made_shapes]
    group_scale_inv = [torch.empty(shape, dtype=torch.float32, device=device) for _, shape in made_shapes]
    made = list(zip(codes, group_scale_inv, strict=True))
    together = getattr(backends.load(backend), "upcast_together", None)
    if together is not None:
        together(get_format(format), data, scale_inv, amaxes, shapes, transposed, codes, group_scale_inv)
        return made
    upcast_one = _implementation("upcast", backend, format)
    for i, shape in enumerate(shapes):
        upcast_one(data[i], scale_inv[i], amaxes[i] if amaxes else None, *shape, transposed, *made[i])
    return made


def upcast_fake(format: str, data: Tensor, rows: int, columns: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Allocate the results of `upcast_codes`."""
    codes_shape, scales_shape = _upcast_shapes(format, rows, columns, transposed)
    return data.new_empty(codes_shape), data.new_empty(scales_shape, dtype=torch.float32)


@functools.lru_cache(maxsize=1024)
def _upcast_shapes(format: str, rows: int, columns: int, transposed: bool) -> tuple[layout.Shape, layout.Shape]:
    shape = (columns, rows) if transposed else (rows, columns)
    codes, scales = layout.upcast_operand(get_format(format), *shape)
    return codes.shape, scales.shape


def _writes_only(*args: object, **arguments: object) -> None:
    return None


def define(
    name: str, schema: str, run: Callable[..., object] | None = None, fake: Callable[..., object] | None = None
) -> torch._ops.OpOverload:
    """Define the op `zerocast::name`; without `run`, tensor subclasses implement it by dispatch."""
    LIBRARY.define(name + schema)
    if run is not None:
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"zerocast::{name}", fake or _writes_only, lib=LIBRARY)
    op: torch._ops.OpOverload = getattr(torch.ops.zerocast, name).default
    return op


partial_amax = Stage("partial_amax")
compute_scales = Stage("compute_scales")
partial_cast = Stage("partial_cast")
roll_history = Stage("roll_history")
transpose = Stage("transpose")
adam_8bit = Stage("adam_8bit")
adam_8bit_cast = Stage("adam_8bit_cast")
adam_amax = Stage("adam_amax")
adam_cast = Stage("adam_cast")
quantize_gradient = Stage("quantize_gradient")
add_gradients = Stage("add_gradients")
transposed = define(
    "transposed",
    "(str backend, str format, Tensor row_data, Tensor? row_scale, int rows, int columns) -> (Tensor, Tensor)",
    transposed_copy,
    transposed_fake,
)
dequantize = define(
    "dequantize",
    "(str backend, str format, Tensor data, Tensor? scale_inv, Tensor? amax, int rows, int columns, bool columnwise, "
    "ScalarType dtype) -> Tensor",
    dequantized,
    lambda backend, fmt, data, scale_inv, amax, rows, columns, columnwise, dtype: data.new_empty(
        (rows, columns), dtype=dtype
    ),
)
upcast = define(
    "upcast",
    "(str backend, str format, Tensor data, Tensor scale_inv, Tensor? amax, int rows, int columns, bool transposed) "
    "-> (Tensor, Tensor)",
    upcast_codes,
    lambda backend, fmt, data, scale_inv, amax, *rest: upcast_fake(fmt, data, *rest),
)
