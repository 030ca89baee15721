"""Steps that raise, out of memory or for a rank that died or came late: what is said then; a loaded state makes it good."""

import contextlib
import copy
import dataclasses
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.apex import checkpoints
from tests.apex.host_on_cpu import WHY_NOT, host_on_cpu
from tests.apex.training import Case, Run
from tests.optim.faults import OutOfMemory
from tests.optim.probe import FP32, PLAIN, Spec
from zerocast.distributed.group import Group

if not WHY_NOT:
    from tests.apex.host_on_cpu import apex

SPECS = (
    Spec("embedding", (50, 24)),
    Spec("delayed", (48, 80), "fp8_delayed:amax_history_len=3"),
    Spec("mx", (64, 96), "mxfp8"),
    Spec("nv", (48, 112), "nvfp4"),
    Spec("norm", (37,), PLAIN, FP32, 1),
)
CASE = Case(
    SPECS, max_norm=0.5, options={"param_sync_dtype": torch.bfloat16}
)  # plain buckets have buffers to gather from
SAID = "raised half-way: masters, moments and weights may be of different steps; load a state with optimizer.load_state_dict"
TIMEOUT = 1.0  # seconds, of a group whose ranks come too late
NAP = 4.0  # seconds that such a rank sleeps


class Repeated:
    """A run whose third step is taken again and again, from the same state, and what a run that nothing befalls holds."""

    def __init__(self) -> None:
        self.run, twin = Run(CASE), Run(CASE)
        for number in range(2):
            self.run.step(number)
            twin.step(number)
        plain = {name: p for name, p in self.run.probe.named_parameters() if name not in self.run.weights}
        self._plain = {name: (parameter, parameter.detach().clone()) for name, parameter in plain.items()}
        self._saved = self.run.optimizer.state_dict()
        self._expected = []
        for number in (2, 3):
            twin.step(number)
            self._expected.append(checkpoints.held(twin))

    @torch.no_grad()
    def load(self) -> None:
        """Back to the end of the second step."""
        for parameter, value in self._plain.values():
            parameter.copy_(value)
        self.run.optimizer.load_state_dict(copy.deepcopy(self._saved))
        assert not self.run.optimizer._params_buckets, "nothing is left to gather of a step that raised"

    def attempt(self, memory: OutOfMemory) -> tuple[str, list[str]]:
        """The third step, in which memory runs out; then whatever must be, and a fourth one.

        Returns what was to be done, "nothing" when memory lasted, "again" or "load", and what is wrong after each of the two.
        """
        run, outcome = self.run, "nothing"
        run.probe.backward(2, run.rank)
        try:
            with memory:
                run.optimizer.clip_grad_norm(CASE.max_norm)
                run.optimizer.step()
            run.optimizer.zero_grad()
        except torch.OutOfMemoryError:
            outcome = "load" if run.optimizer._plan.guard.is_partial else "again"
            if outcome == "load":
                refused(run)
                self.load()  # forgets the gradients too
            else:
                run.optimizer.zero_grad()
            run.step(2)
        wrong = checkpoints.different(checkpoints.held(run), self._expected[0])
        run.step(3)
        wrong += checkpoints.different(checkpoints.held(run), self._expected[1])
        return outcome, [f"{outcome} at operator {memory.count}: {name}" for name in wrong]


