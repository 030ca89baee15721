"""An error half-way through a call leaves the host either unchanged, or refusing every call until it is
repaired: never with wrong bits.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import casts
from tests.hosts.stopping import FAULTS, Place, check
from tests.hosts.under_test import HOSTS, PARTIAL, HostUnderTest, different, find, param
from tests.optim.faults import OutOfMemory, Places, of_each_place
from tests.workers import Ranks

SAMPLES = 3  # operators of a phase, before and after which memory runs out, in a test of every run


class Repeated:
    """The third step, taken again and again from a checkpoint of the second, and what is held after it and after a fourth."""

    def __init__(self, host: str, variant: str, folder: str) -> None:
        self.run = find(host)(folder, variant)
        for number in range(2):
            self.run.step(number)
        self.run.save(2)
        self.run.load()
        self._expected = []
        for number in (2, 3):
            self.run.step(number)
            self._expected.append(self.run.everything())

    def calls(self) -> dict[str, Any]:
        """Return the load, the refreshes and the phases of the third step, in order."""
        return {"load": self.run.load, **self.run.refreshes(), **self.run.phases(2)}

    def places(self, where: str) -> list[int]:
        """Return the places at which the operators of a phase are called, in order."""
        operators = Places()
        for name, call in self.calls().items():
            with operators if name == where else OutOfMemory(-1):
                call()
        return operators.places

    def attempt(self, where: str, memory: OutOfMemory, wrong: list[str]) -> str:
        """Run out of memory in a phase, then recover. Return "nothing", "again", or what the error says to call."""
        run, calls = self.run, self.calls()
        names = [name for name in calls if name not in run.refreshes() or name == where]
        outcome, before = "nothing", run.everything()
        try:
            for name in names:
                with memory if name == where else OutOfMemory(-1):
                    calls[name]()
        except RuntimeError as error:  # what torch's readers make of it too
            if "injected" not in str(error):
                raise
            outcome = self._mend(where, before, wrong)
            is_stepped = names.index(where) > names.index("step") and outcome != "load"
            for name in names[names.index(where) :] if is_stepped else run.phases(2):
                calls[name]()
        for number, expected in zip((2, 3), self._expected, strict=True):
            if number == 3:
                run.step(3)
            wrong += [f"{outcome}, step {number}: {name}" for name in different(expected, run.everything())]
        return outcome

    def _mend(self, where: str, before: casts.Bytes, wrong: list[str]) -> str:
        """Do what must come before the phase is repeated. A load drops gradients by itself."""
        if self.run.complaint():
            wrong += went_on(self.run)
            return self.run.mend()
        self.run.forget()
        if where == "load":
            wrong += [
                f"changed by a load that nothing complains of: {name}"
                for name in different(before, self.run.everything())
            ]
            self.run.load()
        return "again"


def went_on(run: HostUnderTest) -> list[str]:
    """Return the calls that do not refuse a partial state with the reason, and the files that they left."""
    found, before = [], sorted(path.name for path in run.folder.iterdir())
    for name, call in run.guarded().items():
        try:
            call()
            found.append(f"{name} went on")
        except RuntimeError as error:
            found += [] if PARTIAL in str(error) else [f"{name} said: {error}"]
    after = sorted(path.name for path in run.folder.iterdir())
    return found if after == before else [*found, f"{sorted({*after} - {*before})} were left"]


def at_operators(
    host: str, variant: str, where: str, samples: int | None, folder: str
) -> tuple[Counter[str], list[str]]:
    """Run out of memory before and after some operators of a phase. Return how often each outcome
    occurred, and the failures.

    Without `samples`, the operators cover every line of code that calls one.
    """
    with find(host).inside(variant):
        repeated, outcomes, wrong = Repeated(host, variant, folder), Counter[str](), list[str]()
        places = repeated.places(where)
        count = len(places)
        every = 1 if samples is None else max(1, count // samples)
        for afterwards in (False, True):
            for at in of_each_place(places) if samples is None else range(every // 2 * afterwards, count, every):
                found: list[str] = []
                outcomes[repeated.attempt(where, OutOfMemory(at, afterwards), found)] += 1
                wrong += [f"operator {at} of {count}, {'after' if afterwards else 'before'}: {what}" for what in found]
                if len(wrong) > 20:
                    return outcomes, wrong
        return outcomes, wrong


def phases(slow: bool) -> list[Any]:
    """Return host, variant and phase. Only those of each host's first variant are not slow, and none if `slow`."""
    found = []
    for host in HOSTS:
        for index, variant in enumerate(find(host).VARIANTS):
            for where in find(host).remedies(variant):
                found += [param(host, variant, where, slow=slow or index > 0)]
    return found


