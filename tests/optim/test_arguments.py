"""Parameters, groups and hyperparameters: what is taken, and what is refused, on every rank if on any."""

import copy
import inspect
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import zerocast
from tests import casts
from tests.observed import Dispatched, logged
from tests.optim.probe import FEW, Probe
from tests.optim.runs import KINDS, Run, Trainer, build, refused, weight_bytes
from tests.workers import error_of, on_ranks
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig
from zerocast.cast.adam_update import COLUMNS, Hyperparameters
from zerocast.fsdp2 import FusedAdamW

NAN = float("nan")


def named(**layers: nn.Module) -> Any:
    """Return the parameters of some layers with their names."""
    return nn.ModuleDict(layers).named_parameters()


def linear(rows: int = 32) -> nn.Module:
    """Return a quantized layer with a bias."""
    return zerocast.quantize_(nn.Linear(64, rows), zerocast.Recipe({"weight": "nvfp4"}), dtype=torch.bfloat16)


BUILD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "unnamed": (lambda: ZeroAdamW(linear().parameters()), TypeError, "names"),
    "a tensor": (lambda: ZeroAdamW(torch.zeros(3)), TypeError, "names"),
    "no tensor": (lambda: ZeroAdamW([("w", 3)]), TypeError, "names"),
    "nothing": (lambda: ZeroAdamW([]), ValueError, "empty"),
    "nothing to train": (lambda: ZeroAdamW(linear().requires_grad_(False).named_parameters()), ValueError, "gradient|empty"),
    "no params in a group": (lambda: ZeroAdamW([{"lr": 0.1}]), ValueError, "gradient"),
    "one name twice": (lambda: ZeroAdamW([*linear().named_parameters(), *linear().named_parameters()]), ValueError, "name"),
    "one parameter twice": (lambda: ZeroAdamW(_twice()), ValueError, "twice"),
    "one parameter in two groups": (lambda: ZeroAdamW([{"params": [pair]} for pair in _twice()]), ValueError, "more than one"),
    "not a leaf": (lambda: ZeroAdamW([("w", nn.Parameter(torch.zeros(3)) * 2)]), ValueError, "leaf"),
    "float64": (lambda: ZeroAdamW([("w", nn.Parameter(torch.zeros(3, dtype=torch.float64)))]), TypeError, "float64"),
    "negative lr": (lambda: ZeroAdamW(linear().named_parameters(), lr=-1e-3), ValueError, "lr"),
    "infinite lr": (lambda: ZeroAdamW(linear().named_parameters(), lr=float("inf")), ValueError, "lr"),
    "lr of two elements": (lambda: ZeroAdamW(linear().named_parameters(), lr=torch.ones(2)), RuntimeError, "one"),
    "text": (lambda: ZeroAdamW(linear().named_parameters(), lr="1e-3"), TypeError, "lr is a number, got"),
    "beta of 1": (lambda: ZeroAdamW(linear().named_parameters(), betas=(0.9, 1.0)), ValueError, "betas"),
    "one beta": (lambda: ZeroAdamW(linear().named_parameters(), betas=(0.9,)), ValueError, "betas"),
    "negative eps": (lambda: ZeroAdamW(linear().named_parameters(), eps=-1.0), ValueError, "eps"),
    "stage": (lambda: ZeroAdamW(linear().named_parameters(), stage=3), ValueError, "stage"),
    "backend": (lambda: ZeroAdamW(linear().named_parameters(), config=ZeroConfig(backend="x")), ValueError, "backend"),
}  # fmt: skip


def _twice() -> Any:
    weight = nn.Parameter(torch.zeros(3))
    return [("a", weight), ("b", weight)]


