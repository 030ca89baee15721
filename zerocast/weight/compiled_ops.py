"""Products with a QuantizedWeight as torch.library ops, for compiled graphs.

A path of `zerocast.gemm` that multiplies codes by one operator of torch puts that operator, or an
op around it, into the graph. The other paths become the ops below. An op takes the plain buffers of
a weight and is opaque: a compiler cannot inline the dequantized weight, and cannot keep it, or a
transposed copy, for the backward pass. So a compiled backward pass holds quantized bytes, too.

torch keys a graph in its caches by the operations that Dynamo traced and by its inputs. The code of
this package is not among them, so `digest_of_sources` is a part of the key.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerocast import backends, gemm
from zerocast.backends import ops
from zerocast.formats import get_format
from zerocast.weight import experts
from zerocast.weight.gathered_operands import take_gathered_operand
from zerocast.weight.stored import StoredWeight

PACKAGE = Path(__file__).parent.parent
# The sources that are traced into graphs, and those with the shapes that graphs rely on. The first
# has the version.
TRACED = ("__init__.py", "backends", "formats", "fsdp2", "gemm", "weight")

# The schema of `QuantizedWeight.as_arguments()`, from which an op makes a `StoredWeight`.
_WEIGHT = (
    "int[] shape, str format, ScalarType nominal, bool on_demand, "
    "Tensor row_data, Tensor? row_scale, Tensor? column_data, Tensor? column_scale, Tensor? amax"
)


@functools.cache
def digest_of_sources(package: Path = PACKAGE) -> str:
    """Return the SHA-256 of the traced sources, which are read once in a process."""
    digest = hashlib.sha256()
    for entry in TRACED:
        path = package / entry
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _multiply(
    operands: Sequence[Tensor],
    columnwise: bool,
    transposed: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
    path: str,
    *weight: Any,
) -> Tensor:
    return gemm.PATHS[path].multiply(operands, StoredWeight(*weight), columnwise, transposed, bias, dtype)


def _multiply_fake(
    operands: Sequence[Tensor],
    columnwise: bool,
    transposed: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
    path: str,
    shape: Sequence[int],
    *weight: Any,
) -> Tensor:
    return operands[0].new_empty((*operands[0].shape[:-1], shape[columnwise != transposed]), dtype=dtype)


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
    fmt: str,
    row_data: Tensor,
    row_scale: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    after: Tensor,
) -> tuple[Tensor, Tensor]:
    if get_format(fmt).is_exact_in_fp8:
        return ops.upcast_fake(fmt, row_data, rows, columns, columnwise)
    return ops.transposed_fake("", fmt, row_data, row_scale, rows, columns)


def _multiply_experts(
    operands: Sequence[Tensor],
    offs: Tensor | None,
    columnwise: bool,
    is_gradient: bool,
    dtype: torch.dtype,
    path: str,
    *weight: Any,
) -> Tensor:
    return experts.multiply(path, operands, StoredWeight(*weight), offs, columnwise, is_gradient)


def _multiply_experts_fake(
    operands: Sequence[Tensor],
    offs: Tensor | None,
    columnwise: bool,
    is_gradient: bool,
    dtype: torch.dtype,
    path: str,
    shape: Sequence[int],
    *weight: Any,
) -> Tensor:
    return operands[0].new_empty((*operands[0].shape[:-1], shape[2 if columnwise else 1]), dtype=dtype)


def _experts_weight_gradient(left: Tensor, right: Tensor, offs: Tensor | None, path: str) -> Tensor:
    return gemm.EXPERTS[path].weight_gradient(left, right, offs)


def _experts_weight_gradient_fake(left: Tensor, right: Tensor, offs: Tensor | None, path: str) -> Tensor:
    count = left.shape[0] if offs is None else offs.shape[0]
    return left.new_empty((count, left.shape[-1], right.shape[-1]))


ops.define(
    "multiply",
    f"(Tensor[] operands, bool columnwise, bool transposed, Tensor? bias, ScalarType dtype, str path, {_WEIGHT}) -> Tensor",
    _multiply,
    _multiply_fake,
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
    _multiply_experts,
    _multiply_experts_fake,
)
ops.define(
    "experts_weight_gradient",
    "(Tensor left, Tensor right, Tensor? offs, str path) -> Tensor",
    _experts_weight_gradient,
    _experts_weight_gradient_fake,
)
