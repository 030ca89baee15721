"""Who trains a quantized weight: gradients that nobody takes, two owners of one weight, weights without a value."""

import contextlib
import copy
import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.hosts.under_test import ALL_KINDS, find
from tests.observed import logged
from tests.workers import error_of, freeze_modules, on_ranks
from zerocast import CastPlan, QuantizedWeight, Recipe, ZeroAdamW, export, quantize_
from zerocast.distributed.group import ONE_PROCESS
from zerocast.optim import reduction
from zerocast.weight import owners

ORPHANS = "quantized weights got gradients and no optimizer trains them"
ALL = Recipe({"*.weight": "nvfp4"})


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What one test left without an owner is not the next one's. What is left then is in no later collection, of which there are
    many here.
    """
    freeze_modules()
    owners.forget_all()
    yield
    owners.forget_all()


def network(quantized: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
    return quantize_(model, ALL) if quantized else model  # type: ignore[return-value]


def backward(model: Callable[[Tensor], Tensor]) -> None:
    model(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


# A gradient that nobody takes


def quantized_too_late(model: nn.Sequential) -> torch.optim.Optimizer:
    plain = network(quantized=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model[0], model[1] = quantize_(plain, ALL)  # type: ignore[misc]
    return optimizer


def assigned(model: nn.Sequential) -> torch.optim.Optimizer:
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    model.load_state_dict(network().state_dict(), assign=True)
    return optimizer


def assigned_its_own(model: nn.Sequential) -> torch.optim.Optimizer:
    """The new parameters stand for the same bytes."""
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    model.load_state_dict(model.state_dict(), assign=True)
    return optimizer


def over_the_weights(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def of_biases(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([layer.bias for layer in model], lr=1e-3)


def dropped(model: nn.Sequential) -> torch.optim.Optimizer:
    del ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)._config
    gc.collect()
    return of_biases(model)


def partly_taken_over(model: nn.Sequential) -> torch.optim.Optimizer:
    model.first = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    return ZeroAdamW(model[1].named_parameters(), group=ONE_PROCESS)


LEFT_ALONE = [quantized_too_late, assigned, assigned_its_own, over_the_weights, of_biases, dropped, partly_taken_over]


@pytest.mark.notices(
    "an optimizer steps that was built before quantize_, load_state_dict(assign=True) or the replacement of a parameter",
    where="Weights",
    answer="raises",
)
@pytest.mark.parametrize("build", LEFT_ALONE)
def test_a_gradient_that_nobody_takes(build: Callable[[nn.Sequential], torch.optim.Optimizer]) -> None:
    model = network()
    optimizer = build(model)
    backward(model)
    before = [p.detach().clone() for p in model.parameters() if not isinstance(p, QuantizedWeight)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{ORPHANS}|SGD cannot step parameter 0"):
            optimizer.step()
        backward(model)
    assert all(torch.equal(a, b) for a, b in zip(before, (layer.bias for layer in model), strict=True))


def test_a_step_without_torchs_hooks_looks_too() -> None:
    """A captured step is one."""
    model = network()
    optimizer = assigned(model)
    backward(model)
    with pytest.raises(RuntimeError, match=ORPHANS):
        optimizer._prepare()  # type: ignore[attr-defined]


@pytest.mark.parametrize("finders", [(1,), (0, 1)])
@pytest.mark.parametrize("host", ["ZeroAdamW", "CastPlan", "FSDP2"])
@on_ranks(2)
def test_all_ranks_raise_what_some_have_found(host: str, finders: tuple[int, ...], tmp_path: Path) -> None:
    """The others would wait for a rank that raised before a cast: in the step, or under FSDP2 at the next gather."""
    run, judge = find(host)(str(tmp_path / str(dist.get_rank())), ALL_KINDS), network()
    run.step(0)
    run.save(1)
    if dist.get_rank() in finders:
        backward(judge)
    said = error_of(lambda: run.step(1))
    judge.zero_grad()
    run.forget()
    run.load()
    assert ORPHANS in said or "ranks [1] of its shard group could not cast, whose errors say why" in said
    run.step(1)


def a_plan_of_ranks() -> tuple[CastPlan, torch.optim.Optimizer]:
    """Half of a master on each of two ranks, and the optimizer that the plan is attached to."""
    master = nn.Parameter(torch.randn(32 * 32 // 2))
    plan, optimizer = CastPlan([weight()], [master], [dist.get_rank() * master.numel()]), torch.optim.SGD([master])
    plan.attach(optimizer)
    return plan, optimizer


@on_ranks(2)
def test_an_optimizer_over_the_weights_raises_on_all_ranks() -> None:
    plan, model = a_plan_of_ranks()[0], network()
    if dist.get_rank() == 1:
        backward(model)
    told = error_of(over_the_weights(model).step)
    plan.cast()
    assert "SGD cannot step parameter 0" in told


@on_ranks(2)
def test_a_step_without_a_cast_leaves_a_warning() -> None:
    plan, judge = a_plan_of_ranks()[0], network()
    other = of_biases(judge)
    with mock.patch.object(owners.logger, "warning") as warned:
        for _ in range(3):
            backward(judge)
            other.step()
    warned.assert_called_once()
    assert "not yet raised on other ranks by a cast" in warned.call_args.args[0]
    assert ORPHANS in error_of(plan.cast)


def test_a_weight_that_is_frozen_after_the_error_needs_no_owner() -> None:
    model = network()
    optimizer = of_biases(model)
    backward(model)
    with pytest.raises(RuntimeError, match=ORPHANS):
        optimizer.step()
    for layer in model:
        layer.weight.requires_grad_(False)
    optimizer.step()
    steps(model, optimizer)


# What must not trip it: what has an owner trains


def test_two_optimizers_in_turn() -> None:
    """A GAN: the generator's backward pass leaves gradients on what the other optimizer owns."""
    generator, judge = network(), network()
    ours, theirs = (ZeroAdamW(m.named_parameters(), group=ONE_PROCESS) for m in (generator, judge))
    for _ in range(2):
        backward(judge)
        theirs.step()
        theirs.zero_grad()
        backward(lambda x: judge(generator(x)))
        ours.step()
        ours.zero_grad()
        theirs.zero_grad()


