"""Patches: attributes of a framework that an integration replaces, and restores."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


@contextlib.contextmanager
def known_api(unknown: str) -> Iterator[None]:
    """Raise RuntimeError in place of AttributeError: the framework lacks a needed name.

    `unknown` says which versions have it.
    """
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(f"{error}: {unknown}") from error


class Patch(NamedTuple):
    """A new value of an attribute of a module, a class or an instance."""

    owner: Any
    name: str
    value: Any


class Patches(contextlib.ExitStack):
    """The attributes that are replaced in a framework.

    Leaving the context restores them in reverse order, so that several patches of one attribute can
    wrap each other.
    """

    def apply(self, patches: Iterable[Patch]) -> None:
        """Replace the attributes one at a time. Raises AttributeError for one that does not exist.

        `patches` may be a generator. Each attribute is set before the next patch is requested, so a
        later patch can read and wrap an earlier one. A list would break this.
        """
        for owner, name, value in patches:
            getattr(owner, name)
            # A method that an instance has from its class is restored by deleting the attribute.
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(delattr, owner, name)
            setattr(owner, name, value)

    def remove(self, owner: Any, name: str) -> None:
        """Delete an attribute of an instance, so that the one of its class is used."""
        self.callback(setattr, owner, name, vars(owner)[name])
        delattr(owner, name)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace one attribute while the context is open."""
    with Patches() as patches:
        patches.apply([Patch(owner, name, value)])
        yield
