"""Mistakes and unsupported settings are errors that say what was found, on every rank; wrong hosts are named."""

import contextlib
import copy
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.apex.host_on_cpu import WHY_NOT, device, host_on_cpu, needs_apex
from tests.apex.training import MIXED, SMALL, Case, Run, different, held
from tests.hosts.stopping import limit_collectives, wait_for_all_ranks
from tests.observed import debug_mode
from tests.workers import Ranks, error_of
from zerocast import ZeroAdamW
from zerocast.distributed import rank_report

if not WHY_NOT:
    from tests.apex.host_on_cpu import apex
    from zerocast.integrations.apex import DistributedFusedAdam


NEEDED: dict[str, dict[str, Any]] = {  # what Apex itself asks for beside an option
    "store_param_remainders": {"store_params": False, "param_sync_dtype": torch.bfloat16},
    "with_scaled_states": {"dtype": torch.bfloat16},
}


class Foreign(Tensor):
    """A quantized tensor of another library."""

    @staticmethod
    def __new__(cls, *shape: int) -> "Foreign":
        found: Foreign = Tensor._make_wrapper_subclass(cls, shape, device=device(), requires_grad=True)
        found._is_param = True  # what torch.nn.Parameter sets on a subclass
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def model(fmt: str = "nvfp4") -> nn.Module:
    return zerocast.quantize_(
        nn.Linear(64, 32, device=device()), zerocast.Recipe({"weight": fmt}), dtype=torch.bfloat16
    )


def build(what: nn.Module, **options: Any) -> Any:
    return DistributedFusedAdam(what.named_parameters(), **{"bucket_cap_mb": SMALL, **options})


def _with_option(name: str) -> Callable[[], object]:
    value = False if name == "store_params" else torch.bfloat16 if name == "dtype" else True
    return lambda: build(model(), **{name: value, "device": device(), **NEEDED.get(name, {})})


def _owned_by(owner: Callable[[nn.Module], object]) -> Callable[[], object]:
    """Return a call that builds a second optimizer over the same weights while the first one lives."""

    def call() -> object:
        one = model()
        first = owner(one)
        return first, build(one)

    return call


def _after_one_that_is_freed() -> None:
    one = model()
    build(one)
    build(one)


def _foreign_on_rank_1() -> None:
    one = model()
    if dist.get_rank() == 1:
        one.register_parameter("bias", Foreign(32))
    build(one)


def _frozen() -> None:
    one = model()
    one.weight.requires_grad_(False)
    build(one)


def _listed_twice() -> None:
    one = model()
    DistributedFusedAdam([("weight", one.weight), ("again", one.weight)], bucket_cap_mb=SMALL)


def _without_an_attribute() -> None:
    def absent(self: Any) -> None:
        raise AttributeError("default_shard_size")

    missing = property(absent, lambda *_: None)
    with mock.patch.object(apex.DistributedFusedAdam, "default_shard_size", missing, create=True):
        build(model())


def _of_another_layout() -> None:
    """Build the optimizer on an Apex that starts fragments elsewhere."""
    with mock.patch.object(apex, "_round_to_multiple", lambda number, multiple, round_up=True: number + 1):
        build(model())


def _without_the_cast() -> None:
    one = model()
    optimizer = build(one)
    one(torch.ones(1, 64, dtype=torch.bfloat16, device=device())).sum().backward()
    with mock.patch.object(apex.DistributedFusedAdam, "_local_step", return_value=None):
        optimizer.step()


def _other_groups(change: Callable[[list[Any]], object]) -> Callable[[], object]:
    """Return a call that changes the list of parameters, and steps."""

    def call() -> None:
        one = model()
        optimizer = build(one)
        one(torch.ones(1, 64, dtype=torch.bfloat16, device=device())).sum().backward()
        change(optimizer.param_groups[0]["params"])
        optimizer.step()

    return call


def _written_before_the_first(call: str) -> Callable[[], object]:
    """Return a call of an optimizer whose parameters were loaded after it was built."""

    def load() -> object:
        one = nn.Sequential(model(), nn.Linear(32, 8, device=device(), dtype=torch.bfloat16))
        optimizer = build(one)
        one.load_state_dict(one.state_dict())
        one(torch.ones(1, 64, dtype=torch.bfloat16, device=device())).sum().backward()
        return getattr(optimizer, call)()

    return load


