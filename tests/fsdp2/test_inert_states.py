"""A run that resumes from a checkpoint of any moment equals the run that was never saved. A state that does
not fit changes nothing.
"""

import copy
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import digests
from tests.workers import error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.optim import Checkpoints

WIDTH = 32
RECIPE = {"0.weight": "nvfp4", "2.weight": "fp8_delayed:amax_history_len=4"}


class Training:
    """A tiny model and its optimizer, with one way to save and load whatever optimizer it is."""

    def __init__(self, kind: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.kind = kind
        if kind == "ZeroAdamW":
            zerocast.quantize_(self.net.bfloat16(), RECIPE)
            self.optimizer: Any = zerocast.ZeroAdamW(self.net.named_parameters(), lr=1e-2)
            self.state: Any = self.optimizer
            return
        zerocast.fsdp2.prepare(self.net, zerocast.Recipe(RECIPE))
        fully_shard(self.net, mesh=models.mesh(), mp_policy=models.BF16)
        parameters = self.net.parameters()
        makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "FusedAdamW": lambda: FusedAdamW(parameters, lr=1e-2),
            "8-bit moments": lambda: models.with_8bit_moments(self.net, lr=1e-2),
            "AdamW": lambda: torch.optim.AdamW(parameters, lr=1e-2),
        }
        self.optimizer = makers[kind]()
        self.state = TrainingState(self.net, self.optimizer)

    def backward(self, step: int) -> None:
        """Run a backward pass with the inputs of a step."""
        rank = dist.get_rank()
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
        self.net(inputs).float().square().mean().backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def contents(self) -> dict[str, str]:
        """Return digests of masters, moments, hyperparameters, delayed scaling and an output."""
        inputs = torch.ones(4, WIDTH).bfloat16()
        with torch.no_grad():
            output = {"output": casts.sha(self.net(inputs).float())}
        return digests(self.state.state_dict()) | output


def broadcast(text: str) -> str:
    texts = [text]
    dist.broadcast_object_list(texts)
    return texts[0]


@on_ranks(1)
def test_never_stepped_between_optimizers() -> None:
    """A state of FSDP2 that was never stepped loads into a ZeroAdamW, whose moments it clears, and the other way about."""
    for first, second in (("FusedAdamW", "ZeroAdamW"), ("ZeroAdamW", "FusedAdamW"), ("ZeroAdamW", "AdamW")):
        folder = tempfile.mkdtemp()
        saved, loaded = Training(first), Training(second)
        for number in range(2):
            loaded.step(number)
        Checkpoints(folder).save(saved.state, 0)
        Checkpoints(folder).load(loaded.state)
        for name, moments in loaded.state.state_dict()["optim"]["state"].items():
            whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in moments.values()]
            assert not any(one.any() for one in whole if one.dtype != torch.bool), (first, second, name)


Change = Callable[[Any], object]
NAN = float("nan")


