"""Captured steps: the bits of ordinary ones, and what is refused. On the CPU a function that runs again plays the graph."""

import dataclasses
import warnings
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import casts
from tests.distributed.test_same_call import copied
from tests.observed import HostTraffic
from tests.optim.probe import BF16
from tests.optim.runs import DETERMINISTIC, CapturedCase, Repeated, Trainee, compare_with_captured
from tests.selection import worlds
from tests.workers import error_of, on_ranks
from zerocast import QuantizedWeight, ZeroConfig, backends, set_debug
from zerocast.cast import captured_step
from zerocast.optim.bucket_bytes import BucketBytes

KEPT = dataclasses.replace(DETERMINISTIC, keep_columnwise=True)
CASES = {
    "clipped": CapturedCase(),
    "not clipped": CapturedCase(max_norm=None),
    "overlap": CapturedCase(config=dataclasses.replace(DETERMINISTIC, overlap_all_gather=True)),
    "library order": CapturedCase(config=ZeroConfig(bucket_size=4096)),
    "fp8 wire": CapturedCase(config=ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128")),
    "stage 1": CapturedCase(stage=1),
    "kept columnwise copies": CapturedCase(config=KEPT),
    "bf16 moments": CapturedCase(config=dataclasses.replace(DETERMINISTIC, moment_dtype=BF16)),
    "8-bit moments": CapturedCase(config=dataclasses.replace(DETERMINISTIC, moment_dtype="8bit")),
    "learning rates in tensors": CapturedCase(tensor_lr=True),
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        _need_kernels()
    return str(request.param)


def _need_kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if backends.choose(torch.device("cuda")) == "reference":
        pytest.skip("no kernels for this CUDA device, only the reference backend")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replaying_equals_stepping(device, case):
    assert compare_with_captured(dataclasses.replace(case, device=device)) == 1


@pytest.mark.parametrize("world", worlds(2, slow=[3]))
@pytest.mark.parametrize(
    "name", ["overlap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clipped", "bf16 moments"))]
)
def test_on_several_ranks(ranks, world, name):
    assert ranks(world)(compare_with_captured, CASES[name]) == [1] * world


def before_a_step(case: CapturedCase) -> Trainee:
    """Return a trainee with all gradients, after steps that have made tables and columnwise copies."""
    trainee = Trainee(case)
    for number in range(2):
        trainee.backward(number)
        trainee.ordinary_step()
    trainee.backward(2)
    trainee.change_rates(1)
    trainee.optimizer._reducer.finish()
    return trainee


@pytest.mark.parametrize("name", ["clipped", "overlap", "library order", "bf16 moments"])
@on_ranks(1, 2)
def test_no_step_waits_for_the_device(name):
    """No wait occurs from reduced gradients to gathered bytes, with learning rates that have just changed."""
    trainee = before_a_step(CASES[name])
    with HostTraffic() as traffic:
        trainee.ordinary_step()
    assert traffic.found == []


@pytest.mark.gpu
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_torch_sees_no_wait_on_a_gpu(tensor_lr):
    _need_kernels()
    trainee = before_a_step(CapturedCase(device="cuda", tensor_lr=tensor_lr))
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainee.ordinary_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_traffic_is_seen():
    mask, values, places = torch.tensor([True, False]), torch.ones(2), torch.tensor([1, 0])
    with HostTraffic() as traffic:
        for read in (values.sum().item, lambda: values[mask], lambda: torch.where(mask, 1.0, values)):
            read()
        torch.tensor([1.0])
        torch.where(mask, values, values)
        values[places] = values.clone()
    assert len(traffic.found) == 4


class Idle(Repeated):
    """A captured step whose graph does nothing."""

    @staticmethod
    def _record(work: captured_step.Work) -> captured_step.Work:
        return lambda: None


