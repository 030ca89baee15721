"""HostUnderTest: a training run of one host on this rank, as the shared tests of this folder see it.

A host says once how it is built, stepped, saved and loaded, where it may fail and what must refuse to go on then. The tests
beside this file ask the same of all hosts, through what anybody can call.
"""

import abc
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from zerocast import QuantizedWeight

Calls = dict[str, Callable[[], object]]
PARTIAL = "failed partway"  # what every message of a host begins with whose masters or weights are of different steps


# the variant that `test_matrix.py` builds, with parameters of all kinds, and the same in other formats
ALL_KINDS, OTHER_FORMATS = "all kinds", "other formats"


class HostUnderTest(abc.ABC):
    """A run of one variant of a host; its checkpoints lie in `folder`. Two of them take the same steps to the bit."""

    VARIANTS: ClassVar[tuple[str, ...]]
    PLACES: ClassVar[tuple[Any, ...]]  # `stopping.Place`s of a step, a save and a load of the first variant
    MORE_PLACES: ClassVar[dict[str, tuple[Any, ...]]] = {}  # those that other variants have beside them
    NAMES: ClassVar[dict[str, str]] = {  # a parameter of each kind, in ALL_KINDS
        "quantized": "nv",
        "plain": "norm",
        "frozen quantized": "frozen",
        "frozen plain": "frozen_norm",
    }
    BREAKS: ClassVar[
        dict[str, Any]
    ] = {}  # the `stopping.Place` where a "step", "load" or "cast" breaks off on one rank
    CANNOT: ClassVar[dict[str, str]] = {}  # the events of the matrix that it cannot have, with the reason
    why_not: ClassVar[str] = ""  # the host cannot be imported here

    folder: Path

    @abc.abstractmethod
    def __init__(self, folder: str, variant: str) -> None: ...

    @classmethod
    def inside(cls, variant: str) -> AbstractContextManager[Any]:
        """Return the context in which the host runs on this rank."""
        return nullcontext()

    @classmethod
    def remedies(cls, variant: str) -> Mapping[str, set[str]]:
        """Return the outcomes to expect when memory runs out, by the phase, load or refresh in which it does."""
        raise NotImplementedError

    @abc.abstractmethod
    def phases(self, number: int) -> Calls:
        """Return the parts of a step in order. All before "step" change no master, and the last one leaves no
        gradients.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop gradients, as somebody does whose step has raised with nothing written."""

    @abc.abstractmethod
    def save(self, number: int) -> None:
        """Save a checkpoint of that many steps."""

    @abc.abstractmethod
    def load(self) -> int:
        """Load the newest checkpoint. Return its number of steps."""

    def refreshes(self) -> Calls:
        """Return the calls that cast weights again from unchanged masters, without a step of delayed scaling."""
        return {}

    def everything(self) -> casts.Bytes:
        """Return masters, moments, delayed scaling and live bytes of all weights on this rank. Collective."""
        raise NotImplementedError

    @abc.abstractmethod
    def whole(self) -> dict[str, Tensor]:
        """Return masters, moments, step and delayed scaling by name, unsharded. Collective."""

    def guarded(self) -> Calls:
        """Return the calls that go on from, save or read what may be of different steps."""
        raise NotImplementedError

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Return the buffers that this rank computes with, for each parameter that zerocast verifies."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def verified(self) -> Any:
        """The object that `zerocast.verify` is given."""

    loadable: Any = None  # has the state dict of a run, with the masters as "model"

    def states_that_do_not_fit(self) -> Calls:
        """Return loads of a state that lacks a name or has another shape, which are refused with nothing changed."""
        state, name = self.loadable.state_dict(), self.NAMES["quantized"]
        fewer = {key: value for key, value in state["model"].items() if key != name}
        other = {**state["model"], name: torch.zeros(3)}
        return {
            what: lambda model=model: self.loadable.load_state_dict({**state, "model": model})  # type: ignore[misc]
            for what, model in (("a missing name", fewer), ("another shape", other))
        }

    def mend(self) -> str:
        """Do what the error says, and return what that was: "load" or "refresh"."""
        self.load()
        return "load"

    def step(self, number: int) -> None:
        for call in self.phases(number).values():
            call()

    def step_again(self) -> None:
        """Call the optimizer alone, like a loop that has caught an error."""
        self.phases(0)["step"]()

    # -- what `test_matrix.py` asks of the variant ALL_KINDS

    @property
    def model(self) -> torch.nn.Module:
        """The module that holds the parameters."""
        raise NotImplementedError

    def parameter(self, kind: str) -> Tensor:
        """Return the parameter of this kind in the model."""
        return dict(self.model.named_parameters())[self.NAMES[kind]]

    def master(self, kind: str) -> Tensor:
        """Return the master of that parameter, for writes by hand."""
        raise NotImplementedError

    def recast(self) -> None:
        """Make the call that the documentation asks for after masters were written by hand."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Run a forward pass through all parameters side by side. `x` is `[8, 32]` in bf16."""
        parts = [
            torch.nn.functional.linear(x, parameter) if isinstance(parameter, QuantizedWeight) else x * parameter
            for parameter in self.model.parameters()
        ]
        return torch.cat(parts, -1)

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass as the host does, up to the step."""
        loss.backward()

    def live_weight(self) -> QuantizedWeight:
        """Return the trained quantized weight as products read it."""
        weight = self.parameter("quantized")
        assert isinstance(weight, QuantizedWeight)
        return weight

    def dequantized(self) -> dict[str, Tensor]:
        """Return the values of the quantized weights, and the other parameters as they are, by name."""
        return {
            name: p.dequantize() if isinstance(p, QuantizedWeight) else p.detach().clone()
            for name, p in self.model.named_parameters()
        }

    def saved(self) -> dict[str, Tensor]:
        """Return the values of a state dict by name."""
        return self.whole()

    @property
    def sender(self) -> Any:
        """The object that `zerocast.serve` is given."""
        return self.verified

    other: Any = None  # what another_owner built

    # What a host may offer. Only those that define a call have its event in the matrix.

    def detach(self) -> None:
        """End what casts after a step."""
        raise NotImplementedError

    def attach(self) -> None:
        """Make the call again that began it."""
        raise NotImplementedError

    def gather(self) -> None:
        """Gather the weights again between two steps."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Free the gathered weights between two steps."""
        raise NotImplementedError

    def replay(self, number: int) -> None:
        """Take a step that was captured."""
        raise NotImplementedError

    @property
    def scaled(self) -> torch.optim.Optimizer:
        """The optimizer, for torch's GradScaler."""
        raise NotImplementedError

    def cast(self, skip: Tensor) -> None:
        """Cast the masters unless the flag is set, and gather."""
        raise NotImplementedError

    @classmethod
    def offers(cls, name: str) -> bool:
        """Return whether the host defines this call."""
        return getattr(cls, name) is not getattr(HostUnderTest, name)

    @property
    def other_recipe(self) -> dict[str, str]:
        """The recipe of the variant OTHER_FORMATS."""
        raise NotImplementedError

    def another_owner(self) -> Any:
        """Build a second optimizer over the same parameters."""
        raise NotImplementedError

    def complaint(self) -> str:
        """Return why nothing goes on, if masters or weights are of different steps."""
        try:
            next(iter(self.guarded().values()))()
        except RuntimeError as error:
            return str(error) if PARTIAL in str(error) else ""
        return ""


