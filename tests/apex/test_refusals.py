"""Mistakes and unsupported settings are errors that say what was found, on every rank; wrong hosts are named."""

import contextlib
import copy
import importlib
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
from tests.apex.checkpoints import different, held
from tests.apex.host_on_cpu import WHY_NOT, device, host_on_cpu, needs_apex
from tests.apex.training import MIXED, SMALL, Case, Run
from tests.hosts.stopping import limit_collectives
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


def with_option(name: str) -> str:
    value = False if name == "store_params" else torch.bfloat16 if name == "dtype" else True
    others = NEEDED.get(name, {})
    with host_on_cpu(), mock.patch.object(apex, "_FOUND_DEPRECATED_FUSED_ADAM", True):
        return error_of(lambda: build(model(), **{name: value, "device": device(), **others}))


def twice() -> tuple[str, str]:
    """A second optimizer of either kind over the same weights."""
    with host_on_cpu():
        one = model()
        held = build(one)
        again = error_of(lambda: build(one))
        other = model()
        zero = ZeroAdamW(other.named_parameters())
        after_zero = error_of(lambda: build(other))
        assert held is not None and zero is not None
        del held  # an optimizer that is freed owns nothing
        assert build(one) is not None
        return again, after_zero


def foreign(only_on: int) -> str:
    """A tensor of another library; the other ranks hear of it."""
    with host_on_cpu():
        one = model()
        if dist.get_rank() == only_on:
            one.register_parameter("bias", Foreign(32))
        return error_of(lambda: build(one))


def other_weights() -> str:
    with host_on_cpu():
        return error_of(lambda: build(model("nvfp4" if dist.get_rank() else "fp8_block")))


def not_to_be_trained() -> tuple[str, str]:
    """A weight that needs no gradient, and one that is listed twice."""
    with host_on_cpu():
        frozen, one = model(), model()
        frozen.weight.requires_grad_(False)
        named = [("weight", one.weight), ("again", one.weight)]
        return error_of(lambda: build(frozen)), error_of(lambda: DistributedFusedAdam(named, bucket_cap_mb=SMALL))


def more_parameters() -> str:
    with host_on_cpu():
        optimizer = build(model())
        return error_of(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=device()))]}))


def first_format() -> tuple[str, str, str]:
    with host_on_cpu():
        optimizer = build(model())
        save = error_of(lambda: optimizer.state_dict(state_dict_format=1))
        return (
            save,
            error_of(lambda: optimizer.load_state_dict({"gathered_states": []})),
            error_of(lambda: optimizer.load_state_dict({"format": 1})),
        )


def other_states(only_on: int) -> tuple[list[str], list[str]]:
    """States that do not fit, on one rank: what is said, and what they changed."""
    with host_on_cpu():
        run = Run(Case())
        run.step(0)
        before, state, said = held(run), run.optimizer.state_dict(), []
        entries = [key for key in state["state"] if key != "step"]
        group = state["param_groups"][0]
        for other in (
            {"state": state["state"]},
            {**state, "state": {key: value for key, value in state["state"].items() if key != entries[-1]}},
            {**state, "state": {**state["state"], entries[0]: {"param": torch.zeros(3)}}},
            {
                **state,
                "state": {
                    **state["state"],
                    entries[0]: dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), torch.zeros(3)),
                },
            },
            {**state, "param_groups": [{**group, "params": group["params"][1:]}, *state["param_groups"][1:]]},
        ):
            given = other if dist.get_rank() == only_on else state
            said.append(error_of(lambda given=given: run.optimizer.load_state_dict(dict(given))))
        return said, different(held(run), before)


def without(name: str) -> str:
    """An Apex whose optimizers have no such attribute."""

    def absent(self: Any) -> None:
        raise AttributeError(name)

    with (
        host_on_cpu(),
        mock.patch.object(apex.DistributedFusedAdam, name, property(absent, lambda *_: None), create=True),
    ):
        return error_of(lambda: build(model()))


