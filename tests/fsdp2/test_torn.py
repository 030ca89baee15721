"""What raises while FusedAdamW or a load writes: it can be done again, or every later call says what to do; never wrong bits."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.fsdp2.test_fused_adamw import digests, put_gradients
from tests.optim.faults import OutOfMemory
from tests.workers import Ranks
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.optim import Checkpoints

FORMATS = ("nvfp4", "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3")  # each cast has another scale
SAID = "raised half-way: masters, moments and weights may be of different steps; load a checkpoint"
Snapshot = tuple[dict[str, str], dict[str, casts.Bytes]]


class Trained:
    """A model under FusedAdamW, or torch's AdamW, with a checkpoint of its second step and the third as it should be."""

    def __init__(self, folder: str, fused: bool = True) -> None:
        self.model = models.sharded(Net(FORMATS, 64, 96))
        make: Any = FusedAdamW if fused else torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.state, self.checkpoints = TrainingState(self.model, self.optimizer), Checkpoints(folder, keep=None)
        for step in range(2):
            self.step(step)
        self.checkpoints.save(self.state, 2)
        self.step(2)
        self.third = self.snapshot()

    def step(self, step: int, memory: Any = None) -> None:
        """By gradients that are the same in every run; a forward pass casts."""
        put_gradients(self.model, step)
        with memory or contextlib.nullcontext():
            self.optimizer.step()
        self.forward()

    def forward(self) -> None:
        """Gathers."""
        with torch.no_grad():
            self.model(models.batch(0, 64))

    def load(self) -> None:
        """Back to the end of the second step."""
        self.checkpoints.load(self.state)

    def snapshot(self) -> Snapshot:
        """Masters, moments, delayed scaling, and gathered bytes."""
        return digests(self.state.state_dict()), {name: models.bytes_of(w) for name, w in models.unsharded(self.model)}

    def complaints(self, found: Snapshot, what: str) -> list[str]:
        """What differs from the third step."""
        (state, weights), (expected, bytes_) = found, self.third
        wrong = [f"{what}: {key}" for key in expected if state[key] != expected[key]]
        for name, held in weights.items():
            try:
                casts.assert_same_bytes(held, bytes_[name], f"{what}, {name}")
            except BaseException as error:  # pytest's failure is none of Exception
                wrong.append(str(error))
        return wrong

    def allowed(self) -> list[str]:
        """Of everything that would go on from, save or read what is torn, what does not say so."""
        calls: dict[str, Callable[[], object]] = {
            "step": self.optimizer.step,
            "state_dict of the optimizer": self.optimizer.state_dict,
            "state_dict of the model": self.model.state_dict,
            "state_dict": self.state.state_dict,
            "save": lambda: self.checkpoints.save(self.state, 9),
            "forward": self.forward,
            "refresh": lambda: zerocast.fsdp2.refresh(self.model),
            "delayed scaling": lambda: zerocast.fsdp2.state_dict(self.model),
            "verify": lambda: zerocast.verify(self.model),
            "step, again": self.optimizer.step,
        }
        if not isinstance(self.optimizer, FusedAdamW):
            del calls["state_dict of the optimizer"]  # torch's own
        found = []
        for name, call in calls.items():
            try:
                call()
                found.append(f"{name} said nothing")
            except RuntimeError as error:
                if SAID not in str(error):
                    found.append(f"{name} said: {error}")
        return found if self.checkpoints.steps() == [2] else [*found, "saved"]

    def is_torn(self) -> bool:
        """Whether anything here is."""
        return any(guard.is_partial for guard in self.state._guards())


def stepping(trained: Trained, memory: OutOfMemory) -> tuple[str, list[str]]:
    """The third step, in which memory runs out; then whatever must be. What had to be done, and complaints."""
    trained.load()
    found: list[str] = []
    try:
        trained.step(2, memory)
        outcome = "nothing"
    except torch.OutOfMemoryError:
        outcome = "load" if trained.is_torn() else "again"
        if outcome == "load":
            found += trained.allowed()
            trained.load()
            if any(p.grad is not None for p in trained.model.parameters()):
                found.append("gradients of the torn step are there")
        trained.step(2)
    return outcome, found


