"""zerocast.verify over TransformerEngine's tensors: a wrong byte anywhere is found and named, and stale copies are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.sharded import Weight
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.transformer_engine.hybrids import hybrid
from tests.transformer_engine.tensors import buffers
from tests.workers import Ranks, error_of


class Run:
    """Tensors that were cast, gathered and transposed, with masters that stay."""

    def __init__(self, cases: tuple[Weight, ...], columnwise: bool = False) -> None:
        self.casting = Casting(cases, columnwise=columnwise)
        self.tensors = self.casting.tensors
        self.masters, self.starts = self.casting.masters()
        self.step()

    def step(self, transposed: bool = True) -> None:
        """A cast of the masters as they are."""
        integration().quantize_master_weights(self.tensors, self.masters, self.starts, None, None, True)
        if dist.is_initialized():
            self.casting.gather()
        if transposed:
            integration().post_all_gather_processing(self.tensors)

    def report(self) -> zerocast.VerifyReport:
        return zerocast.verify(integration().masters_of(self.tensors))


def every_buffer(cases: tuple[Weight, ...]) -> tuple[list[str], list[str], list[str]]:
    """(differences of untouched tensors, what was found, what was planted): a byte of every buffer on the last rank, one by one."""
    with host_on_cpu():
        run = Run(cases)
        quiet = [str(found) for found in run.report().differences]
        last, found, planted = dist.get_world_size() - 1, [], []
        for index, (case, weight) in enumerate(zip(cases, run.tensors, strict=True)):
            for name, buffer in buffers(weight).items():
                if name == "amax" and not case.fmt.startswith("nvfp4"):
                    continue  # the host's, which moves it on
                if name == "columnwise_data" and buffer is getattr(weight, "_rowwise_data", None):
                    continue  # the same codes
                shared = name.endswith("scale_inv") and case.fmt.startswith(("fp8_delayed", "fp8_current"))
                names = ("rowwise_scale_inv", "columnwise_scale_inv") if shared else (name,)
                may_be_padding = name == "columnwise_scale_inv" and not shared
                whole, offset = buffer.view(torch.uint8).view(-1), 0 if may_be_padding else buffer.nbytes - 1
                place = whole[offset : offset + 1]
                if run.casting.rank == last:
                    place ^= 1
                found += [f"{d.name} {d.buffer} {d.rank} {d.wrong} {d.offset}" for d in run.report().differences]
                planted += [f"model weight {index} {one} {last} 1 {offset}" for one in names]
                if run.casting.rank == last:
                    place ^= 1
        return quiet, sorted(set(found)), sorted(set(planted))


def stale(cases: tuple[Weight, ...]) -> list[list[str]]:
    """Buffers found stale: masters written on one rank; the cast of that without, with new copies; copies marked invalid."""
    with host_on_cpu():
        run, found = Run(cases, columnwise=True), []

        def look() -> None:
            found.append(sorted({f"{d.format} {d.buffer}" for d in run.report().differences}))

        if run.casting.rank == 1:
            for master in run.masters:
                if master is not None:
                    master.neg_()
        look()
        run.step(transposed=False)
        look()
        integration().post_all_gather_processing(run.tensors)
        look()
        for master in run.masters:
            if master is not None:
                master.neg_()
        integration().quantize_master_weights(run.tensors, run.masters, run.starts, None)  # drops or marks copies
        run.casting.gather()
        look()
        integration().post_all_gather_processing(run.tensors)
        look()
        return found


def directions(cases: tuple[Weight, ...]) -> list[str]:
    """A Hybrid tensor whose codes by columns are in a transpose: right, and with a stale byte there."""
    with host_on_cpu():
        (row, column), rank = cases, dist.get_rank()
        weights = [hybrid(row, None), hybrid(None, column)]
        shards = [case.shard(rank) for case in cases]
        integration().quantize_master_weights(weights, [m for m, _ in shards], [start for _, start in shards], None)
        codes = [weights[0]._rowwise_storage._data, weights[1]._columnwise_storage._transpose]
        for case, held in zip(cases, codes, strict=True):  # a rank holds poison in elements that it does not own
            start, stop = case.spans[rank]
            owned = torch.zeros(case.shape, dtype=torch.bool)
            owned.view(-1)[start:stop] = True
            mine = torch.where(owned if held is codes[0] else owned.t(), held, 0).contiguous()
            dist.all_reduce(mine)
            held.copy_(mine)
        reports = [str(zerocast.verify(integration().masters_of(weights)))]
        if rank == 1:
            codes[1].view(-1)[5] ^= 1
        return [*reports, str(zerocast.verify(integration().masters_of(weights)))]


def not_known(cases: tuple[Weight, ...]) -> list[str]:
    """What is said of weights that were never cast, cast in another order, released, and broken on one rank."""
    with host_on_cpu():
        said = []
        run, other = Run(cases), Casting(cases)

        def verify(weights: Any) -> None:
            said.append(error_of(lambda: zerocast.verify(integration().masters_of(weights))))

        verify(other.tensors)
        verify(run.tensors[::-1])
        verify([])
        if run.casting.rank == 1:
            run.tensors[0]._rowwise_scale_inv = None
        verify(run.tensors)
        integration().release(run.tensors)
        verify(run.tensors)
        return said


pytestmark = needs_te

SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
COPIED = ("fp8_delayed", "fp8_current", "fp8_block", "nvfp4")
TILES = "mxfp8:block=32x32"
FORMATS = (*COPIED, "mxfp8", "identity", TILES)


def cases(formats: tuple[str, ...] = FORMATS, cut: int = NUMEL // 3 + 1) -> tuple[Weight, ...]:
    """A weight of each format on two ranks, cut inside a block."""
    return tuple(Weight(fmt, SHAPE, ((0, cut), (cut, NUMEL))) for fmt in formats)


def test_every_byte_counts(ranks: Ranks) -> None:
    """A flipped bit in every buffer of rank 1, in the padding of rowwise scales too; both ranks say the same."""
    for quiet, found, planted in ranks(2)(every_buffer, cases()):
        assert quiet == []
        assert found == planted
        assert len(planted) == 4 + 4 + 4 + 5 + 4 + 1 + 3


@pytest.mark.notices(
    "bytes are older than the masters", where="TransformerEngine", answer="`zerocast.verify` names them"
)
def test_stale_bytes_are_found(ranks: Ranks) -> None:
    """Masters that are newer than the codes; copies that are older than the codes and that TransformerEngine would read."""
    codes = {f"{fmt} rowwise_data" for fmt in FORMATS}
    for written, untransposed, transposed, dropped, made in ranks(2)(stale, cases()):
        assert codes <= set(written)
        assert untransposed == sorted(f"{fmt} columnwise_data" for fmt in COPIED)
        assert transposed == dropped == made == []


def test_directions_of_hybrid_tensors(ranks: Ranks) -> None:
    """Codes in a transpose are verified by rows."""
    for right, stale in ranks(2)(directions, cases(("fp8_current", "fp8_delayed"))):
        assert "all equal the cast of the masters" in right
        assert "model weight 1 columnwise (fp8_delayed) on rank 1: rowwise_data differs in 1 of 6,144 bytes" in stale


def test_weights_that_are_not_known(ranks: Ranks) -> None:
    """Every rank hears of it."""
    for never, reordered, nothing, broken, released in ranks(2)(not_known, cases(("nvfp4", "fp8_block"))):
        for said in (never, reordered, released):
            assert said.startswith("ValueError: rank 0: no masters are known of these 2 weights")
        assert "of these 0 weights" in nothing
        assert broken.startswith("ValueError: rank 1: it has no _rowwise_scale_inv")


@pytest.mark.usefixtures("te")
def test_padding_of_copies_is_nobodys() -> None:
    """TransformerEngine leaves the padding of columnwise scales uninitialized, so `verify` must
    ignore it.
    """
    run = Run(tuple(Weight(fmt, SHAPE, ((0, NUMEL),)) for fmt in ("fp8_block", "nvfp4")))
    block, nvfp4 = (tensor._columnwise_scale_inv for tensor in run.tensors)
    block[:, 1:], nvfp4[SHAPE[1] :] = 7.0, 7
    assert run.report().ok
    nvfp4[SHAPE[1] - 1, SHAPE[0] // 16 - 1] ^= 1
    assert [difference.buffer for difference in run.report().differences] == ["columnwise_scale_inv"]


@pytest.mark.usefixtures("te")
def test_a_copy_of_codes_that_serve_both_directions() -> None:
    """Where something has made one, it is read by columns: verify compares it, and the next call puts the codes in its place."""
    run = Run((Weight(TILES, SHAPE, ((0, NUMEL),)),))
    (weight,) = run.tensors
    weight._columnwise_data = weight._columnwise_data.clone()
    assert run.report().ok
    weight._columnwise_data.view(-1)[9] ^= 1
    (difference,) = run.report().differences
    assert str(difference).startswith(
        f"model weight 0 ({TILES}) on rank 0: columnwise_data differs in 1 of 6,144 bytes"
    )
    run.step()
    assert run.report().ok and weight._columnwise_data is weight._rowwise_data
