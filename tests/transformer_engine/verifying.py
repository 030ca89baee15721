"""`zerocast.verify` and `zerocast.metrics` over TransformerEngine's tensors, on the ranks of a pool."""

from typing import Any

import torch
import torch.distributed as dist

import zerocast
from tests.sharded import Weight
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from tests.transformer_engine.hybrids import hybrid
from tests.transformer_engine.tensors import buffers
from tests.workers import error_of


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
        for case, held in zip(cases, codes, strict=True):  # whoever does not own an element holds poison there
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
