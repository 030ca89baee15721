"""Saving and loading on the real host, through its distributed checkpoints."""

import multiprocessing
import shutil
import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zerocast
from tests import casts
from tests.megatron import te
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import NARROW, Case, Run, build_attached
from zerocast import QuantizedWeight
from zerocast.checkpoint.untrained import own_buffers
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.shards import shares

if not WHY_NOT:
    from megatron.core import dist_checkpointing

State = dict[str, dict[str, torch.Tensor]]


def metadata(kind: str) -> dict[str, Any]:
    """The metadata of a sharding type, gathered over gloo, since NCCL's way asks for CUDA."""
    return {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": True}


def content(run: Run, is_loading: bool, kind: str) -> dict[str, Any]:
    model = run.ddp.module.sharded_state_dict(metadata=metadata(kind))
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata(kind))
    return integration.dequantize_({"model": model, "optimizer": optimizer}, is_loading)


def save(run: Run, folder: str, kind: str) -> None:
    """Save as a training loop does."""
    run.force_sync()
    with mock.patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False):  # the host forks to write
        dist_checkpointing.save(content(run, False, kind), folder)


def load(run: Run, folder: str, kind: str) -> None:
    """Load as a resumed run does."""
    state = dist_checkpointing.load(content(run, True, kind), folder)
    run.ddp.module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])


def _state(run: Run) -> State:
    return {"master": run.masters(), "exp_avg": run.moments("exp_avg"), "exp_avg_sq": run.moments("exp_avg_sq")}


def saved(case: Case, folder: str, kind: str) -> State:
    """Trained and saved: masters and moments."""
    with case.host():
        run, _ = build_attached(case)
        for number in range(case.steps):
            run.step(number)
        save(run, folder, kind)
        return _state(run)


def check_loaded(case: Case, folder: str, kind: str, written: State, rounding: float = 0.0) -> None:
    """Another run loads what was written after three steps. No byte is stale then, nor after two more steps.

    `rounding` is that of moments, relative to the largest of a parameter.
    """
    with case.host():
        run, _ = build_attached(case)
        load(run, folder, kind)
        state = _state(run)
        for key, whole in written.items():
            for name, tensor in whole.items():
                bound = 0.0 if key == "master" else float(tensor.abs().max()) * rounding
                assert float((state[key][name] - tensor).abs().max()) <= bound, (key, name)
        assert _steps(run) == {3.0} and not run.stale_bytes()
        for number in range(2):
            run.step(number)
        run.force_sync()
        assert not run.stale_bytes()


def _steps(run: Run) -> set[float]:
    """Return the numbers of steps, which torch's Adam counts by parameter, and a fused one by group."""
    inner = [one.optimizer for one in run.optimizer.chained_optimizers]
    states = [state for one in inner for state in one.state.values() if "step" in state]
    return {float(held["step"]) for held in states or [group for one in inner for group in one.param_groups]}


def resume_afresh(kind: str, folder: str, sharding: str) -> None:
    """A model of a kind that is saved, and resumed with a fresh initialisation, is as the run that went on."""
    formats = {"frozen plain": "other half", "frozen quantized": "frozen"}.get(kind, NARROW)
    case = Case(formats, kind=kind)
    with case.host():
        (straight, _), (resumed, attachment) = build_attached(case), build_attached(replace(case, seed=8))
        for number in range(2):
            straight.step(number)
        save(straight, folder, sharding)
        load(resumed, folder, sharding)
        for number in range(2):
            straight.step(number)
            resumed.step(number)
        assert zerocast.verify(attachment).ok
        casts.assert_same_bytes(_read(resumed), _read(straight))


def _read(run: Run) -> casts.Bytes:
    """All that a step reads: masters of this rank, bytes of weights, plain parameters and buffers."""
    module, found = run.ddp.module, {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        own = own_buffers(tensor) if isinstance(tensor, QuantizedWeight) else {"": tensor}
        found |= {f"{name}.{buffer}": casts.raw(value) for buffer, value in own.items()}
    for at, one in enumerate(distributed_optimizers(run.optimizer)):
        masters = [master for share in shares(one) for _, master, _, _ in share.masters()]
        found |= {f"master {at} {number}": casts.raw(master) for number, master in enumerate(masters)}
    return found


def resume(case: Case, kind: str) -> None:
    """All that a resumed run holds equals an uninterrupted run's. No byte is stale right after loading, nor in the end."""
    box = [tempfile.mkdtemp(prefix="zerocast-megatron-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    with case.host():
        (straight, _), (resumed, _) = build_attached(case), build_attached(case)
        for number in range(case.steps):
            straight.step(number)
        save(straight, box[0], kind)
        load(resumed, box[0], kind)
        assert not resumed.stale_bytes()
        for number in range(case.steps, case.steps + 2):
            straight.step(number)
            resumed.step(number)
        straight.force_sync()
        resumed.force_sync()
        assert not resumed.stale_bytes()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
        casts.assert_same_bytes(_held(resumed), _held(straight))


def _held(run: Run) -> casts.Bytes:
    """Masters, and every buffer of quantized weights: codes, scales, amax histories."""
    found = {name: casts.raw(master) for name, master in run.masters().items()}
    for name, weight in run.weights.items():
        held = te.bytes_of(weight)[1] if name in run.te_tensors else casts.bytes_of(weight)
        found |= {f"{name}.{buffer}": value for buffer, value in held.items()}
    return found
