"""WriteGuard: what broke off is partial until a complete write, whoever shares the guard."""

import contextlib
from collections.abc import Callable

import pytest

from zerocast.weight.write_guard import WriteGuard, transaction


def guard() -> WriteGuard:
    return WriteGuard("load a state", recast_remedy="cast again")


def breaks_off(guards: list[WriteGuard], what: str = "a step", *, masters: bool = True) -> None:
    with pytest.raises(KeyError), transaction(guards, what, masters=masters):
        raise KeyError


def test_a_complete_write_leaves_nothing() -> None:
    one = guard()
    with one.transaction("a step"):
        assert one.is_open
        assert not one.is_partial
        one.check_complete()  # its own parts read what it writes
    assert (one.is_open, one.is_partial, one.partial) == (False, False, None)


@pytest.mark.parametrize(
    ("masters", "said", "completes"),
    [
        (True, "a step raised half-way: load a state", {True: True, False: False}),
        (False, "a step raised half-way: cast again", {True: True, False: True}),
    ],
    ids=["masters", "weights"],
)
def test_what_broke_off_is_partial_until_a_complete_write(
    masters: bool, said: str, completes: dict[bool, bool]
) -> None:
    """A cast completes weights, and never masters."""
    for written, complete in completes.items():
        one = guard()
        breaks_off([one], masters=masters)
        assert (one.is_partial, one.has_partial_masters) == (True, masters)
        with pytest.raises(RuntimeError, match=said):
            one.check_complete()
        with one.transaction("another", masters=written):
            pass
        assert one.is_partial is not complete


def test_a_cast_that_breaks_off_leaves_partial_masters_to_a_load() -> None:
    one = guard()
    breaks_off([one])
    breaks_off([one], "a cast", masters=False)
    with pytest.raises(RuntimeError, match="a step raised half-way: load a state"):
        one.check_complete()


def test_a_nested_write_is_a_part() -> None:
    one = guard()
    with contextlib.suppress(KeyError), one.transaction("a step"):
        with one.transaction("a cast", masters=False):
            pass
        raise KeyError
    assert one.partial == "a step raised half-way: load a state"
    with one.transaction("a load"), pytest.raises(KeyError), one.transaction("a cast"):
        raise KeyError  # which the load survives
    assert not one.is_partial


@pytest.mark.parametrize("leaves", [lambda: None, lambda: breaks_off([], "nothing")], ids=["reads", "raises"])
def test_a_reader_that_overwrites_looks_at_what_is_partial(leaves: Callable[[], None]) -> None:
    one = guard()
    breaks_off([one])
    with one.overlooked():
        one.check_complete()
        leaves()
    assert one.is_partial


def test_one_write_of_several_owners() -> None:
    model, optimizer = guard(), WriteGuard("load both")
    breaks_off([model, optimizer])
    assert (model.is_partial, optimizer.partial) == (True, "a step raised half-way: load both")
    with transaction([model, optimizer], "a load"):
        assert model.is_open
        assert optimizer.is_open
    assert not model.is_partial
    assert not optimizer.is_partial


def test_what_another_call_broke_is_declared() -> None:
    one = guard()
    one.mark_partial("a cast", masters=False)
    assert one.partial == "a cast raised half-way: cast again"
    assert not one.has_partial_masters
