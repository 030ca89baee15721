"""Adapters for training frameworks, one package per framework, and their replacement of methods
(`patches.py`).

A host is imported only when its package here is. Another package adds a host as an entry point of
the group `zerocast.hosts`: `from zerocast.integrations import its_name` imports it.

Their sources are the folders of `integrations/` at the top of the repository, installed as packages
of this one. In a source tree they are found there.
"""

import pkgutil
from pathlib import Path
from types import ModuleType

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
