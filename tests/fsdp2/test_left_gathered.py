"""Masters that change while their weights are left gathered: ranks ask each other, and only then."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

import zerocast
from tests.fsdp2 import models, test_loops
from tests.fsdp2.test_freshness import ONE_RANK
from tests.workers import on_ranks
from zerocast.fsdp2.gather_status import GatherStatus

FORMATS = "nvfp4", "fp8_block"  # whose products a refresh does not change


def passed(forward: nn.Module) -> tuple[str, torch.Tensor | None]:
    """What a forward pass says, and what it gives."""
    with torch.no_grad():
        try:
            return "nothing", forward(models.batch(0, 64))
        except RuntimeError as error:
            return str(error), None


@pytest.mark.parametrize(
    ("name", "world", "writers"),
    [
        ("write_data", 3, (1,)),
        models.slow("write_local", 3, (1,)),
        ("write_data", 2, (0, 1)),
    ],
)
@on_ranks()
def test_a_change_of_what_is_left_gathered(name: str, writers: tuple[int, ...]) -> None:
    """No gather comes that could tell; a module's forward pass alone is refused where bytes are
    old.

    A load is not among these: `state_dict` frees what FSDP2 left gathered, with or without
    zerocast, on the rank that calls it.
    """
    model = models.sharded(models.Net(FORMATS, 64, 96), reshard_after_forward=False)
    passed(model)
    if dist.get_rank() in writers:
        ONE_RANK[name](model)
    said, outputs = zip(*(passed(forward) for forward in (model.blocks[0], model, model)), strict=True)
    zerocast.fsdp2.refresh(model)
    _, fresh = passed(model)
    assert fresh is not None
    assert all(output is None or torch.equal(output, fresh) for output in outputs[1:])
    models.check(model, name)
    assert ("after the forward pass that left it gathered" in said[0]) == (dist.get_rank() in writers)
    assert said[1] == said[2]
    if writers == (1,):
        assert "was changed on ranks [1] of its shard group and not on ranks" in said[1]
    else:
        assert said[1] == "nothing"


class Rooted(test_loops.Rooted):
    """With a method that gathers the weights of the root module before the hooks of the model run."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of outputs."""
        return self(x).float().square().mean()  # type: ignore[no-any-return]


@on_ranks(2)
def test_nobody_asks_while_it_trains() -> None:
    """Weights that are gathered again are not left from an earlier pass."""
    model = models.sharded(Rooted())
    register_fsdp_forward_method(model, "loss")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(GatherStatus, "exchange", side_effect=AssertionError("asked")):
        for step in range(3):
            for part in range(2):
                model.loss(models.batch(2 * step + part, 64)).backward()
            optimizer.step()
