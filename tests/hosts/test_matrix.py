"""The matrix: what becomes of each use of the weights after each event, on every host.

For every (host, event) a run takes two steps, then the event happens, and then it is used in every way. A twin takes the
same steps and does the event properly, as the documentation says. A use is "right" if its result is the twin's to the bit, and
"refused" if it raises an error that names a remedy. What is neither is asked once more in debug mode; a cell that is silent there
too is a "notice".
"""

import contextlib
import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from tests import casts
from tests.hosts.stopping import Place
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, HostUnderTest, find, param
from tests.workers import Ranks
from zerocast import QuantizedWeight
from zerocast.serve import named_tensors

RIGHT, REFUSED, DEBUG, NOTICE = "right", "refused", "refused in debug mode", "notice"
# what an error tells to do
REMEDY = re.compile(
    r"\bcall\b|\bload\b|refresh|\bbuild\b|run the forward pass again|cast again|\battach|optimizer\.|zerocast\.|differ"
)
USES = ("backward", "send", "dequantize", "product", "verify", "save", "step")

Values = dict[str, Tensor]


def inputs(number: int, grad: bool = False) -> Tensor:
    """The inputs of a forward pass on this rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(8, 32, generator=generator).bfloat16().requires_grad_(grad)


# -- uses


def products(run: HostUnderTest) -> Values:
    with torch.no_grad():
        return {"product": run.product(inputs(7)).clone()}


def sent(run: HostUnderTest) -> Values:
    return {name: tensor.clone() for bucket in named_tensors(run.sender, "bf16") for name, tensor in bucket}


def verified(run: HostUnderTest) -> Values:
    zerocast.verify(run.verified).raise_for_differences()
    return {}


def stepped(run: HostUnderTest) -> Values:
    """One step, and a product with what it made."""
    run.step(5)
    return {**run.saved(), **products(run)}


CALLS: dict[str, Callable[[HostUnderTest], Values]] = {
    "send": sent,
    "dequantize": HostUnderTest.dequantized,
    "product": products,
    "verify": verified,
    "save": lambda run: run.saved(),
    "step": stepped,
}


# -- events


@dataclass(frozen=True)
class Event:
    """What happens to a parameter of some kind.

    Attributes:
        happens: does it, as somebody does who knows no better.
        properly: does the same as the documentation says.
        kinds: of the parameters that it may happen to.
        before: what a run does before, if anything.
    """

    happens: Callable[[HostUnderTest, str], object]
    properly: Callable[[HostUnderTest, str], object] = lambda run, kind: None
    kinds: tuple[str, ...] = ("all",)
    before: Callable[[HostUnderTest], object] = lambda run: None


@torch.no_grad()
def write_master(run: HostUnderTest, kind: str) -> None:
    run.master(kind).mul_(2.0)


def write_master_and_cast(run: HostUnderTest, kind: str) -> None:
    write_master(run, kind)
    run.recast()


def write_live(run: HostUnderTest, kind: str) -> None:
    run.live_weight().rowwise_data.bitwise_xor_(1)


@torch.no_grad()
def write_parameter(run: HostUnderTest, kind: str) -> None:
    run.parameter(kind).mul_(2.0)


@torch.no_grad()
def write_frozen(run: HostUnderTest, kind: str) -> None:
    parameter = run.parameter(kind)
    if not isinstance(parameter, QuantizedWeight):
        parameter.mul_(2.0)
        return
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    parameter.copy_(casts.cast_whole(parameter.format, value, parameter.dtype))


class Broken(Exception):
    """What an event lets a call raise."""


def broken(place: Place, call: Callable[[], object]) -> None:
    """A call that raises at this place."""

    def strike() -> None:
        raise Broken

    with place.armed(strike), contextlib.suppress(Broken):
        call()
        raise AssertionError(f"{place} was not reached")


def break_step(run: HostUnderTest, kind: str) -> None:
    *first, last = before_and_step(run, 3)
    for call in first:
        call()
    broken(run.BREAKS["step"], last)
    run.forget()


def before_and_step(run: HostUnderTest, number: int) -> list[Callable[[], object]]:
    calls = run.phases(number)
    names = list(calls)
    return [calls[name] for name in names[: names.index("step") + 1]]


def break_load(run: HostUnderTest, kind: str) -> None:
    broken(run.BREAKS["load"], run.load)


def break_cast(run: HostUnderTest, kind: str) -> None:
    write_master(run, "quantized")
    broken(run.BREAKS["cast"], run.recast)


def skip_step(run: HostUnderTest, kind: str) -> None:
    """A step whose gradients are not finite."""
    run.backward(run.product(inputs(3)).float().square().mean() * float("inf"))
    run.phases(3)["step"]()
    run.forget()


def other_storage(run: HostUnderTest, kind: str) -> None:
    parameter = run.parameter(kind)
    parameter.data = copy.deepcopy(parameter.data)


@torch.no_grad()
def other_values(run: HostUnderTest, kind: str) -> None:
    parameter = run.parameter(kind)
    moved = copy.deepcopy(parameter.data)
    if isinstance(moved, QuantizedWeight):
        moved.rowwise_data.bitwise_xor_(1)
    else:
        moved.mul_(2.0)
    parameter.data = moved


def unfreeze(run: HostUnderTest, kind: str) -> None:
    run.parameter(kind).requires_grad_(True)


def freeze(run: HostUnderTest, kind: str) -> None:
    run.parameter(kind).requires_grad_(False)


def switch(run: HostUnderTest, kind: str) -> None:
    zerocast.switch(run.verified, {run.NAMES["quantized"]: "fp8_current"})


def take_over(run: HostUnderTest, kind: str) -> None:
    run.other = run.another_owner()


def save(run: HostUnderTest) -> None:
    run.save(2)


def save_and_step(run: HostUnderTest) -> None:
    run.save(2)
    run.step(2)


TRAINED = ("quantized", "plain")
FROZEN = ("frozen quantized", "frozen plain")
EVENTS = {
    "a step": Event(lambda run, kind: run.step(3), lambda run, kind: run.step(3)),
    "a master is written": Event(write_master, write_master_and_cast, TRAINED),
    "the bytes of a weight are written": Event(write_live, kinds=("quantized",)),
    "a parameter is written": Event(write_parameter, write_master_and_cast, ("plain",)),
    "a frozen parameter is written": Event(write_frozen, write_frozen, FROZEN),
    "a step breaks off": Event(break_step, lambda run, kind: run.load(), before=save),
    "a load breaks off": Event(break_load, lambda run, kind: run.load(), before=save_and_step),
    "a cast breaks off": Event(break_cast, lambda run, kind: write_master_and_cast(run, "quantized")),
    "a step of gradients that are not finite": Event(skip_step),
    "other storage": Event(other_storage, kinds=TRAINED + FROZEN),
    "other storage with other values": Event(other_values, write_master_and_cast, TRAINED),
    "it is unfrozen": Event(unfreeze, kinds=FROZEN),
    "it is frozen": Event(freeze, kinds=TRAINED),
    "a switch of formats": Event(switch),
    "another optimizer is built": Event(take_over),
    "a load": Event(lambda run, kind: run.load(), lambda run, kind: run.load(), before=save_and_step),
}


def run_of(host: str, folder: str, event: str, kind: str, variant: str = ALL_KINDS) -> HostUnderTest:
    run = find(host)(tempfile.mkdtemp(dir=folder), variant)
    for number in range(2):
        run.step(number)
    EVENTS[event].before(run)
    return run


def attempt(call: Callable[[], Values]) -> "Values | str":
    """What a call returns, or the error that it raises."""
    try:
        return call()
    except (RuntimeError, ValueError, TypeError, zerocast.VerificationError) as error:
        return f"{type(error).__name__}: {error}"


def outcomes(host: str, folder: str, event: str, kind: str) -> dict[str, "Values | str"]:
    """What every use gives after the event: backward passes in a run of their own."""
    run = run_of(host, folder, event, kind)
    x = inputs(9, grad=True)
    loss = run.product(x).float().square().mean()
    happened = attempt(lambda: EVENTS[event].happens(run, kind) or {})
    found: dict[str, Values | str] = {"event": happened if isinstance(happened, str) else {}}
    found["backward"] = attempt(lambda: run.backward(loss) or {"gradient": x.grad.clone()})
    run = run_of(host, folder, event, kind)
    attempt(lambda: EVENTS[event].happens(run, kind) or {})
    for use, call in CALLS.items():
        found[use] = attempt(lambda call=call: call(run))
    return found


def expected(host: str, folder: str, event: str, kind: str, happened: bool) -> dict[str, "Values | str"]:
    """The same of a twin; where the event was refused, of one to which nothing happens."""
    run = run_of(host, folder, event, kind)
    x = inputs(9, grad=True)
    run.backward(run.product(x).float().square().mean())
    found: dict[str, Values | str] = {"backward": {"gradient": x.grad.clone()}}
    run = run_of(host, folder, event, kind)
    if happened:
        EVENTS[event].properly(run, kind)
    for use, call in CALLS.items():
        found[use] = attempt(lambda call=call: call(run))
    return found


def cells(host: str, event: str, kind: str, folder: str) -> dict[str, str]:
    """What becomes of every use, with what was said or is wrong."""
    with find(host).inside(ALL_KINDS):
        found = outcomes(host, folder, event, kind)
        twin = expected(host, folder, event, kind, not isinstance(found["event"], str))
        answers = {"event": said(found.pop("event"), {})}
        answers |= {use: said(outcome, twin[use]) for use, outcome in found.items()}
        if any(answer.startswith(NOTICE) for answer in answers.values()):
            zerocast.set_debug(True)
            try:
                again = outcomes(host, folder, event, kind)
            finally:
                zerocast.set_debug(False)
            for use, answer in answers.items():
                if answer.startswith(NOTICE) and said(again[use], None).startswith(REFUSED):
                    answers[use] = f"{DEBUG}: {again[use]}"
        return answers


def said(outcome: "Values | str", twin: "Values | str | None") -> str:
    if isinstance(outcome, str):
        return f"{REFUSED}: {outcome}" if REMEDY.search(outcome) else f"no remedy: {outcome}"
    if twin is None or isinstance(twin, str):
        return f"{NOTICE}: the twin says {twin}"
    wrong = [name for name, value in outcome.items() if name not in twin or not torch.equal(value, twin[name])]
    return f"{NOTICE}: {wrong[:3]}" if wrong or outcome.keys() != twin.keys() else RIGHT


CASES = [
    (host, event, kind)
    for host in ("ZeroAdamW", "FSDP2", "Megatron-Core")
    for event, what in EVENTS.items()
    for kind in what.kinds
]


@pytest.mark.parametrize(("host", "event", "kind"), [param(*case) for case in CASES])
def test_matrix(ranks: Callable[[int], Ranks], tmp_path: Path, host: str, event: str, kind: str) -> None:
    (answers,) = ranks(1)(cells, host, event, kind, str(tmp_path))
    print("CELL", host, "|", event, "|", kind)
    for use, answer in answers.items():
        print("    ", use, ":", answer[:400])