def moments_of(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = state["optim"]["state"]
    return found


def every_group(state: Any, key: str, value: float) -> None:
    for numbers in state["optim"]["param_groups"].values():
        numbers[key] = torch.tensor(value)


def changed(name: str, key: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change that puts another tensor in the place of a moment."""
    return lambda state: moments_of(state)[name].update({key: change(moments_of(state)[name][key])})


BREAK: dict[str, Change] = {
    "no model": lambda state: state.pop("model"),
    "no optimizer": lambda state: state.pop("optim"),
    "a master less": lambda state: state["model"].pop("1.weight"),
    "a master more": lambda state: state["model"].update(other=torch.zeros(3)),
    "a master of integers": lambda state: state["model"].update({"1.bias": torch.zeros(WIDTH, dtype=torch.int64)}),
    "a master of another shape": lambda state: state["model"].update({"1.bias": torch.zeros(3)}),
    "no moments": lambda state: moments_of(state).clear(),
    "no moments of one": lambda state: moments_of(state).pop("1.bias"),
    "empty moments of one": lambda state: moments_of(state).update({"1.bias": {}}),
    "moments of a stranger": lambda state: moments_of(state).update(other={"step": torch.tensor(1.0)}),
    "a mark beside moments": lambda state: moments_of(state)["1.bias"].update(never_stepped=torch.tensor(True)),
    "a moment less": lambda state: moments_of(state)["1.bias"].pop("exp_avg_sq"),
    "a moment more": lambda state: moments_of(state)["1.bias"].update(exp_avg_cubed=torch.zeros(WIDTH)),
    "another shape": changed("1.bias", "exp_avg", lambda one: torch.zeros(3)),
    "integers": changed("1.bias", "exp_avg_sq", lambda one: torch.zeros(WIDTH, dtype=torch.int64)),
    "negative": changed("1.bias", "exp_avg_sq", lambda one: one - 1),
    "NaN": changed("1.bias", "exp_avg", lambda one: one * NAN),
    "step -5": changed("1.bias", "step", lambda one: torch.tensor(-5.0)),
    "step NaN": changed("1.bias", "step", lambda one: torch.tensor(NAN)),
    "step 1.5": changed("1.bias", "step", lambda one: torch.tensor(1.5)),
    "no step": lambda state: moments_of(state)["1.bias"].pop("step"),
    "lr NaN": lambda state: every_group(state, "lr", NAN),
    "lr -1": lambda state: every_group(state, "lr", -1.0),
    "beta of 1": lambda state: every_group(state, "beta2", 1.0),
    "negative eps": lambda state: every_group(state, "eps", -1.0),
    "infinite decay": lambda state: every_group(state, "weight_decay", float("inf")),
    "lr of one alone": lambda state: state["optim"]["param_groups"]["1.bias"].update(lr=torch.tensor(0.5)),
    "no beta": lambda state: state["optim"]["param_groups"]["1.bias"].pop("beta1"),
}
BREAK_ZERO: dict[str, Change] = {  # which FSDP2's optimizers take
    "step of one alone": lambda state: moments_of(state)["1.bias"].update(step=torch.tensor(7.0)),
    "hyperparameters of a stranger": lambda state: state["optim"]["param_groups"].update(x={"lr": torch.tensor(1.0)}),
}


@pytest.mark.notices(
    "a state lacks moments, or has impossible values (step -5, lr NaN, negative second moments)",
    where=("ZeroAdamW", "FSDP2"),
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize(
    ("kind", "world"),
    [("ZeroAdamW", 1), ("ZeroAdamW", 2), ("FusedAdamW", 1), ("8-bit moments", 1), ("AdamW", 1), ("AdamW", 2)],
)
@on_ranks()
def test_states_that_do_not_fit(kind: str, world: int) -> None:
    """States that do not fit are refused on all ranks, and none of them has changed anything."""
    culprit, training = world - 1, Training(kind)
    training.step(0)
    before = training.contents()
    for name, change in (BREAK | BREAK_ZERO if kind == "ZeroAdamW" else BREAK).items():
        if kind == "ZeroAdamW" and world > 1 and name in ("negative", "NaN"):
            continue  # shards have no arithmetic
        state = training.state.state_dict()
        state["model"] = dict(state["model"])
        if dist.get_rank() == culprit:
            change(state)
        error = error_of(lambda state=state: training.state.load_state_dict(state))
        assert error.startswith("ValueError: "), name
        assert world == 1 or f"rank {culprit}" in error, name
        assert name not in ("lr NaN", "lr -1") or "lr is out of range" in error, name
    assert training.contents() == before
    training.step(1)


FILES = (
    *("step -5", "step 1.5", "lr NaN", "beta of 1", "integers", "no moments of one", "a moment more"),
    *("negative", "NaN"),
)


@pytest.mark.parametrize("kind", ["ZeroAdamW", "FusedAdamW", models.slow("8-bit moments"), "AdamW"])
@on_ranks(1)
def test_files_that_do_not_fit(kind: str) -> None:
    """Files that do not fit are refused with nothing changed."""
    saved, training = Training(kind), Training(kind)
    saved.step(0)
    for step, name in enumerate(FILES):
        state, folder = saved.state.state_dict(), tempfile.mkdtemp()
        BREAK[name](state)
        dcp.save(state, checkpoint_id=folder)
        training.step(step)
        before = training.contents()
        error = error_of(lambda folder=folder, training=training: zerocast.optim.load(training.state, folder))
        assert error.startswith("ValueError: "), name
        assert training.contents() == before, name
    training.step(len(FILES))


def given(state: Any, target: Training) -> Any:
    """Return a state that an optimizer may keep: torch's AdamW does not copy the moments that it is given."""
    return copy.deepcopy(state) if target.kind == "AdamW" else state


def by_state(source: Training, target: Training) -> None:
    target.optimizer.load_state_dict(given(source.optimizer.state_dict(), target))


def by_torchs_getter(source: Training, target: Training) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(source.net, source.optimizer, options=options)
    set_optimizer_state_dict(target.net, target.optimizer, given(state, target), options=options)


def by_dcp(source: Training, target: Training) -> None:
    folder = broadcast(tempfile.mkdtemp())
    dcp.save({"optim": get_optimizer_state_dict(source.net, source.optimizer)}, checkpoint_id=folder)
    state = {"optim": get_optimizer_state_dict(target.net, target.optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(target.net, target.optimizer, state["optim"])


def by_training_state(source: Training, target: Training) -> None:
    target.state.load_state_dict(source.state.state_dict())


def by_live_names(source: Training, target: Training) -> None:
    """Load like torchtitan 0.3: create the live state if it is empty, then take only the moments that it has."""
    _init_optim_state(target.optimizer)
    saved, live = source.optimizer.state_dict(), target.optimizer.state
    parameters = [parameter for group in target.optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: saved["state"][index][name] for name in live[parameter]}
        for index, parameter in enumerate(parameters)
        if parameter in live
    }
    target.optimizer.load_state_dict(given({**saved, "state": state}, target))


ROUTES = (by_state, by_torchs_getter, by_dcp, by_training_state, by_live_names)


def numbers(training: Training) -> dict[str, str]:
    """Return digests of the moments, with step counts as numbers: torch keeps them in float64 under that default dtype."""
    state = training.state.state_dict()["optim"]["state"]
    steps = {name: str(float(moments.pop("step"))) for name, moments in state.items()}
    return digests(state) | steps


def equal_gradients(training: Training) -> None:
    """Take a step with gradients that depend on no weight and on no delayed scale."""
    training.net.reshard()
    for parameter in training.net.parameters():
        parameter.grad = torch.full_like(parameter.detach(), 0.25)
    training.optimizer.step()
    training.optimizer.zero_grad()


def round_trip(first: str, second: str, route: Callable[[Training, Training], None], dtype: torch.dtype) -> None:
    """Load a state of one optimizer into another under a default dtype."""
    source, target = Training(first), Training(second)
    torch.set_default_dtype(dtype)
    try:
        for step in range(3):
            source.step(step)
        target.net.load_state_dict(source.net.state_dict())
        wanted = numbers(source)
        route(source, target)
        assert numbers(target) == wanted
        equal_gradients(target)
        kept = target.optimizer.state.values()
        assert {float(one["step"]) for one in source.optimizer.state.values()} == {3.0}, "both share step counts"
        assert len({one["step"].untyped_storage().data_ptr() for one in kept}) == len(kept), "parameters share them"
        assert {float(one["step"]) for one in kept} == {4.0}
        equal_gradients(source)
        ours, theirs = ([p.full_tensor() for p in models.held(one.net)] for one in (target, source))
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, theirs, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert target.optimizer.param_groups[0]["lr"] == 1e-2
    assert target.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("dtype", "world"),
    [
        *((torch.float32, 1), (torch.float64, 1)),
        *(models.slow(dtype, 1) for dtype in (torch.float16, torch.bfloat16)),
        *(models.slow(torch.float32, world) for world in (2, 3)),
    ],
    ids=str,
)
@on_ranks()
def test_round_trips_with_torchs_adamw(dtype: torch.dtype) -> None:
    """States go by all routes in both directions. A state of torch's shares its step counts with what loads it."""
    kinds = [("FusedAdamW", "FusedAdamW"), ("FusedAdamW", "AdamW"), ("AdamW", "FusedAdamW")]
    # Moments that were FP32 are rounded: tests/fsdp2/test_moments_8bit.py.
    kinds += [("8-bit moments", "8-bit moments"), ("8-bit moments", "AdamW")]
    pairs = [*itertools.product(kinds, ROUTES)]
    # Every other pair is tried in FP32, and the others in FP64.
    for kind, route in pairs[dtype is torch.float64 :: 2]:
        round_trip(*kind, route, dtype)
