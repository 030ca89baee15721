"""Every class of torch.optim in every mode: what runs under plain FSDP2 runs on prepared
masters, to the bit, and is cast.
"""

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_inductor_cache
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net, digests
from tests.workers import on_ranks
from zerocast.fsdp2 import TrainingState
from zerocast.optim import load, save

CLASSES: dict[str, Any] = {
    name: found
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
} | {"FusedAdamW": zerocast.fsdp2.FusedAdamW}
# what DTensor, or a dense gradient, does not let run (torch 2.13)
NEVER = ("Adafactor", "Rprop", "SparseAdam")
IMPLEMENTATIONS = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},  # on GPUs alone
    "capturable foreach": {"capturable": True, "foreach": True},
    "differentiable": {"differentiable": True},
}
FLAGS: dict[str, dict[str, Any]] = {
    "": {},
    "tensor lr": {"lr": torch.tensor},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "centered": {"centered": True},
    "weight decay": {"weight_decay": 0.1},
    "decoupled weight decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "accumulator": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
}


def modes(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the implementations and flags that the class takes, as (name, options)."""
    takes = inspect.signature(CLASSES[name]).parameters
    for how, flag in itertools.product(IMPLEMENTATIONS, FLAGS):
        options = IMPLEMENTATIONS[how] | FLAGS[flag]
        if set(options) <= set(takes) and (flag != "tensor lr" or "Tensor" in str(takes["lr"].annotation)):
            yield f"{how} {flag}".strip(), options


def stepped(
    name: str, options: dict[str, Any], backend: str, *, prepare: bool
) -> tuple[dict[str, Tensor], str, list[str]]:
    """Return the parameters after three steps on given gradients, the error and the complaints.

    The second half of them learns at another rate, all at half of theirs in the last step; some
    have no gradient in the second one. Steps are compiled where a `backend` for that is named.
    """
    torch._dynamo.reset()
    model = models.sharded(Net(("nvfp4",), 64, 96), prepare=prepare)
    parameters = {key: p for key, p in model.named_parameters() if p.dim() == 2 or name != "Muon"}
    rate = options["lr"](0.01, device=models.place()) if "lr" in options else 0.01
    found, half, order = [], len(parameters) // 2, list(parameters.values())
    groups: list[Any] = [{"params": order[:half]}, {"params": order[half:], "lr": 3 * rate}]
    as_one = name == "LBFGS"  # takes all parameters as one vector
    try:
        optimizer = CLASSES[name](order if as_one else groups, **{**options, "lr": rate})
        scheduler = LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.5)
        take = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for index, parameter in enumerate(order):
                whole = torch.randn(parameter.shape, generator=generator).to(models.place())
                grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.grad = None if step == 1 and index % 3 == 0 and not as_one else grad
            take(lambda: torch.ones(())) if as_one else take()
            scheduler.step()
            found += models.complaints(model, f"step {step}") if prepare and step != 1 else []
    except Exception as error:  # whatever plain FSDP2 raises
        return {}, f"{type(error).__name__}: {error}", found
    return {key: p.detach().full_tensor() for key, p in parameters.items()}, "", found


def compare(name: str, wanted: tuple[str, ...] = (), backend: str = "") -> None:
    """Check that nothing differs from plain FSDP2 in these modes, or in all, and that the class ran in some."""
    ran, found = 0, []
    for mode, options in modes(name):
        if wanted and mode not in wanted:
            continue
        (plain, refused, _), (ours, said, complaints) = (
            stepped(name, options, backend, prepare=how) for how in (False, True)
        )
        found += [f"{name} {mode}: {text}" for text in complaints]
        if said.partition(":")[0] != refused.partition(":")[0]:
            found.append(f"{name} {mode}: prepared {said or 'runs'}, plain {refused or 'runs'}")
        found += [f"{name} {mode}: {key}" for key, value in plain.items() if not torch.equal(value, ours[key])]
        ran += not refused
    assert not found, found
    assert ran or name in NEVER


def compare_all(*wanted: str) -> None:
    for name in CLASSES:
        compare(name, wanted)


@on_ranks(2)
def test_every_class() -> None:
    compare_all("default", "fused")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@on_ranks(2, timeout=120.0)
def test_every_mode(name: str) -> None:
    compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("LBFGS", "SparseAdam")])
@on_ranks(2, timeout=400.0)
def test_every_class_compiled(name: str) -> None:
    compare(name, ("default", "capturable tensor lr"), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "Muon", "SGD"])
@on_ranks(1, timeout=300.0)
def test_inductor(name: str) -> None:
    """Plain steps are compiled first: torch keeps what inductor made of them, and must not take
    it for prepared masters.
    """
    with fresh_inductor_cache():
        compare(name, ("default",), "inductor")


@pytest.mark.skipif(
    not hasattr(DTensor, "_stable_hash_for_caching"),
    reason="this torch has no key of its own for a DTensor in its cache of compiled graphs",
)
@on_ranks(1)
def test_the_key_of_a_compiled_graph() -> None:
    """The key of a graph tells prepared parameters from plain ones, and weights of two formats apart.
    `test_inductor` shows this end to end, but takes long.
    """
    made = [models.sharded(Net(("nvfp4", "fp8_current"), 64, 96), prepare=how) for how in (False, False, True)]
    parameters = [models.held(model)[2] for model in made]
    weights = [
        DTensor.from_local(weight, models.mesh(), [Shard(0)], run_check=False)
        for _, weight in models.unsharded(made[2])
    ]
    ours = DTensor._stable_hash_for_caching
    plain, again, prepared = map(ours, parameters)
    assert plain == again
    assert plain != prepared
    assert ours(weights[0]) != ours(weights[2])
    torchs_plain, _, torchs_prepared = map(ours.__wrapped__, parameters)
    assert torchs_plain == torchs_prepared, "torch tells them apart now: key_graphs_by_local_tensors can go"


# -- checkpoints of torch.optim.Muon go to ZeroMuon and back


RECIPE = zerocast.Recipe({"*": "fp8_block"})


def net() -> nn.Sequential:
    """Return a model of two matrices, whose rows 2 ranks cut evenly and not, with biases for AdamW."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 71))


def split(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return (what Muon updates, what AdamW does) by name."""
    named = list(model.named_parameters())
    return [(n, p) for n, p in named if p.dim() == 2], [(n, p) for n, p in named if p.dim() != 2]


def under_fsdp2() -> tuple[Any, list[torch.optim.Optimizer]]:
    """Return the sharded model with torch's two optimizers."""
    model = zerocast.fsdp2.prepare(net(), RECIPE)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    hidden, rest = ([p for _, p in part] for part in split(model))
    return model, [torch.optim.Muon(hidden, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


@on_ranks(2)
def test_checkpoints_go_to_zero_muon_and_back(tmp_path: Path) -> None:
    model, optimizers = under_fsdp2()
    for step in range(2):
        model(models.batch(step, 64)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    optimizers[0].param_groups[0]["momentum"] = 0.9
    state = TrainingState(model, optimizers)
    save(state, tmp_path / "fsdp2")
    hidden, rest = split(zerocast.quantize_(net(), RECIPE))
    groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False, "weight_decay": 0.01}]
    whole = zerocast.ZeroMuon(groups, lr=1e-2)
    load(whole, tmp_path / "fsdp2")
    assert whole.param_groups[0]["momentum"] == 0.9
    zerocast.verify(whole).raise_for_differences()
    save(whole, tmp_path / "zero")
    other = TrainingState(*under_fsdp2())
    load(other, tmp_path / "zero")
    held = {"model": state.state_dict()["model"], "optim": state.state_dict()["optim"]}
    assert digests(held).items() <= digests(other.state_dict()).items()
