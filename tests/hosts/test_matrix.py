"""The matrix: what becomes of each use of the weights after each event, on every host.

For every (host, event) a run takes two steps, then the event happens, and then it is used in every way. A twin takes the
same steps and does the event properly, as the documentation says. A use is "right" if its result is the twin's to the bit, and
"refused" if it raises an error that names a remedy. What is neither is asked once more in debug mode; a cell that is silent there
too is a "notice".
"""

import contextlib
import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import zerocast
from tests import casts
from tests.hosts.stopping import Place
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, HostUnderTest, find, param
from tests.selection import worlds
from tests.test_notices import marked
from tests.workers import Ranks
from zerocast import QuantizedWeight
from zerocast.serve import named_tensors

RIGHT, REFUSED, DEBUG, NOTICE = "right", "refused", "refused in debug mode", "notice"
# what an error tells to do
REMEDY = re.compile(
    r"(?i)\bcall\b|\bload\b|\bbuild\b|\battach|run the forward pass again|cast again|begin again|load_state_dict|"
    # what needs no other call
    r"copy the model before|already|"
    # what torch and a host say, and a report of differences
    r"modified by an inplace operation|AssertionError|VerificationError|cannot pickle"
)
USES = ("backward", "send", "dequantize", "product", "verify", "save", "step")

Values = dict[str, Tensor]


def inputs(number: int, grad: bool = False) -> Tensor:
    """Return the inputs of a forward pass on this rank."""
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


def moves(run: HostUnderTest, kind: str) -> Values:
    """Return whether a step changes the parameter, which was frozen or unfrozen before."""
    before, _ = value(run, kind), run.step(5)
    return {"it moves": torch.tensor(not torch.equal(before, value(run, kind)))}


def value(run: HostUnderTest, kind: str) -> Tensor:
    tensor = run.master(kind) if kind in TRAINED else run.parameter(kind)
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def stepped(run: HostUnderTest) -> Values:
    """Take a step. Return the state and the products after it."""
    run.step(5)
    return {**run.saved(), **products(run)}


# in this order: what is raised once a cast, such as that masters are NaN, is raised by the first one alone
CALLS: dict[str, Callable[[HostUnderTest], Values]] = {
    "send": sent,
    "dequantize": lambda run: run.dequantized(),
    "product": products,
    "verify": verified,
    "save": lambda run: run.saved(),
}


# -- events


@dataclass(frozen=True)
class Event:
    """An event that happens to parameters of some kind.

    Attributes:
        happens: does it, as somebody does who knows no better.
        properly: does the same as the documentation says.
        kinds: of the parameters that it may happen to.
        before: what a run does before, if anything.
        step: how a step is asked of it.
        variant: of the twin; one of other formats is not the run that did `before`.
        applies: whether a host knows of such an event.
    """

    happens: Callable[[HostUnderTest, str], object]
    properly: Callable[[HostUnderTest, str], object] = lambda run, kind: None
    kinds: tuple[str, ...] = ("all",)
    before: Callable[[HostUnderTest], object] = lambda run: None
    step: Callable[[HostUnderTest, str], Values] = lambda run, kind: stepped(run)
    variant: str = ALL_KINDS
    applies: Callable[[type[HostUnderTest]], bool] = lambda host: True


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
    """The error of a call that is broken off on purpose."""


def broken(place: Place, call: Callable[[], object]) -> None:
    """Break off a call at this place."""

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
    broken(run.BREAKS["cast"], lambda: (run.recast(), products(run)))


def skip_step(run: HostUnderTest, kind: str) -> None:
    """Skip a step by gradients that are not finite."""
    run.backward(run.product(inputs(3)).float().square().mean() * float("inf"))
    run.phases(3)["step"]()
    run.forget()


def skip_by_scaler(run: HostUnderTest, kind: str) -> None:
    """Take a step that torch's GradScaler skips, since a gradient is not finite."""
    scaler = torch.amp.GradScaler(inputs(3).device.type)
    run.backward(scaler.scale(run.product(inputs(3)).float().square().mean()) * float("inf"))
    scaler.step(run.scaled)
    scaler.update()
    run.forget()