def refused(run: Run) -> None:
    """Everything that would go on from, save or read what is torn."""
    calls: list[Callable[[], object]] = [
        run.optimizer.step,
        lambda: run.optimizer.clip_grad_norm(1.0),
        run.optimizer.unscale_grads,
        run.optimizer.state_dict,
        run.optimizer.refresh,
        lambda: run.probe.get_parameter("nv").dequantize(),
        lambda: run.probe.backward(0, 0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=SAID):
            call()


def at_operators(every: int) -> tuple[Counter[str], list[str]]:
    """Memory runs out at every so manieth operator of a step, before and after it: how often what was to be done, what is wrong."""
    with host_on_cpu():
        repeated, outcomes, wrong = Repeated(), Counter[str](), []
        for afterwards in (False, True):
            at = every // 2 * afterwards
            while True:
                memory = OutOfMemory(at, afterwards)
                repeated.load()
                outcome, found = repeated.attempt(memory)
                outcomes[outcome] += 1
                wrong += found
                if memory.count <= at:
                    break
                at += every
        return outcomes, wrong


def while_loading() -> list[str]:
    """Memory runs out while a state is loaded: the optimizer says so, and takes the next one whole."""
    with host_on_cpu():
        repeated, wrong = Repeated(), []
        for at in range(0, 10000, 7):
            memory = OutOfMemory(at)
            try:
                with memory:
                    repeated.load()
                break
            except torch.OutOfMemoryError:
                if repeated.run.optimizer._plan.guard.is_partial:
                    refused(repeated.run)
            repeated.load()
            _, found = repeated.attempt(OutOfMemory(-1))
            wrong += found
        assert at > 70, "some operators were met"
        return wrong


def collectives() -> dict[str, tuple[Any, str]]:
    return {
        "reduce-scatter": (apex, "reduce_scatter_tensor"),
        "all-reduce": (Group, "all_reduce_max"),
        "all-gather": (apex, "all_gather_into_tensor"),
    }


def _dying(original: Callable[..., Any], place: str) -> Callable[..., Any]:
    """A collective around which this process dies."""

    def collective(*args: Any, **kwargs: Any) -> None:
        work = None if place == "before" else original(*args, **kwargs)
        if place == "after" and work is not None:
            work.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    return collective


def dies(path: str, collective: str, place: str) -> None:
    """Rank 1 dies in its third step. Rank 0 raises how long it waited to be told, once it has tried to go on."""
    with host_on_cpu():
        run = Run(CASE)
        for number in range(2):
            run.step(number)
        checkpoints.save(run, path)
        if run.rank == 1:
            owner, name = collectives()[collective]
            setattr(owner, name, _dying(getattr(owner, name), place))
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            list(map(run.step, (2, 3)))  # the bytes of the last collective may have been sent before
        waited, torn = time.monotonic() - start, run.optimizer._plan.guard.is_partial
        if torn:
            refused(run)
        raise RuntimeError(f"rank 0 was told after {waited:.0f} s; torn: {torn}")


def finished(path: str | None, steps: int) -> dict[str, Any]:
    """What a run holds after so many steps, from a saved state of two or from the beginning."""
    with host_on_cpu():
        run = Run(CASE)
        if path is not None:
            checkpoints.load(run, path)
        for number in range(0 if path is None else 2, steps):
            run.step(number)
        return checkpoints.held(run)


@contextlib.contextmanager
def _late(collective: str, rank: int) -> Iterator[None]:
    """Rank 1 sleeps before its next collective of a kind."""
    (owner, name), naps = collectives()[collective], [NAP] * rank
    original = getattr(owner, name)

    def too_late(*args: Any, **kwargs: Any) -> Any:
        if naps:
            time.sleep(naps.pop())
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, too_late):
        yield


def comes_late(path: str, collective: str) -> tuple[float, bool, dict[str, Any]]:
    """Rank 1 is late for a collective of the third step: how long a rank waited, whether torn, what a new group goes on to."""
    with host_on_cpu():
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        options = {**CASE.options, "process_group": group, "distributed_process_group": group}
        run = Run(dataclasses.replace(CASE, options=options))
        for number in range(2):
            run.step(number)
        checkpoints.save(run, path)
        start = time.monotonic()
        with _late(collective, run.rank), pytest.raises(RuntimeError):
            run.step(2)
        waited, torn = time.monotonic() - start, run.optimizer._plan.guard.is_partial
        if torn:
            refused(run)
        dist.barrier()
        return waited, torn, finished(path, 3)
