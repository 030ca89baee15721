"""What the calls say about what they do not take, on the ranks of a pool."""

from typing import Any

import torch.distributed as dist

from tests import casts
from tests.sharded import Weight
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from tests.transformer_engine.tensors import bytes_of
from tests.workers import error_of


def wrong_on_one_rank(cases: tuple[Weight, ...]) -> tuple[str, bool]:
    """(error, whether a byte changed) where an option of rank 1's second weight is one that is not cast."""
    with host_on_cpu():
        casting = Casting(cases)
        if casting.rank == 1:
            casting.tensors[1]._quantizer.nvfp4_use_4over6 = True
        before = [bytes_of(one) for one in casting.tensors]
        error = error_of(casting.cast)
        for held, one in zip(before, casting.tensors, strict=True):
            casts.assert_same_bytes(bytes_of(one), held)
        return error, True


def other_formats(cases: tuple[Weight, ...]) -> str:
    """The error where ranks pass different lists."""
    with host_on_cpu():
        casting = Casting(cases if dist.get_rank() == 0 else cases[::-1])
        return error_of(casting.cast)


def cut_anew(case: Weight, spans: tuple[tuple[int, int], ...]) -> list[Any]:
    """Errors of a second call with other spans, and of one after `release`; the codes that it leaves."""
    with host_on_cpu():
        casting = Casting((case,))
        rank = casting.rank
        casting.cast()
        dist.barrier()
        (start, stop), calls = spans[rank], integration()
        part = case.master().view(-1)[start:stop].clone()
        errors = [error_of(lambda: calls.quantize_master_weights(casting.tensors, [part], [start], None))]
        calls.release(casting.tensors)
        casting.tensors[0]._rowwise_data.fill_(0)
        errors.append(error_of(lambda: calls.quantize_master_weights(casting.tensors, [part], [start], None)))
        return [*errors, bytes_of(casting.tensors[0])]


def calls_out_of_step(cases: tuple[Weight, ...]) -> str:
    """In debug mode: what a rank hears when the other makes another call."""
    import zerocast
    from zerocast.distributed.agreement import validate_across_ranks
    from zerocast.distributed.group import Group

    with host_on_cpu():
        casting = Casting(cases)
        casting.cast()
        zerocast.set_debug(True)
        try:
            if casting.rank == 0:
                return error_of(casting.cast)
            return error_of(lambda: validate_across_ranks(Group.of(None), [], None, what="does something else"))
        finally:
            zerocast.set_debug(False)