def of_another_layout() -> str:
    """An Apex that starts fragments elsewhere."""
    with (
        host_on_cpu(),
        mock.patch.object(apex, "_round_to_multiple", lambda number, multiple, round_up=True: number + 1),
    ):
        return error_of(lambda: build(model()))


def moved() -> list[str]:
    """Weights that were given other storage after the optimizer was built are brought back."""
    with host_on_cpu():
        run = Run(Case())
        for weight in run.weights.values():
            weight.rebind(rowwise_data=weight.rowwise_data.clone())
        run.step(0)
        return run.wrong()


def masters_by_hand() -> tuple[bool, list[str]]:
    """Whether changed masters are seen, and what is wrong after `refresh`."""
    with host_on_cpu():
        run = Run(Case(tuple(spec for spec in Case().specs if spec.fmt != "plain")))
        for owned in run.optimizer.master_views()[0].masters:
            if owned.master is not None:
                owned.master.mul_(1.5)
        seen = bool(run.wrong())
        run.optimizer.refresh()
        return seen, run.wrong()


def plain_only() -> tuple[int, bool]:
    """A model without quantized weights is Apex's as ever."""
    with host_on_cpu():
        torch.manual_seed(0)
        one = nn.Linear(8, 8, device=device())
        before, optimizer = one.weight.detach().clone(), build(one)
        one(torch.ones(2, 8, device=device())).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return len(optimizer.master_views()[0].masters), torch.equal(before, one.weight)


def cannot_cast(run: Run) -> None:
    """No memory is left where weights go back into their buckets before a cast."""
    run.optimizer._driver.gather.prepare = mock.Mock(side_effect=torch.OutOfMemoryError("injected"))


def cannot_step(run: Run) -> None:
    """Apex reads them just before its kernel."""
    for group in run.optimizer.param_groups:
        group["betas"] = None


def partial(run: Run) -> None:
    run.optimizer._plan.validity.broke_off("an optimizer step")


ONE_RANK: dict[str, tuple[Callable[[Run], None], Callable[[Run], object]]] = {
    "cast in a step": (cannot_cast, lambda run: run.step(1)),
    "cast": (cannot_cast, lambda run: run.optimizer.refresh()),
    "step": (cannot_step, lambda run: run.step(1)),
    "refresh": (partial, lambda run: run.optimizer.refresh()),
    "save": (partial, lambda run: run.optimizer.state_dict()),
    "verify": (partial, lambda run: zerocast.verify(run.optimizer)),
}


def one_rank(name: str, on_gpu: bool) -> tuple[str, float, list[str]]:
    """The error of a call for which rank 1 is not ready, the seconds it took, and what is wrong after a load."""
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
        limit_collectives(30)
        vars(run.optimizer._driver.gather).pop("prepare", None)
        run.optimizer.load_state_dict(state)
        return said, seconds, run.wrong()


PACKAGE = "zerocast.integrations.apex"
OPTIONS = {
    "overlap_param_sync": "before the masters of the others have stepped",
    "capturable": "a CUDA graph would replay the kernels",
    "contiguous_param_buffer": "one buffer a bucket already",
    "store_param_remainders": "masters would be in bf16 parameters",
    "with_scaled_states": "a cast needs them in FP32",
    "store_params": "FP32 masters: dtype=torch.float32 and store_params=True, got torch.float32 and False",
    "dtype": "store_params=True, got torch.bfloat16 and True",
}


@needs_apex
@pytest.mark.parametrize("name", OPTIONS)
def test_options(host_ranks: Ranks, name: str) -> None:
    (said,) = host_ranks(1)(with_option, name)
    assert said.startswith("ValueError") and OPTIONS[name] in said


@needs_apex
def test_a_weight_has_one_owner(host_ranks: Ranks) -> None:
    ((again, after_zero),) = host_ranks(1)(twice)
    assert again.startswith("RuntimeError: weight belongs to a DistributedFusedAdam already")
    assert after_zero.startswith("RuntimeError: weight belongs to a ZeroAdamW already")


