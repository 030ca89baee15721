"""A run that torchtitan's checkpointer interrupts and resumes is the one that was never interrupted, bit for bit."""

from pathlib import Path

import pytest
from torch import nn

from tests.torchtitan.host_on_cpu import WHY_NOT, importable, needs_torchtitan
from tests.torchtitan.training import (
    MIXED,
    SLICED,
    TENSOR,
    Case,
    check_resumed,
    from_safetensors,
    loaded_masters,
    masters_not_exported,
    run_and_save,
)
from tests.workers import Ranks

if not WHY_NOT:
    with importable():
        from zerocast.integrations.torchtitan import FusedOptimizers

pytestmark = needs_torchtitan
slow = pytest.mark.slow

CASES = {
    "nvfp4": Case("nvfp4"),
    "fp8_block": Case("fp8_block"),
    "fp8_delayed": Case("fp8_delayed"),
    "AdamW of torch": Case(MIXED, "for-loop"),
    "saved in the background": Case(MIXED, options=("--checkpoint.async_mode=async",)),
    "tensor parallelism": Case(SLICED, options=TENSOR),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "nvfp4" else slow) for name in CASES])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(ranks: Ranks, name: str, tmp_path: Path) -> None:
    check_resumed(ranks, 4 if name == "tensor parallelism" else 2, CASES[name], str(tmp_path))


@slow
def test_plain_torchtitan_loads_the_masters(ranks: Ranks, tmp_path: Path) -> None:
    """Plain torchtitan and other numbers of ranks load a checkpoint, of FP32 tensors and nothing of zerocast."""
    case = Case("nvfp4", "for-loop", steps=2, options=("--checkpoint.no-last-save-model-only",))
    (_, contents, _), _ = ranks(2)(run_and_save, case, str(tmp_path))
    for world, reader in ((2, case.plain()), (3, case.plain()), (3, case)):
        for masters in ranks(world)(loaded_masters, reader, str(tmp_path), 2):
            assert masters and masters.items() <= contents.items()


@slow
def test_slices_are_loaded_without_tensor_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("nvfp4", steps=2, options=("--checkpoint.no-last-save-model-only", *TENSOR))
    contents = ranks(4)(run_and_save, case, str(tmp_path))[0][1]
    for masters in ranks(2)(loaded_masters, Case("fp8_block"), str(tmp_path), 2):
        assert masters and masters.items() <= contents.items()


@slow
def test_starting_from_safetensors_with_names_of_hugging_face(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("nvfp4", "for-loop", steps=2, options=("--checkpoint.last-save-in-hf",)).plain()
    (_, contents, _), _ = ranks(2)(run_and_save, case, str(tmp_path))
    path = tmp_path / "checkpoint" / "step-2"
    assert list(path.glob("*.safetensors"))
    for masters, complaints in ranks(2)(from_safetensors, Case("fp8_block"), str(tmp_path / "next"), str(path)):
        assert not complaints
        assert masters and masters.items() <= contents.items()


@slow
def test_masters_exported_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(masters_not_exported, Case("nvfp4", steps=2), str(tmp_path)) == [[]] * 2


def test_step_counts_are_apart() -> None:
    """A checkpoint is read into what `state_dict` gives."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizers = FusedOptimizers([model], {"lr": 1e-3})
    state = optimizers.state_dict()
    state["state.0.weight.step"].fill_(5.0)
    assert state["state.0.bias.step"] == 0.0
    optimizers.load_state_dict(state)
    again = optimizers.state_dict()
    assert (again["state.0.weight.step"], again["state.0.bias.step"]) == (5.0, 0.0)