def test_the_host_keeps_the_books():
    """With a graph that does nothing, the host still counts casts, assigns copies to the last cast and uses
    gradients up.
    """
    trainee = Trainee(CapturedCase())
    step = trainee.capture(Idle)
    plan, before = trainee.optimizer._weights.driver.plan, trainee.held()
    casts_before = plan.validity.casts
    for number in range(2):
        trainee.backward(number)
        step()
        assert plan.validity.casts == casts_before + number + 1
        casts.assert_same_bytes(trainee.held(), before)
    for parameter in trainee.probe.parameters():
        parameter.grad = None
    assert trainee.optimizer.clip_grad_norm_(1.0) == 0


def test_only_on_a_cuda_device():
    with pytest.raises(RuntimeError, match="parameters are on cpu"):
        Trainee(CapturedCase()).optimizer.capture()


def test_not_with_the_reference_backend():
    """The reference backend cannot be captured, since each of its stages reads from the device."""
    with pytest.raises(RuntimeError, match="reference backend"):
        captured_step.check_capturable(torch.device("cuda"), "reference")


def graphs_after_a_move(device: str, culprit: int) -> list[bool]:
    """Return whether there is a graph after each step. A scale of the culprit moves before the second one."""
    trainee, other = Trainee(CapturedCase(device=device)), Trainee(CapturedCase(device=device))
    step, found = trainee.capture(), []
    for number in range(4):
        if number == 1 and trainee.rank == culprit:
            state = trainee.probe.get_parameter("block").state
            state.move_to({"rowwise_scale_inv": state.buffers["rowwise_scale_inv"].clone()})
        for each, take in ((trainee, step), (other, other.ordinary_step)):
            each.backward(number)
            take()
        found.append(step._replay is not None)
        casts.assert_same_bytes(trainee.held(), other.held())
    return found


def test_moved_storage_is_recorded_again(device):
    assert graphs_after_a_move(device, culprit=0) == [True, False, True, True]


def test_storage_that_moves_on_one_rank(ranks):
    """The rank whose storage moves takes one step without a graph, with the collectives of the others' graphs."""
    assert ranks(2)(graphs_after_a_move, "cpu", 1) == [[True] * 4, [True, False, True, True]]


@torch.no_grad()
def write_a_norm(trainee: Trainee) -> None:
    trainee.probe.get_parameter("norm").add_(1)


def take_out(trainee: Trainee) -> None:
    trainee.optimizer.param_groups[0]["params"].pop()


def rate_out_of_range(trainee: Trainee) -> None:
    trainee.optimizer.param_groups[0]["lr"] = float("nan")


def other_bytes(trainee: Trainee) -> None:
    weight = trainee.probe.get_parameter("nv")
    weight.data = weight.data.clone()
    weight.rowwise_data.bitwise_xor_(1)


REFUSALS = {
    write_a_norm: "parameters were written since the last step",
    take_out: "param_groups",
    rate_out_of_range: "lr",
    other_bytes: "different storage and different values",
}


@pytest.mark.notices(
    "one rank cannot take a captured step",
    where="ZeroAdamW",
    answer="raises on all ranks, and a load is needed; nothing changed if no rank can",
)
@pytest.mark.parametrize(
    ("what", "culprits", "name", "at_capture"),
    [
        (write_a_norm, [1], "overlap", False),
        (take_out, [1], "8-bit moments", False),
        (take_out, [0, 1], "8-bit moments", False),
        (rate_out_of_range, [0, 1], "overlap", False),
        (other_bytes, [1], "clipped", False),
        (write_a_norm, [1], "clipped", True),
        (write_a_norm, [0, 1], "clipped", True),
    ],
)
@on_ranks(2)
def test_a_rank_that_cannot_step_takes_part_in_the_graph_of_the_others(what, culprits, name, at_capture):
    """All raise, also when a step is captured. Once a state is loaded the run goes on."""
    case = CASES[name]
    trainee = Trainee(case)
    step = trainee.capture()
    trainee.backward(0)
    step()
    groups = [{**group, "params": [*group["params"]]} for group in trainee.optimizer.param_groups]
    state = copied(trainee.optimizer.state_dict())
    trainee.backward(1)
    if trainee.rank in culprits:
        what(trainee)
    said = error_of(trainee.capture if at_capture else step)
    is_partial = trainee.optimizer._plan.validity.partial is not None
    for group, before in zip(trainee.optimizer.param_groups, groups, strict=True):
        group |= before
    trainee.optimizer.zero_grad()
    trainee.optimizer.load_state_dict(state)
    other = Trainee(case)
    other.backward(0)
    other.ordinary_step()
    for each, take in ((trainee, step), (other, other.ordinary_step)):
        each.backward(1)
        take()
    casts.assert_same_bytes(trainee.held(), other.held())
    assert trainee.optimizer.skipped_steps == 0
    assert REFUSALS[what] in said
    assert is_partial == (len(culprits) == 1)