def skip_cast(run: HostUnderTest, kind: str) -> None:
    run.cast(torch.ones(1, dtype=torch.bool))


def write_master_and_skip_cast(run: HostUnderTest, kind: str) -> None:
    write_master(run, kind)
    skip_cast(run, kind)


def copy_model(run: HostUnderTest, kind: str) -> None:
    """Copy the model, and write to the copy."""
    copied = copy.deepcopy(run.model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if isinstance(parameter, QuantizedWeight):
                parameter.rowwise_data.bitwise_xor_(1)
            else:
                parameter.mul_(2.0)


def replay(run: HostUnderTest, kind: str) -> None:
    """Take two captured steps: the first one may be an ordinary one, which the second one records."""
    for number in (3, 4):
        run.replay(number)


def step_twice(run: HostUnderTest, kind: str) -> None:
    for number in (3, 4):
        run.step(number)


def attach_anew(run: HostUnderTest, kind: str) -> None:
    run.detach()
    run.attach()


def other_storage(run: HostUnderTest, kind: str) -> None:
    parameter = run.parameter(kind)
    parameter.data = parameter.data.clone()


@torch.no_grad()
def other_values(run: HostUnderTest, kind: str) -> None:
    parameter = run.parameter(kind)
    moved = parameter.data.clone()
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
    zerocast.switch(run.verified, run.other_recipe)


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
    "a master is written and cast": Event(write_master_and_cast, write_master_and_cast, ("quantized",)),
    "the bytes of a weight are written": Event(write_live, kinds=("quantized",)),
    "a parameter is written": Event(write_parameter, write_master_and_cast, ("plain",)),
    "a frozen parameter is written": Event(write_frozen, write_frozen, FROZEN),
    "a step breaks off": Event(break_step, lambda run, kind: run.load(), before=save),
    "a load breaks off": Event(break_load, lambda run, kind: run.load(), before=save_and_step),
    "a cast breaks off": Event(
        break_cast,
        lambda run, kind: write_master_and_cast(run, "quantized"),
        applies=lambda host: "cast" in host.BREAKS,
    ),
    "it is detached": Event(lambda run, kind: run.detach(), applies=lambda host: host.offers("detach")),
    "it is attached twice": Event(lambda run, kind: run.attach(), applies=lambda host: host.offers("attach")),
    "it is detached and attached": Event(
        attach_anew, applies=lambda host: host.offers("attach") and host.offers("detach")
    ),
    "it is gathered": Event(lambda run, kind: run.gather(), applies=lambda host: host.offers("gather")),
    "it is resharded": Event(lambda run, kind: run.reshard(), applies=lambda host: host.offers("reshard")),
    "it is copied": Event(copy_model),
    "steps are replayed": Event(replay, step_twice, applies=lambda host: host.offers("replay")),
    "a step of gradients that are not finite": Event(skip_step),
    "a GradScaler skips a step": Event(skip_by_scaler, applies=lambda host: host.offers("scaled")),
    "a cast is skipped": Event(skip_cast, applies=lambda host: host.offers("cast")),
    "a master is written and its cast is skipped": Event(
        write_master_and_skip_cast, write_master_and_cast, ("quantized",), applies=lambda host: host.offers("cast")
    ),
    "other storage": Event(other_storage, kinds=TRAINED + FROZEN),
    "other storage with other values": Event(other_values, write_master_and_cast, TRAINED),
    "it is unfrozen": Event(unfreeze, kinds=FROZEN, step=moves),
    "it is frozen": Event(freeze, kinds=TRAINED, step=moves),
    "a switch of formats": Event(switch, lambda run, kind: run.load(), before=save, variant=OTHER_FORMATS),
    "another optimizer is built": Event(take_over),
    "a load": Event(lambda run, kind: run.load(), lambda run, kind: run.load(), before=save_and_step),
}


def run_of(host: str, folders: Iterator[str], event: str) -> HostUnderTest:
    """Return a run to which the event may happen now, in a folder that is the same on all ranks."""
    run = find(host)(next(folders), ALL_KINDS)
    for number in range(2):
        run.step(number)
    EVENTS[event].before(run)
    return run


