"""The choice of a GEMM path. It is made once per weight, input dtype and preference, and kept until
the weight's storage moves.
"""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.gemm import block_128, per_row, per_tensor, plain
from zerocast.gemm.blackwell import MXFP4, MXFP8, NVFP4
from zerocast.gemm.case import Case

logger = logging.getLogger(__name__)


Operands = tuple[Tensor, ...]


class AnyPath(Protocol):
    """The functions of every path, which is a module or an object."""

    def supports(self, fmt: FormatSpec) -> bool:
        """Return True if this is the path of weights of this format."""

    def hardware(self, case: Case) -> Iterator[str]:
        """Yield the reasons why the device cannot run this path, one sentence each."""

    def unsupported_reasons(self, case: Case) -> Iterator[str]:
        """Yield the reasons other than the device why this path cannot run, one sentence each."""

    def quantize(self, x: Tensor, fmt: FormatSpec, gradient: bool) -> Operands:
        """Quantize an input `[..., k]` or an output gradient for a product."""


class Path(AnyPath, Protocol):
    """A path of products of matrices."""

    def multiply(
        self,
        operands: Sequence[Tensor],
        weight: Any,
        columnwise: bool,
        transposed: bool,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the product of the operands from `quantize` with one direction of the weight,
        `[rows, features]` of `dtype`.

        In the forward pass it is `x @ W.T + bias` from the rowwise copy, in the backward pass `grad
        @ W` from the columnwise copy. A transposed weight exchanges `W` and `W.T`.
        """


class ExpertsPath(AnyPath, Protocol):
    """A path of grouped products of all experts, and of their weight gradients."""

    def multiply(
        self, operands: Sequence[Tensor], weight: Any, offs: Tensor | None, columnwise: bool, is_gradient: bool
    ) -> Tensor:
        """Return the product of the operands from `quantize` with one copy of each expert."""

    def weight_gradient(self, left: Tensor, right: Tensor, offs: Tensor | None) -> Tensor:
        """Return `left.T @ right` of each expert, of an input and an output gradient as they
        are.
        """


class OperatorPath(Path, Protocol):
    """A path whose product is one operator of torch, and that also computes weight gradients on
    tensor cores.
    """

    def multiply_codes(
        self,
        operands: Sequence[Tensor],
        weight: tuple[Tensor, Tensor | None],
        fmt: FormatSpec,
        columnwise: bool,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the result of `multiply` with (codes, scale_inv) of that direction of the weight.

        A compiled graph holds the operator, or an op around it, which takes less CPU work to call
        than the op `multiply` with a whole weight.
        """

    def quantize_both_ways(
        self, x: Tensor, fmt: FormatSpec, gradient: bool, is_square: bool
    ) -> tuple[Operands, Operands]:
        """Return the result of `quantize`, and the operand of the weight gradient from the same
        input or output gradient. The weight gradient sums over tokens, so it needs a different
        layout.

        If `is_square`, an input may have the square blocks of a weight instead of groups of tokens.
        """

    def weight_gradient(self, grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return `grad.T @ x` as `dtype`, from the second results of `quantize_both_ways` for
        both.
        """


# Paths, keyed by name. `PATHS` is in order of preference: the first path that supports a format and
# that the device can run is used. `dequantize` supports every format, so it is last.
OPERATORS: dict[str, OperatorPath] = {"per_tensor": per_tensor, "block_128": block_128}
PATHS: dict[str, Path] = {
    "nvfp4": NVFP4,
    "per_tensor": per_tensor,
    "block_128": block_128,
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
    "dequantize": plain,
}
EXPERTS: dict[str, ExpertsPath] = {"per_row": per_row}
PREFERENCES = ("auto", "dequantize", "scaled_mm", "block_128")
WEIGHT_GRADIENTS = ("nominal", "fp8", "fp8_groups")
# Devices on which "auto" uses a scaled product. The CPU emulates it, which is slower than
# dequantizing and gives different bits.
AUTOMATIC_DEVICES = ("cuda",)


@dataclass
class Settings:
    """The settings of the process. A compiled function looks at them twice for each weight, which
    takes no call.

    Attributes:
        now: the current (preference, weight_gradients) of `use`.
    """

    now: tuple[str, str] = ("auto", "nominal")


settings = Settings()


class Choice(NamedTuple):
    """The path of a product.

    Attributes:
        path: the name of the path; None if the one that `use` asks for cannot run.
        reason: why the path is not one on tensor cores; empty if it is.
    """

    path: str | None
    reason: str


def use(preference: str | None = None, *, weight_gradients: str | None = None) -> ExitStack:
    """Select how quantized weights are multiplied, for the process or within a `with` statement.

    "auto" (the default): tensor cores on CUDA devices where a path can run, else dequantize.
    "dequantize": always that. "scaled_mm": torch's scaled matrix multiply, on the CPU too where
    torch has it; a product that cannot raises RuntimeError with the reason. The two give
    different bits, since the scaled one quantizes the input as well. "block_128": as "auto", but a
    weight that two paths can multiply (`nvfp4:exact_in_fp8` on Hopper) takes the path of that name.
    Its inputs have a scale for every 128 elements of a row in place of one for all, which the
    outliers of an input hurt less, and products take longer.

    `weight_gradients` is "nominal" (the default): the weight gradient is a product of the input and
    the output gradient in the nominal dtype or FP32. With "fp8" both are quantized if products with
    the weight run on FP8 tensor cores, and autograd keeps the quantized input only. If the weight
    has blocks of 128x128, the input then has such blocks as well, and the output gradient has
    groups of 128 tokens. With "fp8_groups" both have groups of 128 tokens, and the product takes
    1.4 times as long on Hopper. For grouped products of experts autograd keeps the unquantized
    input, and both operands have a scale per feature. For weights of a `Recipe(fast=True)`
    "nominal" means "fp8". An argument that is None changes nothing.

    A backward pass uses the settings of its forward pass. Compiled functions are compiled again.
    Raises ValueError for any other value.
    """
    if preference not in (None, *PREFERENCES):
        raise ValueError(f"a GEMM path is chosen by one of {', '.join(PREFERENCES)}, got {preference!r}")
    if weight_gradients not in (None, *WEIGHT_GRADIENTS):
        raise ValueError(f"weight gradients are one of {', '.join(WEIGHT_GRADIENTS)}, got {weight_gradients!r}")
    restore = ExitStack()
    before = settings.now
    restore.callback(setattr, settings, "now", before)
    settings.now = preference or before[0], weight_gradients or before[1]
    return restore


def settings_of(weight: Any) -> tuple[Any, ...]:
    """Return the settings that a graph with a product of this weight depends on."""
    path = choice_of(weight, weight.dtype).path
    return weight_gradients_of(weight, path), path


def weight_gradients_of(weight: Any, path: str | None) -> str:
    """Return the current setting of weight gradients for products of this path with this weight, as
    `use` names it.
    """
    if path not in OPERATORS and path not in EXPERTS:
        return "nominal"
    _, weight_gradients = settings.now
    is_unset = weight_gradients == "nominal"
    return "fp8" if is_unset and weight.state.fp8_weight_gradients else weight_gradients


def warn_nominal(weight: Any, path: str) -> None:
    """Log once per layer that its weight gradient stays nominal although `use` asks for another.

    This happens below a DTensor or torch.func: autograd has recorded the product before this
    package sees it, and computes the gradient by its own formula.
    """
    if weight_gradients_of(weight, path) != "nominal":
        _warn_nominal(weight.state.name or repr(weight))


@functools.cache
def _warn_nominal(layer: str) -> None:
    logger.warning("the weight gradients of %s are nominal, not FP8, below a DTensor or torch.func", layer)


def _path_of(case: Case, preference: str) -> tuple[str, str]:
    """Return the (name, reason) of the path for a format and a device.

    It is the one that `preference` names, if that can run. Otherwise it is the first path that
    takes the format and that the device can run, with an empty reason. If there is none, it is the
    first path that takes the format, with the reasons of all such paths why the device cannot run
    them.
    """
    paths: Mapping[str, AnyPath] = {**EXPERTS, "dequantize": plain} if case.experts else PATHS
    names = [name for name, path in paths.items() if path.supports(case.format)]
    if preference in names and not any(_reasons(preference, case)):
        return preference, ""
    reasons = {name: next(paths[name].hardware(case), "") for name in names if name != "dequantize"}
    runnable = next((name for name, reason in reasons.items() if not reason), None)
    return (runnable, "") if runnable else (names[0], "; ".join(reasons.values()))


def _reasons(name: str, case: Case) -> Iterator[str]:
    """Yield all reasons why a path cannot run."""
    path = module_of(name)
    yield from path.hardware(case)
    yield from path.unsupported_reasons(case)


def module_of(name: str) -> AnyPath:
    """Return the path of this name, for matrices or for all experts."""
    return EXPERTS[name] if name in EXPERTS else PATHS[name]


@functools.cache
def decide(case: Case, preference: str) -> Choice:
    """Return the path for a case; the same answer on every machine with the same torch."""
    if preference == "dequantize":
        return Choice("dequantize", "asked for")
    name, reason = _path_of(case, preference)
    reason = reason or next(module_of(name).unsupported_reasons(case), "")
    if name == "dequantize":
        reason = f"{case.format} has no scaled product{' of all experts' if case.experts else ''}"
    if preference == "scaled_mm":
        return Choice(None if reason else name, reason)
    if not reason and case.device not in AUTOMATIC_DEVICES:
        reason = f"on {case.device} only when asked for: zerocast.gemm.use('scaled_mm')"
    return Choice("dequantize" if reason else name, reason)


def choice_of(weight: Any, dtype: torch.dtype) -> Choice:
    """Return the choice of `x @ W.T` for a QuantizedWeight and an input of `dtype`, under the
    current preference.
    """
    return _decided(weight, dtype, transposed=False)[0]


def path_of(weight: Any, dtype: torch.dtype, transposed: bool) -> str:
    """Return the name of the path to use. Raises RuntimeError, with the reason, if the preference
    cannot be met.
    """
    (path, reason), is_fallback = _decided(weight, dtype, transposed)
    if path is None:
        raise RuntimeError(f"{settings.now[0]!r} was asked for and {weight!r} cannot be multiplied so: {reason}")
    if is_fallback:
        _warn_fallback(weight.state.name or repr(weight), reason)
    return path


def _decided(weight: Any, dtype: torch.dtype, transposed: bool) -> tuple[Choice, bool]:
    """Return the choice, and whether it is a fallback (`falls_back`). Kept with the weight's
    storage.
    """
    if weight.dim() not in (2, 3):
        return Choice("dequantize", f"no product supports a weight of {weight.dim()} dimensions"), False
    choices: dict[Any, tuple[Choice, bool]] = weight.state.choices
    preference, _ = settings.now
    key = preference, dtype, transposed
    if key not in choices:
        case = Case.of(weight, dtype, transposed)
        choices[key] = decide(case, preference), falls_back(case, preference)
        logger.info("the products of %s use the path %s", weight.state.name or repr(weight), choices[key][0])
        if choices[key][0].path == "dequantize" and plain.product_dtype(dtype, case.device) is not dtype:
            plain.log_fp32_products()
    return choices[key]


def falls_back(case: Case, preference: str) -> bool:
    """Return True if a product is dequantized, unasked, on a GPU that has tensor cores for its
    format.
    """
    name, reason = _path_of(case, preference)
    has_tensor_cores = case.device in AUTOMATIC_DEVICES and name != "dequantize" and not reason
    return has_tensor_cores and preference in ("auto", "block_128") and decide(case, preference).path == "dequantize"


@functools.cache
def _warn_fallback(layer: str, reason: str) -> None:
    logger.warning("the products of %s are dequantized on a GPU that has tensor cores for them: %s", layer, reason)
