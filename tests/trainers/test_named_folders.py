"""accelerate names checkpoints by itself where it is asked to, and then loads the newest one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainers.host_on_cpu import WHY_NOT, host_on_cpu
from tests.trainers.runs import Seen

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def train_once(model: Seen, optimizer: torch.optim.Optimizer) -> Tensor:
    """Step, and return the masters."""
    model(torch.ones(2, 64, dtype=torch.bfloat16)).backward()
    optimizer.step()
    return torch.cat([getattr(t, "flat", t).reshape(-1).float() for t in optimizer.state_dict()["model"].values()])


def test_the_newest_named_folder_is_loaded(tmp_path: Path) -> None:
    with host_on_cpu():
        from accelerate.utils import ProjectConfiguration

        import zerocast
        from zerocast.integrations.huggingface import Accelerator

        named = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=named)
        model = Seen()
        optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-2)
        accelerator.prepare(model, optimizer)
        for _ in range(2):
            train_once(model, optimizer)
            accelerator.save_state()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]
        third = train_once(model, optimizer)
        train_once(model, optimizer)
        accelerator.load_state()
        torch.testing.assert_close(train_once(model, optimizer), third, rtol=0, atol=0)


def test_a_plain_model_that_zeroadamw_trains_is_saved_by_its_masters(tmp_path: Path) -> None:
    """accelerate would write its parameters with safetensors, which refuses parts of one buffer."""
    with host_on_cpu():
        import zerocast
        from zerocast.integrations.huggingface import Accelerator

        accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=0.1)
        accelerator.prepare(model, optimizer)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        accelerator.save_state(str(tmp_path / "state"))
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        accelerator.load_state(str(tmp_path / "state"))
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0)
