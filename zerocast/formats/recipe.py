"""Recipe: maps parameter names to formats by glob patterns; the first match wins."""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zerocast.formats import FormatSpec, get_format


@dataclass(frozen=True, init=False)
class Recipe:
    """A format for each parameter name: `Recipe({"*.mlp.*": "nvfp4"}, default="identity")`.

    Patterns are globs, tried in order; values are FormatSpecs or format names. Where a recipe is
    asked for, such a mapping may stand for it. Raises TypeError for patterns that are no mapping,
    ValueError for an unknown format.
    """

    patterns: tuple[tuple[str, FormatSpec], ...]
    default: FormatSpec

    def __init__(self, patterns: Mapping[str, str | FormatSpec], default: str | FormatSpec = "identity") -> None:
        if not isinstance(patterns, Mapping):
            raise TypeError(
                f"a recipe maps patterns of parameter names to formats, such as {{'*.weight': 'fp8_block'}}, got {patterns!r}"
            )
        object.__setattr__(self, "patterns", tuple((pattern, get_format(fmt)) for pattern, fmt in patterns.items()))
        object.__setattr__(self, "default", get_format(default))

    @classmethod
    def of(cls, recipe: "RecipeLike") -> "Recipe":
        """The recipe itself, or the one that a mapping stands for."""
        return recipe if isinstance(recipe, Recipe) else cls(recipe)

    def __repr__(self) -> str:
        patterns = {pattern: str(fmt) for pattern, fmt in self.patterns}
        return f"Recipe({patterns}, default={str(self.default)!r})"

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


RecipeLike = Recipe | Mapping[str, str | FormatSpec]