HOSTS = {
    "ZeroAdamW": "tests.hosts.zero_adamw:Zero",
    "FSDP2": "tests.hosts.fsdp2:Prepared",
    "Megatron-Core": "tests.hosts.megatron:Megatron",
    "Apex": "tests.hosts.apex:Fused",
}

# What `test_matrix.py` alone asks: runs that are variants of a host for other tests, and loops of one's own, which keep no
# checkpoints and refuse no calls.
OF_THE_MATRIX = {
    "ZeroMuon": "tests.hosts.zero_adamw:Muon",
    "FSDP2 with AdamW": "tests.hosts.fsdp2:TorchStepped",
    "accelerate": "tests.hosts.trainers:Accelerated",
    "Fabric": "tests.hosts.trainers:OfFabric",
    "CastPlan": "tests.hosts.plans:AttachedPlan",
    "quantize_master_weights": "tests.hosts.plans:CastsOfOneCall",
}


def find(host: str) -> type[HostUnderTest]:
    """Return the class of a host, or of a run of the matrix."""
    module, _, name = {**HOSTS, **OF_THE_MATRIX}[host].partition(":")
    found: type[HostUnderTest] = getattr(importlib.import_module(module), name)
    return found


def param(host: str, *values: Any, slow: bool = False) -> Any:
    """Return a test parameter, skipped where the host is not installed."""
    why_not = find(host).why_not
    marks = [pytest.mark.skipif(bool(why_not), reason=why_not), *([pytest.mark.slow] if slow else [])]
    return pytest.param(host, *values, marks=marks)


def variants(*quick: str) -> list[Any]:
    """Return (host, variant) of all hosts. Variants that are neither the first of their host nor named are slow."""
    return [
        param(host, variant, slow=index > 0 and f"{host} {variant}" not in quick)
        for host in HOSTS
        for index, variant in enumerate(find(host).VARIANTS)
    ]


def different(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return names of the values that are not equal to the bit."""
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not np.array_equal(value, found[name])]


def gathered(pieces: Mapping[str, list[tuple[Any, Tensor]]], shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the whole tensors of the pieces (where, values) that all ranks hold."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    whole = {name: torch.full(tuple(shape), torch.nan) for name, shape in shapes.items()}
    for name, held in ((name, held) for one in everyone for name, held in one.items()):
        for where, values in held:
            whole[name][where] = values.float()
    return whole
