"""Saving and loading on the real host, through its distributed checkpoints."""

import multiprocessing
import shutil
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.megatron.host_on_cpu import WHY_NOT, host_on_cpu
from tests.megatron.training import Case, Run, build
from zerocast.integrations import megatron as integration

if not WHY_NOT:
    from megatron.core import dist_checkpointing

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def _inner(run: Run) -> Any:
    (one,) = run.optimizer.chained_optimizers
    return one.optimizer


def _content(run: Run, is_loading: bool) -> dict[str, Any]:
    model = run.ddp.module.sharded_state_dict(metadata=METADATA)
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return integration.dequantize_({"model": model, "optimizer": optimizer})


def _load(run: Run, folder: str) -> None:
    run.step(99)  # a fresh torch.optim.Adam has no state to load into
    state = dist_checkpointing.load(_content(run, is_loading=True), folder)
    run.ddp.module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    inner = _inner(
        run
    )  # without TransformerEngine and Apex the host loads the step of the groups, and not that of the states
    for group in inner.param_groups:
        for param in group["params"]:
            inner.state[param]["step"] = torch.tensor(float(group["step"]))


def resume(case: Case) -> tuple[dict[str, bool], dict[str, int]]:
    """Whether masters equal those of an uninterrupted run, bit for bit; stale bytes right after loading and in the end."""
    box = [tempfile.mkdtemp(prefix="zerocast-megatron-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    with host_on_cpu():
        runs = []
        for _ in range(2):
            with integration.building():
                runs.append(build(case))
            integration.attach(runs[-1].optimizer, runs[-1].ddp)
        straight, resumed = runs
        for number in range(case.steps):
            straight.step(number)
        straight.force_sync()
        with mock.patch.dict(
            vars(multiprocessing.current_process())["_config"], daemon=False
        ):  # the host forks to write
            dist_checkpointing.save(_content(straight, is_loading=False), box[0])
        _load(resumed, box[0])
        wrong = resumed.stale_bytes()
        for number in range(case.steps, case.steps + 2):
            straight.step(number)
            resumed.step(number)
        straight.force_sync()
        resumed.force_sync()
        wrong |= resumed.stale_bytes()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
        theirs, ours = straight.masters(), resumed.masters()
        same = {name: torch.equal(theirs[name], ours[name]) for name in theirs}
        return same, wrong