DIFFERENT: dict[str, Callable[[], object]] = {
    "shape": lambda: ZeroAdamW(linear(48).named_parameters()),
    "format": lambda: ZeroAdamW(nn.Linear(64, 32).bfloat16().named_parameters()),
    "name": lambda: ZeroAdamW(named(other=linear())),
    "order": lambda: ZeroAdamW(reversed(list(linear().named_parameters()))),
    "fewer": lambda: ZeroAdamW(list(linear().named_parameters())[:1]),
    "more": lambda: ZeroAdamW([*linear().named_parameters(), ("z", nn.Parameter(torch.zeros(1)))]),
    "groups": lambda: ZeroAdamW([{"params": [pair]} for pair in linear().named_parameters()]),
    "lr": lambda: ZeroAdamW(linear().named_parameters(), lr=0.5),
    "betas": lambda: ZeroAdamW(linear().named_parameters(), betas=(0.5, 0.5)),
    "wire": lambda: ZeroAdamW(linear().named_parameters(), config=ZeroConfig(grad_wire="fp8_1x128")),
    "8-bit moments": lambda: ZeroAdamW(linear().named_parameters(), config=ZeroConfig(moment_dtype="8bit")),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@on_ranks(2)
def test_refused_on_every_rank_if_on_one():
    """A wrong argument on rank 1 alone, or one that differs from the others', is refused on every rank."""
    calls = {what: build for what, (build, *_) in BUILD.items()} | DIFFERENT
    for what, call in calls.items():
        message = error_of(call if dist.get_rank() == 1 else lambda: ZeroAdamW(linear().named_parameters()))
        kind = BUILD[what][1] if what in BUILD else ValueError
        assert message.startswith(f"{kind.__name__}: "), what
        assert "rank 1" in message and re.search(BUILD[what][2] if what in BUILD else "", message), what
        assert what in BUILD or "rank 0" in message, what


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_size": 0},
        {"bucket_size": -1},
        {"grad_dtype": torch.float16},
        {"grad_wire": "fp8"},
        {"grad_wire": ""},
        {"grad_wire": torch.float8_e4m3fn},
        {"moment_dtype": torch.float16},
    ],
)
def test_config_is_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ZeroConfig(**options)


@on_ranks(4)
def test_a_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="one dimension"):
        ZeroAdamW(linear().named_parameters(), group=mesh)
    with pytest.raises(TypeError, match="group"):
        ZeroAdamW(linear().named_parameters(), group="world")  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda groups: groups[0]["params"].append(nn.Parameter(torch.zeros(1))),
    "take out": lambda groups: groups[0]["params"].pop(),
    "move": lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
    "split": lambda groups: groups.append({**groups[0], "params": [groups[0]["params"].pop()]}),
    "merge": lambda groups: groups[0]["params"].extend(groups.pop()["params"]),
    # Between groups whose lengths stay as they were.
    "exchange": lambda groups: [
        group["params"].append(p) for group, p in zip(groups, firsts(groups)[::-1], strict=True)
    ],
    "reorder": lambda groups: groups[0]["params"].reverse(),
}


def firsts(groups: Any) -> list[nn.Parameter]:
    return [group["params"].pop(0) for group in groups]


@pytest.mark.notices(
    "parameters are added to param_groups, taken out or moved after the optimizer was built",
    where=("ZeroAdamW", "Apex"),
    answer="the next step raises, nothing changed",
)
@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_change(change):
    trainer = Trainer(Run())
    trainer.step(0)
    before = weight_bytes(trainer.probe), trainer.optimizer._masters.master.clone()
    CHANGES[change](trainer.optimizer.param_groups)
    assert "build another optimizer and load the state of this one" in error_of(lambda: trainer.step(1))
    assert torch.equal(trainer.optimizer._masters.master, before[1])
    for name, found in weight_bytes(trainer.probe).items():
        casts.assert_same_bytes(found, before[0][name], name)


OUT_OF_RANGE = [("lr", NAN), ("lr", -1.0), ("lr", torch.tensor(NAN)), ("betas", (1.0, 1.0)), ("betas", (0.9, NAN))]
OUT_OF_RANGE += [("eps", -1e-8), ("weight_decay", float("inf"))]


def stepped_with(kind: str, key: str, value: Any) -> tuple[str, list[bool]]:
    """Return the error of a step whose group has had this value since the first step, and whether parameters
    are unchanged.
    """
    net: Any = nn.Linear(32, 32) if kind == "FusedAdamW" else linear(64)
    optimizer = build(kind, net.named_parameters())
    for _ in range(2):
        net(torch.ones(2, net.in_features, dtype=net.weight.dtype)).float().square().mean().backward()
        before = [values(parameter) for parameter in net.parameters()]
        error = error_of(optimizer.step)
        optimizer.param_groups[0][key] = value
    return error, list(map(torch.equal, before, map(values, net.parameters())))


def values(parameter: Any) -> torch.Tensor:
    return parameter.dequantize() if isinstance(parameter, QuantizedWeight) else parameter.detach().clone()


