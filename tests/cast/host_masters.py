"""Masters on the host of weights on another device, told apart on one that has no other: the reference backend stands for that of
the device, and no storage may be handed both to it and to the CPU backend.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts, sharded
from tests.sharded import Outcome, Weight
from zerocast import CastPlan
from zerocast.backends import ops
from zerocast.cast import cpu_masters, partition

DEVICE, HOST = "reference", "cpu"


class Apart:
    """The storages that the stages of each backend were handed."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, Tensor]] = {DEVICE: {}, HOST: {}}

    def watching(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def call(stage: str, backend: str, fmt: str | None = None) -> Callable[..., None]:
            run = implementation(stage, backend, fmt)

            def watched(*arguments: Any) -> None:
                for argument in arguments:
                    for tensor in argument if isinstance(argument, list) else [argument]:
                        if isinstance(tensor, Tensor) and tensor.numel():
                            self.of[backend][tensor.untyped_storage().data_ptr()] = (
                                tensor  # kept, so that no address is reused
                            )
                run(*arguments)

            return watched

        return call

    @property
    def shared(self) -> int:
        """The number of storages that both backends were handed."""
        return len(self.of[DEVICE].keys() & self.of[HOST].keys())


class EveryOther:
    """A choice of every other master as one on the host, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._seen: dict[int, bool] = {}

    def __call__(self, master: Tensor, device: torch.device) -> bool:
        return self._seen.setdefault(master.data_ptr(), len(self._seen) % 2 == 0)


@contextlib.contextmanager
def apart(piece: int = 1 << 22, mixed: bool = False) -> Iterator[Apart]:
    """Let plans take all masters, or every other, for masters on the host while the context is open, in pieces
    of `piece` elements.
    """
    found, sides = Apart(), {"side_effect": EveryOther()} if mixed else {"return_value": True}
    with (
        mock.patch.object(partition, "is_on_cpu", **sides),
        mock.patch.object(cpu_masters, "PIECE", piece),
        mock.patch.object(ops, "_implementation", found.watching(ops._implementation)),
    ):
        yield found


def cast_and_gather(
    cases: tuple[Weight, ...], piece: int, steps: int = 1, mixed: bool = False
) -> tuple[Outcome, int, set[str]]:
    """Return the outcome of a plan with masters on the host, the number of storages that both devices were
    handed, and the backends that had any.
    """
    with apart(piece, mixed) as found:
        outcome = sharded.cast_and_gather(cases, DEVICE, steps)
        return outcome, found.shared, {name for name, storages in found.of.items() if storages}


def compare_with_the_device(cases: tuple[Weight, ...], piece: int) -> None:
    """Check that buffers are those of masters on the device after three casts, of which the second is skipped.
    Delayed scales and histories are among them.
    """
    pairs = [sharded.Sharded(cases, dist.get_rank()) for _ in range(2)]
    plans = [CastPlan(pairs[0].weights, pairs[0].masters, pairs[0].starts, backend=DEVICE)]
    with apart(piece):
        plans.append(CastPlan(pairs[1].weights, pairs[1].masters, pairs[1].starts, backend=DEVICE))
        for step in range(3):
            for held, plan in zip(pairs, plans, strict=True):
                held.set_masters(step)
                with mock.patch.object(partition, "is_on_cpu", return_value=plan is plans[1]):
                    plan.cast(skip=torch.tensor([step == 1]))
            for ours, theirs in zip(pairs[1].weights, pairs[0].weights, strict=True):
                for name, expected in theirs.state.buffers.items():
                    found = ours.state.buffers[name]
                    assert found is expected is None or (casts.raw(found) == casts.raw(expected)).all(), (step, name)