def loading(trained: Trained, memory: OutOfMemory) -> tuple[str, list[str]]:
    """A load after the third step, in which memory runs out; then whatever must be, and the third step."""
    trained.load()
    trained.step(2)
    saved = _copied(trained.state.state_dict())
    trained.load()
    found: list[str] = []
    outcome = "nothing"
    try:
        with memory:
            trained.state.load_state_dict(saved)
    except RuntimeError as error:  # what torch makes of it
        found += [] if "injected" in str(error) else [str(error)]
        outcome = "load" if trained.is_torn() else "again"
        if outcome == "load":
            found += trained.allowed()
        trained.state.load_state_dict(saved)
    return outcome, found


def reading(trained: Trained, memory: OutOfMemory) -> tuple[str, list[str]]:
    """As `loading`, by a reader that fills masters in place."""
    found: list[str] = []
    outcome = "nothing"
    try:
        with memory:
            trained.load()
    except RuntimeError as error:  # what the reader makes of it
        found += [] if "injected" in str(error) else [str(error)]
        outcome = "load" if trained.is_torn() else "again"
        if outcome == "load":
            found += trained.allowed()
        trained.load()
    trained.step(2)
    return outcome, found


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found[key] = _copied(value)
        elif isinstance(value, DTensor):
            local = value.to_local()
            plain = getattr(local, "plain", local).clone()
            found[key] = DTensor.from_local(plain, value.device_mesh, value.placements)
        else:
            found[key] = value.clone()
    return found


WHERE: dict[str, Callable[[Trained, OutOfMemory], tuple[str, list[str]]]] = {
    "step": stepping,
    "load": loading,
    "read": reading,
}


def at_operators(folder: str, where: str, every: int, fused: bool) -> tuple[Counter[str], list[str]]:
    """Memory runs out at every so manieth operator, before it and after it; how often what was to be done, and complaints."""
    trained, outcomes = Trained(folder, fused), Counter[str]()
    found: list[str] = []
    for afterwards in (False, True):
        at = every // 2 * afterwards
        while True:
            memory = OutOfMemory(at, afterwards)
            outcome, complaints = WHERE[where](trained, memory)
            outcomes[outcome] += 1
            what = f"{outcome} after operator {at} of {where}, {afterwards}"
            found += [f"{what}: {complaint}" for complaint in complaints]
            found += trained.complaints(trained.snapshot(), what)
            if memory.count <= at or len(found) > 20:
                break
            at += every
    return outcomes, found


FEW = [("step", True, 61), ("load", True, 131), ("read", True, 301), ("load", False, 131)]
ALL = [
    models.slow("step", True, 1),
    models.slow("load", True, 1),
    models.slow("read", True, 7),
    models.slow("load", False, 1),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("where", "fused", "every"), [*FEW, *ALL])
def test_operators(ranks: Ranks, tmp_path: Any, where: str, fused: bool, every: int) -> None:
    """On one rank: what was not torn is as it was before."""
    ((outcomes, found),) = ranks(1)(at_operators, str(tmp_path), where, every, fused, timeout=1100.0)
    assert found == []
    assert outcomes["load"], outcomes
    assert outcomes["nothing"] == 2, "once with enough memory, before and after"


class FirstPass(TorchDispatchMode):
    """Memory runs out when the first masters of a step are written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write, and run out."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.zerocast.adam_amax.default:
            raise torch.OutOfMemoryError("injected")
        return result


def torn_on_one(folder: str, rank: int) -> tuple[list[str], list[str]]:
    """Three passes after a step that raised on one rank say, and complaints after all have loaded."""
    trained = Trained(folder)
    trained.load()
    put_gradients(trained.model, 2)
    with contextlib.suppress(torch.OutOfMemoryError), FirstPass() if dist.get_rank() == rank else OutOfMemory(-1):
        trained.optimizer.step()
    said = []
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            trained.forward()
        said.append(str(caught.value))
    trained.load()
    trained.step(2)
    return said, trained.complaints(trained.snapshot(), "after a load")


def test_a_rank_that_is_torn_raises_on_all(ranks: Ranks, tmp_path: Any) -> None:
    """At the next gather, and none waits for another."""
    for rank, (said, found) in enumerate(ranks(3)(torn_on_one, str(tmp_path), 1)):
        words = (
            SAID
            if rank == 1
            else "raised half-way on ranks [1] of its shard group, which have masters of different steps"
        )
        assert len(said) == 3 and all(words in text for text in said), said
        assert found == []
