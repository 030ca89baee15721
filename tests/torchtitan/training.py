"""Runs of the real Trainer on every rank of a pool, their checkpoints, and their losses, masters and bytes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.torchtitan.host_on_cpu import WHY_NOT, host_on_cpu, importable
from tests.workers import Ranks, error_of

if not WHY_NOT:
    with importable():
        from torchtitan.config import ConfigManager
        from torchtitan.train import Trainer

        import tests.torchtitan.corpus  # noqa: F401
        from zerocast.integrations.torchtitan import MasterWeightConverter

MIXED = "layers.0.*=nvfp4,layers.1.attention.*=mxfp8:block=32x32,layers.1.feed_forward.*=mxfp8,output.*=fp8_block"
SLICED = "layers.0.*=nvfp4,layers.1.attention.*=fp8_current,layers.1.feed_forward.*=mxfp8,output.*=fp8_delayed"
EXPERTS = (
    "layers.*.attention.w[qo].*=nvfp4,layers.0.feed_forward.*=mxfp8,layers.*.experts.w1=%s,layers.*.experts.w2=nvfp4,"
    "layers.*.experts.w3=mxfp8,*.shared_experts.*=fp8_block"
)
TENSOR = ("--parallelism.tensor_parallel_degree=2",)
ALL = "layers.*=%s,output.*=%s"


@dataclass(frozen=True)
class Case:
    recipe: str = "nvfp4"  # a format, or entries
    implementation: str = "zerocast"
    steps: int = 4
    options: tuple[str, ...] = ()  # further arguments of the command line
    converters: str = "quantize.linear.zerocast"

    @property
    def formats(self) -> list[str]:
        return [entry.partition("=")[2] or entry for entry in self.recipe.split(",")]

    def having(self, *options: str) -> "Case":
        """Return the same case with more arguments on its command line."""
        return replace(self, options=(*self.options, *options))

    def plain(self) -> "Case":
        """Return the same case without zerocast's converter."""
        return replace(self, converters="")

    def arguments(self, folder: str) -> list[str]:
        entries = self.recipe if "=" in self.recipe else ALL % (self.recipe, self.recipe)
        name = "corpus_zerocast" if self.implementation == "zerocast" else "corpus"
        given = [
            "--job.custom_config_module=tests.torchtitan.corpus",
            f"--job.dump_folder={folder}",
            f"--model.name={name}",
            "--model.flavor=tiny",
            f"--quantize.linear.zerocast.recipe={entries}",
            f"--optimizer.implementation={self.implementation}",
            "--optimizer.lr=3e-3",
            f"--training.steps={self.steps}",
            "--training.local_batch_size=2",
            "--training.seq_len=64",
            "--lr_scheduler.warmup_steps=2",
            "--activation_checkpoint.mode=none",
            "--debug.seed=7",
            "--metrics.log_freq=1",
        ]
        converters = [f"--model.converters={self.converters}"] if self.converters else []
        return [*given, *converters, *self.options]


@contextlib.contextmanager
def trainer(case: Case, folder: str) -> Iterator[Any]:
    """Yield a Trainer of this case, and end it like torchtitan's `main`."""
    with host_on_cpu(), importable():
        made = Trainer(ConfigManager().parse_args(case.arguments(folder)))
        record_losses(made)
        try:
            yield made
        finally:
            made.close()


def record_losses(made: Any) -> None:
    """Record the losses that torchtitan logs at each step in `made.losses`."""
    made.losses, log = [], made.metrics_processor.log

    def recorded(step: int, average: float, *args: Any, **kwargs: Any) -> None:
        made.losses.append(average)
        log(step, average, *args, **kwargs)

    made.metrics_processor.log = recorded


def train(case: Any, folder: str, make: Any = trainer) -> tuple[list[float], list[str], list[str]]:
    """Return losses by step, gathered bytes that are not the unsharded cast of the masters, and what
    `zerocast.verify` finds.
    """
    with make(case, folder) as run:
        run.train()
        (model,) = run.model_parts
        report = zerocast.verify(model)
        assert report.weights == len(models.masters(model)) > 0
        return run.losses, complaints(run, case.recipe), [str(difference) for difference in report.differences]


