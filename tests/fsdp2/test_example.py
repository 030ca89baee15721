"""The GPT example under FSDP2: every way to be parallel, resuming in another one, and a late phase in bf16."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt_pretrain import fsdp2, train
from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.data import Corpus
from examples.gpt_pretrain.model import GPTConfig
from examples.gpt_pretrain.run_log import RunLog, read_records
from examples.gpt_pretrain.world import World
from tests.fsdp2 import models
from tests.workers import Ranks, on_ranks

TINY = GPTConfig(n_layer=1, n_head=2, n_embd=128, context=32)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A few steps on text that is easily learnt."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    shape: dict[str, Any] = {"steps": 8, "batch_size": 4, "eval_sequences": 4, "warmup_steps": 2}
    return TrainConfig(model=TINY, format="nvfp4", data=(path,), out=tmp_path, lr=3e-3, **shape)


def run(config: TrainConfig) -> dict[str, Any]:
    """Return the summary of a run on the ranks of a pool."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device(models.place()))
    corpus = Corpus.load(config.data, config.model.context)
    step, model, optimizer = train.start(config, world)
    log = RunLog(config.out, resumed_at=step, enabled=world.rank == 0)
    trainer = train.Trainer(config, world, corpus, model, optimizer, log, step)
    summary = trainer.run()
    log.close()
    dist.barrier()
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "_adamw", optimizer)
    return {**summary, "rates": [group["lr"] for group in inner.param_groups]}


def losses(folder: Path) -> list[float]:
    """Return the training losses of a run."""
    return [record["loss"] for record in read_records(folder / "metrics.jsonl") if record["event"] == "train"]


@pytest.mark.parametrize("parallel", ["fsdp2", models.slow("hsdp"), "fsdp2_tp"])
def test_every_way_learns_what_zero_does(ranks: Ranks, config: TrainConfig, parallel: Any) -> None:
    """Each way learns like ZeRO from the same batches. FSDP2 has norms in bf16, and gathers again for the
    backward pass.
    """
    world = 2 if parallel == "fsdp2" else 4
    zero = replace(config, out=config.out / "zero", grad_accum=2 if parallel == "fsdp2" else 1)
    ranks(world // zero.slices if parallel != "fsdp2_tp" else 2)(run, zero)
    found = ranks(world)(run, replace(zero, out=config.out / parallel, parallel=parallel))[0]
    expected = losses(zero.out)
    assert losses(config.out / parallel)[:4] == pytest.approx(expected[:4], rel=0.01)
    assert losses(config.out / parallel) == pytest.approx(expected, rel=0.1)
    assert expected[-1] < expected[0] - 0.8
    gathered = found["traffic_bytes_per_parameter"]["weight_gather"]
    forward = found["weight_bytes_per_parameter"]["forward"]
    slices = (
        2 if parallel == "fsdp2_tp" else 1
    )  # of the MLP, which is two thirds of the blocks, a rank gathers its half
    assert forward < 0.9
    assert 1.5 * forward / slices < gathered < 2.2 * 2 * forward


def mesh_of(config: TrainConfig) -> Any:
    """Return the ranks of this rank's shard and replica groups with the timeouts of the groups, or
    the error.
    """
    try:
        mesh = fsdp2._mesh(config, torch.device(models.place()))
    except ValueError as error:
        return str(error)
    groups = [mesh.get_group(name) for name in ("shard", "replicate")]
    waits = {group._get_backend(device).options._timeout for group in groups for device in group._device_types}
    return [*map(dist.get_process_group_ranks, groups), waits]


@on_ranks(2, 4)
def test_replicas_follow_the_ranks_that_there_are(world: int, config: TrainConfig) -> None:
    """The mesh follows the number of ranks, and its groups have the timeout of the run."""
    config, rank = replace(config, parallel="hsdp", shard_ranks=2, timeout=17.0), dist.get_rank()
    shard, replicate = [rank // 2 * 2, rank // 2 * 2 + 1], list(range(rank % 2, world, 2))
    assert mesh_of(config) == [shard, replicate, {timedelta(seconds=17)}]


def test_ranks_that_do_not_divide(ranks: Ranks, config: TrainConfig) -> None:
    config = replace(config, parallel="hsdp")
    assert ranks(3)(mesh_of, config) == ["--parallel hsdp makes two halves of the ranks, there are 3"] * 3
    config = replace(config, shard_ranks=3)
    assert ranks(4)(mesh_of, config) == ["--parallel hsdp makes replicas of 3 of the ranks, there are 4"] * 4
    with pytest.raises(ValueError, match="shard_ranks needs parallel=hsdp, got fsdp2"):
        replace(config, parallel="fsdp2")
    with pytest.raises(ValueError, match="shard_ranks cannot be negative, got -1"):
        replace(config, shard_ranks=-1)


def test_a_late_phase_in_bf16(ranks: Ranks, config: TrainConfig) -> None:
    """Nothing is quantized from step 5 on, and the loss goes on falling."""
    config = replace(config, parallel="fsdp2", late_share=3 / 8, checkpoint_every=6, measure_every=2)
    late = ranks(2)(run, config)[0]
    found = losses(config.out)
    assert late["weight_bytes_per_parameter"]["forward"] == pytest.approx(2.0)
    assert max(found[5:]) < min(found[:4])
    measured = [record for record in read_records(config.out / "metrics.jsonl") if record["event"] == "measured"]
    assert [record["step"] for record in measured] == [2, 4]  # of bf16 there is nothing to measure
    assert all(0 < record["cast_error"] < 0.2 for record in measured)
