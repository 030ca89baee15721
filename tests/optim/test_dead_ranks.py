"""A rank that dies around a collective, or comes too late: the others raise in time, and a resume finds nothing half-written."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from tests.optim.probe import MIXED, Spec
from tests.optim.runs import Run, Trainer
from tests.optim.test_resume import snapshot
from tests.workers import Ranks, RanksFailed
from zerocast import ZeroConfig
from zerocast.distributed.group import Group
from zerocast.optim import Checkpoints

# The last has 4 MB of bytes and 256 KB of amaxes: they take a while, in which a rank can die.
RUN = Run((*MIXED, Spec("large", (1024, 2048), "mxfp8")), config=ZeroConfig(bucket_size=2**16))
COLLECTIVES = {"reduce-scatter": "reduce_scatter_mean", "all-reduce": "all_reduce_max", "all-gather": "all_gather_into"}
TIMEOUT = 1.0  # seconds, of a group whose ranks come too late
NAP = 4.0  # seconds that such a rank sleeps
SAID = "an optimizer step raised half-way: masters, moments and weights may be of different steps"
Collective = Callable[..., Any]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_largest(name: str, place: str) -> Collective:
    """A collective around which this process dies, when it carries the large weight."""
    original = getattr(Group, name)

    def collective(self: Group, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.nbytes < 2**17:
            return original(self, tensor, *args, **kwargs)
        if place == "before":
            _die()
        if place == "during" and name == "all_reduce_max":
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle, async_op=True)
            _die()
        if place == "during":
            original(self, tensor, *args, **{**kwargs, "async_op": True})
            _die()
        work = original(self, tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        return _die()

    return collective


def dies(folder: str, collective: str, place: str) -> None:
    """Rank 1 dies in its third step. Rank 0 raises what it was told, once it has tried everything to go on."""
    trainer, checkpoints = Trainer(RUN), Checkpoints(folder)
    for step in range(2):
        trainer.step(step)
    checkpoints.save(trainer.optimizer, 2)
    dist.barrier()
    if trainer.rank == 1:
        name = COLLECTIVES[collective]
        setattr(Group, name, _at_largest(name, place))
    with pytest.raises(RuntimeError) as caught:
        list(map(trainer.step, range(2, 4)))
    assert "torch" in str(caught.value) or "peer" in str(caught.value), caught.value
    for go_on in (trainer.optimizer.step, lambda: trainer.step(3), lambda: checkpoints.save(trainer.optimizer, 3)):
        with pytest.raises(RuntimeError):
            go_on()
    raise RuntimeError(f"rank 0 was told; torn: {trainer.optimizer._weights.plan.guard.is_partial}")


def finished(folder: str | None, steps: int) -> casts.Bytes:
    """All that a rank holds after so many steps, from a checkpoint or from the beginning."""
    trainer = Trainer(RUN)
    first = Checkpoints(folder).load(trainer.optimizer) if folder else 0
    for step in range(first, steps):
        trainer.step(step)
    return snapshot(trainer)


@pytest.mark.parametrize(
    ("collective", "place"),
    [
        ("all-reduce", "during"),
        *(
            pytest.param(collective, place, marks=pytest.mark.slow)
            for collective in COLLECTIVES
            for place in ("before", "during", "after")
            if (collective, place) != ("all-reduce", "during")
        ),
    ],
)
def test_a_rank_that_dies(ranks: Ranks, tmp_path: Path, collective: str, place: str) -> None:
    folder = str(tmp_path / "checkpoints")
    with pytest.raises(RanksFailed) as caught:
        ranks(2)(dies, folder, collective, place)
    said = str(caught.value)
    assert "--- rank 1 ---\nthe process died" in said
    assert "RuntimeError: rank 0 was told" in said, said
    if collective != "reduce-scatter":
        assert "torn: True" in said
    assert Checkpoints(folder).steps() == [2]
    resumed, whole = ranks(2)(finished, folder, 4), ranks(2)(finished, None, 4)
    for rank in range(2):
        casts.assert_same_bytes(resumed[rank], whole[rank], f"rank {rank}, resumed")


@contextlib.contextmanager
def _late_once(name: str, rank: int) -> Iterator[None]:
    """Rank 1 sleeps before its first collective of a kind."""
    original, naps = getattr(Group, name), [NAP] * rank

    def too_late(self: Group, *args: Any, **kwargs: Any) -> Any:
        if naps:
            time.sleep(naps.pop())
        return original(self, *args, **kwargs)

    with mock.patch.object(Group, name, too_late):
        yield


def _runs_out(name: str, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Rank 1 is out of memory before its first collective of a kind, and never comes to it."""
    return (
        mock.patch.object(Group, name, side_effect=torch.OutOfMemoryError("injected"))
        if rank
        else contextlib.nullcontext()
    )


FAULTS = {"late": _late_once, "out of memory": _runs_out}


def fails_alone(folder: str, collective: str, fault: str) -> tuple[float, str, bool, casts.Bytes]:
    """Rank 1 fails at a collective of its second step: how long and what a rank raised, whether torn; resumed elsewhere."""
    trainer = Trainer(RUN, group=dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    checkpoints = Checkpoints(folder)
    trainer.step(0)
    checkpoints.save(trainer.optimizer, 1)
    start = time.monotonic()
    with FAULTS[fault](COLLECTIVES[collective], trainer.rank), pytest.raises(RuntimeError) as caught:
        trainer.step(1)
    waited, torn = time.monotonic() - start, trainer.optimizer._weights.plan.guard.is_partial
    with pytest.raises(RuntimeError, match=SAID if torn else ""):
        trainer.optimizer.step()
    dist.barrier()
    other = Trainer(RUN, group=dist.new_group(timeout=timedelta(seconds=30)))
    checkpoints.load(other.optimizer)
    other.step(1)
    return waited, str(caught.value), torn, snapshot(other)


SLOW = [pair for pair in itertools.product(COLLECTIVES, FAULTS) if pair != ("all-gather", "late")]


@pytest.mark.parametrize(
    ("collective", "fault"), [("all-gather", "late"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_a_rank_that_fails_alone(ranks: Ranks, tmp_path: Path, collective: str, fault: str) -> None:
    """It comes to a collective too late, or not at all."""
    whole = ranks(2)(finished, None, 2)
    found = ranks(2)(fails_alone, str(tmp_path / "checkpoints"), collective, fault)
    assert TIMEOUT <= found[0][0] < NAP, "rank 0 waits for as long as the group says, not for rank 1"
    for rank, (_, text, torn, resumed) in enumerate(found):
        assert text
        assert torn == (collective != "reduce-scatter")
        casts.assert_same_bytes(resumed, whole[rank], f"rank {rank}, resumed in a new group")