@needs_apex
@pytest.mark.parametrize("world", [2])
def test_what_is_wrong_on_one_rank_raises_on_all(host_ranks: Ranks, world: int) -> None:
    for said in host_ranks(world)(foreign, 1):
        assert said.startswith("TypeError: rank 1: bias is a Foreign, which zerocast does not know")
    for said in host_ranks(world)(other_weights):
        assert "weight: fp8_block (32, 64) torch.bfloat16 on rank 0 and weight: nvfp4" in said


@needs_apex
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_is_trained_is_listed_once(host_ranks: Ranks) -> None:
    ((frozen, again),) = host_ranks(1)(not_to_be_trained)
    assert frozen.startswith("ValueError: weight needs no gradient, but weight decay would change it")
    assert again.startswith("ValueError: again is listed twice: a parameter has one master")


@needs_apex
def test_no_more_parameters(host_ranks: Ranks) -> None:
    assert host_ranks(1)(more_parameters)[0].startswith("RuntimeError: parameters cannot be added to this optimizer")


@needs_apex
def test_the_first_state_dict_format(host_ranks: Ranks) -> None:
    for said in host_ranks(1)(first_format)[0]:
        assert said.startswith("ValueError: state dicts of format 2 hold quantized weights' masters, got format 1")


@needs_apex
def test_an_apex_of_another_shape(host_ranks: Ranks) -> None:
    (said,) = host_ranks(1)(without, "default_shard_size")
    assert said.startswith("RuntimeError: DistributedFusedAdam has no default_shard_size: this Apex has an API that")
    assert "this Apex has a layout that" in host_ranks(1)(of_another_layout)[0]


@needs_apex
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(host_ranks: Ranks, name: str, on_gpu: bool) -> None:
    """All raise, and none waits for its timeout; with the reports of ranks as on a GPU, too."""
    for said, seconds, wrong in host_ranks(2)(one_rank, name, on_gpu):
        assert said and seconds < 7 and wrong == [], (said, seconds, wrong)


@needs_apex
@pytest.mark.parametrize("world", [2])
def test_states_that_do_not_fit(host_ranks: Ranks, world: int) -> None:
    """On one rank: all of them refuse, and nothing is changed on any."""
    for said, changed in host_ranks(world)(other_states, 1):
        assert changed == []
        lacks = "ValueError: rank 1: the state does not fit this optimizer: it lacks "
        assert [text.startswith(lacks) for text in said] == [True, True, True, False, False], said
        assert "'param_groups'" in said[0] and str(len(MIXED) - 1) in said[1] and "'exp_avg'" in said[2]
        assert (
            "'param': (3,), 'exp_avg': (3,), 'exp_avg_sq': (3,)} in the state and (50, 24) in this optimizer" in said[3]
        )
        first, second = (sum(spec.group == group for spec in MIXED) for group in (0, 1))
        groups = f"the state has groups of [{first - 1}, {second}] parameters, this optimizer of [{first}, {second}]"
        assert groups in said[4]


@needs_apex
@pytest.mark.parametrize("world", [2])
def test_weights_and_masters_changed_by_hand(host_ranks: Ranks, world: int) -> None:
    assert host_ranks(world)(moved) == [[]] * world
    assert host_ranks(world)(masters_by_hand) == [(True, [])] * world


@needs_apex
def test_without_quantized_weights(host_ranks: Ranks) -> None:
    assert host_ranks(1)(plain_only) == [(0, False)]


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing of either package had been imported, afterwards too."""
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
    "no class": ({**INIT, OPTIMIZER: ""}, RuntimeError, "has no DistributedFusedAdam"),
    "no method": (
        {**INIT, OPTIMIZER: "class DistributedFusedAdam:\n    def param_sync(self): ..."},
        RuntimeError,
        "has no _broadcast_params, _check_params_shard_dtypes, _init_param_state",
    ),
}


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
