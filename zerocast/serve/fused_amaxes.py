"""Engines lay some weights behind each other and keep one global scale for them: those must agree.

vLLM takes the largest of the stored scales of query, key and value, and of gate and up, and does
not rescale the codes of the others (`vllm/model_executor/layers/quantization/`:
`compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `modelopt.py`).
"""

import logging
from collections.abc import Sequence

from zerocast.formats.shared_amax import PRESETS, groups_of
from zerocast.serve.namings import layout_of
from zerocast.serve.piece import Piece
from zerocast.weight import QuantizedWeight

logger = logging.getLogger(__name__)


class FusedAmaxes:
    """The tensor amaxes of what was written, by stored name."""

    def __init__(self, naming: str, allow_unequal: bool) -> None:
        self._naming, self._allow_unequal = naming, allow_unequal
        self._found: dict[str, float] = {}

    def note(self, name: str, weight: QuantizedWeight, pieces: Sequence[Piece]) -> None:
        """Remember the amax of a weight that is written."""
        if self._naming != "bf16" and layout_of(self._naming, name, weight.format).shares_amax:
            assert weight.amax is not None
            self._found |= dict.fromkeys((piece.name for piece in pieces), weight.amax.item())

    def check(self) -> None:
        """ValueError, or one warning, for weights that engines fuse and whose scales differ."""
        patterns = tuple(group for preset in PRESETS.values() for group in preset)
        unequal = []
        for group in groups_of(patterns, self._found):
            amaxes = [self._found[name] for name in group.names]
            if min(amaxes) != max(amaxes):
                unequal.append((min(amaxes) / max(amaxes), group))
        if not unequal:
            return
        share, group = min(unequal, key=lambda item: item[0])
        text = (
            f"{len(unequal)} groups of weights that engines fuse have tensor amaxes of their own; an engine that takes one "
            f"global scale for {group} decodes some of them to {share:.2f} of their values"
        )
        if not self._allow_unequal:
            raise ValueError(
                f"{text}: train with Recipe(..., share_amax='llama'), or pass allow_unequal_scales=True for readers that keep "
                "the scales apart, as transformers does"
            )
        logger.warning("%s: Recipe(..., share_amax='llama') gives them one", text)