OTHER_GROUPS = "RuntimeError: parameters of this optimizer were added, removed or moved"
FIRST_FORMAT = "ValueError: state dicts of format 2 hold quantized weights' masters, got format 1"
OPTIONS = {
    "overlap_param_sync": "before the masters of the others have stepped",
    "capturable": "a CUDA graph would replay the kernels",
    "contiguous_param_buffer": "one buffer a bucket already",
    "store_param_remainders": "masters would be in bf16 parameters",
    "with_scaled_states": "a cast needs them in FP32",
    "store_params": "FP32 masters: dtype=torch.float32 and store_params=True, got torch.float32 and False",
    "dtype": "store_params=True, got torch.bfloat16 and True",
}
# By name, what happens, on how many ranks, and the error.
REFUSED: dict[str, tuple[Callable[[], object], int, str]] = {
    **{name: (_with_option(name), 1, f"ValueError: .*{said}") for name, said in OPTIONS.items()},
    "step after a load of the model": (
        _written_before_the_first("step"),
        1,
        "RuntimeError: 4 parameters were written after",
    ),
    "save after a load of the model": (
        _written_before_the_first("state_dict"),
        2,
        "RuntimeError: 4 parameters were written",
    ),
    "owned by another": (_owned_by(build), 1, "RuntimeError: weight belongs to a DistributedFusedAdam already"),
    "owned by a ZeroAdamW": (
        _owned_by(lambda one: ZeroAdamW(one.named_parameters())),
        1,
        "RuntimeError: weight belongs to a ZeroAdamW already",
    ),
    "owned by one that is freed": (_after_one_that_is_freed, 1, "$"),
    "foreign on one rank": (
        _foreign_on_rank_1,
        2,
        "TypeError: rank 1: bias is a Foreign, which zerocast does not know",
    ),
    "other weights": (
        lambda: build(model("nvfp4" if dist.get_rank() else "fp8_block")),
        2,
        r".*weight: fp8_block \(32, 64\) torch.bfloat16 on rank 0 and weight: nvfp4",
    ),
    "frozen": (_frozen, 1, "ValueError: weight needs no gradient, but weight decay would change it"),
    "listed twice": (_listed_twice, 1, "ValueError: again is listed twice: a parameter has one master"),
    "more parameters": (
        lambda: build(model()).add_param_group({"params": [nn.Parameter(torch.zeros(2, device=device()))]}),
        1,
        OTHER_GROUPS,
    ),
    "parameters in the list": (
        _other_groups(lambda params: params.append(nn.Parameter(torch.zeros(2, device=device())))),
        1,
        OTHER_GROUPS,
    ),
    "fewer parameters": (_other_groups(lambda params: params.pop()), 1, OTHER_GROUPS),
    "moved parameters": (_other_groups(lambda params: params.reverse()), 1, OTHER_GROUPS),
    "saved in the first format": (lambda: build(model()).state_dict(state_dict_format=1), 1, FIRST_FORMAT),
    "loaded in the first format": (lambda: build(model()).load_state_dict({"format": 1}), 1, FIRST_FORMAT),
    "loaded without a format": (lambda: build(model()).load_state_dict({"gathered_states": []}), 1, FIRST_FORMAT),
    "without an attribute": (
        _without_an_attribute,
        1,
        "RuntimeError: .*default_shard_size.*: this Apex has an API that",
    ),
    "another layout": (_of_another_layout, 1, ".*this Apex has a layout that"),
    "a step that casts by another method": (
        _without_the_cast,
        2,
        "RuntimeError: .*returned without a cast of its masters",
    ),
}


def refusal(name: str) -> str:
    with host_on_cpu(), mock.patch.object(apex, "_FOUND_DEPRECATED_FUSED_ADAM", True):
        return error_of(REFUSED[name][0])


@needs_apex
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(host_ranks: Ranks, name: str) -> None:
    _, world, message = REFUSED[name]
    for said in host_ranks(world)(refusal, name):
        assert re.match(message, said, re.DOTALL), said


def other_states(only_on: int) -> tuple[list[str], list[str]]:
    """Load states that do not fit on one rank. Return the errors, and what they changed."""
    with host_on_cpu():
        run = Run(Case())
        run.step(0)
        before, state, said = held(run), run.optimizer.state_dict(), []
        entries = [key for key in state["state"] if key != "step"]
        group = state["param_groups"][0]
        for other in (
            {"state": state["state"]},
            {**state, "state": {**state["state"], entries[0]: {"param": torch.zeros(3)}}},
            {**state, "param_groups": [{**group, "params": group["params"][1:]}, *state["param_groups"][1:]]},
            {
                **state,
                "param_groups": [{**group, "param_names": group["param_names"][::-1]}, *state["param_groups"][1:]],
            },
        ):
            given = other if dist.get_rank() == only_on else state
            said.append(error_of(lambda given=given: run.optimizer.load_state_dict(dict(given))))
        return said, different(held(run), before)


def plain_only() -> tuple[int, bool]:
    """Train a model without quantized weights. Return the number of our masters, and whether the step changed nothing."""
    with host_on_cpu():
        torch.manual_seed(0)
        one = nn.Linear(8, 8, device=device())
        before, optimizer = one.weight.detach().clone(), build(one)
        one(torch.ones(2, 8, device=device())).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return len(optimizer.master_views()[0].masters), torch.equal(before, one.weight)


def cannot_cast(run: Run) -> None:
    """Let memory run out where weights go back into their buckets before a cast."""
    run.optimizer._driver.gather.prepare = mock.Mock(side_effect=torch.OutOfMemoryError("injected"))


def cannot_step(run: Run) -> None:
    """Spoil the betas, which Apex reads just before its kernel."""
    for group in run.optimizer.param_groups:
        group["betas"] = None


