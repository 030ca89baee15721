"""The compiled extension `zerocast.backends._C` and the CUDA kernels: loading them, the GPU targets
and the arguments.
"""

import functools
import importlib
import itertools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.formats import FormatSpec
from zerocast.plugins import KERNELS, plugins

# (address, name of the dtype, bytes) of a tensor, and of a list of tensors of one dtype.
Memory = tuple[int, str, int]
Memories = tuple[list[int], str, list[int]]
# Converts an argument of a stage to what the extension takes.
Converter = Callable[[Any], Any]

# The names of all dtypes. The extension raises on dtypes that it does not support.
DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@functools.cache
def load() -> ModuleType:
    """Import the extension. Raises ImportError with the remedy if it is missing or built from
    different sources.
    """
    try:
        # A missing extension must not fail the import of this module: so the caller gets the
        # reason.
        from zerocast.backends import _C  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "zerocast.backends._C, the compiled part of zerocast, cannot be loaded: install with `pip install .`, or, to work in "
            "this source tree, with `pip install -e .`; a run from the source root after a plain install sees the sources only"
        ) from error
    if _C.columns() != [column.name for column in Column]:
        raise ImportError(
            f"zerocast.backends._C was built for the descriptor columns {_C.columns()}, zerocast/backends/descriptor.py has "
            f"{[column.name for column in Column]}: build it again with `pip install -e .`"
        )
    return _C


@functools.cache
def load_kernels() -> ModuleType:
    """Import the CUDA kernels: those that were built with zerocast, else those of another package.

    Raises ImportError with the reason if there are none, if they cannot be imported, and if they
    were built from other sources than the extension.
    """
    extension, name = load(), "zerocast.backends._cuda"
    try:
        kernels, package = importlib.import_module(name), name
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        found = plugins(KERNELS, ()).get("cuda")
        if found is None:
            raise ImportError(
                "no CUDA kernels are installed: install the package zerocast-kernels-cu13, or build zerocast where nvcc and a "
                "GPU are found or with ZEROCAST_CUDA=1"
            ) from error
        kernels, package = found.load(needed=["KERNEL_SOURCES"]), found.package
    if kernels.KERNEL_SOURCES != extension.KERNEL_SOURCES:
        raise ImportError(
            f"the CUDA kernels of {package} and zerocast {sys.modules['zerocast'].__version__} were built from different "
            f"sources ({kernels.KERNEL_SOURCES} and {extension.KERNEL_SOURCES}): install both in one version, or build again"
        )
    return kernels


def stage(topic: ModuleType, name: str, arguments: Sequence[str]) -> Callable[..., None]:
    """Return a stage of `_C.cpu` or of the kernels. Raises ImportError unless it was built with
    these arguments, in this order.
    """
    built = getattr(topic, "ARGUMENTS", {}).get(name, ())
    if built != tuple(arguments):
        raise ImportError(
            f"{topic.__name__} was built for {name}({', '.join(built)}), zerocast/backends/ops.py has "
            f"{name}({', '.join(arguments)}): build it again with `pip install -e .`"
        )
    entry: Callable[..., None] = getattr(topic, name)
    return entry


def upcast_together(
    topic: ModuleType, format_of: Callable[[FormatSpec], Any], last: Callable[[Tensor], Any], last_name: str
) -> Callable[..., None]:
    """Return the stage `upcast` of `_C.cpu` or of the kernels for several weights
    (`ops.upcast_together`). `last` makes its last argument from the codes of the first weight.
    """
    names = ("fmt", "data", "scale_inv", "amaxes", "shapes", "transposed", "codes", "group_scale_inv")
    entry = stage(topic, "upcast_together", (*names, last_name))

    def run(fmt: FormatSpec, *arguments: Any) -> None:
        # Lists of tensors, except the shapes and the flag `transposed`.
        data, scale_inv, amaxes, shapes, transposed, *targets = arguments
        sources = map(memories, (data, scale_inv, amaxes))
        entry(format_of(fmt), *sources, shapes, transposed, *map(memories, targets), last(data[0]))

    return run


@dataclass(frozen=True)
class CompiledStage:
    """A stage of a compiled backend. It takes tensors and values by the arguments of its table
    entry in order (`ops.STAGES`), and passes the extension addresses, sizes and plain data.

    Attributes:
        entry: the stage of the extension.
        converters: for each argument that the extension takes, its place in the table entry and
            the function that converts it.
        last: returns the last argument of the extension, from the argument at `table_place`.
        table_place: the place of the table, or of another tensor in a stage without a table.
        from_table: functions of the format and the table, which return further arguments.
        skip_place: the place of a flag that is read here. If it holds True, nothing is done.
    """

    entry: Callable[..., None]
    converters: Sequence[tuple[int, Converter]]
    last: Callable[[Tensor], Any]
    table_place: int = 0
    from_table: Sequence[Callable[[FormatSpec, Tensor], Any]] = ()
    skip_place: int | None = None

    def __call__(self, *arguments: Any) -> None:
        """Run the stage once, by all arguments of its table entry."""
        skip = None if self.skip_place is None else arguments[self.skip_place]
        if skip is not None and bool(skip):
            return
        table = arguments[self.table_place]
        values = [convert(arguments[place]) for place, convert in self.converters]
        if self.from_table:
            values += [make(arguments[0], table) for make in self.from_table]
        self.entry(*values, self.last(table))


