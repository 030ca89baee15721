"""Weight formats as values. Each format has a file of its name.

The file defines `build(...) -> FormatSpec`; the keywords of `build` are the options of the format.
Another package adds such a module as an entry point of the group `zerocast.formats`.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from zerocast.formats.element import Element
from zerocast.formats.spec import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule, option_key
from zerocast.plugins import FORMATS, plugins

__all__ = ["AmaxPolicy", "Block", "Columnwise", "Element", "FormatSpec", "ScaleRule", "format_names", "get_format"]

# The modules of this package that do not define a format.
_NOT_FORMATS = {"element", "layout", "memory", "readers", "recipe", "shared_amax", "spec"}
_LITERALS: dict[str, Any] = {"True": True, "False": False}


@functools.cache
def format_names() -> tuple[str, ...]:
    """Return the names that `get_format` accepts: of zerocast and of other packages."""
    own = _own_names()
    return *own, *plugins(FORMATS, own)


@functools.cache
def _own_names() -> tuple[str, ...]:
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_FORMATS))


def get_format(name: str | FormatSpec, **options: Any) -> FormatSpec:
    """Return the format called `name`.

    Options are keywords, or inline as in ``"fp8_block:power_of_2_scale=False"``, the text that
    `str(fmt)` returns; an inline option without a value is True. Raises ValueError for an unknown
    name, an option that this format does not have, or a value outside its range, TypeError for an
    option of a different type, ImportError for a format of another package that cannot be loaded.
    """
    if type(name) is str and not options:  # as every product asks
        return _build(name, ())
    if isinstance(name, FormatSpec):
        if options:
            raise TypeError(f"options {sorted(options)} go with a format name, got the format {name}")
        return name
    if not isinstance(name, str):
        raise TypeError(f"a format is a name or a FormatSpec, got {name!r}")
    # The types are a part of the key of the cache. Without them True would hit the entry of 1, and
    # a wrong type would not raise.
    return _build(name, tuple(sorted((option, type(value), value) for option, value in options.items())))


@functools.lru_cache(maxsize=256)
def _build(text: str, options: tuple[tuple[str, type, Any], ...]) -> FormatSpec:
    name, _, inline = text.partition(":")
    build = _module(name).build
    chosen = {**_parse(inline), **{option: value for option, _, value in options}}
    known = inspect.signature(build).parameters
    for option, value in chosen.items():
        if option not in known:
            raise ValueError(f"format {name} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        expected = type(known[option].default)
        # `0` means `0.0`. Types are compared exactly, since a bool is an int to isinstance.
        if expected is float and type(value) is int:
            chosen[option] = value = float(value)
        if type(value) is not expected:
            raise TypeError(f"option {option} of {name} is a {expected.__name__}, got {value!r}")
    spec: FormatSpec = build(**chosen)
    if spec.name != name:
        raise ValueError(f"the format {name} calls itself {spec.name!r}: both names are one")
    if not 0.0 <= spec.amax_epsilon < float("inf"):
        raise ValueError(f"amax_epsilon must be finite and not negative, got {spec.amax_epsilon}")
    return dataclasses.replace(spec, key=option_key(build, name, chosen))


def _module(name: str) -> ModuleType:
    """Import the module of a format."""
    own = _own_names()
    if name in own:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in plugins(FORMATS, own):
        close = difflib.get_close_matches(name, format_names(), n=1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown format {name!r}; {guess}known: {', '.join(format_names())}")
    return plugins(FORMATS, own)[name].load(needed=["build"])


def _parse(inline: str) -> dict[str, Any]:
    """Return the options in `inline`, the part of a format's text after the colon."""
    options: dict[str, Any] = {}
    for item in inline.split(",") if inline else ():
        key, equals, value = item.partition("=")
        options[key.strip()] = _literal(value.strip()) if equals else True
    return options


def _literal(text: str) -> Any:
    """Return the value of an option that is given as text: a bool, an int, a float or the text
    itself.
    """
    if text in _LITERALS:
        return _LITERALS[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