def test_a_copy_that_is_averaged() -> None:
    model = network()
    average = copy.deepcopy(model)
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    for _ in range(2):
        with torch.no_grad():
            average(torch.randn(2, 32, dtype=torch.bfloat16))
        average(torch.randn(2, 32, dtype=torch.bfloat16))  # not even under no_grad
        average.load_state_dict(model.state_dict())
        steps(model, optimizer, 1)


@pytest.mark.notices(
    "an optimizer is built again before a step has used the reduced gradients",
    where="ZeroAdamW",
    answer="warns: they are dropped",
)
@pytest.mark.parametrize("used_up", [False, True])
def test_gradients_of_an_optimizer_that_is_replaced(caplog: pytest.LogCaptureFixture, used_up: bool) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    backward(model)
    if used_up:
        optimizer.zero_grad()
    with caplog.at_level(logging.WARNING, "zerocast"):
        ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    assert ("the gradients that no step of it has used are dropped" in caplog.text) != used_up


def test_a_model_that_is_moved() -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    model._apply(lambda t: t.clone())  # as Module.to another device and back
    steps(model, optimizer)


@pytest.mark.notices(
    "a parameter gets no gradient in 100 backward passes (unused, frozen, or replaced in the model)",
    where="ZeroAdamW",
    answer="warns once",
)
def test_parameters_without_gradients_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "PATIENCE", 10)
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    backward(model)
    optimizer.step()
    with logged() as lines:
        for passes in range(20):
            if passes == 5:
                backward(model)  # all of them once more
            backward(model[0])
            optimizer.step()
    (said,) = lines
    assert said.startswith(
        "2 parameters of a ZeroAdamW got no gradient on this rank in 10 backward passes, the first is 1."
    )


@pytest.mark.notices(
    "a parameter is frozen (requires_grad_(False)) in mid-run: moments and weight decay still change it",
    where="ZeroAdamW",
    answer="warns once, after the first backward pass",
)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_that_is_frozen_is_named_once(stage: int) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS, stage=stage)
    with logged() as lines:
        for frozen in (False, True, True):
            model[1].requires_grad_(not frozen)
            backward(model)
            optimizer.step()
    (said,) = lines
    assert said.startswith("1.bias is frozen (requires_grad is False) and one of a ZeroAdamW")