def attempt(call: Callable[[], Values]) -> "Values | str":
    """Return the result of a call, or its error as text."""
    try:
        return call()
    except (RuntimeError, ValueError, TypeError, AssertionError, zerocast.VerificationError) as error:
        return f"{type(error).__name__}: {error}"


def of_backward(host: str, folders: Iterator[str], event: str, kind: str) -> dict[str, "Values | str"]:
    """Return the result of the event, and of a backward pass that began before it."""
    run = run_of(host, folders, event)
    x = inputs(9, grad=True)
    loss = run.product(x).float().square().mean()
    happened = attempt(lambda: EVENTS[event].happens(run, kind) or {})
    found: dict[str, Values | str] = {"event": happened if isinstance(happened, str) else {}}
    return found | {"backward": attempt(lambda: run.backward(loss) or {"gradient": x.grad.clone()})}


def of_other_uses(host: str, folders: Iterator[str], event: str, kind: str) -> dict[str, "Values | str"]:
    """Return the result of every other use after the event, in a run of their own."""
    run = run_of(host, folders, event)
    attempt(lambda: EVENTS[event].happens(run, kind) or {})
    found: dict[str, Values | str] = {use: attempt(lambda call=call: call(run)) for use, call in CALLS.items()}
    return found | {"step": attempt(lambda: EVENTS[event].step(run, kind))}


# What backward passes give without any event, by host and by what runs do before.
GRADIENTS: dict[tuple[str, Callable[[HostUnderTest], object]], Tensor] = {}
# The uses of twins to which nothing happens, by host and by what runs do before.
UNDISTURBED: dict[tuple[str, Callable[[HostUnderTest], object]], dict[str, "Values | str"]] = {}


def expected(host: str, folders: Iterator[str], event: str, kind: str, happened: bool) -> dict[str, "Values | str"]:
    """Return the same outcomes of a twin, to which nothing happens if the event was refused."""
    undisturbed = host, EVENTS[event].before
    other = EVENTS[event].variant
    becomes_another = happened and other != ALL_KINDS
    if becomes_another or undisturbed not in GRADIENTS:
        run, x = run_of(host, folders, event), inputs(9, grad=True)
        run.backward(run.product(x).float().square().mean())
        GRADIENTS[undisturbed] = x.grad.clone()
    found: dict[str, Values | str] = {"backward": {"gradient": GRADIENTS[undisturbed]}}
    nothing_happens = not becomes_another and (not happened or EVENTS[event].properly is Event.properly)
    is_of_a_step = EVENTS[event].step is Event.step
    if nothing_happens and is_of_a_step and undisturbed in UNDISTURBED:
        return found | UNDISTURBED[undisturbed]
    run = find(host)(str(run.folder), other) if becomes_another else run_of(host, folders, event)
    if happened:
        EVENTS[event].properly(run, kind)
    uses: dict[str, Values | str] = {use: attempt(lambda call=call: call(run)) for use, call in CALLS.items()}
    uses["step"] = attempt(lambda: EVENTS[event].step(run, kind))
    if EVENTS[event].step is moves:
        uses["step"] = {"it moves": torch.tensor(kind in FROZEN)}
    if nothing_happens and is_of_a_step:
        UNDISTURBED[undisturbed] = uses
    return found | uses


def cells(host: str, event: str, kind: str, folder: str) -> dict[str, str]:
    """Return the answer to every use on all ranks, with the error or the difference."""
    folders = (f"{folder}/{number}" for number in itertools.count())
    with find(host).inside(ALL_KINDS):
        case = host, folders, event, kind
        found = of_backward(*case) | of_other_uses(*case)
        twin = expected(*case, not isinstance(found["event"], str))
        answers = {"event": said(found.pop("event"), {})}
        answers |= {use: said(outcome, twin[use]) for use, outcome in found.items()}
        answers = of_all_ranks(answers)
        silent = {use for use, answer in answers.items() if answer.startswith(NOTICE)}
        zerocast.set_debug(True)
        try:
            again = of_backward(*case) if "backward" in silent else {}
            again |= of_other_uses(*case) if silent - {"backward"} else {}
        finally:
            zerocast.set_debug(False)
        for use in silent:
            if said(again[use], None).startswith(REFUSED):
                answers[use] = f"{DEBUG}: {again[use]}"
        return answers


