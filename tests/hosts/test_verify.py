"""zerocast.verify of every host: one wrong byte in any buffer of any weight on any rank is found and named, and nothing else is."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.hosts.under_test import different, find, variants
from tests.workers import Ranks, on_ranks
from zerocast import verify

LOCAL = ("scale", "amax_history")  # of these no rank alone can know what they should be


def flip(tensor: Tensor, at: int, rank: int) -> None:
    """Flip the lowest bit of one byte on one rank."""
    if dist.get_rank() == rank:
        tensor.data.view(-1).view(torch.uint8)[at] ^= 1


def every_buffer(host: str, variant: str, folder: str, culprit: int) -> tuple[int, list[str]]:
    """Flip a bit of each buffer of each weight on one rank in turn. Return their number, and reports that are wrong."""
    with find(host).inside(variant):
        run, world = find(host)(folder, variant), dist.get_world_size()
        for number in range(2):
            run.step(number)
        live, tried = run.live(), 0
        wrong = [] if verify(run.verified).ok else ["complains of what is right"]
        for number, (name, buffers) in enumerate(live.items()):
            for buffer, tensor in buffers.items():
                if world == 1 and buffer in LOCAL:
                    continue
                size = tensor.numel() * tensor.element_size()
                at = (7919 * (number + 1)) % size if number % 3 else size - 1
                flip(tensor, at, culprit)
                report = verify(run.verified)
                flip(tensor, at, culprit)
                tried += 1
                suspects = set(range(1, world)) if culprit == 0 and buffer in LOCAL else {culprit}
                same = [
                    one for one, other in buffers.items() if other.data_ptr() == tensor.data_ptr()
                ]  # one scale for both
                read = [one for one in same if f"{one.partition('_')[0]}_data" in buffers or one == buffer]
                expected = {(name, rank, one, 1, at, size) for rank in suspects for one in read}
                found = {(d.name, d.rank, d.buffer, d.wrong, d.offset, d.total) for d in report.differences}
                if found != expected or any(d.found ^ d.expected != 1 for d in report.differences):
                    wrong.append(f"{name} {buffer} byte {at} on rank {culprit} of {world}: {report}")
        return tried, wrong if verify(run.verified).ok else [*wrong, "complains of what is right again"]


@pytest.mark.parametrize(
    ("world", "culprit"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 0), (2, 0), (3, 2)))],
)
@pytest.mark.parametrize(("host", "variant"), variants())
@pytest.mark.notices(
    "a byte of a weight is not that of the cast of the masters",
    where=("ZeroAdamW", "FSDP2", "Megatron", "Apex"),
    answer="`zerocast.verify` names weight, rank, buffer and offset",
)
def test_every_buffer(ranks: Ranks, tmp_path: Path, host: str, variant: str, world: int, culprit: int) -> None:
    for tried, wrong in ranks(world)(every_buffer, host, variant, str(tmp_path), culprit, timeout=250.0):
        assert wrong == []
        assert tried >= 12


@on_ranks(3)
@pytest.mark.parametrize(("host", "variant"), variants("ZeroAdamW overlap"))
def test_what_is_right_is_not_complained_of(tmp_path: Path, host: str, variant: str) -> None:
    """Nothing right is complained of on three ranks that cut weights and blocks; verifying, saving and loading
    change nothing.
    """
    with find(host).inside(variant):
        run, twin, found = find(host)(str(tmp_path), variant), find(host)(str(tmp_path), variant), []
        for number in range(3):
            for one in (run, twin):
                one.step(number)
            found += [f"step {number}: {d}" for d in verify(run.verified).differences]
            if number == 1:
                run.save(2)
                run.load()
                found += [f"loaded: {d}" for d in verify(run.verified).differences]
                for call in (*run.refreshes().values(), *twin.refreshes().values()):
                    call()
                found += [f"refreshed: {d}" for d in verify(run.verified).differences]
        assert found + different(twin.everything(), run.everything()) == []