@pytest.mark.notices(
    "memory runs out at any operator of a step, a gather or a load",
    where=("ZeroAdamW", "FSDP2", "Megatron", "Apex"),
    answer="the call can be repeated, or everything raises; never wrong bits",
)
@pytest.mark.parametrize(("host", "variant", "where"), phases(slow=False))
def test_some_operators(ranks: Ranks, tmp_path: Path, host: str, variant: str, where: str) -> None:
    ((outcomes, wrong),) = ranks(1)(at_operators, host, variant, where, SAMPLES, str(tmp_path), timeout=280.0)
    assert wrong == []
    possible = find(host).remedies(variant)[where]
    assert {*outcomes} - {"nothing"} <= possible, outcomes
    assert {*outcomes} >= possible - {"again"}, outcomes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("host", "variant", "where"), phases(slow=True))
def test_every_operator(ranks: Ranks, tmp_path: Path, host: str, variant: str, where: str) -> None:
    ((outcomes, wrong),) = ranks(1)(at_operators, host, variant, where, None, str(tmp_path), timeout=1700.0)
    assert wrong == []
    assert {*outcomes} - {"nothing"} == find(host).remedies(variant)[where], outcomes


def continued(host: str, variant: str, folder: str) -> list[str]:
    """Return what differs from an undisturbed run two steps after a load."""
    with find(host).inside(variant):
        straight, resumed = find(host)(folder, variant), find(host)(folder, variant)
        first = resumed.load()
        for number in range(first + 2):
            straight.step(number)
            if number >= first:
                resumed.step(number)
        return different(straight.everything(), resumed.everything())


def alone() -> list[Any]:
    """Return the cases in which one rank fails alone. Those of every run have two ranks, no SIGSTOP, and
    the middle of an all_reduce_max for their place.
    """
    found = []
    for host in HOSTS:
        first = find(host).VARIANTS[0]
        places = [(first, place) for place in find(host).PLACES]
        places += [(variant, place) for variant, more in find(host).MORE_PLACES.items() for place in more]
        for variant, place in places:
            for fault in FAULTS:
                # two that are left may hear of it in different calls: in the one that was in flight, or the next
                for world in (2, 3) if fault == "SIGKILL" or place.when == "during" else (2,):
                    quick = world == 2 and fault != "SIGSTOP" and str(place) == "during all_reduce_max"
                    found += [
                        pytest.param(
                            *param(host, variant, place, fault, world).values,
                            marks=param(host, slow=not quick).marks,
                            id=f"{host}-{place}-{fault}-{world}",
                        )
                    ]
    return found


@pytest.mark.timeout(400)
@pytest.mark.notices(
    "one rank is killed, stopped (SIGSTOP) for longer than the timeout, or out of memory, at any collective or file",
    where=("ZeroAdamW", "FSDP2", "Megatron", "Apex"),
    answer="the others raise within the timeout, a stopped rank when it continues, and no rank steps or saves",
)
@pytest.mark.notices(
    "a forward or backward pass raises on one rank alone",
    where=("ZeroAdamW", "FSDP2"),
    answer="the others wait for it in their next collective until the timeout of their group, as in bf16, and take no step",
)
@pytest.mark.parametrize(("host", "variant", "place", "fault", "world"), alone())
def test_a_rank_that_fails_alone(
    ranks: Ranks, tmp_path: Path, host: str, variant: str, place: Place, fault: str, world: int
) -> None:
    for said in check(tmp_path, host, variant, place, fault, world):
        print(said)
    assert ranks(world)(continued, host, variant, str(tmp_path / "checkpoints")) == [[]] * world