def of_all_ranks(answers: dict[str, str]) -> dict[str, str]:
    """Count a use as silent if it is silent on any rank: a small parameter has its master on one
    rank, and only that rank has different values.
    """
    if not dist.is_initialized():
        return answers
    by_rank: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, answers)
    silent = {use: answer for other in by_rank for use, answer in other.items() if answer.startswith(NOTICE)}
    return answers | silent


def said(outcome: "Values | str", twin: "Values | str | None") -> str:
    if isinstance(outcome, str):
        return f"{REFUSED}: {outcome}" if REMEDY.search(outcome) else f"no remedy: {outcome}"
    if twin is None or isinstance(twin, str):
        return f"{NOTICE}: the twin says {twin}"
    wrong = [name for name, value in outcome.items() if name not in twin or not torch.equal(value, twin[name])]
    return f"{NOTICE}: {wrong[:3]}" if wrong or outcome.keys() != twin.keys() else RIGHT


# The outcome of each use on each host, in the order of COLUMNS: "." right, "R" refused, "D" refused in debug mode, "n" a notice,
# or "-" where the event cannot be.
COLUMNS = ("event", *USES)
LETTERS = {".": RIGHT, "R": REFUSED, "D": DEBUG, "n": NOTICE}
TABLE = """
event                                  |kind            |ZeroAdamW|ZeroMuon|accelerate|Fabric  |FSDP2   |FSDP2 with AdamW
a step                                 |all             |.R...... |.R......|.R......  |.R......|.R......|.R......
a master is written                    |quantized       |..DDDR.. |..DDDR..|..DDDR..  |..DDDR..|.R......|.R......
a master is written                    |plain           |..DDDR.. |..DDDR..|..DDDR..  |..DDDR..|.n......|.n......
a master is written and cast           |quantized       |.R...... |.R......|.R......  |.R......|.R......|.R......
the bytes of a weight are written      |quantized       |.nnnnRRR |.nnnnRRR|.nnnnRRR  |.nnnnRRR|.nnn....|.nnn....
a parameter is written                 |plain           |.R...RRR |.R...RRR|.R...RRR  |.R...RRR|.n......|.n......
a frozen parameter is written          |frozen quantized|.R...... |.R......|.R......  |.R......|.RR.....|.RR.....
a frozen parameter is written          |frozen plain    |.R...... |.R......|.R......  |.R......|.n......|.n......
a step breaks off                      |all             |.RRRRRRR |.RRRRRRR|.RRRRRRR  |.RRRRRRR|.RRRRRRR|.Rnnn.nn
a load breaks off                      |all             |.RRRRRRR |.RRRRRRR|.RRRRRRR  |.RRRRRRR|.RRRRRRR|.RRRRRRR
a step of gradients that are not finite|all             |.R...... |.R......|.R......  |.R......|.RRnnRnR|.RRnnRnR
other storage                          |quantized       |........ |........|........  |........|........|........
other storage                          |plain           |........ |........|........  |........|........|........
other storage                          |frozen quantized|........ |........|........  |........|........|........
other storage                          |frozen plain    |........ |........|........  |........|........|........
other storage with other values        |quantized       |.nnnnRRR |.nnnnRRR|.nnnnRRR  |.nnnnRRR|..nnn.nn|..nnn.nn
other storage with other values        |plain           |.n...RRR |.n...RRR|.n...RRR  |.n...RRR|..n.n.nn|..n.n.nn
it is unfrozen                         |frozen quantized|.......R |.......R|......RR  |.......R|........|........
it is unfrozen                         |frozen plain    |.......R |.......R|.......R  |.......R|........|........
it is frozen                           |quantized       |.......n |.......n|.......n  |.......n|........|........
it is frozen                           |plain           |.......n |.......n|.......n  |.......n|........|........
a switch of formats                    |all             |.R...... |.R......|.R......  |.R......|.R......|.R......
another optimizer is built             |all             |.....R.R |.......R|.....R.R  |.....R.R|........|........
a load                                 |all             |.R...... |.R......|.R......  |.R......|.R......|.R......
a cast breaks off                      |all             |-        |-       |-         |-       |.R......|.R......
it is attached twice                   |all             |-        |-       |-         |-       |R.......|R.......
it is gathered                         |all             |-        |-       |-         |-       |........|........
it is resharded                        |all             |-        |-       |-         |-       |........|........
it is copied                           |all             |........ |........|........  |........|R.......|R.......
steps are replayed                     |all             |.R...... |R.......|.R......  |.R......|.R......|-
a GradScaler skips a step              |all             |........ |........|........  |........|........|........

event                                      |kind            |Megatron-Core|Apex    |CastPlan|quantize_master_weights
a step                                     |all             |.R......     |.R......|.R......|.R...R..
a master is written                        |quantized       |..DDDR.D     |..DDDR..|..DDDR.D|..DDDR.D
a master is written                        |plain           |..DDDR.D     |........|.R......|.R...R..
a master is written and cast               |quantized       |.R......     |.R......|.n......|.n...R..
the bytes of a weight are written          |quantized       |.nnnnR.n     |.nnnnR..|.nnnnR.n|.nnnnR.n
a parameter is written                     |plain           |.....Rnn     |.Rnnn.nn|.R......|.R...R..
a frozen parameter is written              |frozen quantized|.R......     |.R......|.R......|.R...R..
a frozen parameter is written              |frozen plain    |.R......     |.R......|.R......|.R...R..
a step breaks off                          |all             |.RRRRRRR     |.RRRRRRR|-       |-
a load breaks off                          |all             |.RRRRRRR     |.RRRRRRR|-       |-
a step of gradients that are not finite    |all             |.RnnnRRR     |.RnnnRRR|.RnnnRnR|RRnnnRnR
other storage                              |quantized       |........     |........|........|.....R..
other storage                              |plain           |.......n     |........|........|.....R..
other storage                              |frozen quantized|........     |........|........|.....R..
other storage                              |frozen plain    |........     |........|........|.....R..
other storage with other values            |quantized       |.nnnnRnn     |.nnnnRnn|.nnnnRnn|.nnnnRnn
other storage with other values            |plain           |.....Rnn     |.nnnn.nn|.n......|.n...R..
it is unfrozen                             |frozen quantized|.......R     |.......R|.......R|.....R.R
it is unfrozen                             |frozen plain    |.......n     |.......n|.......n|.....R.n
it is frozen                               |quantized       |.R.....n     |.......n|........|.....R..
it is frozen                               |plain           |.R.....n     |.......n|........|.....R..
a switch of formats                        |all             |R.......     |R.......|.R......|R....R..
another optimizer is built                 |all             |R.......     |R.......|R.......|-
a load                                     |all             |.R......     |.R......|.R......|.R...R..
a cast breaks off                          |all             |.RRRRRRR     |.RRRRRRR|.RRRRR.R|.RRRRR.R
it is detached                             |all             |..R..R.R     |-       |.......D|-
it is attached twice                       |all             |R.......     |-       |R.......|-
it is gathered                             |all             |........     |-       |........|.....R..
it is copied                               |all             |R.......     |........|........|.....R..
a GradScaler skips a step                  |all             |-            |-       |........|.....R..
it is detached and attached                |all             |........     |-       |........|-
a cast is skipped                          |all             |-            |-       |........|-
a master is written and its cast is skipped|quantized       |-            |-       |..nnnR.n|-
"""


