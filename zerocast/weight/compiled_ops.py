"""QuantizedWeights in compiled graphs: their products as torch.library ops, and the plain tensors
that a graph gets in their place.

A path of `zerocast.gemm` that multiplies codes by one operator of torch puts that operator, or an
op around it, into the graph. The other paths become the ops below. An op takes the plain buffers of
a weight and is opaque: a compiler cannot inline the dequantized weight, and cannot keep it, or a
transposed copy, for the backward pass. So a compiled backward pass holds quantized bytes, too.

torch keys a graph in its caches by the operations that Dynamo traced and by its inputs. The code of
this package is not among them, so `digest_of_sources` is a part of the key.

AOTAutograd of torch 2.11 takes each input of a graph apart by a walk in Python, and looks at
everything that a backward pass was saved, which costs the CPU 70 calls per weight
(`take_apart_at_once`). Later releases generate code for this.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerocast import backends, gemm, torch_names
from zerocast.backends import ops
from zerocast.formats import get_format
from zerocast.weight import experts
from zerocast.weight.buffers import StoredWeight
from zerocast.weight.gathered_operands import take_gathered_operand

PACKAGE = Path(__file__).parent.parent
# The sources that are traced into graphs, and those with the shapes that graphs rely on. The first
# has the version.
TRACED = ("__init__.py", "backends", "formats", "fsdp2", "gemm", "weight")

# The schema of `QuantizedWeight.as_arguments()`, from which an op makes a `StoredWeight`.
_WEIGHT = (
    "int[] shape, str format, ScalarType nominal, bool on_demand, "
    "Tensor row_data, Tensor? row_scale, Tensor? column_data, Tensor? column_scale, Tensor? amax"
)

# The last release of torch that walks, and the function that does.
LAST_THAT_WALKS = (2, 11)
WALKS_IN = "torch._functorch._aot_autograd.runtime_wrappers"
WALKS = "runtime_unwrap_tensor_subclasses"
# The types of the inputs that a graph gets unchanged.
_PLAIN = {Tensor, nn.Parameter, int}


@functools.cache
def digest_of_sources(package: Path = PACKAGE) -> str:
    """Return the SHA-256 of the traced sources, which are read once in a process."""
    digest = hashlib.sha256()
    for entry in TRACED:
        path = package / entry
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _operand(
    fmt: str,
    row_data: Tensor,
    row_scale: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    after: Tensor,
) -> tuple[Tensor, Tensor]:
    # `after` is not read. It makes the operand depend on the other one, so that a partitioner
    # cannot put a columnwise copy into the forward graph and save it
    # (`QuantizedWeight.direction_in_graph`).
    made = take_gathered_operand(row_data, columnwise)
    if made is not None:
        return made
    backend = backends.choose(row_data.device)
    if get_format(fmt).is_exact_in_fp8:
        assert row_scale is not None
        return ops.upcast_codes(backend, fmt, row_data, row_scale, amax, rows, columns, columnwise)
    return ops.transposed_copy(backend, fmt, row_data, row_scale, rows, columns)


def _operand_fake(
    fmt: str, row_data: Tensor, row_scale: Tensor | None, amax: Tensor | None, *where: Any
) -> tuple[Tensor, Tensor]:
    rows, columns, columnwise, _ = where
    if get_format(fmt).is_exact_in_fp8:
        return ops.upcast_fake(fmt, row_data, rows, columns, columnwise)
    return ops.transposed_fake("", fmt, row_data, row_scale, rows, columns)


def _like(operands: Sequence[Tensor], features: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory for a product of `operands` with so many features."""
    return operands[0].new_empty((*operands[0].shape[:-1], features), dtype=dtype)


ops.define(
    "multiply",
    f"(Tensor[] operands, bool columnwise, bool transposed, Tensor? bias, ScalarType dtype, str path, {_WEIGHT}) -> Tensor",
    lambda operands, columnwise, transposed, bias, dtype, path, *weight: gemm.PATHS[path].multiply(
        operands, StoredWeight(*weight), columnwise, transposed, bias, dtype
    ),
    lambda operands, columnwise, transposed, _, dtype, path, shape, *rest: _like(
        operands, shape[columnwise != transposed], dtype
    ),
)
ops.define(
    "operand",
    "(str format, Tensor row_data, Tensor? row_scale, Tensor? amax, int rows, int columns, bool columnwise, Tensor after) "
    "-> (Tensor, Tensor)",
    _operand,
    _operand_fake,
)
ops.define(
    "multiply_experts",
    "(Tensor[] operands, Tensor? offs, bool columnwise, bool is_gradient, ScalarType dtype, str path, "
    f"{_WEIGHT}) -> Tensor",
    lambda operands, offs, columnwise, is_gradient, dtype, path, *weight: experts.multiply(
        path, operands, StoredWeight(*weight), offs, columnwise, is_gradient
    ),
    lambda operands, offs, columnwise, is_gradient, dtype, path, shape, *rest: _like(
        operands, shape[2 if columnwise else 1], dtype
    ),
)
ops.define(
    "experts_weight_gradient",
    "(Tensor left, Tensor right, Tensor? offs, str path) -> Tensor",
    lambda left, right, offs, path: gemm.EXPERTS[path].weight_gradient(left, right, offs),
    lambda left, right, offs, path: left.new_empty(
        (len(left if offs is None else offs), left.shape[-1], right.shape[-1])
    ),
)


def take_apart_at_once(kind: type[Any]) -> None:
    """Let compiled graphs ask weights of class `kind` for all their plain tensors in one call.
    Called while a weight is traced, before the first graph runs.

    This replaces a function of torch 2.11 for the process, which is still called for other
    subclasses of Tensor. A test counts the calls (`tests/fsdp2/test_host_work.py`).
    """
    module = sys.modules.get(WALKS_IN)
    if module is None or torch_names.installed_release() > LAST_THAT_WALKS:
        return
    walk = getattr(module, WALKS)
    if not hasattr(walk, "takes_weights"):
        setattr(module, WALKS, _by_weight(kind, walk))


def _by_weight(kind: type[Any], walk: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def unwrapped(
        arguments: Sequence[Any], *, append_symints: bool, subclass_metas: Sequence[Any] | None = None
    ) -> list[Any]:
        plain: list[Any] = []
        for place, argument in enumerate(arguments):
            # Each call costs time here, also calls into C. A weight's sizes are constants of a
            # graph.
            if type(argument) in _PLAIN:
                plain += (argument,)
            elif type(argument) is kind:
                plain += argument.read_by_graphs()
            else:
                metas = None if subclass_metas is None else [subclass_metas[place]]
                plain += walk([argument], append_symints=append_symints, subclass_metas=metas)
        return plain

    unwrapped.takes_weights = True  # type: ignore[attr-defined]
    return unwrapped