def complaints(made: Any, when: str) -> list[str]:
    """Return gathered bytes, or slices, that are not those of the unsharded cast of the masters."""
    compare = models.complaints_of_slices if made.parallel_dims.tp_enabled else models.complaints
    return compare(made.model_parts[0], when)


def amaxes_are_measured(case: Case, folder: str) -> bool:
    """Return whether the next cast finds the amaxes of all weights measured."""
    with trainer(case, folder) as run:
        run.train()
        manager = models.manager(run.model_parts[0])
        manager.plan.forget_old_amaxes()
        groups = manager.plan.cast_groups
        assert groups
        return all(len(group.amaxes.measured) == len(group.weights) for group in groups)


def refused(case: Any, folder: str, make: Any = trainer) -> str:
    """Return the ValueError of a run."""
    try:
        with make(case, folder) as run:
            run.train()
            return ""
    except ValueError as error:
        return f"ValueError: {error}"


def converter_after_sharding(case: Case, folder: str) -> str:
    """Return the converter's error for a model that torchtitan has sharded."""
    with trainer(case, folder) as run:
        converter = MasterWeightConverter(run.job_config, run.parallel_dims)
        return error_of(lambda: converter.convert(run.model_parts[0]))


SAVING = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")


def run_and_save(
    case: Any, folder: str, resume: int = -1, make: Any = trainer
) -> tuple[list[float], dict[str, str], list[str]]:
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
        return digests_of_masters(made), complaints(made, "as loaded")


def masters_not_exported(case: Case, folder: str) -> list[str]:
    """Return the masters that torchtitan's last checkpoint, in bf16, does not hold rounded."""
    with trainer(case.having("--checkpoint.enable", "--checkpoint.export_dtype=bfloat16"), folder) as made:
        made.train()
        wanted = {name: whole_tensor(p).bfloat16() for name, p in made.model_parts[0].state_dict().items()}
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(found, checkpoint_id=f"{folder}/checkpoint/step-{case.steps}")
        return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def loaded_masters(case: Any, folder: str, step: int, make: Any = trainer) -> dict[str, str]:
    """Return digests of the masters with which a run of this case starts from that step. Data may be cut for
    other ranks.
    """
    with make(case.having(*SAVING, "--checkpoint.exclude_from_loading=dataloader"), folder) as made:
        made.checkpointer.load(step=step)
        return digests_of_masters(made)


def digests_of_masters(made: Any) -> dict[str, str]:
    return {
        name: casts.sha(whole_tensor(p))
        for name, p in made.model_parts[0].state_dict().items()
        if isinstance(p, Tensor)
    }


def contents(made: Any) -> dict[str, str]:
    """Return digests of masters, optimizer state with delayed scaling, and gathered bytes."""
    (model,) = made.model_parts
    gathered = {
        f"{name} {buffer}": casts.sha(value)
        for name, weight in models.unsharded(model)
        for buffer, value in models.bytes_of(weight).items()
    }
    state = {
        key: casts.sha(whole_tensor(value))
        for key, value in made.optimizers.state_dict().items()
        if torch.is_tensor(value)
    }
    return digests_of_masters(made) | state | gathered


def whole_tensor(tensor: Any) -> Tensor:
    """Return the tensor gathered from all ranks, if it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def check_resumed(ranks: Ranks, world: int, case: Any, folder: str, make: Any = trainer) -> None:
    """Check that a run that goes on from its second step equals the uninterrupted run, to the bit."""
    whole = ranks(world)(run_and_save, case, folder, -1, make, timeout=240)
    resumed = ranks(world)(run_and_save, case, folder, 2, make, timeout=240)
    for (losses, held, wrong), (later, again, wrong_again) in zip(whole, resumed, strict=True):
        assert later == losses[2:]
        assert again == held
        assert not wrong and not wrong_again
    assert any("rowwise_data" in key for key in whole[0][1]) and any("exp_avg" in key for key in whole[0][1])
    assert ("fp8_delayed" in case.recipe) == any("amax_history" in key for key in whole[0][1])
