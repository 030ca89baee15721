"""Training in processes of its own, of which one fails alone at a chosen place: who raises, and when.

It is killed (SIGKILL), or stopped (SIGSTOP) and continued (SIGCONT) once the others have raised, or runs out of memory there. All
but the killed one leave an outcome: when and what they raised, and whether anything that they tried after that went through.

A rank that runs out of memory outside of a collective has left the transport whole. So all ranks try together, as a user
would, once all have raised. Nothing goes through where a collective of somebody has timed out; all of it does, on every rank,
where all have raised the same and nothing has changed (a file that was not written, or not read).
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.hosts.under_test import HostUnderTest, find
from tests.workers import START_SECONDS, context, join

TIMEOUT = 3.0  # of the process group
MARGIN = 10.0  # for whoever is not stopped to raise
VICTIM = 1
GOOD_STEPS = 2  # before anything happens
LAST_STEP = 5


GO_ON = "going on together"
HARMLESS = ("write_data", "read_data")  # a rank that fails here has told the others, and nothing of the run has changed
FAULTS = ("SIGKILL", "SIGSTOP", "out of memory")


@dataclass(frozen=True)
class Place:
    """A call of `owner` (`module:Class`, or a module), before, during or after which a rank is struck; during: it is in flight."""

    owner: str
    name: str
    when: str = "before"

    def __str__(self) -> str:
        return f"{self.when} {self.name}"

    def is_between_collectives(self, fault: str) -> bool:
        """Return whether all ranks can go on after the fault, if all of them have raised."""
        return fault == "out of memory" and self.when != "during"

    @contextlib.contextmanager
    def armed(self, strike: Callable[[], None]) -> Iterator[None]:
        """While the context is open, the first such call strikes."""
        module, _, name = self.owner.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, name) if name else owner
        original, strikes = getattr(owner, self.name), [strike]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not strikes:  # a stand-in of the host has put this back
                return original(*args, **kwargs)
            strike = strikes.pop()
            if self.when == "before":
                strike()
                return original(*args, **kwargs)
            if self.when == "during":
                return _in_flight(original, strike, *args, **kwargs)
            result = original(*args, **kwargs)
            if hasattr(result, "wait"):
                result.wait()
            strike()
            return result

        setattr(owner, self.name, call)
        yield
        setattr(owner, self.name, original)


def around(owner: str, *names: str) -> tuple[Place, ...]:
    """Return the places before, during and after each of these collectives."""
    return tuple(Place(owner, name, when) for name in names for when in ("before", "during", "after"))


BESIDE = ("before", "after")
# of the largest moments of groups that boundaries between ranks cut, once a step
CUT_GROUPS = tuple(Place("zerocast.optim.moments_8bit:CutGroups", "reduce", when) for when in BESIDE)


def _in_flight(original: Callable[..., Any], strike: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    """Strike while the collective runs. A synchronous one is made asynchronous for that."""
    if original.__name__ == "all_reduce_max":
        group, tensor = args[:2]
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.handle, async_op=True)
        strike()
        work.wait()
        return None
    work = original(*args, **{**kwargs, "async_op": True})
    strike()
    if kwargs.get("async_op"):
        return work
    work.wait()
    return None


def _live(rank: int, world: int, folder: str, name: str, variant: str, place: Place, fault: str) -> None:
    """Run one rank of a host until it is stopped at `place`, or to the end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    join(rank, world, "gloo", Path(folder, "store").as_uri(), timedelta(seconds=START_SECONDS))
    with find(name).inside(variant):
        _train(rank, Path(folder), find(name)(str(Path(folder, "checkpoints")), variant), place, fault)
    os._exit(0)


def _train(rank: int, folder: Path, loop: HostUnderTest, place: Place, fault: str) -> None:
    for step in range(GOOD_STEPS):
        loop.step(step)
    loop.save(GOOD_STEPS)
    dist.barrier()
    limit_collectives(TIMEOUT)

    def strike() -> None:
        _leave(folder / "struck", time.monotonic())
        if fault == "out of memory":
            raise torch.OutOfMemoryError("injected")
        os.kill(os.getpid(), signal.Signals[fault])

    steps, error = GOOD_STEPS, None
    is_together = place.is_between_collectives(fault)
    with place.armed(strike) if rank == VICTIM else contextlib.nullcontext():
        try:
            for step in range(GOOD_STEPS, LAST_STEP):
                loop.step(step)
                steps += 1
                loop.save(step + 1)
                loop.load()
        except RuntimeError as caught:
            error = f"{type(caught).__name__}: {caught}"
    raised_at = time.monotonic()
    if error is None and not (folder / "struck").exists():
        return  # no rank came to the place
    attempts = _attempts(loop)
    if is_together:
        _leave(folder / f"raised_{rank}", raised_at)
        _wait_for([folder / f"raised_{other}" for other in range(dist.get_world_size())], 2 * (TIMEOUT + MARGIN))
        attempts = {GO_ON: lambda: _go_on(loop, steps)}
    went_through = [what for what, attempt in attempts.items() if _goes_through(attempt)]
    outcome = {"error": error, "raised_at": raised_at, "steps": steps, "went_through": went_through}
    _leave(folder / f"outcome_{rank}", outcome)
    _wait_for([folder / "end"], 600.0)


