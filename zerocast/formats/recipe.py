"""Recipe: maps parameter names to formats by glob patterns; the first match wins."""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zerocast.formats import FormatSpec, get_format


@dataclass(frozen=True, init=False)
class Recipe:
    """A format for each parameter name: `Recipe({"*.mlp.*": "nvfp4"}, default="identity")`.

    Patterns are globs, tried in order; values are FormatSpecs or format names.
    """

    patterns: tuple[tuple[str, FormatSpec], ...]
    default: FormatSpec

    def __init__(self, patterns: Mapping[str, str | FormatSpec], default: str | FormatSpec = "identity") -> None:
        object.__setattr__(self, "patterns", tuple((pattern, get_format(fmt)) for pattern, fmt in patterns.items()))
        object.__setattr__(self, "default", get_format(default))

    def format_of(self, name: str) -> FormatSpec:
        """The format of the parameter called `name`."""
        return next((fmt for pattern, fmt in self.patterns if fnmatch.fnmatchcase(name, pattern)), self.default)

    def check_used(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches none of the names, which is most likely a
        misspelling.
        """
        known = list(names)
        for pattern, _ in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                raise ValueError(f"recipe pattern {pattern!r} matches no weight; there are: {', '.join(known[:8])} ...")
