"""What one rank alone cannot do: it takes part in the collectives of the others, and all raise, none at a timeout."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.hosts.stopping import limit_collectives, wait_for_all_ranks
from tests.megatron.attaching import offloaded
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.training import METADATA, MIXED, Attached, Case
from tests.observed import debug_mode
from tests.workers import Ranks, error_of
from zerocast.distributed import rank_report
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.shards import shares

pytestmark = needs_megatron
CULPRIT, SECONDS = 1, 8.0


def masters(one: Any) -> Iterator[torch.Tensor]:
    for share in shares(one):
        yield from (master for _, master, _, _ in share.masters() if master is not None and master.numel())


def strided_in(number: int) -> Callable[[Attached], None]:
    """Every other element of a larger tensor, which no cast reads; Adam steps it."""

    def change(attached: Attached) -> None:
        for master in masters(distributed_optimizers(attached.run.optimizer)[number]):
            master.data = master.data.repeat_interleave(2)[::2]

    return change


def moments_in(number: int) -> Callable[[Attached], None]:
    """A moment that does not fit, which torch's Adam finds in its step."""

    def change(attached: Attached) -> None:
        inner = distributed_optimizers(attached.run.optimizer)[number].optimizer
        for state in inner.state.values():
            state["exp_avg"] = state["exp_avg"][:-1]

    return change


def step_raises(attached: Attached) -> None:
    """The inner optimizer's step, as where the CPU has no memory left."""

    def step(*_: Any, **__: Any) -> None:
        raise MemoryError("injected")

    distributed_optimizers(attached.run.optimizer)[0].optimizer.step = step


def unfrozen(attached: Attached) -> None:
    for parameter in attached.run.ddp.parameters():
        parameter.requires_grad_(True)


def step(attached: Attached, saved: Any) -> None:
    attached.run.forward_and_backward(1)
    attached.run.optimizer.step()


def refresh(attached: Attached, saved: Any) -> None:
    attached.attachment.refresh()


def reload(attached: Attached, saved: Any) -> None:
    attached.run.optimizer.reload_model_params()


def load(attached: Attached, saved: Any) -> None:
    attached.load(saved)


def load_of_less(attached: Attached, saved: Any) -> None:
    if dist.get_rank() == CULPRIT:
        for state in saved.values() if 0 in saved else [saved]:
            state["param_state"] = {}
    attached.load(saved)


def partial(attached: Attached) -> None:
    """Leave the weights as a gather does that has raised."""
    attached.attachment._guard.validity.failed_partway("an all-gather", masters=False)


def save(attached: Attached, saved: Any) -> None:
    """Save as a training loop does, whose write is collective."""
    model = attached.run.ddp.module.sharded_state_dict(metadata=METADATA)
    attached.run.optimizer.sharded_state_dict(model, metadata=METADATA)
    dist.barrier()


def save_parameters(attached: Attached, saved: Any) -> None:
    attached.run.optimizer.save_parameter_state(os.devnull)


def verify(attached: Attached, saved: Any) -> None:
    zerocast.verify(attached.attachment)


def nothing(attached: Attached) -> None:
    pass


HOSTS: dict[str, tuple[Case, int]] = {
    "dense": (Case(MIXED), 0),
    "experts": (Case(MIXED, experts=True), 1),
    "overlap": (Case(MIXED, overlap=True, experts=True), 0),
}
OFFLOAD, FROZEN = offloaded(experts=True), Case("all kinds", kind="frozen")
CASES: dict[str, tuple[Case, Callable[[Attached], None], Callable[[Attached, Any], None]]] = {
    **{
        f"{name} {event} {call.__name__}": (case, change, call)
        for name, (case, number) in HOSTS.items()
        for event, change, calls in (
            ("strided", strided_in(number), (step, refresh, reload, load)),
            ("moments", moments_in(number), (step,)),
            ("less", nothing, (load_of_less,)),
            ("partial", partial, (save, save_parameters, verify)),
        )
        for call in calls
    },
    "offload step": (OFFLOAD, step_raises, step),
    "offload load": (OFFLOAD, nothing, load_of_less),
    "frozen unfrozen step": (FROZEN, unfrozen, step),
}

ON_GPUS = ("dense strided step", "dense strided refresh", "experts moments step", "dense partial save")


ERRORS = ("ValueError", "RuntimeError", "KeyError", "MemoryError", "InvalidWeights")


def fail_on_one_rank(name: str, on_gpu: bool) -> None:
    """All ranks raise in the call of a case, none at a timeout. Weights are then whole, or a load is asked for."""
    case, change, call = CASES[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(case.host())
        if on_gpu:
            stack.enter_context(debug_mode())
            stack.enter_context(mock.patch.object(rank_report, "_is_on_gpu", return_value=True))
        attached = Attached(case)
        attached.run.step(0)
        saved = attached.saved()
        limit_collectives(SECONDS)
        if dist.get_rank() == CULPRIT:
            change(attached)
        started = time.monotonic()
        said = error_of(lambda: call(attached, saved))
        is_in_time = time.monotonic() - started < SECONDS - 1
        wait_for_all_ranks(f"{name} {on_gpu}", 2 * SECONDS)
        after = error_of(attached.attachment.refresh) if is_in_time else ""
        limit_collectives(30)
    assert is_in_time and said.startswith(ERRORS), said
    assert ("load a checkpoint" in after) == (call not in (refresh, save, save_parameters, verify)), after


@pytest.mark.notices(
    "a step, a load or `refresh` raises on one rank before its cast, or a save",
    where="Megatron",
    answer="raises on all ranks that share masters with it",
)
@pytest.mark.parametrize("name", CASES)
def test_one_rank(ranks: Ranks, name: str) -> None:
    ranks(2)(fail_on_one_rank, name, False)


@pytest.mark.parametrize("name", ON_GPUS)
def test_one_rank_on_a_gpu(ranks: Ranks, name: str) -> None:
    """The other ranks would go on to their gathers without debug mode."""
    ranks(2)(fail_on_one_rank, name, True)
