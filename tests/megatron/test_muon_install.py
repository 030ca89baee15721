"""One line before a pretrain() by Muon, as `test_install.py` asks it by Adam."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.megatron import pretraining
from tests.megatron.muon import WHY_NO_MUON, muon_in_the_host
from tests.megatron.pretraining import WHY_NOT, Left, run_with
from tests.megatron.test_install import SECONDS
from tests.megatron.training import NARROW
from tests.workers import error_of, on_ranks
from zerocast.integrations.megatron import installation, layout, optimizer_state

if not WHY_NO_MUON:
    from megatron.core.optimizer import layer_wise_optimizer

WHY_NO_PRETRAINING = WHY_NOT or WHY_NO_MUON
MUON = ("--optimizer", "muon")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "allgather")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def train(*flags: str, **options: Any) -> Left:
    """A run of `pretraining.train` by Muon."""
    with muon_in_the_host():
        return pretraining.train(*MUON, *flags, **options)


@contextlib.contextmanager
def _without(owner: Any, name: str) -> Iterator[None]:
    """A host that lacks a name."""
    held = vars(owner)[name]
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, held)


def _in_an_older_release() -> None:
    with _without(layer_wise_optimizer, "tag_params_for_buffer_routing"):
        run_with(*MUON)()


def _wrapped_otherwise() -> None:
    """A release that wraps models elsewhere, with no layout of whole matrices."""
    with mock.patch.object(layout, "whole_matrices", return_value=[]):
        run_with(*MUON)()


def _saved_without_a_moment() -> None:
    """Megatron does so under Lion, whose moments it takes Adam's for."""
    with mock.patch.object(optimizer_state, "moments_left_out", return_value=["exp_avg_sq"]):
        run_with(*MUON, RESHARDABLE, "--save", "never written", "--save-interval", "1")()


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "values of matrices": (
        run_with(*MUON, "--no-use-layer-wise-param-layout"),
        "ValueError: .*-param-layout is not .* leave it",
    ),
    "an older release": (_in_an_older_release, "ValueError: .*muon is not supported: .* no layout .*; 0.19 does"),
    "a model that is wrapped otherwise": (_wrapped_otherwise, "ValueError: use_distributed_optimizer=False is not"),
    "a moment that is not saved": (
        _saved_without_a_moment,
        "ValueError: fully_reshardable checkpoints of Megatron leave out exp_avg_sq .* use dp_resh",
    ),
}


pytestmark = pytest.mark.skipif(bool(WHY_NO_PRETRAINING), reason=WHY_NO_PRETRAINING or "there is Muon")
SLOW = pytest.mark.slow


@on_ranks(2, timeout=SECONDS)
@pytest.mark.parametrize("name", CASES)
def test_mistakes(name: str) -> None:
    mistake, message = CASES[name]
    with muon_in_the_host():
        said = error_of(mistake)
    assert re.match(message, said), said
    assert installation._installed is None


@SLOW
@on_ranks(2, timeout=SECONDS)
@pytest.mark.parametrize("more", [(), (RESHARDABLE,)], ids=["dp_reshardable", "fully"])
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["", "experts"])
def test_trains_evaluates_saves_and_resumes(tmp_path: Path, more: tuple[str, ...], experts: tuple[str, ...]) -> None:
    """Every step verified; a resumed run is the one that was not interrupted, to the bit."""
    flags = ("--train-iters", "4", *more, *experts)
    through = train(*flags, *pretraining.saving_to(tmp_path))
    assert set(through.formats.values()) == {NARROW, "fp8_block"}
    assert len(through.formats) == (6 if experts else 4) and len(through.evaluated) >= 2
    assert through.losses[4] < through.losses[1]
    through.check_resumed(train(*flags, *pretraining.loading_from(tmp_path)))


@SLOW
@on_ranks(2, timeout=SECONDS)
def test_with_overlap_and_from_a_model_that_the_script_provides() -> None:
    """Megatron then makes the layout of whole matrices itself: the same bytes; and so under the older name. Adam updates the output
    layer, which is quantized too.
    """
    flags = ("--train-iters", "2", "--untie-embeddings-and-output-weights")
    recipe = {"*embeddings.weight": "identity", "*_*.weight": NARROW}
    built = train(*flags, recipe=recipe)
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--optimizer", "dist_muon")
    provided = train(*flags, *overlap, recipe=recipe, provides_model=True)
    assert len(built.formats) == 5
    built.check_same(provided)