@pytest.mark.notices(
    "no gradient in a step (no backward pass, p.grad = None, zero_grad()): moments and weight decay still change parameters",
    where="ZeroAdamW",
    answer="warns once on each such rank",
)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_without_gradients(stage: int) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS, stage=stage)
    with logged() as lines:
        for _ in range(2):
            with optimizer.no_sync():
                backward(model)
            optimizer.step()
            backward(model)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert not lines
        for _ in range(2):
            optimizer.step()
    (said,) = lines
    assert said.startswith("a ZeroAdamW had no gradient on this rank for a step")


@pytest.mark.notices(
    "no gradient in a step (no backward pass, p.grad = None, zero_grad()): moments and weight decay still change parameters",
    where="ZeroAdamW",
    answer="warns once on each such rank",
)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_is_removed_is_named_once(stage: int) -> None:
    model = network()
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS, stage=stage)
    with logged() as lines:
        for removed in ([], [model[1].bias], [model[1].bias]):
            backward(model)
            for parameter in removed:
                parameter.grad = None
            optimizer.step()
            model.zero_grad()
    (said,) = lines
    assert said.startswith(
        "1 gradients were removed (p.grad = None, model.zero_grad()) between a backward pass and the step"
    )
    assert "the first is that of 1.bias" in said


# A weight without a value

READS: dict[str, Callable[[QuantizedWeight, Path], object]] = {
    "dequantize": lambda w, folder: w.dequantize(),
    "linear": lambda w, folder: nn.functional.linear(torch.randn(2, 32, dtype=w.dtype), w),
    "linear of its transpose": lambda w, folder: torch.randn(2, 32, dtype=w.dtype) @ w.t(),
    "linear of a detached weight": lambda w, folder: nn.functional.linear(
        torch.randn(2, 32, dtype=w.dtype), w.detach()
    ),
    "matmul": lambda w, folder: torch.randn(2, 32, dtype=w.dtype) @ w,
    "a compiled product": lambda w, folder: torch.compile(nn.functional.linear, backend="aot_eager")(
        torch.randn(2, 32, dtype=w.dtype), w
    ),
    "a compiled product that has met others": lambda w, folder: warm(torch.randn(2, 32, dtype=w.dtype), w),
    "direction": lambda w, folder: w.direction(columnwise=False),
    "columnwise": lambda w, folder: w.direction(columnwise=True),
    "a copy of a copy": lambda w, folder: copy.deepcopy(w).dequantize(),
    "a copy that was pickled": lambda w, folder: pickle.loads(pickle.dumps(w)).dequantize(),
    "a clone": lambda w, folder: w.clone().dequantize(),
    "another weight's copy_": lambda w, folder: casts.cast_whole(w.format, torch.randn(32, 32)).copy_(w),
    "rebind": lambda w, folder: (w.rebind(torch.zeros_like(w.rowwise_data)), w.dequantize()),
    "export": lambda w, folder: export.export_safetensors(module_of(w), folder),
    "post_all_gather": lambda w, folder: CastPlan([w], [None], [None], ONE_PROCESS).post_all_gather(),
    "post_all_gather_processing": lambda w, folder: zerocast.post_all_gather_processing([w]),
    "the masters of an optimizer": lambda w, folder: ZeroAdamW([("w", nn.Parameter(w))], group=ONE_PROCESS),
    "a plan that has no master of it": lambda w, folder: (beside(w).cast(), w.dequantize()),
}


def module_of(weight: QuantizedWeight) -> nn.Module:
    module = nn.Linear(32, 32, bias=False)
    module.weight = nn.Parameter(weight)
    return module


