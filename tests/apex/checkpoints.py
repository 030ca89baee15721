"""Everything that a run holds: saved in Apex's own state dict, loaded, gone on with; left alone by a step that is skipped."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tests import casts
from tests.apex.host_on_cpu import host_on_cpu
from tests.apex.training import Case, Run


def held(run: Run) -> dict[str, Any]:
    """Return everything that a step changes, as bytes."""
    found = {f"{name} {key}": casts.raw(value) for name, state in run.state().items() for key, value in state.items()}
    for name, parameter in run.probe.named_parameters():
        weight = run.weights.get(name)
        bytes_of = {"data": casts.raw(parameter).copy()} if weight is None else casts.bytes_of(weight)
        found |= {f"live {name} {key}": value for key, value in bytes_of.items()}
    return found


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert set(ours) == set(theirs)
    return [name for name, value in ours.items() if not (value == theirs[name]).all()]


def save(run: Run, path: str) -> None:
    """Save masters and moments, and the plain parameters, which Apex leaves to the model."""
    plain = {name: p.detach() for name, p in run.probe.named_parameters() if name not in run.weights}
    state = {"optimizer": run.optimizer.state_dict(), "plain": plain}
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load(run: Run, path: str) -> None:
    """Load the optimizer, then the plain parameters, which Apex leaves to the model, where no memory runs out."""
    state = torch.load(path, weights_only=True)
    run.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad(), _disable_current_modes():
        for name, value in state["plain"].items():
            run.probe.get_parameter(name).copy_(value)


def without_delayed() -> list[str]:
    """Return what is wrong with the bytes after a load of Apex's own state, whose missing scales are seeded
    from the masters.
    """
    with host_on_cpu():
        run = Run(Case())
        for number in range(2):
            run.step(number)
        state = run.optimizer.state_dict()
        for saved in state["state"].values():
            for name in ("scale", "amax_history", "cast_scale"):
                if isinstance(saved, dict):
                    saved.pop(name, None)
        run.optimizer.load_state_dict(state)
        return run.wrong()
