"""install() before a pretrain() by Muon, in the ranks of a pool: right bytes, and each mistake."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.megatron import installing
from tests.megatron.installing import RECIPE, installed
from tests.megatron.muon import WHY_NO_MUON, muon_in_the_host
from tests.megatron.pretraining import WHY_NOT, pretrain
from tests.megatron.training import NARROW
from tests.workers import error_of
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


def begun(*flags: str) -> dict[str, Any]:
    """The masters before the first step of a run."""
    with muon_in_the_host():
        return installing.begun(*MUON, *flags)


def plain(*flags: str) -> dict[str, Any]:
    """A run of a script that provides its model, without zerocast: what is left of it."""
    with muon_in_the_host():
        return pretrain(*MUON, *flags, provides_model=True, after=installing.left)


def _with(*flags: str, recipe: Any = RECIPE, without: str = "") -> Callable[[], Any]:
    def case() -> None:
        with installed(recipe, None):
            pretrain("--train-iters", "1", *MUON, *flags, without=without)

    return case


def _two_recipes() -> None:
    with installed({"*.linear_*.weight": ("fp8_block", "fp8_current")[dist.get_rank()]}):
        pretrain("--train-iters", "1", *MUON)


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


CASES: dict[str, Callable[[], Any]] = {
    "whole masters": _with(without=installing.DISTRIBUTED),
    "values of matrices": _with("--no-use-layer-wise-param-layout"),
    "lion beside": _with("--muon-scalar-optimizer", "lion"),
    "torch": _with("--ckpt-format", "torch"),
    "two recipes": _two_recipes,
    "an embedding": _with(recipe={"*.weight": "fp8_block"}),
    "mxfp8": _with(recipe={"*.linear_*.weight": "mxfp8"}),
    "experts with biases": _with(*EXPERTS, without="--disable-bias-linear"),
    "an older release": _in_an_older_release,
    "a model that is wrapped otherwise": _wrapped_otherwise,
    "a moment that is not saved": _saved_without_a_moment,
}


def say(name: str) -> str:
    """The message that a case raises; afterwards nothing is installed."""
    with muon_in_the_host():
        said = error_of(CASES[name])
    assert installation._installed is None
    return said
