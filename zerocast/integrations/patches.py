"""Patches: attributes of a host that an integration replaces, and gives back."""

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """A new value of an attribute of a module, a class or an instance."""

    owner: Any
    name: str
    value: Any


class Patches(contextlib.ExitStack):
    """The attributes that are replaced in a host.

    Leaving the context restores them in reverse order, so that several patches of one attribute
    come off like layers.
    """

    def apply(self, patches: Iterable[Patch]) -> None:
        """Replace one attribute after the other; a later patch may wrap an earlier one."""
        for owner, name, value in patches:
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