@pytest.mark.notices(
    "a learning rate, betas, eps or weight decay in param_groups is out of range",
    where=("ZeroAdamW", "FSDP2"),
    answer="the next step of zerocast's optimizers raises, nothing changed; for tensors on a GPU the step after it",
)
@pytest.mark.parametrize(("key", "value"), OUT_OF_RANGE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_went_out_of_range(kind: str, key: str, value: Any) -> None:
    error, same = stepped_with(kind, key, value)
    assert error.startswith(f"ValueError: {key} is out of range: ")
    assert all(same)


@pytest.mark.parametrize("kind", ["ZeroAdamW", "ZeroMuon"])
@pytest.mark.parametrize("bad_ranks", [[0, 1], [1]])
@on_ranks(2)
def test_values_out_of_range_are_told_to_all_ranks(kind: str, bad_ranks: list[int]) -> None:
    """All ranks raise even if only one rank has the values; under Muon that rank still sends its
    gradients to the owners.
    """
    net = linear()
    optimizer = build(kind, net.named_parameters(), config=ZeroConfig(bucket_size=1))
    net(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
    before = net.bias.detach().clone()
    if dist.get_rank() in bad_ranks:
        optimizer.param_groups[0]["lr"] = NAN
    error = error_of(optimizer.step)
    assert optimizer.skipped_steps == 0
    if bad_ranks == [0, 1]:
        assert error == "ValueError: lr is out of range: nan"
        assert torch.equal(net.bias, before)
    else:
        assert error.startswith("RuntimeError: ranks make different calls")
        assert "lr is out of range: nan" in error


def test_a_number_after_a_tensor_on_the_device() -> None:
    """A number is written again after a tensor, even the number that was there before the tensor."""
    table, tensor = Hyperparameters(1, torch.device("meta")), torch.zeros((), device="meta")
    group = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8}
    written = []
    for lr in (0.5, 0.5, tensor, tensor, 0.5, 0.5):
        with Dispatched() as operators:
            table.refresh([{**group, "lr": lr}])
        written.append((operators.counts["aten::fill_"], operators.counts["aten::copy_"]))
    assert written == [(4, 0), (0, 0), (0, 1), (0, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=list(COLUMNS))
def test_numbers_that_the_host_reads_late(column: int) -> None:
    """Hyperparameters on a GPU reach the host one step late, and are refused then."""
    table = Hyperparameters(1, torch.device("cpu"))
    group = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8}
    table.refresh([group])
    for value in (-1.0, NAN, float("inf"), 1.0):
        before = table._values[0, column].clone()
        table._values[0, column] = value
        table._late.send()
        table._values[0, column] = before
        name, end = list(COLUMNS.items())[column]
        if value < 0 or not value < end:
            with pytest.raises(ValueError, match=f"{name} of parameter group 0, a tensor on a GPU, was out of range"):
                table.refresh([group])
        table.refresh([group])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_learning_rate_on_a_gpu_that_is_out_of_range() -> None:
    net = linear().cuda()
    optimizer = ZeroAdamW(net.named_parameters(), lr=torch.tensor(1e-3, device="cuda"))
    said = []
    for lr in (1e-3, -1.0, 1e-3, 1e-3):
        optimizer.param_groups[0]["lr"].fill_(lr)
        net(torch.ones(2, 64, dtype=torch.bfloat16, device="cuda")).float().square().mean().backward()
        said.append(error_of(optimizer.step))
        optimizer.zero_grad()
    assert [bool(error) for error in said] == [False, False, True, False]
    assert said[2].startswith(
        "ValueError: lr of parameter group 0, a tensor on a GPU, was out of range in the last step: -1.0"
    )


EMPTY: dict[str, Any] = {"state": {}, "param_groups": []}
TORCHS_CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "get_optimizer_state_dict": get_optimizer_state_dict,
    "get_state_dict": get_state_dict,
    "set_optimizer_state_dict": lambda net, optimizer: set_optimizer_state_dict(net, optimizer, EMPTY),
    "set_state_dict": lambda net, optimizer: set_state_dict(
        net, optimizer, model_state_dict=Probe(FEW).state_dict(), optim_state_dict=EMPTY
    ),
}


