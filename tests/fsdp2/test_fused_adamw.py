"""FusedAdamW: the step of ZeroAdamW over FSDP2's shards, with the amaxes of the next cast in the same pass."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import EACH, Net, digests
from tests.observed import Dispatched
from tests.optim.runs import ADAM
from tests.workers import Ranks, error_of, on_ranks
from zerocast.checkpoint import checkpoint
from zerocast.fsdp2 import FusedAdamW, TrainingState

WIDTH, HIDDEN = 64, 96
STEPS, SAVED = 4, 2


def gradient(name: str, shape: Any, step: int) -> Tensor:
    """Return a reduced gradient that is the same in every run, and exact in bf16."""
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def put_gradients(model: nn.Module, step: int) -> None:
    """Give each parameter this rank's rows of its gradient."""
    for name, p in model.named_parameters():
        whole = gradient(name, p.shape, step).to(p.device)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def by_zero(path: str, moment_dtype: Any) -> tuple[dict[str, str], dict[str, casts.Bytes]]:
    """Train a ZeroAdamW on one process and save it before its last two steps. Return its last state and bytes."""
    model = Net(EACH, WIDTH, HIDDEN)
    zerocast.quantize_(model, zerocast.Recipe(model.recipe), dtype=torch.bfloat16)
    config = zerocast.ZeroConfig(moment_dtype=moment_dtype)
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), **ADAM, config=config)
    for step in range(STEPS):
        if step == SAVED:
            zerocast.optim.save(optimizer, path)
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, parameter.shape, step).to(parameter.dtype)
        optimizer.step()
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, zerocast.QuantizedWeight)}
    return digests(optimizer.state_dict()), {name: models.bytes_of(weight) for name, weight in weights.items()}


def by_fsdp2(path: str, moment_dtype: Any, shape: tuple[int, ...]) -> tuple[dict[str, str], dict[str, casts.Bytes]]:
    """Take the last steps under FSDP2 on a mesh of this shape, from the same checkpoint, without running code from it."""
    mesh = models.mesh(shape, ("replicate", "shard")[-len(shape) :])
    model = models.sharded(Net(EACH, WIDTH, HIDDEN), mesh=mesh)
    optimizer = FusedAdamW(model.named_parameters(), lr=1.0, moment_dtype=moment_dtype)
    state = TrainingState(model, optimizer)
    checkpoint.load(state, path)
    for step in range(SAVED, STEPS):
        fused_step(model, optimizer, step)
        gathered = {name: models.bytes_of(weight) for name, weight in models.unsharded(model)}
    return digests(state.state_dict()), gathered


@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
@pytest.mark.parametrize("shape", [models.slow((1,)), (3,), models.slow((2, 2))], ids=str)
def test_steps_from_one_checkpoint(ranks: Ranks, tmp_path: Any, shape: tuple[int, ...], moment_dtype: Any) -> None:
    """ZeroAdamW and FSDP2 have equal masters, moments, delayed state, hyperparameters and bytes after the same
    gradients.
    """
    ((state, weights),) = ranks(1)(by_zero, str(tmp_path / "it"), moment_dtype)
    for found, gathered in ranks(math.prod(shape))(by_fsdp2, str(tmp_path / "it"), moment_dtype, shape):
        assert found == state
        for name, held in gathered.items():
            casts.assert_same_bytes(held, {key: weights[name][key] for key in held}, name)


def fused_step(model: Any, optimizer: Any, step: int) -> None:
    put_gradients(model, step)
    optimizer.step()


def average(model: Any, optimizer: Any, step: int) -> None:
    """Take a step, then write to some masters."""
    fused_step(model, optimizer, step)
    with torch.no_grad():
        torch._foreach_mul_([p for name, (p, _) in models.masters(model).items() if "blocks.0" in name], 3.0)


def step_twice(model: Any, optimizer: Any, step: int) -> None:
    """Take two steps without a cast in between. The second makes the weights smaller."""
    fused_step(model, optimizer, step)
    for group in optimizer.param_groups:
        group["weight_decay"] = 50.0
    fused_step(model, optimizer, step)


def two_optimizers(model: Any, optimizer: Any, step: int) -> None:
    """Step another optimizer between two steps of ours."""
    put_gradients(model, step)
    plain = torch.optim.SGD([p for name, (p, _) in models.masters(model).items() if "blocks.1" in name], lr=1.0)
    optimizer.step()
    plain.step()
    optimizer.step()


