"""One line before a pretrain() by Muon, as `test_install.py` asks it by Adam."""

import re
from pathlib import Path

import pytest

from tests.megatron import muon_install
from tests.megatron.muon_install import EXPERTS, RESHARDABLE
from tests.megatron.test_install import on, same
from tests.megatron.training import NARROW
from tests.workers import Ranks

pytestmark = pytest.mark.skipif(
    bool(muon_install.WHY_NO_PRETRAINING), reason=muon_install.WHY_NO_PRETRAINING or "there is Muon"
)
SLOW = pytest.mark.slow
TABLE = {
    "whole masters": "ValueError: .*optimizer='muon' is not supported without .* In pretrain.. that is --use-distributed-op",
    "values of matrices": "ValueError: .*--no-use-layer-wise-param-layout is not supported: .* leave it out",
    "lion beside": "ValueError: .*muon_scalar_optimizer='lion' is not supported: use 'adam'",
    "torch": "ValueError: .*--ckpt-format torch, .* saved as torch_dist only",
    "two recipes": "ValueError: .*recipe.*fp8_current",
    "an embedding": "ValueError: .*embedding.word_embeddings.weight is the table of an embedding and is not quantized",
    "mxfp8": "ValueError: .* mxfp8 needs both directions gathered.* use mxfp8:block=32x32",
    "experts with biases": "ValueError: .*bias of an expert is not a matrix, .* set add_bias_linear=False",
    "an older release": "ValueError: .*--optimizer muon is not supported: this megatron-core has no layout .*; 0.19 does",
    "a model that is wrapped otherwise": "ValueError: use_distributed_optimizer=False is not supported",
    "a moment that is not saved": "ValueError: fully_reshardable checkpoints of Megatron leave out exp_avg_sq .* use dp_resh",
}


@pytest.mark.parametrize("name", TABLE)
def test_mistakes(ranks: Ranks, name: str) -> None:
    for said in on(ranks, 2)(muon_install.say, name):
        assert re.match(TABLE[name], said), said


def test_every_mistake_is_in_the_table() -> None:
    assert TABLE.keys() == muon_install.CASES.keys()


@SLOW
@pytest.mark.parametrize("more", [(), (RESHARDABLE,)], ids=["dp_reshardable", "fully"])
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["", "experts"])
def test_trains_evaluates_saves_and_resumes(
    ranks: Ranks, tmp_path: Path, more: tuple[str, ...], experts: tuple[str, ...]
) -> None:
    """Every step verified; a resumed run is the one that was not interrupted, to the bit."""
    folder, flags = str(tmp_path / "checkpoint"), ("--train-iters", "4", *more, *experts)
    through = on(ranks, 2)(muon_install.train, *flags, "--save", folder, "--save-interval", "2")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = on(ranks, 2)(muon_install.train, *flags, "--load", folder)
    for before, after in zip(through, resumed, strict=True):
        assert not before["stale"] and set(before["weights"].values()) == {NARROW}
        assert len(before["weights"]) == (6 if experts else 4) and len(before["evaluated"]) >= 2
        assert before["losses"][4] < before["losses"][1]
        assert after["losses"] == {step: before["losses"][step] for step in (3, 4)}
        assert same(after["masters"], before["masters"]) and not after["stale"]


@SLOW
@pytest.mark.parametrize(("world", "experts"), [(3, ()), (4, ("--global-batch-size", "8", *EXPERTS))])
def test_resumes_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, world: int, experts: tuple[str, ...]) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = on(ranks, 2)(muon_install.train, "--train-iters", "2", "--save", folder, "--save-interval", "2", *experts)
    flags = ("--train-iters", "3", "--load", folder, "--override-opt_param-scheduler", *experts)
    held = on(ranks, world)(muon_install.begun, *flags)
    for rank, masters in enumerate(held):
        assert same(masters, saved[rank % 2]["masters"])  # every second rank has the same experts
    for left in on(ranks, world)(muon_install.train, *flags):
        assert not left["stale"] and list(left["losses"]) == [3]


@SLOW
def test_with_overlap_and_from_a_model_that_the_script_provides(ranks: Ranks) -> None:
    """Megatron then makes the layout of whole matrices itself: the same bytes; and so under the older name."""
    flags = ("--train-iters", "2", "--untie-embeddings-and-output-weights")
    built = on(ranks, 2)(muon_install.with_the_output_layer, False, *flags)
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--optimizer", "dist_muon")
    provided = on(ranks, 2)(muon_install.with_the_output_layer, True, *flags, *overlap)
    for one, other in zip(built, provided, strict=True):
        assert not one["stale"] and not other["stale"] and len(one["weights"]) == 5  # Adam's output layer among them
        assert one["losses"] == other["losses"] and same(one["masters"], other["masters"])


@SLOW
def test_a_checkpoint_in_bf16_gives_masters_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    save = ("--train-iters", "1", "--save", folder, "--save-interval", "1")
    masters = on(ranks, 2)(muon_install.plain, *save)[0]["masters"]
    held = on(ranks, 2)(muon_install.begun, "--train-iters", "1", "--finetune", "--load", folder)[0]
    assert same(held, {name: master.bfloat16().float() for name, master in masters.items()})