@pytest.mark.parametrize("call", TORCHS_CALLS)
def test_torchs_calls_for_states(call: str) -> None:
    """Torch's calls for states are refused with nothing changed."""
    trainer = Trainer(Run())
    trainer.step(0)
    said = refused(trainer, lambda: TORCHS_CALLS[call](trainer.probe, trainer.optimizer))
    assert "keeps no state by parameter" in said


@pytest.mark.parametrize("copies", [copy.deepcopy, copy.copy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())])
@pytest.mark.parametrize("kind", ["ZeroAdamW", "ZeroMuon"])
def test_optimizers_are_not_copied(kind: str, copies: Any) -> None:
    with pytest.raises(TypeError, match=f"a {kind} cannot be copied or pickled: build another one and load the state"):
        copies(build(kind, linear().named_parameters()))


@pytest.mark.parametrize("kind", ["ZeroAdamW", "ZeroMuon"])
def test_defaults_are_complete(kind: str) -> None:
    """The defaults have all hyperparameters of the constructor, and so has each group."""
    zero = build(kind, linear().named_parameters())
    options = inspect.signature(type(zero)).parameters
    hyperparameters = options.keys() - {"params", "group", "stage", "config"}
    assert zero.defaults.keys() == hyperparameters
    for name in hyperparameters:
        assert zero.defaults[name] == options[name].default
        assert zero.param_groups[0][name] == options[name].default


OPTIONS = [{"amsgrad": True}, {"maximize": True}, {"decoupled_weight_decay": False}]


@pytest.mark.parametrize("kind", [ZeroAdamW, FusedAdamW])
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_options_that_have_no_effect(kind, option):
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="has no effect in this optimizer"):
        kind([{"params": [("w", parameter)], **option}])
    optimizer = kind([("w", parameter)])
    optimizer.param_groups[0].update({name: not value for name, value in option.items()})  # as torch has them
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = parameter.clone()
    optimizer.param_groups[0].update(option)
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match="has no effect in this optimizer"):
        optimizer.step()
    assert torch.equal(parameter, before)


@pytest.mark.notices("frozen parameters differ between ranks", where="ZeroAdamW", answer="warns once, when it is built")
@pytest.mark.parametrize("alike", [True, False])
@on_ranks(2)
def test_frozen_parameters_that_differ(alike):
    """A warning names frozen parameters that differ between ranks, quantized ones included."""
    torch.manual_seed(0 if alike else dist.get_rank())
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32, bias=False) for name in "abc"}).bfloat16()
    zerocast.quantize_(model, zerocast.Recipe({"b.weight": "nvfp4"}, default="identity"))
    for name in "ab":
        model[name].requires_grad_(False)
    with logged("zerocast.optim.untrained_checks") as said:
        ZeroAdamW({"params": group} for group in [model.named_parameters()])
    assert len(said) == (0 if alike or dist.get_rank() else 1)
    for line in said:
        assert line.startswith("2 parameters and buffers that this optimizer does not train have different values")
        assert "among them a.weight, b.weight:" in line


@pytest.mark.notices(
    "buffers, or parameters that the optimizer does not train, differ between ranks",
    where="ZeroAdamW",
    answer="warns once, at the second or 101st step (models of `quantize_`)",
)
@pytest.mark.parametrize(
    ("differ", "names"),
    [("nothing", None), ("a buffer", "table"), ("biases that another optimizer steps", "0.bias, 1.bias")],
)
@on_ranks(2)
def test_what_is_left_out_differs(differ, names):
    """An optimizer of the quantized weights alone warns once if other parameters or buffers differ between ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
    model.register_buffer("table", torch.full((4,), float(rank if differ == "a buffer" else 0)))
    zerocast.quantize_(model, {"*.weight": "nvfp4"})
    optimizer = ZeroAdamW([(name, p) for name, p in model.named_parameters() if name.endswith("weight")])
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    rest = torch.optim.SGD(biases, lr=0.1)
    said = []
    for step in range(4):
        # the same inputs on all ranks give the same gradients of biases
        seed = step + (rank if differ == "biases that another optimizer steps" else 0)
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(inputs).float().square().mean().backward()
        with logged("zerocast.optim.untrained_checks") as lines:
            optimizer.step()
        rest.step()
        rest.zero_grad()
        optimizer.zero_grad()
        said.append(lines)
    assert [len(texts) for texts in said] == [0, int(names is not None and rank == 0), 0, 0]
    assert not said[1] or f"among them {names}:" in said[1][0]