class Kernel(torch.optim.Optimizer):
    """An optimizer that writes like a custom kernel, past torch's dispatcher."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter._local_tensor.plain.mul_(3.0)


def unseen_optimizer(model: Any, optimizer: Any, step: int) -> None:
    """Step an optimizer whose writes are not seen after ours."""
    fused_step(model, optimizer, step)
    Kernel([p for name, (p, _) in models.masters(model).items() if "blocks.1" in name], {}).step()


def some_frozen(model: Any, optimizer: Any, step: int) -> None:
    """Step two optimizers of ours beside weights that do not learn."""
    put_gradients(model, step)
    held = models.masters(model)
    for name, (parameter, _) in held.items():
        parameter.grad = None if "blocks.0" in name else parameter.grad
    FusedAdamW([p for name, (p, _) in held.items() if "blocks.1" in name], lr=0.1).step()
    FusedAdamW([p for name, (p, _) in held.items() if "blocks.1" not in name], lr=0.1).step()


# and whether the pass has measured all there is
CASES: dict[str, tuple[Callable[[Any, Any, int], None], bool]] = {
    "step": (fused_step, True),
    "write after a step": (average, False),
    "two steps": (step_twice, True),
    "two optimizers": (two_optimizers, True),
    "unseen optimizer": (unseen_optimizer, False),
    "frozen": (some_frozen, False),
}


def stepped(keep_codes: bool) -> None:
    """Check the bytes after each case. A step measures amaxes and, where they are kept, writes codes of whole
    block rows; all are made again where something else has written since.
    """
    formats = models.DELAYED, "nvfp4", "fp8_current", "fp8_block", "mxfp8:block=32x32"
    model = models.sharded(Net(formats, WIDTH, HIDDEN), keep_codes=keep_codes)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    models.check(model, "at the start")
    for step, (name, (case, measured)) in enumerate(CASES.items()):
        before = {key: p.full_tensor() for key, (p, _) in models.masters(model).items()}
        case(model, optimizer, step)
        with Dispatched() as operators:
            models.check(model, name)
        assert (operators.stages.count("partial_amax") == 0) == measured, name
        assert any(not torch.equal(p.full_tensor(), before[key]) for key, (p, _) in models.masters(model).items())


@pytest.mark.parametrize("keep_codes", [False, True])
@on_ranks(2)
def test_amaxes_come_from_the_step(keep_codes: bool) -> None:
    stepped(keep_codes)


@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
@on_ranks(2)
def test_a_parameter_moves_to_another_group(moment_dtype: Any) -> None:
    """A parameter that moves to another group has that group's learning rate from the next step on."""
    model = models.sharded(Net(("nvfp4",), WIDTH, HIDDEN))
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, moment_dtype=moment_dtype)
    first, second = optimizer.param_groups[0], {**optimizer.param_groups[0], "params": [], "param_names": [], "lr": 0.0}
    optimizer.param_groups.append(second)
    fused_step(model, optimizer, 0)
    for key in ("params", "param_names"):
        second[key].append(first[key].pop())
    (moved,) = second["params"]
    before = moved.full_tensor()
    fused_step(model, optimizer, 1)
    assert torch.equal(moved.full_tensor(), before)


@on_ranks(2)
def test_a_step_count_is_written() -> None:
    """A step reads a count that was reset for one of several parameters, in place or by another tensor."""
    masters = []
    for in_place in (True, False):
        model = models.sharded(Net(("nvfp4",), WIDTH, HIDDEN))
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        fused_step(model, optimizer, 0)
        moments = optimizer.state[optimizer.param_groups[0]["params"][2]]
        if in_place:
            moments["step"].zero_()
        else:
            moments["step"] = torch.zeros(())
        fused_step(model, optimizer, 1)
        masters.append([parameter.full_tensor() for parameter in models.held(model)])
    assert all(map(torch.equal, *masters))


