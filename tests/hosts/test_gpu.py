"""The shared tests of hosts over NCCL, a GPU a rank."""

import contextlib
import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.devices import gpus
from tests.hosts import test_checkpoints, test_faults, test_verify
from tests.hosts.stopping import VICTIM, Place, limit_collectives, processes
from tests.hosts.under_test import HOSTS, find, param, variants
from tests.workers import START_SECONDS, Ranks, join

SECONDS = 250.0
DIED, FINISHED = 17, 0
TIMEOUT = 10.0  # of the process groups
MARGIN = 30.0  # for NCCL's watchdog to notice, and for the process to end


@pytest.mark.parametrize(("host", "variant"), variants())
class TestOnGpus:
    """Tests of each host's first variant."""

    pytestmark = gpus(2)

    def test_some_operators(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        if "step" not in find(host).remedies(variant):
            pytest.skip("what raises within torch's own optimizer is torch's")
        arguments = host, variant, "step", test_faults.SAMPLES, str(tmp_path)
        ((outcomes, wrong),) = gpu_ranks(1)(test_faults.at_operators, *arguments, timeout=SECONDS)
        assert wrong == []
        assert outcomes["load"], outcomes

    def test_every_buffer(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        for tried, wrong in gpu_ranks(2)(test_verify.every_buffer, host, variant, str(tmp_path), 1, timeout=SECONDS):
            assert wrong == []
            assert tried >= 12

    def test_resume_is_exact(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        found = gpu_ranks(2)(test_checkpoints.interrupted, host, variant, str(tmp_path), timeout=SECONDS)
        assert found == [[], []]

    def test_other_numbers_of_ranks(self, gpu_ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
        if host == "Megatron-Core":
            pytest.skip("as Megatron's own checkpoints do: tests/megatron/test_gpu.py")
        for before, after in ((2, 1), (1, 2)):
            folder = str(tmp_path / f"{before}")
            test_checkpoints.check_other_ranks(gpu_ranks, folder, host, variant, before, after, SECONDS)


def train(rank: int, world: int, backend: str, folder: str, host: str, place: Place | None) -> None:
    """Take three steps, each of which the host waits for. A rank dies in the second. Errors end the process,
    like a user's.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # NCCL's watchdog aborts: no time for a dump of the whole memory,
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # nor for a debugging report,
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # nor, for a minute, for the other ranks' reports
    join(rank, world, backend, Path(folder, "store").as_uri(), timedelta(seconds=START_SECONDS))
    variant = find(host).VARIANTS[0]
    with find(host).inside(variant):
        run = find(host)(str(Path(folder, "checkpoints")), variant)
        for number in range(3):
            strikes = place is not None and rank == VICTIM and number == 1
            with place.armed(die) if place and strikes else contextlib.nullcontext():
                run.step(number)
            run.everything()
            limit_collectives(TIMEOUT)
    dist.barrier()
    dist.destroy_process_group()


def die() -> NoReturn:
    """End this process after all launched work is done, so that the other rank waits in the next
    collective and in none before.
    """
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    os._exit(DIED)


def before_collectives() -> list[Any]:
    """Return hosts with places before each collective of their steps. With None no rank
    dies, and none may raise.
    """
    found = []
    for host in HOSTS:
        steps = [p for p in find(host).PLACES if p.when == "before" and "checkpoint" not in p.owner]
        for place in (None, *steps):
            found += [pytest.param(host, place, marks=param(host).marks, id=f"{host}-{place}")]
    return found


@pytest.mark.parametrize(("host", "place"), before_collectives())
class TestOfARankThatDies:
    """Tests of a host that runs ahead of the GPU and waits there. The watchdog of the process group ends the
    process after the timeout.
    """

    pytestmark = gpus(2)

    def test_the_other_gets_an_error_in_time(self, tmp_path: Path, host: str, place: Place | None) -> None:
        check_error_in_time(tmp_path, host, place, "nccl")


def check_error_in_time(folder: Path, host: str, place: Place | None, backend: str) -> None:
    with processes(train, 2, backend, str(folder), host, place) as (other, victim):
        victim.join(2 * START_SECONDS)
        assert victim.exitcode == (DIED if place else FINISHED)
        died = time.monotonic()
        other.join(TIMEOUT + MARGIN)
        assert other.exitcode is not None, f"still waiting {TIMEOUT + MARGIN} s after the other rank died"
        assert (other.exitcode == FINISHED) == (place is None)
        print(f"{host}, {place}: exit status {other.exitcode} after {time.monotonic() - died:.1f} s")
