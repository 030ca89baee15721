"""install() before a pretrain() by Muon, in the ranks of a pool: right bytes, and each mistake."""

from collections.abc import Callable
from typing import Any

from tests.megatron import installing
from tests.megatron.muon import muon_in_the_host
from tests.megatron.pretraining import pretrain
from tests.workers import error_of

MUON = ("--optimizer", "muon")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "allgather")


def train(*flags: str, **options: Any) -> dict[str, Any]:
    """What a run leaves, as `installing.train`."""
    with muon_in_the_host():
        return installing.train(*MUON, *flags, **options)


def begun(*flags: str) -> dict[str, Any]:
    """The masters before the first step of a run."""
    with muon_in_the_host():
        return installing.begun(*MUON, *flags)


def plain(*flags: str) -> dict[str, Any]:
    """A run of a script that provides its model, without zerocast."""
    with muon_in_the_host():
        return pretrain(*MUON, *flags, provides_model=True, after=installing.left)
