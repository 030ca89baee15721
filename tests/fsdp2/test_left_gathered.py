"""Masters that change while their weights are left gathered: ranks ask each other, and only then."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.test_freshness import ONE_RANK
from tests.workers import Ranks, on_ranks
from zerocast.fsdp2.gather_status import GatherStatus

FORMATS = "nvfp4", "fp8_block"  # whose products a refresh does not change


def passed(forward: nn.Module) -> tuple[str, torch.Tensor | None]:
    """What a forward pass says, and what it gives."""
    with torch.no_grad():
        try:
            return "nothing", forward(models.batch(0, 64))
        except RuntimeError as error:
            return str(error), None


def changed(name: str, ranks: tuple[int, ...]) -> list[str]:
    """What is said once these ranks changed masters whose weights are left gathered: by forward
    passes of a module and twice of the model; then complaints, after `refresh` too.
    """
    model = models.sharded(models.Net(FORMATS, 64, 96), reshard_after_forward=False)
    passed(model)
    if dist.get_rank() in ranks:
        ONE_RANK[name](model)
    said, outputs = zip(*(passed(forward) for forward in (model.blocks[0], model, model)), strict=True)
    zerocast.fsdp2.refresh(model)
    _, fresh = passed(model)
    assert fresh is not None
    stale = ["stale" for output in outputs[1:] if output is not None and not torch.equal(output, fresh)]
    return [*said, *stale, *models.complaints(model, name)]


@pytest.mark.parametrize(
    "name", ["write_data", *(models.slow(name) for name in ("copy_data", "swap_average", "write_local"))]
)
def test_a_change_on_one_rank_of_what_is_left_gathered(ranks: Ranks, name: str) -> None:
    """No gather comes that could tell; a module's forward pass alone is refused where bytes are
    old.

    A load is not among these: `state_dict` frees what FSDP2 left gathered, with or without
    zerocast, on the rank that calls it.
    """
    for rank, (module, model, again, *complaints) in enumerate(ranks(3)(changed, name, (1,))):
        assert ("after the forward pass that left it gathered" in module) == (rank == 1), module
        assert "was changed on ranks [1] of its shard group and not on ranks" in model
        assert again == model
        assert not complaints


def test_a_change_on_all_ranks_of_what_is_left_gathered(ranks: Ranks) -> None:
    for module, *others in ranks(2)(changed, "write_data", (0, 1)):
        assert "after the forward pass that left it gathered" in module
        assert others == ["nothing", "nothing"]


class Rooted(nn.Module):
    """A prepared weight in the root module, which `loss` gathers before the hooks of the model run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64)])
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both layers in order."""
        return self.head(self.blocks[0](x))  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of outputs."""
        return self(x).float().square().mean()  # type: ignore[no-any-return]


@on_ranks(2)
def test_nobody_asks_while_it_trains() -> None:
    """What was gathered anew is not left from an earlier pass."""
    model = models.sharded(Rooted(), {"*weight": "nvfp4"})
    register_fsdp_forward_method(model, "loss")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(GatherStatus, "exchange", side_effect=AssertionError("asked")):
        for step in range(3):
            for part in range(2):
                model.loss(models.batch(2 * step + part, 64)).backward()
            optimizer.step()
