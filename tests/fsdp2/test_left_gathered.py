"""Masters that change while their weights are left gathered: ranks ask each other, and only then."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.test_freshness import ONE_RANK
from tests.fsdp2.test_training import MIXED, gpt, step_all, two_optimizers
from tests.workers import Ranks
from zerocast.fsdp2 import left_gathered


def changed(name: str, ranks: tuple[int, ...]) -> list[str]:
    """What forward passes say once these ranks changed masters whose weights are left gathered: a module's, the model's, and after
    `refresh`."""
    model = models.sharded(models.Net(models.FEW, 64, 96), reshard_after_forward=False)
    with torch.no_grad():
        model(models.batch(0, 64))
    if dist.get_rank() in ranks:
        ONE_RANK[name](model)
    said = []
    for forward in (model.blocks[0], model, model):
        with torch.no_grad():
            try:
                forward(models.batch(0, 64))
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
    zerocast.fsdp2.refresh(model)
    return [*said, *models.complaints(model, name)]


@pytest.mark.parametrize(
    "name", ["write_data", *(models.slow(name) for name in ("copy_data", "swap_average", "write_local"))]
)
def test_a_change_on_one_rank_of_what_is_left_gathered(ranks: Ranks, name: str) -> None:
    """No gather comes that could tell; a module's forward pass alone is refused where bytes are old.

    A load is not among these: `state_dict` frees what FSDP2 left gathered, with or without zerocast, on the rank that calls it.
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


def without_questions() -> None:
    """Two steps, in which nobody is asked about gathered weights."""
    model = gpt(MIXED)
    with mock.patch.object(left_gathered, "Said", side_effect=AssertionError("asked")):
        step_all(model, two_optimizers(model), range(2))


def test_nobody_asks_while_it_trains(ranks: Ranks) -> None:
    """`loss` gathers the root module before the model's own hooks run; that is not left from an earlier pass."""
    ranks(2)(without_questions)
