"""Adapters for training frameworks, one package per framework, and their replacement of methods: a
Patch is an attribute of a framework that an integration replaces, and restores.

A host is imported only when its package here is. Another package adds a host as an entry point of
the group `zerocast.hosts`: `from zerocast.integrations import its_name` imports it.

Their sources are the folders of `integrations/` at the top of the repository, installed as packages
of this one. In a source tree they are found there.
"""

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from zerocast.plugins import HOSTS, plugins

_root = Path(__file__).parents[2]
if (_root / "csrc").is_dir():
    __path__.append(str(_root / "integrations"))


def __getattr__(name: str) -> ModuleType:
    """Return a host of another package."""
    # Python asks here before it imports a module of this package.
    own = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
    if name in own or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hosts = plugins(HOSTS, own)
    if name not in hosts:
        known = [*own, *hosts]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are: {', '.join(known)}")
    return hosts[name].load()


@contextlib.contextmanager
def known_api(unknown: str) -> Iterator[None]:
    """Raise RuntimeError in place of AttributeError: the framework lacks a needed name.

    `unknown` says which versions have it.
    """
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(f"{error}: {unknown}") from error


def overrides(*own: str) -> Callable[[type], type]:
    """Return a decorator for a subclass of a class of a framework. It raises RuntimeError unless
    every method but `own` overrides one: a framework that has renamed it would not call ours.
    """

    def check(kind: type) -> type:
        base = kind.__mro__[1]
        methods = [
            name for name, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)
        ]
        missing = [name for name in methods if name not in own and not hasattr(base, name)]
        if missing:
            framework = base.__module__.partition(".")[0]
            raise RuntimeError(
                f"{base.__name__} has no {', '.join(missing)}: this {framework} has an API that zerocast does not support"
            )
        return kind

    return check


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