class BoundStage:
    """A compiled stage for calls in which some arguments stay the same. These are converted by the
    first call, and again when a tensor in one of their lists is at another address.

    Args:
        stage: the stage.
        fixed: the arguments that stay the same, keyed by their places in the table entry. They
            include the format and the table of a stage that has them.
        check: called with all arguments before the fixed ones are converted.
    """

    def __init__(self, stage: CompiledStage, fixed: Mapping[int, Any], check: Callable[..., None]) -> None:
        self._stage = stage
        self._fixed = fixed
        self._check = check
        lists = (value for value in fixed.values() if isinstance(value, list))
        self._tensors: list[Tensor] = list(itertools.chain.from_iterable(lists))
        # None before the first call.
        self._addresses: list[int] | None = None
        numbered = enumerate(stage.converters)
        # For each argument that differs from call to call: its index among the converted ones, its
        # place in the table entry, and its converter.
        self._open = [(index, place, convert) for index, (place, convert) in numbered if place not in fixed]

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Run the stage by all arguments of its table entry. The fixed ones are only checked."""
        stage = self._stage
        # The same lines as above: a step runs ten stages, and each call costs.
        skip = None if stage.skip_place is None else arguments[stage.skip_place]
        if skip is not None and bool(skip):
            return
        addresses = list(map(Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            self._check(*arguments)
            self.convert_fixed()
        converted = [*self._converted]
        for index, place, convert in self._open:
            converted[index] = convert(arguments[place])
        stage.entry(*converted, *self._made, stage.last(arguments[stage.table_place]))

    def convert_fixed(self) -> None:
        """Convert the fixed arguments. Called before the first call, their check is omitted."""
        stage, fixed = self._stage, self._fixed
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._converted = [convert(fixed[place]) if place in fixed else None for place, convert in stage.converters]
        self._made = [make(fixed[0], fixed[stage.table_place]) for make in stage.from_table]


def format_maker(module: ModuleType) -> Callable[[FormatSpec], Any]:
    """Return a function that returns a format as the plain data that this compiled module takes."""
    made: dict[str, Any] = {}

    def format_of(fmt: FormatSpec) -> Any:
        # The text, as `str` returns it, is faster to hash than the fields of the format.
        key = fmt.key or fmt.name
        if key not in made:
            made[key] = _plain(module, fmt)
        return made[key]

    return format_of


def _plain(module: ModuleType, fmt: FormatSpec) -> Any:
    return module.Format(
        element=fmt.element.name if fmt.element else "nominal",
        scale_rule=fmt.scale_rule.name,
        columnwise=fmt.columnwise.name,
        amax_policy=fmt.amax_policy.name,
        block=fmt.block or (0, 0),
        columnwise_block=fmt.columnwise_block or (0, 0),
        scale_group=fmt.scale_group or (0, 0),
        scale_rounds_down=fmt.scale_rounding == "floor",
        exact_scales=fmt.exact_scales,
        power_of_2_scale=fmt.power_of_2_scale,
        most_recent=fmt.amax_compute_algo == "most_recent",
        amax_epsilon=fmt.amax_epsilon,
        margin=fmt.margin,
        amax_history_len=fmt.amax_history_len,
    )


def memory(tensor: Tensor | None) -> Memory:
    """Return the address, dtype and bytes of a contiguous tensor; zeros for None. The extension
    compares the bytes with the bytes that a stage will touch.
    """
    if tensor is None:
        return 0, "", 0
    if not tensor.is_contiguous():
        raise _has_gaps(tensor)
    return tensor.data_ptr(), DTYPES[tensor.dtype], tensor.nbytes


def memories(tensors: Sequence[Tensor]) -> Memories:
    """Return the addresses, the dtype and the bytes of contiguous tensors of one dtype."""
    if not tensors:
        return [], "", []
    if False in map(Tensor.is_contiguous, tensors):
        raise _has_gaps(next(tensor for tensor in tensors if not tensor.is_contiguous()))
    dtype, *others = set(map(_dtype, tensors))
    if others:
        raise ValueError(f"the tensors of one role have one dtype, got {' and '.join(map(str, (dtype, *others)))}")
    return list(map(Tensor.data_ptr, tensors)), DTYPES[dtype], list(map(nbytes, tensors))


nbytes: Callable[[Tensor], int] = operator.attrgetter("nbytes")
_dtype: Callable[[Tensor], torch.dtype] = operator.attrgetter("dtype")


def _has_gaps(tensor: Tensor) -> ValueError:
    return ValueError(
        f"a stage needs contiguous tensors, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    )


def why_no_kernels(targets: str, device: torch.device) -> str | None:
    """Return the reason why no target of the build runs on this GPU, or None if one does.

    `targets` is text such as "90a 100f 90+PTX": "90a" runs on compute capability 9.0 only, "100f"
    on 10.x, "80" on 8.x, and PTX on its own capability and all above.
    """
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if any(_serves(target, capability) for target in targets.split()):
        return None
    return (
        f"the CUDA kernels were built for the targets {targets}, none of which runs on {torch.cuda.get_device_name(device)}, "
        f"compute capability {capability[0]}.{capability[1]}: install zerocast again on this machine, or with ZEROCAST_CUDA=1"
    )


def _serves(target: str, capability: tuple[int, int]) -> bool:
    number, _, ptx = target.partition("+")
    built = divmod(int(number.rstrip("af")), 10)
    if number.endswith("a"):
        return capability == built
    return capability >= built and (bool(ptx) or capability[0] == built[0])
