"""zerocast.verify every so many steps of a prepared model. What it finds: tests/hosts/test_verify.py."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.workers import on_ranks
from zerocast import VerificationError


def kept_codes(model: Any, weight: Any) -> torch.Tensor:
    """The codes that this rank keeps of a weight and sends."""
    (group,) = models.manager(model).plan.cast_groups
    return group.kept_codes(weight.name).view(-1)


def _break_the_cast(model: Any) -> None:
    _, weight = models.masters(model)["blocks.1.3.weight"]
    plan = models.manager(model).plan
    launch = plan.launch

    def broken(**options: Any) -> None:
        launch(**options)
        kept_codes(model, weight)[0] ^= 1

    plan.launch = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 0, 0, 1, 1, 1]), (2, [0, 0, 0, 1, 0, 1])])
@on_ranks(2)
def test_verify_every(every: int, wanted: list[int]) -> None:
    model = Net(("nvfp4", models.DELAYED), 64, 96)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe), verify_every=every, keep_codes=True)
    models.sharded(model, prepare=False)
    optimizer, raised = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            _break_the_cast(model)
        try:
            models.train(model, optimizer, range(step, step + 1), 64)
        except VerificationError as error:
            raised.append("blocks.1.3.weight" in str(error))
            models.train(model, optimizer, range(step, step + 1), 64)  # says it once a cast
        else:
            raised.append(False)
    assert raised == [bool(value) for value in wanted]


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="verify_every is None or at least 1, got 0"):
        zerocast.fsdp2.prepare(nn.Linear(32, 32), zerocast.Recipe({"weight": "nvfp4"}), verify_every=0)
