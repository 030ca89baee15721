"""zerocast.verify over TransformerEngine's tensors: a wrong byte anywhere is found and named, and stale copies are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.casts import Weight
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.transformer_engine.tensors import NUMEL, SHAPE, TILES, Casting, buffers, hybrid, weights_of
from tests.workers import on_ranks

pytestmark = needs_te

COPIED = ("fp8_delayed", "fp8_current", "fp8_block", "nvfp4")
FORMATS = (*COPIED, "mxfp8", "identity", TILES)
CUT = (NUMEL // 3 + 1,)  # inside a block


class Run(Casting):
    """Tensors that were cast, gathered and transposed, with masters that stay."""

    def __init__(self, cases: tuple[Weight, ...], columnwise: bool = False) -> None:
        super().__init__(cases, columnwise=columnwise)
        self.lasting = self.masters()
        self.step()

    def step(self, transposed: bool = True) -> None:
        """A cast of the masters as they are."""
        integration().quantize_master_weights(self.tensors, *self.lasting, None, None, True)
        if dist.is_initialized():
            self.gather()
        if transposed:
            integration().post_all_gather_processing(self.tensors)

    def write_masters(self) -> None:
        for master in self.lasting[0]:
            if master is not None:
                master.neg_()

    def report(self) -> zerocast.VerifyReport:
        return zerocast.verify(integration().masters_of(self.tensors))

    def differing(self) -> set[str]:
        """The buffers that differ, with their formats."""
        return {f"{difference.format} {difference.buffer}" for difference in self.report().differences}


@on_ranks(2)
@host_on_cpu()
def test_every_byte_counts() -> None:
    """A flipped bit in every buffer of rank 1, in the padding of rowwise scales too; both ranks say the same."""
    run = Run(weights_of(*FORMATS, cuts=CUT))
    planted = set()
    assert run.report().ok
    for index, (case, weight) in enumerate(zip(run.cases, run.tensors, strict=True)):
        for name, buffer in buffers(weight).items():
            if name == "amax" and not case.fmt.startswith("nvfp4"):
                continue  # the host's, which moves it on
            if name == "columnwise_data" and buffer is getattr(weight, "_rowwise_data", None):
                continue  # the same codes
            shared = name.endswith("scale_inv") and case.fmt.startswith(("fp8_delayed", "fp8_current"))
            names = ("rowwise_scale_inv", "columnwise_scale_inv") if shared else (name,)
            may_be_padding = name == "columnwise_scale_inv" and not shared
            offset = 0 if may_be_padding else buffer.nbytes - 1
            place = buffer.view(torch.uint8).view(-1)[offset : offset + 1]
            place ^= run.rank
            found = {(d.name, d.buffer, d.rank, d.wrong, d.offset) for d in run.report().differences}
            wanted = {(f"model weight {index}", one, 1, 1, offset) for one in names}
            assert found == wanted
            place ^= run.rank
            planted |= wanted
    assert len(planted) == 4 + 4 + 4 + 5 + 4 + 1 + 3


@on_ranks(2)
@pytest.mark.notices(
    "bytes are older than the masters", where="TransformerEngine", answer="`zerocast.verify` names them"
)
@host_on_cpu()
def test_stale_bytes_are_found() -> None:
    """Masters that are newer than the codes; copies that are older than the codes and that TransformerEngine would read."""
    run = Run(weights_of(*FORMATS, cuts=CUT), columnwise=True)
    if run.rank == 1:
        run.write_masters()
    assert run.differing() >= {f"{fmt} rowwise_data" for fmt in FORMATS}
    run.step(transposed=False)
    assert run.differing() == {f"{fmt} columnwise_data" for fmt in COPIED}
    integration().post_all_gather_processing(run.tensors)
    assert run.report().ok
    run.write_masters()
    integration().quantize_master_weights(run.tensors, *run.lasting, None)
    run.gather()
    assert run.report().ok, "copies were dropped, or marked invalid"
    integration().post_all_gather_processing(run.tensors)
    assert run.report().ok


@on_ranks(2)
@host_on_cpu()
def test_directions_of_hybrid_tensors() -> None:
    """Codes in a transpose are verified by rows."""
    rank, cases = dist.get_rank(), weights_of("fp8_current", "fp8_delayed", cuts=CUT)
    weights = [hybrid(cases[0], None), hybrid(None, cases[1])]
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
    assert zerocast.verify(integration().masters_of(weights)).ok
    codes[1].view(-1)[5] ^= rank
    found = str(zerocast.verify(integration().masters_of(weights)))
    assert "model weight 1 columnwise (fp8_delayed) on rank 1: rowwise_data differs in 1 of 6,144 bytes" in found


@on_ranks(2)
@host_on_cpu()
def test_weights_that_are_not_known() -> None:
    """Weights that were never cast, cast in another order, broken on one rank, or released: every rank hears of it."""
    run = Run(weights_of("nvfp4", "fp8_block", cuts=CUT))

    def refused(weights: list[Any], said: str) -> None:
        with pytest.raises(ValueError, match=f"^rank {said}"):
            zerocast.verify(integration().masters_of(weights))

    unknown = "0: no masters are known of these 2 weights"
    refused(Casting(run.cases).tensors, unknown)
    refused(run.tensors[::-1], unknown)
    refused([], "0: .* of these 0 weights")
    if run.rank == 1:
        run.tensors[0]._rowwise_scale_inv = None
    refused(run.tensors, "1: it has no _rowwise_scale_inv")
    integration().release(run.tensors)
    refused(run.tensors, unknown)


@pytest.mark.usefixtures("te")
def test_padding_of_copies_is_ignored() -> None:
    """TransformerEngine leaves the padding of columnwise scales uninitialized."""
    run = Run(weights_of("fp8_block", "nvfp4"))
    block, nvfp4 = (tensor._columnwise_scale_inv for tensor in run.tensors)
    block[:, 1:], nvfp4[SHAPE[1] :] = 7.0, 7
    assert run.report().ok
    nvfp4[SHAPE[1] - 1, SHAPE[0] // 16 - 1] ^= 1
    assert [difference.buffer for difference in run.report().differences] == ["columnwise_scale_inv"]


@pytest.mark.usefixtures("te")
def test_a_copy_of_codes_that_serve_both_directions() -> None:
    """Something has made one, which is read by columns: verify compares it, and the next call puts the codes in its place."""
    run = Run(weights_of(TILES))
    (weight,) = run.tensors
    weight._columnwise_data = weight._columnwise_data.clone()
    assert run.report().ok
    weight._columnwise_data.view(-1)[9] ^= 1
    (difference,) = run.report().differences
    assert f"model weight 0 ({TILES}) on rank 0: columnwise_data differs in 1 of 6,144 bytes" in str(difference)
    run.step()
    assert run.report().ok and weight._columnwise_data is weight._rowwise_data
