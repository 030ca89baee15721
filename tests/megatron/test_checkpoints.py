"""A run that is saved, loaded and continued is the run that was never interrupted."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import (
    ALL,
    MIXED,
    NARROW,
    Case,
    build_attached,
    check_loaded,
    checkpoint_content,
    resume,
    saved,
)
from tests.workers import Ranks, on_ranks
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.optimizer_state import _unpadded

pytestmark = needs_megatron
pytest.importorskip("psutil", reason="Megatron's checkpoints need psutil")


KINDS = ["dp_reshardable", "fully_reshardable"]
SLOW = pytest.mark.slow


class Bucket(NamedTuple):
    """The part of a bucket of Megatron's that tells where its padding is."""

    offset: int
    numel_unpadded: int


def test_places_without_padding() -> None:
    """Each parameter moves down by the padding of all buckets before its own, and of no other."""
    buckets = [Bucket(0, 10), Bucket(16, 20), Bucket(48, 8)]
    places = {"a": (0, 10, 0), "b": (16, 24, 1), "c": (24, 36, 1), "d": (48, 56, 2)}
    assert _unpadded(buckets, places) == {"a": (0, 10, 0), "b": (10, 18, 1), "c": (18, 30, 1), "d": (30, 38, 2)}


@pytest.mark.parametrize("sharding", [KINDS[0], pytest.param(KINDS[1], marks=SLOW)])
@pytest.mark.parametrize("kind", ["frozen plain", "frozen quantized", "buffers", "tied"])
def test_every_kind_of_model_resumes_afresh(ranks: Ranks, tmp_path: Path, kind: str, sharding: str) -> None:
    formats = {"frozen plain": "other half", "frozen quantized": "frozen"}.get(kind, NARROW)
    ranks(2)(resume, Case(formats, kind=kind), str(tmp_path), sharding)


@on_ranks(2)
@host()
def test_frozen_bytes_of_another_format() -> None:
    """The buffers of both formats have the same shapes."""
    run, _ = build_attached(Case(NARROW, kind="frozen quantized"))
    entries = integration.dequantize_(run.ddp.module.sharded_state_dict()).items()
    state = {name: entry.data for name, entry in entries}
    state["layers.0.weight.format"] = state["layers.0.weight.format"] ^ 1
    said = "the frozen weight layers.0.weight is nvfp4, and .* in the checkpoint: it has no master to be cast from"
    with pytest.raises(ValueError, match=said):
        run.ddp.module.load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after", "experts", "kind"),
    [
        (2, 3, True, KINDS[0]),
        (3, 2, True, KINDS[1]),
        pytest.param(3, 1, True, KINDS[0], marks=SLOW),
        pytest.param(2, 4, False, KINDS[0], marks=SLOW),
        pytest.param(2, 4, True, KINDS[1], marks=SLOW),
        pytest.param(1, 4, False, KINDS[1], marks=SLOW),
    ],
)
def test_other_numbers_of_ranks(
    ranks: Ranks, tmp_path: Path, before: int, after: int, experts: bool, kind: str
) -> None:
    case = Case(MIXED, overlap=True, experts=experts)
    written = ranks(before)(saved, case, str(tmp_path), kind)[0]
    ranks(after)(check_loaded, case, str(tmp_path), kind, written)


@SLOW
@pytest.mark.parametrize(("kind", "busbw", "world"), [(KINDS[0], False, 2), (KINDS[1], False, 3), (KINDS[1], True, 1)])
@pytest.mark.parametrize("formats", ALL)
def test_several_buckets(ranks: Ranks, tmp_path: Path, formats: str, busbw: bool, kind: str, world: int) -> None:
    """Padding lies between them, for bandwidth much of it; Megatron alone then saves parameters from the wrong places."""
    case = Case(formats, overlap=True, busbw=busbw, bucket_size=20_000)
    written = ranks(world)(saved, case, str(tmp_path), kind)[0]
    ranks(world)(check_loaded, case, str(tmp_path), kind, written)


@on_ranks(4)
@pytest.mark.parametrize("is_loading", [False, pytest.param(True, marks=SLOW)])
@host()
def test_a_rank_without_parameters_of_a_bucket(is_loading: bool) -> None:
    """Megatron asserts there on that rank alone, and the others wait."""
    run, _ = build_attached(Case(MIXED, experts=True))
    run.step(0)
    with pytest.raises(ValueError, match=r"leaves 1 of 4 ranks without any.* use fully_reshardable"):
        checkpoint_content(run, is_loading, KINDS[0])
    checkpoint_content(run, is_loading, KINDS[1])
