"""Recipe: maps parameter names to formats by glob patterns; the first match wins."""

import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerocast.formats import FormatSpec, get_format
from zerocast.formats.readers import reader_called
from zerocast.formats.shared_amax import Patterns, SharedAmax, check_group, groups_of, patterns_of
from zerocast.formats.spec import ScaleRule

logger = logging.getLogger(__name__)


@dataclass(frozen=True, init=False)
class Recipe:
    """A format for each parameter name: `Recipe({"*.mlp.*": "nvfp4"}, default="identity")`.

    Functions that expect a recipe also accept the mapping.

    Args:
        patterns: globs of parameter names, tried in order, with a FormatSpec or a format name each.
        default: the format of parameters that no pattern matches.
        share_amax: groups of patterns whose weights share one tensor amax, the largest of theirs,
            since inference engines fuse them: `[("*.q_proj.weight", "*.k_proj.weight")]`, or
            "llama" for query, key and value, and for gate and up. Weights are in one group if their
            names match its patterns with the same text in place of the `*`. This concerns nvfp4 and
            fp8_current; formats without a tensor amax share nothing.
        fast: True for the fastest training step that a GPU has with these formats. Where products
            with a weight run on FP8 tensor cores its gradient is computed from FP8 operands, as by
            `zerocast.gemm.use(weight_gradients="fp8")`. Each block is compiled to one graph
            (`block.compile(fullgraph=True)`); a block is an element of an `nn.ModuleList` or
            `nn.ModuleDict` that has a quantized weight, the outermost of nested ones. `quantize_`
            and `zerocast.fsdp2.prepare` do both; `zerocast.switch` keeps these settings.

    Raises TypeError for patterns that are not a mapping, ValueError for an unknown format. Weights
    of different formats in one group, and fp8_delayed in a group, raise ValueError in
    `shared_amaxes`.
    """

    patterns: tuple[tuple[str, FormatSpec], ...]
    default: FormatSpec
    share_amax: Patterns = ()
    fast: bool = False

    def __init__(
        self,
        patterns: Mapping[str, str | FormatSpec],
        default: str | FormatSpec = "identity",
        share_amax: str | Sequence[Sequence[str]] = (),
        *,
        fast: bool = False,
    ) -> None:
        if not isinstance(patterns, Mapping):
            raise TypeError(
                f"a recipe maps patterns of parameter names to formats, such as {{'*.weight': 'fp8_block'}}, got {patterns!r}"
            )
        object.__setattr__(self, "share_amax", patterns_of(share_amax))
        object.__setattr__(self, "patterns", tuple((pattern, get_format(fmt)) for pattern, fmt in patterns.items()))
        object.__setattr__(self, "default", get_format(default))
        object.__setattr__(self, "fast", fast)

    @classmethod
    def of(cls, recipe: "RecipeLike") -> "Recipe":
        """Return the given recipe, or a recipe of the given mapping."""
        return recipe if isinstance(recipe, Recipe) else cls(recipe)

    @classmethod
    def parse(cls, entries: Sequence[str], option: str) -> "Recipe":
        """Return the recipe of entries `pattern=format` from a command line or a configuration,
        where `option` is their name for errors. Raises ValueError for an empty list, for an entry
        without `=`, and for an unknown format.
        """
        # Only the first "=" splits, since a format may have options with more of them.
        split = [entry.partition("=") for entry in entries]
        wrong = [entry for entry, (pattern, _, fmt) in zip(entries, split, strict=True) if not pattern or not fmt]
        if wrong or not entries:
            raise ValueError(
                f"{option} is a list of pattern=format, as layers.*.weight=nvfp4, got {wrong[0] if wrong else 'nothing'!r}"
            )
        return cls({pattern: fmt for pattern, _, fmt in split})

    def __repr__(self) -> str:
        patterns = {pattern: str(fmt) for pattern, fmt in self.patterns}
        shared = f", share_amax={list(self.share_amax)}" if self.share_amax else ""
        fast = ", fast=True" if self.fast else ""
        return f"Recipe({patterns}, default={str(self.default)!r}{shared}{fast})"

    def format_of(self, name: str) -> FormatSpec:
        """Return the format of the parameter called `name`."""
        return next((fmt for pattern, fmt in self.patterns if fnmatch.fnmatchcase(name, pattern)), self.default)

    def shared_amaxes(self, names: Iterable[str]) -> dict[str, SharedAmax]:
        """Return the group of each weight that shares its tensor amax, keyed by the name of the
        weight. Raises ValueError for formats that cannot share one, and if `share_amax` matches no
        group.
        """
        groups = groups_of(self.share_amax, names)
        if self.share_amax and not groups:
            raise ValueError(f"share_amax {list(self.share_amax)} finds no two weights that belong together")
        formats = {name: self.format_of(name) for group in groups for name in group.names}
        return {name: group for group in groups if check_group(group, formats) for name in group.names}

    def for_reader(self, reader: str | None, model: Any) -> "Recipe":
        """Return a recipe whose weights an inference engine can serve as they are trained: this
        one, with a shared tensor amax for the weights that the engine fuses, which is logged.

        Args:
            reader: "vllm" or "sglang"; None changes nothing.
            model: the nn.Module that is to be trained.

        Raises ValueError for an unknown reader, a format that it does not read, and weights that it
        fuses and that have different formats.
        """
        if reader is None:
            return self
        facts = reader_called(reader)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.dim() >= 2}
        formats = {name: self.format_of(name) for name in shapes}
        facts.check(formats, shapes, type(model).__name__)
        shared = {name: group for group in groups_of(self.share_amax, shapes) for name in group.names}
        added: dict[tuple[str, ...], None] = {}
        for patterns in facts.fused:
            for group in groups_of((patterns,), shapes):
                if formats[group.names[0]].scale_rule is not ScaleRule.TWO_LEVEL:
                    continue
                present = {shared.get(name) for name in group.names}
                if len(present) > 1:
                    raise ValueError(
                        f"{reader} fuses {group}, but share_amax has only some of them: put all of them into one group"
                    )
                if present == {None}:
                    added[patterns] = None
        if not added:
            return self
        logger.info("weights that %s fuses now share a tensor amax: %s", reader, "; ".join(map(", ".join, added)))
        share_amax = (*self.share_amax, *added)
        return Recipe(dict(self.patterns), self.default, share_amax, fast=self.fast)

    def used(self, names: Iterable[str]) -> list[bool]:
        """Return a flag for each pattern: True if it matches any of the names."""
        known = list(names)
        return [any(fnmatch.fnmatchcase(name, pattern) for name in known) for pattern, _ in self.patterns]

    def check_used(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches none of the names, which is most likely a
        misspelling.
        """
        known = list(names)
        for (pattern, _), used in zip(self.patterns, self.used(known), strict=True):
            if not used:
                raise ValueError(f"recipe pattern {pattern!r} matches no weight; there are: {', '.join(known[:8])} ...")


RecipeLike = Recipe | Mapping[str, str | FormatSpec]
