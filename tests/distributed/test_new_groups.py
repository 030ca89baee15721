"""Groups that zerocast makes: torch names them by how many groups a process is in, which differs between ranks."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers import Ranks, on_ranks
from zerocast.distributed.group import Group


def sums(group: Group, times: int = 2) -> list[float]:
    """Return the sums of ranks over new groups of the same ranks."""
    found = []
    for _ in range(times):
        ranks = torch.tensor([float(dist.get_rank())])
        group.duplicate().all_reduce_sum(ranks)
        found.append(ranks.item())
    return found


def in_more_groups() -> list[float]:
    dist.new_group([0, 1])
    return sums(Group.of(None))


def in_more_groups_of_their_own() -> list[float]:
    """Make another number of groups on each rank. As of torch 2.14 their count names torch's groups."""
    world = dist.distributed_c10d._world
    made = world.group_count
    own = [dist.new_group([dist.get_rank()], use_local_synchronization=True) for _ in range(dist.get_rank())]
    found = sums(Group.of(None))
    for group in own:
        dist.destroy_process_group(group)
    world.group_count = made  # else the next group that a case asks torch for has a name on every rank
    return found


def after_a_group_is_destroyed() -> list[float]:
    asked = dist.new_group()
    found = sums(Group.of(None))
    dist.destroy_process_group(asked)
    return found + sums(Group.of(None))


def after_one_of_ours_is_destroyed() -> list[float]:
    found = []
    for _ in range(3):
        ours = Group.of(None).duplicate()
        ranks = torch.tensor([float(dist.get_rank())])
        ours.all_reduce_sum(ranks)
        dist.destroy_process_group(ours.handle)
        found.append(ranks.item())
    return found


def of_some_ranks() -> list[float]:
    """Put ranks 0 and 1 in a group without rank 2, and let ranks 1 and 2 make new ones."""
    dist.new_group([0, 1])
    pair = dist.new_group([1, 2])
    return sums(Group.of(pair)) if dist.get_rank() else [3.0]


CASES = [
    in_more_groups,
    in_more_groups_of_their_own,
    after_a_group_is_destroyed,
    after_one_of_ours_is_destroyed,
    of_some_ranks,
]


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_unequal_numbers_of_groups(ranks: Ranks, case: Callable[[], Any]) -> None:
    assert set(itertools.chain.from_iterable(ranks(3)(case))) == {3.0}


@on_ranks(2)
def test_nothing_but_the_group_is_left_behind() -> None:
    """Nothing is left behind, not even a count on some ranks, by which torch's names of other groups would differ."""
    world = dist.distributed_c10d._world
    before = len(world.pg_names), world.group_count
    Group.of(None).duplicate()
    assert (len(world.pg_names) - before[0], world.group_count - before[1]) == (1, 0)


@on_ranks(2)
def test_a_group_has_one_cpu_twin() -> None:
    """Collectives of the twin never meet those of the group, in any order in which ranks start them."""
    group, rank = Group.of(None), dist.get_rank()
    twin = group.cpu_twin()
    assert twin.handle is group.cpu_twin().handle is not group.handle
    numbers = [torch.tensor([rank + 1]), torch.tensor([10 * (rank + 1)])]
    in_order = [(group, numbers[0]), (twin, numbers[1])][:: 1 - 2 * rank]
    flights = [ranks.all_reduce_max(number, async_op=True) for ranks, number in in_order]
    for flight in flights:
        assert flight is not None
        flight.wait()
    assert [number.item() for number in numbers] == [2, 20]
    assert Group(None, 0, 1).cpu_twin().handle is None