def table() -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the outcomes of all uses by host, event and kind, of TABLE."""
    found = {}
    for part in TABLE.strip().split("\n\n"):
        header, *lines = ([cell.strip() for cell in line.split("|")] for line in part.splitlines())
        for event, kind, *cells in lines:
            for host, letters in zip(header[2:], cells, strict=True):
                if letters != "-":
                    uses = zip(COLUMNS, letters, strict=True)
                    found[host, event, kind] = {use: LETTERS[letter] for use, letter in uses}
    return found


EXPECTED = table()


def test_the_table_has_every_host_event_and_kind() -> None:
    cases = {
        (host, event, kind)
        for host in {host for host, _, _ in EXPECTED}
        for event, what in EVENTS.items()
        for kind in what.kinds
        if what.applies(find(host)) and event not in find(host).CANNOT
    }
    assert cases == EXPECTED.keys()


# The lines of docs/notices.md, by their mistakes, that hold what nothing or only debug mode notices after each event.
BY_HAND, OTHER_VALUES = "a master is written by hand and nothing casts it", "gets other values by `.data =`"
WRITTEN_BETWEEN = "a plain parameter is written between a forward pass and its backward pass"
FROZEN_LATER = "in mid-run: moments and weight decay still change it"
LINES = {
    "a master is written": (BY_HAND, WRITTEN_BETWEEN),
    "a master is written and cast": ("a master is written and cast by `plan.cast()`",),
    "the bytes of a weight are written": ("the bytes of a quantized weight", "the bytes of a gathered weight"),
    "a parameter is written": (WRITTEN_BETWEEN, "a parameter is written by hand"),
    "a frozen parameter is written": (WRITTEN_BETWEEN,),
    "a step of gradients that are not finite": ("masters become NaN or Inf in a step",),
    "a step breaks off": ("a step of torch's own optimizer breaks off",),
    "it is detached": ("an optimizer steps over masters and nothing casts them",),
    "a master is written and its cast is skipped": ("`plan.cast(skip=)` skips",),
    "other storage": ("a plain parameter gets other storage",),
    "other storage with other values": (OTHER_VALUES, "get other values by `.data =`", "`.data =` of a parameter"),
    "it is unfrozen": ("is unfrozen",),
    "it is frozen": (FROZEN_LATER,),
}


def test_every_silent_cell_has_a_line_in_the_notices() -> None:
    """A cell that is silent, or noticed in debug mode alone, is in a line for its host."""
    places = {"Megatron-Core": "Megatron", "quantize_master_weights": "CastPlan", "FSDP2 with AdamW": "FSDP2"}
    places |= dict.fromkeys(("ZeroMuon", "accelerate", "Fabric"), "ZeroAdamW")
    mistakes = defaultdict(list)
    for where, mistake, _ in marked():
        mistakes[where].append(mistake)
    lacking = [
        (host, event)
        for (host, event, _), uses in EXPECTED.items()
        if {NOTICE, DEBUG} & {*uses.values()}
        and not any(line in mistake for mistake in mistakes[places.get(host, host)] for line in LINES[event])
    ]
    assert lacking == []


def in_words(answer: str) -> str:
    """Return one of the words of the table, or an error without a remedy as it is."""
    return max((word for word in LETTERS.values() if answer.startswith(word)), key=len, default=answer)


@pytest.mark.notices(
    "a backward pass after a step, a load, or a cast of written masters uses an earlier forward pass",
    where=("FSDP2", "Megatron", "Apex"),
    answer="raises if it reads a quantized weight that has changed",
)
@pytest.mark.notices(
    "a master is written by hand and nothing casts it",
    where=("ZeroAdamW", "Megatron", "CastPlan", "Apex"),
    answer="in debug mode the next read raises; `zerocast.verify` names it",
)
@pytest.mark.notices(
    "the bytes of a quantized weight are written by hand",
    where="ZeroAdamW",
    answer="products and refits read them; the next step or save raises, and `zerocast.verify` names it",
)
@pytest.mark.notices(
    "the bytes of a gathered weight are written by hand",
    where="FSDP2",
    answer="nothing: they are read until FSDP2 frees them",
)
@pytest.mark.notices(
    "the bytes of a quantized weight are written by hand",
    where=("Megatron", "Apex"),
    answer="they are read until the next step; `zerocast.verify` names it",
)
@pytest.mark.notices(
    "the bytes of a quantized weight are written by hand, or get other values by `.data =`",
    where="CastPlan",
    answer="they are read until the next cast; `zerocast.verify` names the weight",
)
@pytest.mark.notices(
    "a master is written and cast by `plan.cast()` between a forward pass and its backward pass",
    where="CastPlan",
    answer="it reads the new values; after `attach` a step there makes it raise",
)
@pytest.mark.notices(
    "a master is written, and `plan.cast(skip=)` skips its cast",
    where="CastPlan",
    answer="the weight is as it was until the next cast, since only the device knows the flag; `zerocast.verify` names it",
)
@pytest.mark.notices(
    "a step of torch's own optimizer breaks off",
    where="FSDP2",
    answer="weights are cast from the masters that it has left, as FSDP2 alone would use them: load a checkpoint",
)
@pytest.mark.notices(
    "a plain parameter that no optimizer has is unfrozen",
    where="CastPlan",
    answer="nothing: it is no weight of the plan",
)
@pytest.mark.notices(
    "a parameter is written by hand, or gets other values by `.data =`",
    where=("Megatron", "Apex"),
    answer="the next step overwrites it with its master, as without zerocast; `zerocast.verify` names it (Apex: quantized ones)",
)
@pytest.mark.notices(
    "a plain parameter gets other storage by `.data =`",
    where="Megatron",
    answer="it is not trained any more, as without zerocast",
)
@pytest.mark.notices(
    "a weight gets other values by `.data =` between a forward pass and its backward pass",
    where=("ZeroAdamW", "Megatron", "CastPlan", "Apex"),
    answer="it reads the new values, as in torch; ZeroAdamW's next step or save raises",
)
@pytest.mark.notices(
    "`.data =` of a parameter, which is a DTensor",
    where="FSDP2",
    answer="nothing changes, as in torch: write into the parameter",
)
@pytest.mark.notices(
    "a plain parameter is written between a forward pass and its backward pass",
    where="FSDP2",
    answer="the backward pass reads the new value, as in plain FSDP2",
)
@pytest.mark.notices(
    "a parameter that was frozen when the optimizer was built, or that it was not given, is unfrozen",
    where=("Megatron", "Apex"),
    answer="the next step raises for quantized weights; plain ones are not trained, as without zerocast",
)
@pytest.mark.notices(
    "a parameter is frozen in mid-run: moments and weight decay still change it",
    where=("Megatron", "Apex"),
    answer="nothing, as without zerocast; under Megatron a backward pass from before the change raises",
)
@pytest.mark.notices(
    "masters become NaN or Inf in a step, and the weights are read before the next step or save",
    where=("FSDP2", "Megatron", "Apex"),
    answer="FSDP2 raises at the next forward pass or refit; others' weights are read until the next step or save raises",
)
@pytest.mark.notices(
    "masters become NaN or Inf in a step, and the weights are read before the next cast",
    where="CastPlan",
    answer="they are read until the next step's cast or `zerocast.verify` raises",
)
@pytest.mark.parametrize("world", worlds(1, slow=[2]))
@pytest.mark.parametrize(("host", "event", "kind"), [param(*case) for case in EXPECTED])
def test_matrix(ranks: Ranks, tmp_path: Path, host: str, event: str, kind: str, world: int) -> None:
    is_of_one_rank = (kind == "plain" and not host.startswith("FSDP2")) or host == "ZeroMuon"
    if world > 1 and event == "a master is written" and is_of_one_rank:
        pytest.skip("one rank has that master, and raises alone in debug mode")
    if world > 1 and (host, event) == ("quantize_master_weights", "a step of gradients that are not finite"):
        pytest.skip(
            "the call raises before the gather of its caller, so weights read there are those of a cast without one"
        )
    for answers in ranks(world)(cells, host, event, kind, str(tmp_path), timeout=250.0):
        words = {use: in_words(answer) for use, answer in answers.items()}
        if world > 1 and (host, event) == ("ZeroMuon", "another optimizer is built"):
            # The old optimizer is verified, and the new one has computed another amax, from codes.
            words["verify"] = "right"
        assert words == EXPECTED[host, event, kind], answers
