"""The arguments of an optimizer: ZeroConfig, the choices that are not hyperparameters of its
update, and checks of parameters, hyperparameters and the ownership of weights.

A weight has one owner. Of several optimizers over a weight, the last one that was built owns it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zerocast.cast.adam_update import check_options
from zerocast.distributed.bucket import BUCKET_SIZE
from zerocast.distributed.gradient_wire import check_grad_wire
from zerocast.formats.layout import Span
from zerocast.optim.update_rule import rule_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, Held, find_conflict, overlapping
from zerocast.weight.validity import Use
from zerocast.weight.weight import NOMINAL_DTYPES


@dataclass(frozen=True)
class ZeroConfig:
    """The communication, storage and checks of a ZeroAdamW or a ZeroMuon.

    Attributes:
        bucket_size: the number of elements of a bucket, before padding; a larger parameter gets a
            separate bucket. For matrices that each belong to one rank (ZeroMuon) it is the minimum
            size of a bucket of masters and bytes, which has about one matrix per rank. Their
            gradients are sharded like all others, and a rank is sent this many elements at a time.
        overlap_all_gather: let the all-gather of quantized bytes overlap with the next forward
            pass. Changes no bit.
        deterministic: add gradients in rank order and take the norm in logical order, so that a run
            with the same number of ranks repeats bit for bit with any communication library. Each
            reduce-scatter becomes an all-to-all, which costs more.
        grad_wire: the wire format of gradients: None for the dtype in which they are reduced, or
            "fp8_1x128", E4M3 codes with one FP32 scale for 128 elements
            (docs/formats/fp8_1x128.md), 1.03 bytes per element. The scale is 448 / amax of the
            group, and codes are rounded to nearest even. The owner adds `code * (1 / scale)` of all
            ranks in FP32 in rank order, so this sum repeats without `deterministic`, which then
            only orders the norm. Every contribution is rounded, including the owner's, also with a
            single rank. A group with a value that is not finite arrives as NaN and skips the step
            on all ranks. Each backward pass outside `no_sync()` rounds the gradients that it sends.
        grad_dtype: the dtype in which gradients are reduced; None for each parameter's own dtype.
            With FP32, weight gradients of quantized weights are computed in FP32, too. If all are
            reduced in bf16, a rank keeps 2 bytes per element of them where that rounds nothing.
        backend: a name from `zerocast.backends`; None for an automatic choice.
        moment_dtype: the dtype in which both moments of AdamW are stored. With bf16, which saves 4
            bytes per element, an update computes in FP32 and rounds moments to nearest even when it
            stores them. "8bit" stores one byte and 1/32 byte of scale each, which saves 5.9 bytes
            an element (docs/formats/moments_8bit.md); the bits do not depend on the number of
            ranks. States hold its moments in FP32.
        state: "compact" lets states and checkpoints hold moments in 8 bits as they are, codes and
            scales, 2.06 bytes per element in place of 8. Only optimizers with such moments load
            them, on any number of ranks; they load FP32 moments as well.
        keep_columnwise: keep the columnwise copies of quantized weights, 0.5 to 1 byte per element,
            and make them once per step. Otherwise each product that reads a copy makes it and drops
            it, in every micro-batch. Changes no bit.
        verify_every: compare all live bytes with an unsharded cast of the masters
            (`zerocast.verify`) after every this many steps, and raise VerificationError on every
            rank if any differ. None for never. The masters are gathered for it, and cast by the
            slow reference.
    """

    bucket_size: int = BUCKET_SIZE
    overlap_all_gather: bool = False
    deterministic: bool = False
    grad_wire: str | None = None
    grad_dtype: torch.dtype | None = None
    backend: str | None = None
    moment_dtype: torch.dtype | Literal["8bit"] = torch.float32
    state: Literal["fp32", "compact"] = "fp32"
    keep_columnwise: bool = False
    verify_every: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values, before any rank communicates."""
        if self.bucket_size < 1:
            raise ValueError(f"bucket_size must be positive, got {self.bucket_size}")
        if self.verify_every is not None and self.verify_every < 1:
            raise ValueError(f"verify_every is None or at least 1, got {self.verify_every}")
        check_grad_wire(self.grad_wire)
        if self.grad_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"grad_dtype is None, torch.float32 or torch.bfloat16, got {self.grad_dtype}")
        if self.moment_dtype not in (torch.float32, torch.bfloat16, "8bit"):
            raise ValueError(f"moment_dtype is torch.float32, torch.bfloat16 or '8bit', got {self.moment_dtype}")
        if self.state != "fp32" and (self.state, self.moment_dtype) != ("compact", "8bit"):
            raise ValueError(f"state is 'fp32', or 'compact' with moments in 8 bits, got {self.state!r}")


