"""Plugins: backends, formats, hosts and compiled CUDA kernels that other installed packages add by
entry points.

An entry point names a module, in the group of its kind:

    [project.entry-points."zerocast.formats"]
    fp8_square = "their_package.fp8_square"

The metadata of installed packages is read when a name is requested that zerocast does not have, and
when all names are listed. A module is imported when its name is requested.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

logger = logging.getLogger(__name__)
BACKENDS = "zerocast.backends"
FORMATS = "zerocast.formats"
HOSTS = "zerocast.hosts"
KERNELS = "zerocast.kernels"


@dataclass(frozen=True)
class Plugin:
    """An entry point of another package.

    Attributes:
        group: BACKENDS, FORMATS, HOSTS or KERNELS.
        name: the name by which users ask for it.
        package: name and version of the package, for messages.
        entry_point: the entry point, which imports the module.
    """

    group: str
    name: str
    package: str
    entry_point: metadata.EntryPoint

    def load(self, needed: Sequence[str] = ()) -> ModuleType:
        """Import the module. Raises ImportError, naming the package, if that fails, and if the
        module lacks an attribute of `needed`.
        """
        try:
            module: ModuleType = self.entry_point.load()
        except (Exception, SystemExit) as error:
            # Importing a module of others can raise anything.
            raise ImportError(f"{self} cannot be loaded: {error!r}") from error
        missing = [attribute for attribute in needed if not hasattr(module, attribute)]
        if missing:
            raise ImportError(f"{self} cannot be used: {self.entry_point.value} has no {' and no '.join(missing)}")
        return module

    def __str__(self) -> str:
        return f"{self.name!r} in the group {self.group} of the package {self.package}"


@functools.cache
def plugins(group: str, taken: tuple[str, ...]) -> Mapping[str, Plugin]:
    """Return the plugins of a group, keyed by name. None is imported.

    A name in `taken`, the names of zerocast itself, and a name that two packages use are rejected
    with a warning.
    """
    by_name: dict[str, list[Plugin]] = {}
    for entry_point in metadata.entry_points(group=group):
        distribution = entry_point.dist
        package = "an unknown package" if distribution is None else f"{distribution.name} {distribution.version}"
        by_name.setdefault(entry_point.name, []).append(Plugin(group, entry_point.name, package, entry_point))
    accepted = {}
    for name, plugins_of_name in sorted(by_name.items()):
        if name in taken:
            logger.warning("%s is ignored: zerocast has one of this name", plugins_of_name[0])
        elif len(plugins_of_name) > 1:
            logger.warning("%s and %s are ignored: they have the same name", *plugins_of_name[:2])
        else:
            accepted[name] = plugins_of_name[0]
    return accepted
