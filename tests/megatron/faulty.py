"""Steps, gathers and loads of an attached host that die half-way, on the ranks of a pool."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests import casts
from tests.megatron.here import groups, host
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import Case, build
from tests.optim.faults import OutOfMemory
from zerocast import verify
from zerocast.distributed.group import Group
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.primary import weight_of

if not WHY_NOT:
    from megatron.core.distributed import param_and_grad_buffer as buffers

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
SAID = r"raised half-way: (masters, moments and )?weights may be of different steps; "
TIMEOUT = 1.0  # seconds, of groups whose ranks come too late


class Attached:
    """A run with its attachment, and its optimizers' state in memory, which goes back by the host's own `load_state_dict`."""

    def __init__(self, case: Case) -> None:
        with integration.quantized_params():
            self.run = build(case)
        self.attachment = integration.attach(self.run.optimizer, self.run.ddp)
        self.own = self.run.optimizer.chained_optimizers

    def saved(self) -> Any:
        """As `dp_reshardable` checkpoints hold it."""
        self.run.force_sync()
        states = {index: self._saved(one) for index, one in enumerate(self.own)}
        return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), states if len(states) > 1 else states[0])

    def _saved(self, one: Any) -> dict[str, Any]:
        state = one.get_parameter_state_dp_reshardable()
        for tensors in (t for buckets in _dicts(state) for bucket in _first(buckets) for t in bucket):
            tensors["padding"] = False
        return {**one.state_dict(), "param_state": state, "param_state_sharding_type": "dp_reshardable"}

    def load(self, state: Any) -> None:
        """As a resumed run does: first what is to be filled, then the state."""
        model = self.run.ddp.module.sharded_state_dict(metadata=METADATA)
        self.run.optimizer.sharded_state_dict(model, is_loading=True, metadata=METADATA)
        integration.dequantize_(model, is_loading=True)
        self.run.optimizer.load_state_dict(tree_map_only(torch.Tensor, torch.clone, state))

    def everything(self) -> casts.Bytes:
        """Masters, moments and the bytes of all parameters, as this rank holds them."""
        self.run.force_sync()
        found = {f"own.{name}.{key}": casts.raw(value).copy() for name, key, value in self._owned()}
        for name, param in self.run.ddp.module.named_parameters():
            weight = weight_of(param) if name in self.run.weights else None
            held = {"": casts.raw(param).copy()} if weight is None else casts.bytes_of(weight)
            found |= {f"{name}.{key}": value for key, value in held.items()}
        return found

    def _owned(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for i, one in enumerate(self.own):
            for j, param in enumerate(p for group in one.optimizer.param_groups for p in group["params"]):
                yield f"{i}.{j}", "master", param
                yield from ((f"{i}.{j}", key, value) for key, value in one.optimizer.state[param].items())

    def is_torn(self) -> bool:
        """As the weights say."""
        return any(plan.guard.is_partial for plan in self.attachment.plans)

    def refused(self, folder: str, masters: bool) -> list[str]:
        """What goes on although something is torn: nothing should."""
        optimizer, went_on = self.run.optimizer, []
        model = self.run.ddp.module.sharded_state_dict(metadata=METADATA)
        calls: dict[str, Callable[[], Any]] = {
            "step": optimizer.step,
            "inner step": self.own[0].step,
            "state_dict": optimizer.state_dict,
            "sharded_state_dict": lambda: optimizer.sharded_state_dict(model, metadata=METADATA),
            "save_parameter_state": lambda: optimizer.save_parameter_state(os.path.join(folder, "state")),
            "reload_model_params": optimizer.reload_model_params,
            "dequantize_": lambda: integration.dequantize_(model),
            "dequantize": lambda: weight_of(next(iter(self.run.weights.values()))).dequantize(),
            "forward": lambda: self.run.forward_and_backward(0),
            "force_sync": self.run.force_sync,
            "verify": lambda: verify(self.attachment),
        }
        if masters:
            calls["refresh"] = self.attachment.refresh
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                if "raised half-way" not in str(error) or ("load a checkpoint" not in str(error)):
                    went_on.append(f"{name}: {error}")
            else:
                went_on.append(name)
        return went_on if not os.path.exists(os.path.join(folder, "state")) else [*went_on, "a file"]


def _dicts(state: dict[Any, Any]) -> list[Any]:
    return [value for key, value in state.items() if isinstance(key, int)]


def _first(buckets: dict[Any, Any]) -> Any:
    return next(iter(buckets.values()))


def different(expected: casts.Bytes, found: casts.Bytes) -> list[str]:
    """What differs, by name."""
    assert expected.keys() == found.keys()
    return [name for name, content in expected.items() if not np.array_equal(content, found[name])]


def at_operators(case: Case, where: str, every: int, folder: str) -> tuple[Counter[str], list[str]]:
    """Memory runs out at every so manieth operator of the third step: how often what was to be done, and what was wrong then."""
    with host(case.te):
        straight, attached = Attached(case), Attached(case)
        for number in range(2):
            straight.run.step(number)
            attached.run.step(number)
        state, expected = attached.saved(), []
        for number in (2, 3):
            straight.run.step(number)
            expected.append(straight.everything())
        outcomes, wrong = Counter[str](), list[str]()
        for afterwards in (False, True):
            at = every // 2 * afterwards
            while True:
                memory = OutOfMemory(at, afterwards)
                attached.load(state)
                outcome = _attempt(attached, memory, where, state, folder, wrong)
                outcomes[outcome] += 1
                for number, whole in zip((2, 3), expected, strict=True):
                    if number == 3:
                        attached.run.step(3)
                    found = attached.everything()
                    differ = different(whole, found)
                    wrong += [f"{outcome} at {at}, {afterwards}, step {number}: {differ}"] if differ else []
                if memory.count <= at:
                    break
                at += every
        return outcomes, wrong


def _attempt(attached: Attached, memory: OutOfMemory, where: str, state: Any, folder: str, wrong: list[str]) -> str:
    """The third step with little memory, and what had to be done to come to its end: "nothing", "again", "refresh" or "load"."""
    run, outcome, enough = attached.run, "nothing", OutOfMemory(-1)
    try:
        with memory if where == "load" else enough:
            attached.load(state)
        with memory if where == "refresh" else enough:
            attached.attachment.refresh()
        for group in run.ddp.bucket_groups + run.ddp.expert_parallel_bucket_groups:
            group.param_gather_dispatched = not run.case.overlap  # gather in the forward pass, as after a step
        with memory if where == "forward" else enough:
            loss = run.forward(2)
        run.backward(loss)
        with memory if where == "step" else enough:
            run.optimizer.step()
        with memory if where == "sync" else enough:
            run.force_sync()
    except torch.OutOfMemoryError:
        outcome = "again"
        if attached.is_torn():
            said = next(p.guard.partial for p in attached.attachment.plans if p.guard.partial)
            outcome = "refresh" if "attachment.refresh()" in said else "load"
            wrong += attached.refused(folder, masters=outcome == "load")
            attached.attachment.refresh() if outcome == "refresh" else attached.load(state)
        if where != "sync":
            run.step(2)
    return outcome


def faulty(collective: str, fault: Callable[[], Any]) -> Any:
    """`fault` before the all-reduce of a cast, or before an all-gather of bytes."""
    owner, name = (Group, "all_reduce_max") if collective == "all-reduce" else (buffers, "dist_all_gather_func")
    return mock.patch.object(owner, name, side_effect=lambda *_, **__: fault())


def dies(collective: str, case: Case) -> None:
    """Rank 1 dies in its second step, or in the forward pass after it; rank 0 raises what it was told when it tried to go on."""
    with groups(), host(case.te):
        attached = Attached(case)
        attached.run.step(0)
        dist.barrier()
        start = time.monotonic()
        killing = faulty(collective, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RuntimeError) as caught, killing if dist.get_rank() else nullcontext():
            list(map(attached.run.step, (1, 2)))
        seconds = time.monotonic() - start
        for go_on in (attached.run.optimizer.step, lambda: attached.run.step(3), lambda: verify(attached.attachment)):
            with pytest.raises(RuntimeError, match=SAID):
                go_on()
        raise RuntimeError(f"rank 0 was told after {seconds:.0f} s, torn: {attached.is_torn()}: {caught.value}")


def fails_alone(collective: str, fault: str, case: Case) -> tuple[float, str, bool, list[str]]:
    """Rank 1 is out of memory, or late, in its second step: how long and what a rank raised; torn; what differs after a resume."""
    with host(case.te):
        with groups(TIMEOUT):
            attached = Attached(case)
            attached.run.step(0)
            state = attached.saved()
            start = time.monotonic()
            with pytest.raises(RuntimeError) as caught, _alone(collective, fault):
                list(map(attached.run.step, (1, 2)))
            waited, torn = time.monotonic() - start, attached.is_torn()
            with pytest.raises(RuntimeError, match=SAID):
                attached.run.optimizer.step()
        dist.barrier()
        with groups():
            straight, resumed = Attached(case), Attached(case)
            straight.run.step(0)
            resumed.load(state)
            straight.run.step(1)
            resumed.run.step(1)
            theirs, ours = straight.everything(), resumed.everything()
            return (
                waited,
                str(caught.value),
                torn,
                different(theirs, ours),
            )


def _alone(collective: str, fault: str) -> Any:
    def raises() -> None:
        raise torch.OutOfMemoryError("injected") if fault == "out of memory" else _late()

    if dist.get_rank() == 1:
        return faulty(collective, raises)
    return OutOfMemory(-1)


def _late() -> RuntimeError:
    time.sleep(3 * TIMEOUT)
    return RuntimeError("too late")