def partial(run: Run) -> None:
    run.optimizer._plan.validity.failed_partway("an optimizer step")


ONE_RANK: dict[str, tuple[Callable[[Run], None], Callable[[Run], object]]] = {
    "cast in a step": (cannot_cast, lambda run: run.step(1)),
    "cast": (cannot_cast, lambda run: run.optimizer.refresh()),
    "step": (cannot_step, lambda run: run.step(1)),
    "refresh": (partial, lambda run: run.optimizer.refresh()),
    "save": (partial, lambda run: run.optimizer.state_dict()),
    "verify": (partial, lambda run: zerocast.verify(run.optimizer)),
}


def one_rank(name: str, on_gpu: bool) -> tuple[str, float, list[str]]:
    """Return the error of a call for which rank 1 is not ready, its seconds, and what is wrong after a load."""
    event, call = ONE_RANK[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(host_on_cpu())
        if on_gpu:
            stack.enter_context(debug_mode())
            stack.enter_context(mock.patch.object(rank_report, "_is_on_gpu", return_value=True))
        run = Run(Case())
        run.step(0)
        state = copy.deepcopy(run.optimizer.state_dict())
        limit_collectives(8)
        if dist.get_rank() == 1:
            event(run)
        started = time.monotonic()
        said = error_of(lambda: call(run))
        seconds = time.monotonic() - started
        wait_for_all_ranks(f"{name} {on_gpu}", 16)
        limit_collectives(30)
        vars(run.optimizer._driver.gather).pop("prepare", None)
        run.optimizer.load_state_dict(state)
        return said, seconds, run.wrong()


PACKAGE = "zerocast.integrations.apex"


@needs_apex
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(host_ranks: Ranks, name: str, on_gpu: bool) -> None:
    """All ranks raise without waiting for a timeout, also with the reports of ranks on a GPU."""
    for said, seconds, wrong in host_ranks(2)(one_rank, name, on_gpu):
        assert said and seconds < 7 and wrong == [], (said, seconds, wrong)


@needs_apex
@pytest.mark.notices(
    "a state has the names of the parameters in another order",
    where="Apex",
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize("world", [2])
def test_states_that_do_not_fit(host_ranks: Ranks, world: int) -> None:
    """A state that does not fit on one rank is refused by all, and nothing changes on any."""
    for said, changed in host_ranks(world)(other_states, 1):
        assert changed == []
        lacks = "ValueError: rank 1: the state does not fit this optimizer: it lacks "
        assert said[0].startswith(f"{lacks}'param_groups'") and said[1].startswith(f"{lacks}'exp_avg'"), said
        first, second = (sum(spec.group == group for spec in MIXED) for group in (0, 1))
        groups = f"the state has groups of [{first - 1}, {second}] parameters, this optimizer of [{first}, {second}]"
        assert groups in said[2]
        assert "the parameters of this optimizer in another order" in said[3]


@needs_apex
def test_without_quantized_weights(host_ranks: Ranks) -> None:
    assert host_ranks(1)(plain_only) == [(0, False)]


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test import both packages afresh, and leave nothing of its imports behind."""
    names = [n for n in sys.modules if n == "apex" or n.startswith(("apex.", PACKAGE))]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n == "apex" or n.startswith(("apex.", PACKAGE))]:
        del sys.modules[name]


def _package(folder: Path, files: dict[str, str]) -> str:
    for path, content in files.items():
        (folder / "apex" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "apex" / path).write_text(content)
    return str(folder)


OPTIMIZER = "contrib/optimizers/distributed_fused_adam.py"
INIT = {"__init__.py": "", "contrib/__init__.py": "", "contrib/optimizers/__init__.py": ""}
HOSTS = {
    "the index's": ({"__init__.py": "raise SystemExit", "lib/libapex.py": ""}, ImportError, "a toolkit for logins"),
    "no extensions": ({**INIT, OPTIMIZER: "import amp_C_is_missing"}, ImportError, "with the extensions amp_C and"),
    "no class": ({**INIT, OPTIMIZER: ""}, RuntimeError, "has no attribute 'DistributedFusedAdam': this Apex"),
    "no method": (
        {**INIT, OPTIMIZER: "class DistributedFusedAdam:\n    def param_sync(self): ..."},
        RuntimeError,
        "DistributedFusedAdam has no .*, _broadcast_params, .*: this apex has an API that",
    ),
}


@pytest.mark.notices(
    "a version of the host lacks a method that zerocast overrides, or its step does not call the one that casts",
    where=("Megatron", "Apex"),
    answer="raises where it is imported or attached, or in the first step",
)
@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("name", HOSTS)
def test_wrong_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """The `apex` of the package index is another project: it is named, and not run."""
    files, error, said = HOSTS[name]
    monkeypatch.syspath_prepend(_package(tmp_path, files))
    with pytest.raises(error, match=said):
        importlib.import_module(PACKAGE)


@pytest.mark.usefixtures("afresh")
def test_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="NVIDIA Apex is not installed, and is on no package index"):
        importlib.import_module(PACKAGE)