def warm(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The graph is there before the weight is."""
    product = torch.compile(nn.functional.linear, backend="aot_eager")
    product(x, casts.cast_whole(weight.format, torch.randn(32, 32)))
    return product(x, weight)


def beside(weight: QuantizedWeight) -> CastPlan:
    other = QuantizedWeight.empty((32, 32), weight.format)
    return CastPlan([other, weight], [torch.randn(32 * 32), None], [0, None], ONE_PROCESS)


@pytest.mark.notices(
    "a weight of QuantizedWeight.empty is read before it has a value", where="Weights", answer="raises"
)
@pytest.mark.parametrize(
    ("read", "fmt"),
    [(read, "nvfp4") for read in READS]
    + [(read, fmt) for read in READS for fmt in ("fp8_delayed", "mxfp8", "identity") if "compiled" not in read],
)
def test_a_weight_without_a_value_is_not_read(read: str, fmt: str, tmp_path: Path) -> None:
    weight = QuantizedWeight.empty((32, 32), fmt)
    with pytest.raises(RuntimeError, match=r"(has|was) never (been )?cast|before the first cast"):
        READS[read](weight, tmp_path)


def test_masters_may_start_from_a_value_that_was_never_cast() -> None:
    w = QuantizedWeight.empty((32, 32), "nvfp4")
    w.high_precision_init_val = torch.randn(32, 32)
    optimizer = ZeroAdamW([("w", nn.Parameter(w))], group=ONE_PROCESS)
    assert optimizer.state_dict()["model"]["w"].abs().sum() > 0


def test_a_torn_weight_is_not_read_by_a_compiled_product_either() -> None:
    weight = casts.cast_whole("nvfp4", torch.randn(32, 32))
    product, x = torch.compile(nn.functional.linear, backend="aot_eager"), torch.randn(2, 32, dtype=weight.dtype)
    product(x, weight)
    with contextlib.suppress(KeyError), weight.state.validity.transaction("a cast"):
        raise KeyError
    with pytest.raises(RuntimeError, match="failed partway"):
        product(x, weight)


# Two owners of one weight


class Plan:
    """A weight, the masters of its two halves in one flat tensor, and a plan over some of it."""

    def __init__(self, weight: QuantizedWeight, first: int = 0, last: int = 32 * 32) -> None:
        self.master = nn.Parameter(torch.randn(last - first))
        self.plan = CastPlan([weight], [self.master], [first], ONE_PROCESS)
        self.optimizer = torch.optim.SGD([self.master], lr=0.1)

    def attach(self) -> Any:
        return self.plan.attach(self.optimizer)


def weight() -> QuantizedWeight:
    return nn.Parameter(casts.cast_whole("nvfp4", torch.randn(32, 32)))  # type: ignore[return-value]


@pytest.mark.notices(
    "two owners write the same elements: attached plans, ZeroAdamWs, `quantize_master_weights`",
    where=("CastPlan", "ZeroAdamW"),
    answer="the second one raises, nothing changed",
)
def test_two_attached_plans() -> None:
    w = weight()
    # They share one element; a plan of other elements may stand beside either.
    first, second = Plan(w, 0, 513), Plan(w, 512)
    handle = first.attach()
    Plan(w, 513).attach().remove()
    with pytest.raises(ValueError, match="a CastPlan that is attached to SGD writes weights of this CastPlan"):
        second.attach()
    assert not second.optimizer._optimizer_step_post_hooks
    handle.remove()
    second.attach()


def test_a_plan_trains_weights_whose_data_was_replaced() -> None:
    """The optimizer's hook asks who trains them before the plan's cast looks where they lie now."""
    w, inputs = weight(), torch.randn(2, 32, dtype=torch.bfloat16)
    plan = Plan(w)
    plan.attach()
    w.data = copy.deepcopy(weight())  # which no plan has cast
    nn.functional.linear(inputs, w).sum().backward()
    plan.master.grad = torch.ones_like(plan.master)
    plan.optimizer.step()
    plan.plan.post_all_gather()
    casts.assert_same_bytes(casts.bytes_of(w), casts.unsharded("nvfp4", plan.master.detach().view(32, 32), w.dtype))


def attached(w: QuantizedWeight) -> Any:
    plan = Plan(w)
    return plan, plan.attach()


LIVING: dict[str, Callable[[QuantizedWeight], Any]] = {
    "a CastPlan that is attached to SGD": attached,
    "a ZeroAdamW": lambda w: ZeroAdamW([("w", w)], group=ONE_PROCESS),
}


@pytest.mark.notices(
    "two owners write the same elements: attached plans, ZeroAdamWs, `quantize_master_weights`",
    where=("CastPlan", "ZeroAdamW"),
    answer="the second one raises, nothing changed",
)
@pytest.mark.parametrize("who", LIVING)
def test_nobody_else_writes_weights_of_an_owner(who: str) -> None:
    """A plan that was built before the owner, or after it, or a ZeroAdamW. It can once the owner is gone."""
    w = weight()
    older = Plan(w)
    older.plan.cast()
    owner = LIVING[who](w)
    is_plan = who != "a ZeroAdamW"
    if is_plan:
        owner[0].plan.cast()
    before, validity = casts.bytes_of(w), w.state.validity
    for write in (
        older.plan.cast,
        older.attach,
        lambda: Plan(w),
        lambda: zerocast.quantize_master_weights([w], [torch.randn(32 * 32)], [0], ONE_PROCESS),
    ):
        with pytest.raises(ValueError, match=f"{who} writes weights of this CastPlan"):
            write()
    if is_plan:
        with pytest.raises(RuntimeError, match=f"{who} writes weights that a ZeroAdamW is built over"):
            ZeroAdamW([("w", w)], group=ONE_PROCESS)
    assert w.state.validity is validity
    casts.assert_same_bytes(casts.bytes_of(w), before)
    del owner
    gc.collect()
    older.plan.cast()
    older.attach()


# The optimizer of an attached plan

ELSEWHERE: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "other parameters": lambda m: torch.optim.SGD([nn.Parameter(torch.randn(4))]),
    "a copy": lambda m: torch.optim.SGD([m.detach().clone()]),
    "the model": lambda m: torch.optim.SGD(network().parameters()),
}


OVER: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "the masters": lambda m: torch.optim.SGD([m]),
    "a view of them": lambda m: torch.optim.SGD([m.detach().view(2, -1)[1]]),
    "masters in its state": lambda m: with_master_in_state(m),
    "tensors without storage": lambda m: torch.optim.SGD([torch.empty(4, device="meta")]),
}


def with_master_in_state(master: Tensor) -> torch.optim.Optimizer:
    rounded = nn.Parameter(master.detach().bfloat16())
    optimizer = torch.optim.SGD([rounded])
    optimizer.state[rounded]["master_param"] = master
    return optimizer


@pytest.mark.parametrize("build", ELSEWHERE)
def test_an_optimizer_of_something_else(build: str) -> None:
    plan = Plan(weight())
    optimizer = ELSEWHERE[build](plan.master)
    with pytest.raises(ValueError, match=r"this CastPlan casts 1 masters and this SGD updates \d+ other storages"):
        plan.plan.attach(optimizer)
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("build", OVER)
def test_an_optimizer_of_the_masters(build: str) -> None:
    plan = Plan(weight())
    plan.plan.attach(OVER[build](plan.master))


def test_a_plan_is_attached_once() -> None:
    plan = Plan(weight())
    handle = plan.attach()
    with pytest.raises(ValueError, match="this CastPlan is attached to this SGD already"):
        plan.attach()
    handle.remove()
    plan.attach()


def two_optimizers() -> tuple[CastPlan, list[torch.optim.Optimizer]]:
    masters = [nn.Parameter(torch.randn(32 * 32)) for _ in range(2)]
    plan = CastPlan([weight(), weight()], masters, [0, 0], ONE_PROCESS)
    return plan, [torch.optim.SGD([master]) for master in masters]


def test_masters_that_no_optimizer_steps_over() -> None:
    plan, optimizers = two_optimizers()
    plan.attach(optimizers[0])
    with logged() as lines:
        optimizers[0].step()
        optimizers[0].step()
    assert lines == ["no attached optimizer updates the masters of weights [1]: they stay as they are"]


@pytest.mark.notices(
    "a parameter of an attached optimizer is replaced, so that it no longer updates the master",
    where="CastPlan",
    answer="logs the weights whose masters no optimizer updates, at its next step",
)
def test_a_master_whose_parameter_is_replaced() -> None:
    plan, (optimizer, other) = two_optimizers()
    optimizer.add_param_group({"params": other.param_groups[0]["params"]})
    plan.attach(optimizer)
    with logged() as lines:
        optimizer.step()
        (master,) = optimizer.param_groups[1]["params"]
        optimizer.param_groups[1]["params"] = [nn.Parameter(master.detach().clone())]
        assert not lines
        for _ in range(2):
            optimizer.step()
    assert lines == ["no attached optimizer updates the masters of weights [1]: they stay as they are"]


@pytest.mark.parametrize("convert", [lambda model: model.to("cpu"), nn.Module.cpu, nn.Module.bfloat16])
def test_a_model_is_converted_to_what_it_is_after_a_read_without_an_owner(convert) -> None:
    """`Module.to` exchanges parameters by swap_tensors, which raises on one that has a weak reference."""
    model = network()
    model(torch.randn(4, 32, dtype=torch.bfloat16))
    convert(model)
    steps(model, ZeroAdamW(model.named_parameters(), group=ONE_PROCESS))


@pytest.mark.notices(
    "`model.load_state_dict` loads weights of a plan, but nothing loads its masters",
    where="CastPlan",
    answer="they are read until the next cast; `zerocast.verify` names them",
)
def test_a_state_dict_is_loaded_into_weights_of_a_plan() -> None:
    model = network()
    weights = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    masters = [weight.dequantize().float().flatten() for weight in weights]
    plan = CastPlan(weights, masters, [0] * len(weights), ONE_PROCESS)
    before = copy.deepcopy(model.state_dict())
    for master in masters:
        master.add_(1.0)
    plan.cast()
    plan.post_all_gather()
    of_masters = weights[0].dequantize()
    model.load_state_dict(before)
    assert not torch.equal(weights[0].dequantize(), of_masters)
    assert {difference.name for difference in zerocast.verify(plan).differences} == {"weight 0", "weight 1"}
    plan.cast()
    assert torch.equal(weights[0].dequantize(), of_masters)


# A ZeroAdamW that was taken over


def test_an_optimizer_that_was_taken_over_can_be_saved_until_the_newer_one_steps() -> None:
    model = network()
    first = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    steps(model, first)
    second = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    second.load_state_dict(first.state_dict())
    steps(model, second)
    with pytest.raises(RuntimeError, match="another optimizer was built over these parameters"):
        first.state_dict()


def planned(model: nn.Module) -> nn.Module:
    """Give the weights to a plan that has cast nothing yet."""
    weights = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    CastPlan(weights, [weight.dequantize().float().flatten() for weight in weights], [0] * len(weights), ONE_PROCESS)
    return model


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    # torch copies tensors to a device that has an index and is the same.
    "moved": lambda model: model.to("cpu:0"),
    "planned": planned,
}


@pytest.mark.notices(
    "an optimizer is built over weights that an earlier optimizer or plan has cast: masters are the values of the codes",
    where="ZeroAdamW",
    answer="warns at its first step, unless it has loaded a state by then",
)
@pytest.mark.parametrize("earlier", ["stepped", "built"])
def test_masters_that_begin_from_codes_are_noticed(earlier: str) -> None:
    model = network()
    first = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    if earlier == "stepped":
        steps(model, first)
    state = copy.deepcopy(first.state_dict())
    with logged() as lines:
        loaded = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
        loaded.load_state_dict(state)
        steps(model, loaded)
        assert not lines
        steps(model, ZeroAdamW(model.named_parameters(), group=ONE_PROCESS))
    (said,) = lines
    assert said.startswith(
        "the masters of 2 quantized weights of a ZeroAdamW, the first is 0.weight, began as the values"
    )


@pytest.mark.parametrize("copied", COPIES)
def test_masters_that_begin_from_the_codes_of_a_copy_are_noticed(copied: str) -> None:
    model = network()
    steps(model, ZeroAdamW(model.named_parameters(), group=ONE_PROCESS))
    model = COPIES[copied](model)
    with logged() as lines:
        steps(model, ZeroAdamW(model.named_parameters(), group=ONE_PROCESS))
    (said,) = lines
    assert said.startswith(
        "the masters of 2 quantized weights of a ZeroAdamW, the first is 0.weight, began as the values"
    )


def test_a_hook_that_returns_a_tensor_is_named() -> None:
    """torch passes what it returns to the hook of the optimizer."""
    model = network()
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    optimizer = ZeroAdamW(model.named_parameters(), group=ONE_PROCESS)
    with pytest.raises(RuntimeError, match="returned a tensor, which the hook of the optimizer got in place"):
        steps(model, optimizer)


def test_a_skipped_cast_leaves_what_weights_were_quantized_from() -> None:
    layer = quantize_(nn.Linear(32, 32, bias=False), {"weight": "nvfp4"})
    initial = layer.weight.high_precision_init_val
    before = layer.weight.dequantize()
    plan = CastPlan([layer.weight], [initial.float().flatten() + 1.0], [0])
    plan.cast(skip=torch.tensor([True]))
    assert layer.weight.high_precision_init_val is initial
    assert torch.equal(layer.weight.dequantize(), before)
    plan.cast(skip=torch.tensor([False]))
    assert layer.weight.high_precision_init_val is None


def test_a_cast_of_weights_on_a_cpu_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may see a GPU whose driver is too old to be asked anything."""

    def too_old() -> bool:
        raise RuntimeError("the driver is insufficient")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", too_old)
    layer = quantize_(nn.Linear(32, 32, bias=False), {"weight": "nvfp4"})
    master = layer.weight.dequantize().float().flatten()
    CastPlan([layer.weight], [master], [0]).cast(skip=torch.tensor([False]))