def test_weights_that_are_moved_back_are_not_moved(device):
    """Bytes that were bound elsewhere come home at every step, and other models' weights are none of ours."""
    trainee, other = Trainee(CapturedCase(device=device)), Trainee(CapturedCase(device=device))
    step = trainee.capture()
    for number in range(2):
        for t in (trainee, other):
            t.backward(number)
        weight = trainee.probe.get_parameter("nv")
        version = weight.state.validity.storage_version
        weight.rebind(torch.empty_like(weight.rowwise_data))
        assert weight.state.validity.storage_version > version
        step()
        other.ordinary_step()
    assert all((value == trainee.held()[name]).all() for name, value in other.held().items())


class Tables(TorchDispatchMode):
    """The int64 tensors that our ops are given."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "zerocast":
            given = [*args, *(kwargs or {}).values()]
            self.found += [arg for arg in given if isinstance(arg, torch.Tensor) and arg.dtype is torch.int64]
        return func(*args, **(kwargs or {}))


def test_what_is_recorded_was_run_before():
    """A backend may look into a table the first time that it sees it, which must not be while a graph records."""
    trainee = Trainee(CapturedCase(config=KEPT))
    for parameter in trainee.probe.parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.state.drop_columnwise()  # capturing makes new storage
    with Tables() as warm:
        step = trainee.capture()
    with Tables() as recorded:
        step._replay()
    seen = {id(table) for table in warm.found}
    assert recorded.found
    assert all(id(table) in seen for table in recorded.found)


class WithoutHost(Repeated):
    """A captured step without the host's part: a replay records nothing of what the optimizer left in its weights."""

    @staticmethod
    def _record(work: captured_step.Work) -> captured_step.Work:
        def replay() -> None:
            with mock.patch.object(BucketBytes, "record"):
                work()

        return replay


def test_debug_copies_follow_replayed_graphs(device):
    """The copies follow replays: otherwise the second step would take the first graph's writes for those of a user."""
    set_debug(True)
    try:
        trainee, eager = Trainee(CapturedCase(device=device)), Trainee(CapturedCase(device=device))
        step = trainee.capture(WithoutHost)
        for number in range(3):
            for each, take in ((trainee, step), (eager, eager.ordinary_step)):
                each.backward(number)
                take()
        casts.assert_same_bytes(trainee.held(), eager.held())
        with torch.no_grad():
            trainee.probe.get_parameter("norm").data.add_(1)
        trainee.backward(3)
        with pytest.raises(RuntimeError, match="parameters were written since the last step, among norm"):
            step()
    finally:
        set_debug(False)


def test_schedulers_see_the_step():
    trainee = Trainee(CapturedCase())
    scheduler = torch.optim.lr_scheduler.StepLR(trainee.optimizer, 1)
    step = trainee.capture()
    trainee.backward(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        scheduler.step()
    assert trainee.optimizer.param_groups[0]["lr"] < 1e-2
