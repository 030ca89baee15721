"""Checkpoints of torchtitan's own CheckpointManager: what a run holds at its end, in digests."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests import casts
from tests.fsdp2 import models
from tests.torchtitan.training import Case, complaints, trainer
from tests.workers import Ranks

SAVING = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")


def run(case: Any, folder: str, resume: int = -1, make: Any = trainer) -> tuple[list[float], dict[str, str], list[str]]:
    """Run and save, after a step if given. Return losses, digests of all state, and complaints about gathered bytes."""
    load = (f"--checkpoint.load_step={resume}",) if resume >= 0 else ()
    with make(case.having(*SAVING, *load), folder) as made:
        made.train()
        return made.losses, contents(made), complaints(made, "at the end")


def from_safetensors(case: Case, folder: str, path: str) -> tuple[dict[str, str], list[str]]:
    """Return digests of the masters of a run that starts from Hugging Face's names, and complaints about its bytes."""
    options = ("--checkpoint.enable", "--checkpoint.initial-load-in-hf", f"--checkpoint.initial_load_path={path}")
    with trainer(case.having(*options), folder) as made:
        assert made.checkpointer.load()
        return masters(made), complaints(made, "as loaded")


def exported(case: Case, folder: str) -> list[str]:
    """Return the masters that torchtitan's last checkpoint, in bf16, does not hold rounded."""
    with trainer(case.having("--checkpoint.enable", "--checkpoint.export_dtype=bfloat16"), folder) as made:
        made.train()
        wanted = {name: whole(p).bfloat16() for name, p in made.model_parts[0].state_dict().items()}
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(found, checkpoint_id=f"{folder}/checkpoint/step-{case.steps}")
        return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def loaded_masters(case: Any, folder: str, step: int, make: Any = trainer) -> dict[str, str]:
    """Return digests of the masters with which a run of this case starts from that step. Data may be cut for
    other ranks.
    """
    with make(case.having(*SAVING, "--checkpoint.exclude_from_loading=dataloader"), folder) as made:
        made.checkpointer.load(step=step)
        return masters(made)


def masters(made: Any) -> dict[str, str]:
    return {name: casts.sha(whole(p)) for name, p in made.model_parts[0].state_dict().items() if isinstance(p, Tensor)}


def contents(made: Any) -> dict[str, str]:
    """Return digests of masters, optimizer state with delayed scaling, and gathered bytes."""
    (model,) = made.model_parts
    gathered = {
        f"{name} {buffer}": casts.sha(value)
        for name, weight in models.unsharded(model)
        for buffer, value in models.bytes_of(weight).items()
    }
    state = {
        key: casts.sha(whole(value)) for key, value in made.optimizers.state_dict().items() if torch.is_tensor(value)
    }
    return masters(made) | state | gathered


def whole(tensor: Any) -> Tensor:
    """Return the tensor gathered from all ranks, if it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def check_resumed(ranks: Ranks, world: int, case: Any, folder: str, make: Any = trainer) -> None:
    """Check that a run that goes on from its second step equals the uninterrupted run, to the bit."""
    whole = ranks(world)(run, case, folder, -1, make, timeout=240)
    resumed = ranks(world)(run, case, folder, 2, make, timeout=240)
    for (losses, held, wrong), (later, again, wrong_again) in zip(whole, resumed, strict=True):
        assert later == losses[2:]
        assert again == held
        assert not wrong and not wrong_again
    assert any("rowwise_data" in key for key in whole[0][1]) and any("exp_avg" in key for key in whole[0][1])
    assert ("fp8_delayed" in case.recipe) == any("amax_history" in key for key in whole[0][1])