RESETS: dict[str, Callable[[FusedAdamW], object]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "pop": lambda optimizer: [optimizer.state.pop(parameter) for parameter in list(optimizer.state)],
    "empty entries": lambda optimizer: optimizer.state.update({parameter: {} for parameter in optimizer.state}),
    "another dict": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("then", ["step", "save"])
@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
@on_ranks(2)
def test_moments_are_reset(moment_dtype: Any, then: str) -> None:
    """Moments begin again at zero after a caller has removed their entries, as in torch.optim."""
    model = models.sharded(Net(("nvfp4",), WIDTH, HIDDEN))
    for how, reset in RESETS.items():
        results = []
        for resets in (False, True):
            with torch.no_grad():
                for parameter in models.held(model):
                    parameter.fill_(0.5)
            optimizer = FusedAdamW(model.named_parameters(), lr=1e-2, moment_dtype=moment_dtype)
            if resets:
                fused_step(model, optimizer, 0)
                with torch.no_grad():
                    for parameter in models.held(model):
                        parameter.fill_(0.5)
                reset(optimizer)
            if then == "step":
                fused_step(model, optimizer, 1)
            results.append(digests({"masters": model.state_dict(), "moments": optimizer.state_dict()["state"]}))
        assert results[0] == results[1], how


def test_a_state_that_was_kept_during_steps() -> None:
    """A state of FP32 moments has the tensors in use and copies of the step counts, so it restores nothing."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer = FusedAdamW([parameter], lr=1e-2)
    parameter.grad = torch.ones(8)
    optimizer.step()
    kept = optimizer.state_dict()
    optimizer.load_state_dict(kept)
    optimizer.step()
    with pytest.raises(ValueError, match="the state is that of step 1, but its tensors are views"):
        optimizer.load_state_dict(kept)
    kept["state"][0]["step"].fill_(7.0)
    optimizer.load_state_dict(kept)
    assert optimizer.state[parameter]["step"] == 7


def test_a_first_step_in_inference_mode() -> None:
    """Step counts that it makes have version counters, which later steps compare."""
    fused, stock = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer, of_torch = FusedAdamW([fused], lr=1e-2), torch.optim.AdamW([stock], lr=1e-2)
    for is_first in (True, False):
        fused.grad, stock.grad = torch.full((8,), 0.5), torch.full((8,), 0.5)
        with torch.inference_mode(is_first):
            optimizer.step()
        of_torch.step()
    torch.testing.assert_close(fused, stock)


MISFITS = {
    "masters are float32, a parameter is torch.bfloat16": torch.zeros(2, dtype=torch.bfloat16),
    "are on one device": torch.zeros(2, device="meta"),
}


@pytest.mark.parametrize("said", MISFITS)
def test_masters_are_fp32_on_one_device(said: str) -> None:
    """A kernel that is given addresses of the host reads memory that is not there."""
    fit, misfit = nn.Parameter(torch.zeros(2)), nn.Parameter(MISFITS[said])
    optimizer = FusedAdamW([fit])
    assert said in error_of(lambda: FusedAdamW([fit, misfit]))
    assert said in error_of(lambda: optimizer.add_param_group({"params": [misfit]}))
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2


def numbers_read(layers: int) -> int:
    """Return how many scalars the first step after a load reads, when it rebuilds its tables."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = FusedAdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with Dispatched() as operators:
        optimizer.step()
    return operators.counts["aten::_local_scalar_dense"]


def test_step_numbers_are_read_at_once() -> None:
    assert numbers_read(1) == numbers_read(8)


@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"])
def test_hooks_of_states_see_and_change_them_whole(moment_dtype: Any) -> None:
    stepped, unstepped = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = FusedAdamW([("stepped", stepped), ("unstepped", unstepped)], **ADAM, moment_dtype=moment_dtype)
    stepped.grad = torch.ones(4)
    optimizer.step()
    optimizer.state["count"] = 1

    def double(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        assert state["state"][1]["exp_avg"].count_nonzero() == 0
        state["state"][0]["exp_avg"] = 2 * state["state"][0]["exp_avg"]

    def note(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state["loaded"] = optimizer.state[stepped]["step"].clone()

    before = optimizer.moments(stepped)["exp_avg"].clone()
    optimizer.register_state_dict_post_hook(double)
    optimizer.register_load_state_dict_post_hook(note)
    state = optimizer.state_dict()
    assert state["state"]["count"] == 1
    optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.moments(stepped)["exp_avg"], 2 * before, rtol=0.1, atol=0)
    assert optimizer.state["count"] == 1
    assert optimizer.state["loaded"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(optimizer.moments(stepped)["exp_avg"], 4 * before, rtol=0.2, atol=0)


Named = list[tuple[str, Any]]


def eight_bit(params: Any, **options: Any) -> FusedAdamW:
    """Return the optimizer that most ranks build, with moments in 8 bits."""
    return FusedAdamW(params, **{**ADAM, "moment_dtype": "8bit", **options})


def add_group(named: Named, **group: Any) -> None:
    eight_bit(named[:1]).add_param_group({"params": named[1:], **group})


# what most ranks do, what one rank does, and what all are told
DIFFERENT: dict[str, tuple[Callable[[Named], object], Callable[[Named], object], str]] = {
    "FP32 moments": (
        eight_bit,
        lambda named: FusedAdamW([parameter for _, parameter in named], **ADAM),
        "settings differ between ranks: moment_dtype is '8bit' on rank 0 and torch.float32 on rank {}",
    ),
    "bf16 moments": (
        eight_bit,
        lambda named: eight_bit(named, moment_dtype=torch.bfloat16),
        "rank {}: moment_dtype of a FusedAdamW is torch.float32 or '8bit', got torch.bfloat16",
    ),
    "no names": (
        eight_bit,
        lambda named: eight_bit([parameter for _, parameter in named]),
        "rank {}: moments in 8 bits are rounded by random numbers",
    ),
    "other names": (
        eight_bit,
        lambda named: eight_bit([(f"module.{name}", parameter) for name, parameter in named]),
        "weight 0 is blocks.0.0.weight: ",
    ),
    "one twice": (
        lambda named: FusedAdamW(named, **ADAM),
        lambda named: FusedAdamW([named[0], named[0], *named[2:]], **ADAM),
        "rank {}: a parameter is listed twice in a parameter group",
    ),
    "lr out of range": (eight_bit, lambda named: eight_bit(named, lr=-1.0), "rank {}: lr is out of range: -1.0"),
    "lr": (
        eight_bit,
        lambda named: eight_bit(named, lr=0.5),
        "settings differ between ranks: lr is 0.01 on rank 0 and 0.5 on rank {}",
    ),
    "an added group": (
        add_group,
        lambda named: add_group(named, eps=0.5),
        "settings differ between ranks: eps of group 1 is 1e-08 on rank 0 and 0.5 on rank {}",
    ),
    "a group that cannot be added": (
        add_group,
        lambda named: add_group(named, maximize=True),
        "rank {}: maximize=True in a parameter group has no effect in this optimizer",
    ),
}


@pytest.mark.notices(
    "ranks build a `FusedAdamW` with other parameters, hyperparameters or `moment_dtype`",
    where="FSDP2",
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize(("shape", "world"), [((2,), 2), ((2, 2), 4)], ids=str)
@on_ranks()
def test_ranks_that_differ(shape: tuple[int, ...], world: int) -> None:
    """The last rank differs from the others, also over a mesh of replicas, most of whose groups see no difference."""
    model = models.sharded(
        Net(models.FEW, WIDTH, HIDDEN), mesh=models.mesh(shape, ("replicate", "shard")[-len(shape) :])
    )
    named = list(model.named_parameters())
    for ours, theirs, expected in DIFFERENT.values():
        call = theirs if dist.get_rank() == world - 1 else ours
        told = error_of(lambda call=call: call(named))
        assert told.startswith(f"ValueError: {expected.format(world - 1)}")
    fused_step(model, eight_bit(named), 0)
    models.check(model, "after all")


@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
@pytest.mark.parametrize("divisor", [0, 2])
@on_ranks(2)
def test_memory_that_was_taken_away(divisor: int, moment_dtype: Any) -> None:
    model = models.sharded(Net(("fp8_block",), 64, 96))
    optimizer, found = FusedAdamW(model.named_parameters(), lr=1e-3, moment_dtype=moment_dtype), {}
    models.train(model, optimizer, range(1), 64)

    def forward() -> torch.Tensor:
        return model(models.batch(1, 64))

    for name in ("blocks.0.1.bias", "blocks.0.1.weight"):
        parameter = dict(model.named_parameters())[name]
        held = {**{key: optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}, "master": parameter}
        for key, tensor in held.items():
            for use in (optimizer.step, forward) if key == "master" and "weight" in name else (optimizer.step,):
                put_gradients(model, 0)
                if use is forward:
                    optimizer.step()
                local = tensor._local_tensor
                storage = getattr(local, "plain", local).untyped_storage()
                kept = storage.clone()
                storage.resize_(storage.nbytes() // divisor if divisor else 0)
                # A forward pass that raises leaves FSDP2 as it is then.
                found[f"{name} {key} {use.__name__}"] = error_of(use)
                storage.resize_(kept.nbytes())
                storage.copy_(kept)
    assert len(found) == 7
    assert all("was freed or made smaller" in text for text in found.values()), found


@on_ranks(2)
def test_sums_that_are_not_reduced_are_refused() -> None:
    """Partial gradients are refused. Tensor parallelism without data parallelism leaves them on replicated parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer = FusedAdamW([parameter])
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    assert "with placements (Replicate(),) has placements (Partial(sum),)" in error_of(optimizer.step)
    assert torch.equal(parameter.to_local(), torch.ones(4))
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    optimizer.step()