# Owners that take parameters over from each other.
OURS = ("a ZeroAdamW", "a ZeroMuon")
STAGES = (1, 2)
TAKEN_OVER = (
    "another optimizer was built over these parameters: this one no longer gets gradients or writes weights. Use the newer one, "
    "and load states into it"
)
OTHER_GROUPS = (
    "the param_groups of this {name} were modified after it was built (parameters added, removed or moved), which has no effect: "
    "call add_param_group, or build another optimizer and load the state of this one"
)
# (name, parameter, index of its parameter group)
Named = tuple[str, Tensor, int]


def check_owners(named: Sequence[Named], who: str) -> None:
    """Raise RuntimeError for a weight that has no value, or a partial one, and for one that has
    another owner, as seen by the new owner `who`.
    """
    for name, parameter, _ in named:
        if not isinstance(parameter, QuantizedWeight) or parameter.high_precision_init_val is not None:
            continue
        if not parameter.state.ever_cast:
            raise RuntimeError(
                f"{name}, {parameter!r}, has never been cast: masters start from its value, so set one (quantize_, "
                "load_state_dict, QuantizedWeight.of_buffers)"
            )
        parameter.state.validity.check(Use.READ)
    other = find_conflict(_held(named), lambda claim: claim.who in OURS, _parameters(named))
    if other is not None:
        raise RuntimeError(
            f"{other.who} writes weights that {who} is built over, and a weight has one owner: call remove() of its handle, or "
            "delete it"
        )


def listed_parameters(param_groups: Sequence[dict[str, Any]]) -> list[tuple[list[int], bool]]:
    """Return the ids of each group's parameters, and whether Muon updates them."""
    return [(list(map(id, group["params"])), bool(group.get("use_muon"))) for group in param_groups]


def take_over(named: Sequence[Named], who: str) -> Claim:
    """Claim these parameters. The claim of an older optimizer ends, for all of its parameters, if
    it has any of these.
    """
    for older in overlapping(_held(named), _parameters(named)):
        older.end()
    return Claim(who, _held(named), _parameters(named))


def _parameters(named: Sequence[Named]) -> list[Tensor]:
    return [parameter for _, parameter, _ in named]


def _held(named: Sequence[Named]) -> Held:
    return [(p.state, (Span(0, p.numel()),)) for _, p, _ in named if isinstance(p, QuantizedWeight)]


def trainable(params: Iterable[Any]) -> list[Any]:
    """Return the given (name, parameter) pairs, or groups of pairs, without parameters that are
    frozen or empty. Raises TypeError for parameters without names.
    """
    items = list(params)
    if items and isinstance(items[0], dict):
        # A group whose parameters are all frozen stays, so that groups keep the caller's numbers.
        return [{"param_names": [], **group, "params": trainable(group.get("params", ()))} for group in items]
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
            raise TypeError("parameters must have names: pass model.named_parameters()")
    return [(name, parameter) for name, parameter in items if parameter.requires_grad and parameter.numel()]


def validated(param_groups: list[dict[str, Any]], stage: int) -> list[Named]:
    """Return the parameters with their names and the indices of their groups. Raises ValueError or
    TypeError for invalid arguments, or if no parameter can be trained.
    """
    if stage not in STAGES:
        raise ValueError(f"stage is one of {STAGES}, got {stage}")
    for group in param_groups:
        rule_of(group).check(group)
    check_options(param_groups)
    return _check_parameters(param_groups)


def _check_parameters(param_groups: list[dict[str, Any]]) -> list[Named]:
    named = [
        (name, parameter, index)
        for index, group in enumerate(param_groups)
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]
    if not named:
        raise ValueError("no parameter needs a gradient")
    if len({name for name, _, _ in named}) < len(named):
        raise ValueError("two parameters have the same name")
    if len({id(parameter) for _, parameter, _ in named}) < len(named):
        raise ValueError("a parameter is listed twice, under two names")
    devices = {parameter.device for _, parameter, _ in named}
    if len(devices) > 1:
        raise ValueError(f"the parameters of one optimizer are on one device, got {sorted(map(str, devices))}")
    for name, parameter, _ in named:
        if parameter.dtype not in NOMINAL_DTYPES:
            raise TypeError(f"{name} is {parameter.dtype}; bf16, fp16 and fp32 parameters can be trained")
    return named


def hyperparameters_by_name(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters of all groups that ranks compare, keyed by name. With several
    groups the names include the number of the group.
    """
    return {
        f"{name} of group {index}" if len(groups) > 1 else name: value
        for index, group in enumerate(groups)
        for name, value in rule_of(group).compared(group).items()
    }


def describe(parameter: Tensor) -> str:
    """Return the format, shape and dtype of a parameter, as a text that ranks compare."""
    stored = parameter.format if isinstance(parameter, QuantizedWeight) else "plain"
    return f"{stored} {tuple(parameter.shape)} {parameter.dtype}"
