"""One line before a pretrain() by Muon, as `test_install.py` asks it by Adam."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.megatron import installing
from tests.megatron.installing import RECIPE, installed
from tests.megatron.muon import WHY_NO_MUON, muon_in_the_host
from tests.megatron.pretraining import WHY_NOT, pretrain
from tests.megatron.test_install import on, same
from tests.megatron.training import NARROW
from tests.workers import Ranks, error_of
from zerocast.integrations.megatron import host, installation

if not WHY_NO_MUON:
    from megatron.core.optimizer import layer_wise_optimizer

WHY_NO_PRETRAINING = WHY_NOT or WHY_NO_MUON
MUON = ("--optimizer", "muon")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "allgather")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def train(*flags: str, **options: Any) -> dict[str, Any]:
    """What a run leaves, as `installing.train`."""
    with muon_in_the_host():
        return installing.train(*MUON, *flags, **options)


def with_the_output_layer(provides_model: bool, *flags: str) -> dict[str, Any]:
    """Quantized too, which Adam updates; of a model that Megatron builds, or that the script provides."""
    recipe = {"*embeddings.weight": "identity", "*_*.weight": NARROW}
    return train(*flags, recipe=recipe, provides_model=provides_model)


def _with(*flags: str, recipe: Any = RECIPE, without: str = "") -> Callable[[], Any]:
    def case() -> None:
        with installed(recipe, None):
            pretrain("--train-iters", "1", *MUON, *flags, without=without)

    return case


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
        _with()()


def _wrapped_otherwise() -> None:
    """A release that wraps models elsewhere, with no layout of whole matrices."""
    with mock.patch.object(host, "wrappers_of_built_models", return_value=[]):
        _with()()


def _saved_without_a_moment() -> None:
    """As under Lion, whose moments Megatron takes Adam's for."""
    with mock.patch.object(host, "moments_left_out", return_value=["exp_avg_sq"]):
        _with(RESHARDABLE, "--save", "never written", "--save-interval", "1")()


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "values of matrices": (
        _with("--no-use-layer-wise-param-layout"),
        "ValueError: .*--no-use-layer-wise-param-layout is not supported: .* leave it out",
    ),
    "an older release": (
        _in_an_older_release,
        "ValueError: .*--optimizer muon is not supported: this megatron-core has no layout .*; 0.19 does",
    ),
    "a model that is wrapped otherwise": (
        _wrapped_otherwise,
        "ValueError: use_distributed_optimizer=False is not supported",
    ),
    "a moment that is not saved": (
        _saved_without_a_moment,
        "ValueError: fully_reshardable checkpoints of Megatron leave out exp_avg_sq .* use dp_resh",
    ),
}


def say(name: str) -> str:
    """The message that a case raises; afterwards nothing is installed."""
    with muon_in_the_host():
        said = error_of(CASES[name][0])
    assert installation._installed is None
    return said


pytestmark = pytest.mark.skipif(bool(WHY_NO_PRETRAINING), reason=WHY_NO_PRETRAINING or "there is Muon")
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_mistakes(ranks: Ranks, name: str) -> None:
    for said in on(ranks, 2)(say, name):
        assert re.match(CASES[name][1], said), said


@SLOW
@pytest.mark.parametrize("more", [(), (RESHARDABLE,)], ids=["dp_reshardable", "fully"])
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["", "experts"])
def test_trains_evaluates_saves_and_resumes(
    ranks: Ranks, tmp_path: Path, more: tuple[str, ...], experts: tuple[str, ...]
) -> None:
    """Every step verified; a resumed run is the one that was not interrupted, to the bit."""
    folder, flags = str(tmp_path / "checkpoint"), ("--train-iters", "4", *more, *experts)
    through = on(ranks, 2)(train, *flags, "--save", folder, "--save-interval", "2")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = on(ranks, 2)(train, *flags, "--load", folder)
    for before, after in zip(through, resumed, strict=True):
        assert not before["stale"] and set(before["weights"].values()) == {NARROW, "fp8_block"}
        assert len(before["weights"]) == (6 if experts else 4) and len(before["evaluated"]) >= 2
        assert before["losses"][4] < before["losses"][1]
        assert after["losses"] == {step: before["losses"][step] for step in (3, 4)}
        assert same(after["masters"], before["masters"]) and not after["stale"]


@SLOW
def test_with_overlap_and_from_a_model_that_the_script_provides(ranks: Ranks) -> None:
    """Megatron then makes the layout of whole matrices itself: the same bytes; and so under the older name."""
    flags = ("--train-iters", "2", "--untie-embeddings-and-output-weights")
    built = on(ranks, 2)(with_the_output_layer, False, *flags)
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--optimizer", "dist_muon")
    provided = on(ranks, 2)(with_the_output_layer, True, *flags, *overlap)
    for one, other in zip(built, provided, strict=True):
        assert not one["stale"] and not other["stale"] and len(one["weights"]) == 5  # Adam's output layer among them
        assert one["losses"] == other["losses"] and same(one["masters"], other["masters"])
