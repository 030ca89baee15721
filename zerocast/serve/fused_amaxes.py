"""Checks of global scales: weights that an engine fuses into one matrix need the same global scale.

vLLM concatenates query, key and value, and gate and up. It takes the largest of their stored global
scales and does not rescale the codes of the others (`vllm/model_executor/layers/quantization/`:
`compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `modelopt.py`).
"""

import logging
from collections.abc import Mapping, Sequence

from zerocast.formats import FormatSpec
from zerocast.formats.readers import FUSED
from zerocast.formats.shared_amax import SharedAmax, groups_of
from zerocast.serve.namings import layout_of
from zerocast.serve.piece import Piece
from zerocast.weight import QuantizedWeight

logger = logging.getLogger(__name__)

_REMEDY = (
    "train with quantize_(..., serve='vllm'), or pass allow_unequal_scales=True for readers that keep the scales apart, as "
    "transformers does"
)


def check_shared_amaxes(
    naming: str,
    pieces: Mapping[str, Sequence[Piece]],
    formats: Mapping[str, FormatSpec],
    shared: Mapping[str, SharedAmax | None],
) -> None:
    """Raise ValueError for weights that engines fuse and that do not share their tensor amax in
    training. Called before any of them is read.
    """
    weight_of: dict[str, str] = {}
    for name, fmt in formats.items():
        if layout_of(naming, name, fmt).shares_amax:
            weight_of |= dict.fromkeys((piece.name for piece in pieces[name]), name)
    for group in groups_of(FUSED, weight_of):
        members = {weight_of[name] for name in group.names}
        if len(members) > 1 and len({shared[name] or name for name in members}) > 1:
            raise ValueError(
                f"{group} have different tensor amaxes, and an engine that fuses them takes one: {_REMEDY}"
            )


class FusedAmaxes:
    """The tensor amaxes of the weights that an export has written."""

    def __init__(self, naming: str, allow_unequal: bool) -> None:
        self._naming = naming
        self._allow_unequal = allow_unequal
        # By stored name.
        self._amaxes: dict[str, float] = {}

    def note(self, name: str, weight: QuantizedWeight, pieces: Sequence[Piece]) -> None:
        """Remember the amax of a weight that is written."""
        if self._naming != "bf16" and layout_of(self._naming, name, weight.format).shares_amax:
            assert weight.amax is not None
            self._amaxes |= dict.fromkeys((piece.name for piece in pieces), weight.amax.item())

    def check(self) -> None:
        """Raise ValueError, or one warning, for weights that engines fuse and whose scales
        differ.
        """
        unequal = []
        for group in groups_of(FUSED, self._amaxes):
            amaxes = [self._amaxes[name] for name in group.names]
            if min(amaxes) != max(amaxes):
                unequal.append((min(amaxes) / max(amaxes), group))
        if not unequal:
            return
        share, group = min(unequal, key=lambda item: item[0])
        text = (
            f"{len(unequal)} groups of weights that engines fuse have different tensor amaxes; an engine that takes one "
            f"global scale for {group} decodes some of them to {share:.2f} of their values"
        )
        if not self._allow_unequal:
            raise ValueError(f"{text}: {_REMEDY}")
        logger.warning("%s: quantize_(..., serve='vllm') gives them one", text)
