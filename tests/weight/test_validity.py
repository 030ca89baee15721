"""Validity: what broke off is partial until a complete write, for all that is written together."""

import contextlib
from collections.abc import Callable

import pytest

from zerocast.weight.validity import RELOAD, Use, Validity, transaction


def validity() -> Validity:
    return Validity("load a state", recast_remedy="cast again")


def breaks_off(validities: list[Validity], what: str = "a step", *, masters: bool = True) -> None:
    with pytest.raises(KeyError), transaction(validities, what, masters=masters):
        raise KeyError


def test_a_complete_write_leaves_nothing() -> None:
    one = validity()
    with one.transaction("a step"):
        assert one.is_writing
        assert one.partial is None
        one.check(Use.SAVE)  # its own parts read what it writes
    assert (one.is_writing, one.partial) == (False, None)


@pytest.mark.parametrize(
    ("masters", "said", "completes"),
    [
        (True, f"a step raised half-way: {RELOAD.format(load='load a state')}", {True: True, False: False}),
        (False, "a step raised half-way: cast again", {True: True, False: True}),
    ],
    ids=["masters", "weights"],
)
def test_what_broke_off_is_partial_until_a_complete_write(
    masters: bool, said: str, completes: dict[bool, bool]
) -> None:
    """A cast completes weights, and never masters."""
    for written, complete in completes.items():
        one = validity()
        breaks_off([one], masters=masters)
        assert (one.partial is not None, one.has_partial_masters) == (True, masters)
        with pytest.raises(RuntimeError, match=said):
            one.check(Use.SAVE)
        with one.transaction("another", masters=written):
            pass
        assert (one.partial is None) is complete


def test_a_cast_that_breaks_off_leaves_partial_masters_to_a_load() -> None:
    one = validity()
    breaks_off([one])
    breaks_off([one], "a cast", masters=False)
    with pytest.raises(RuntimeError, match=f"a step raised half-way: {RELOAD.format(load='load a state')}"):
        one.check(Use.SAVE)


def test_a_nested_write_is_a_part() -> None:
    one = validity()
    with contextlib.suppress(KeyError), one.transaction("a step"):
        with one.transaction("a cast", masters=False):
            pass
        raise KeyError
    assert str(one.partial) == f"a step raised half-way: {RELOAD.format(load='load a state')}"
    with one.transaction("a load"), pytest.raises(KeyError), one.transaction("a cast"):
        raise KeyError  # which the load survives
    assert one.partial is None


@pytest.mark.parametrize("leaves", [lambda: None, lambda: breaks_off([], "nothing")], ids=["reads", "raises"])
def test_a_reader_that_overwrites_looks_at_what_is_partial(leaves: Callable[[], None]) -> None:
    one = validity()
    breaks_off([one])
    with one.reading_partial():
        one.check(Use.SAVE)
        leaves()
    assert one.partial


def test_one_write_of_several_owners() -> None:
    model, optimizer = validity(), Validity("load both")
    breaks_off([model, optimizer])
    assert (bool(model.partial), str(optimizer.partial)) == (
        True,
        f"a step raised half-way: {RELOAD.format(load='load both')}",
    )
    with transaction([model, optimizer], "a load"):
        assert model.is_writing
        assert optimizer.is_writing
    assert model.partial is None
    assert optimizer.partial is None


def test_what_another_call_broke_is_declared() -> None:
    one = validity()
    one.broke_off("a cast", masters=False)
    assert str(one.partial) == "a cast raised half-way: cast again"
    assert not one.has_partial_masters