def _attempts(loop: HostUnderTest) -> dict[str, Callable[[], None]]:
    return {
        "step": loop.step_again,
        "a whole step": lambda: loop.step(LAST_STEP),
        "save": lambda: loop.save(LAST_STEP + 1),
    }


def _go_on(loop: HostUnderTest, steps: int) -> None:
    """Go on like a loop whose call raised on all ranks with an error that says it can be called again."""
    loop.forget()
    loop.save(steps)
    for step in range(steps, LAST_STEP):
        loop.step(step)
        loop.save(step + 1)


def _goes_through(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except RuntimeError:
        return False
    return True


def limit_collectives(seconds: float) -> None:
    """Set the timeout of every group. FSDP2's mesh has one of its own in some versions of torch."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def wait_for_all_ranks(what: str, seconds: float) -> None:
    """Wait until all ranks have called this once, without a collective: a collective of this rank would end
    one in which another waits in vain.
    """
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
    store.add(what, 1)
    while store.add(what, 0) < dist.get_world_size() and time.monotonic() < end:
        time.sleep(0.01)


def _leave(path: Path, value: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def _wait_for(paths: list[Path], seconds: float, processes: Sequence[BaseProcess] = ()) -> bool:
    """Wait for all files. Return whether they are there in time; processes that end early leave none."""
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > end or (processes and not any(process.is_alive() for process in processes)):
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def processes(target: Callable[..., None], world: int, *arguments: Any) -> Iterator[list[BaseProcess]]:
    """Start `target(rank, world, *arguments)` in a process for each rank, and leave none behind."""
    started = [context.Process(target=target, args=(rank, world, *arguments), daemon=True) for rank in range(world)]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def check(folder: Path, host: str, variant: str, place: Place, fault: str, world: int) -> list[str]:
    """Check that ranks that are not stopped raise in time, and that none goes on. Return the errors by rank,
    without the killed one.
    """
    outcomes = [folder / f"outcome_{rank}" for rank in range(world)]
    survivors = [path for rank, path in enumerate(outcomes) if rank != VICTIM or fault == "out of memory"]
    with processes(_live, world, str(folder), host, variant, place, fault) as started:
        assert _wait_for([folder / "struck"], 2 * START_SECONDS, started), "the place was not reached"
        struck = json.loads((folder / "struck").read_text())
        assert _wait_for(survivors, 4 * (TIMEOUT + MARGIN)), [path.exists() for path in survivors]
        found = [_check_outcome(path, struck) for path in survivors]
        if fault == "SIGSTOP":
            time.sleep(max(0.0, struck + TIMEOUT + 1.0 - time.monotonic()))
            continued = time.monotonic()
            os.kill(started[VICTIM].pid or 0, signal.SIGCONT)
            assert _wait_for(outcomes, 4 * (TIMEOUT + MARGIN)), (
                "the stopped rank goes on and on, or has died",
                started[VICTIM].exitcode,
            )
            found.append(_check_outcome(outcomes[VICTIM], continued))
        elif fault == "SIGKILL":
            started[VICTIM].join(MARGIN)
            assert started[VICTIM].exitcode == -signal.SIGKILL
        (folder / "end").touch()
    expected = [GO_ON] if place.is_between_collectives(fault) and place.name in HARMLESS else []
    for path in (path for path in outcomes if path.exists()):
        outcome = json.loads(path.read_text())
        assert outcome["went_through"] == expected, f"{path.name}: {outcome}"
    return found


def _check_outcome(path: Path, since: float) -> str:
    outcome = json.loads(path.read_text())
    assert outcome["error"] is not None, f"{path.name} went on as if nothing had happened: {outcome}"
    seconds = outcome["raised_at"] - since
    assert seconds <= TIMEOUT + MARGIN, f"{path.name} raised after {seconds:.1f} s: {outcome}"
    assert outcome["steps"] <= GOOD_STEPS + 1, f"{path.name} stepped on: {outcome}"
    return f"{path.name} after {seconds:.1f} s: {outcome['error']}"
