"""torch.compile of `step`, which torch's own optimizers allow: ours runs between graphs, and its bits are those of eager."""

from typing import Any

import pytest
import torch

from tests import casts
from tests.optim.runs import Run, Trainer
from tests.optim.test_muon import SMALL
from tests.optim.test_skipped_steps import everything


@pytest.mark.parametrize("run", [Run(), SMALL], ids=["ZeroAdamW", "ZeroMuon"])
def test_a_compiled_step_is_the_step(run: Run) -> None:
    eager, compiled = Trainer(run), Trainer(run)
    step: Any = torch.compile(compiled.optimizer.step, backend="eager")
    for number in range(3):
        eager.backward(number)
        eager.optimizer.step()
        compiled.backward(number)
        step()
        casts.assert_same_bytes(everything(compiled), everything(eager), f"step {number}")
