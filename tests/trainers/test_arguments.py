"""Every field of transformers' TrainingArguments is obeyed by our Trainer, or refused before training with what to do."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

import zerocast
from tests.workers import error_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make readers")

from accelerate.utils import DistributedType  # noqa: E402

from zerocast.integrations.huggingface import Accelerator, Trainer  # noqa: E402
from zerocast.integrations.huggingface.trainer import REFUSED, REFUSED_OF_OPTIMIZER  # noqa: E402

# Read by the stock Trainer, by its data loaders or by accelerate, whose code is not changed here, or of no effect in the stock
# Trainer either. A field that a release of transformers adds fails the test until it is put into one of the sets.
_READ_ELSEWHERE = """
output_dir do_train do_eval do_predict resume_from_checkpoint seed data_seed full_determinism num_train_epochs
max_steps per_device_train_batch_size gradient_accumulation_steps max_grad_norm average_tokens_across_devices
label_smoothing_factor neftune_noise_alpha torch_empty_cache_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps
label_names length_column_name use_cache bf16 fp16 bf16_full_eval fp16_full_eval tf32 use_cpu local_rank
accelerator_config activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
liger_kernel_config debug skip_memory_metrics ddp_backend ddp_timeout logging_strategy logging_steps
logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo
hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint remove_unused_columns train_sampling_strategy
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
"""
OBEYED = {
    *_READ_ELSEWHERE.split(),
    # a parameter without a gradient counts as zero, as with True
    "ddp_find_unused_parameters",
    # read with `fsdp` alone
    "fsdp_config",
}
RECIPE = {"*_proj.weight": "fp8_block"}
URL = "memory://runs"
OF_OPTIMIZER = {"optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}
ROWS = [{"input_ids": torch.arange(8) + shift, "labels": torch.arange(8) + shift} for shift in range(8)]


def plain_model() -> Any:
    """Return a Llama of one layer."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, vocab_size=32, num_attention_heads=2, num_hidden_layers=1
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def model() -> Any:
    return zerocast.quantize_(plain_model(), RECIPE, dtype=torch.bfloat16)


def trainer_of(folder: Path | str, **options: Any) -> Any:
    """Return a Trainer. Some fields of TrainingArguments are set after its own checks, which ask for GPUs."""
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, bf16=True, report_to=[], disable_tqdm=True, max_steps=2, learning_rate=1e-2
    )
    for name, value in options.items():
        setattr(arguments, name, value)
    net = model()
    net.model.norm.requires_grad_(False)
    return Trainer(net, arguments, train_dataset=ROWS, eval_dataset=ROWS)


def test_every_field_is_obeyed_or_refused() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert not fields - OBEYED - OF_OPTIMIZER - REFUSED.keys() - REFUSED_OF_OPTIMIZER.keys()
    assert not OBEYED & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_the_trainer_is_built(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='a value' in TrainingArguments cannot be obeyed: "):
        trainer_of(tmp_path, **{name: "a value"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("optim", "adafactor"), ("optim", "sgd"), ("optim_args", "a=1"), ("optim_target_modules", "all")],
)
def test_refused_when_training_begins(tmp_path: Path, name: str, value: str) -> None:
    """The argument is refused if the Trainer builds the optimizer. A given one trains, as in the stock Trainer."""
    with pytest.raises(ValueError, match=f"{name}='{value}' in TrainingArguments"):
        trainer_of(tmp_path, **{name: value}).train()


def test_models_that_accelerate_is_to_shard_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    configured = mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP)
    with configured, pytest.raises(RuntimeError, match="configured for FSDP, and ZeroAdamW shards"):
        accelerator.prepare(model())


# A higher loss counts as better, so the best model is that of the first of two checkpoints.
LOADS_BEST = {
    "save_steps": 1,
    "eval_steps": 1,
    "eval_strategy": transformers.trainer_utils.IntervalStrategy.STEPS,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_model_is_loaded(tmp_path: Path, save_only_model: bool) -> None:
    """The best model is loaded from masters and moments, or from the masters of a checkpoint that no run resumes."""
    trainer = trainer_of(tmp_path, save_only_model=save_only_model, **LOADS_BEST)
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-1"
    stored = safetensors.torch.load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    masters = zerocast.optim.full_state_dict(trainer.model, trainer._zero())
    assert stored and all(torch.equal(tensor, masters[name]) for name, tensor in stored.items())
    assert zerocast.verify(trainer._zero()).ok
    (measured,) = [
        line["eval_loss"] for line in trainer.state.log_history if line.get("step") == 1 and "eval_loss" in line
    ]
    assert trainer.evaluate()["eval_loss"] == measured
    if save_only_model:
        with pytest.raises(ValueError, match="has no masters and moments, so a run does not resume from it: the"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_model_is_not_that_of_an_earlier_run(tmp_path: Path) -> None:
    """A run with save_only_model overwrites checkpoints that have masters."""
    for options in ({"learning_rate": 5e-2}, {"save_only_model": True}):
        trainer = trainer_of(tmp_path, **LOADS_BEST, **options)
        trainer.train()
    stored = safetensors.torch.load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    masters = zerocast.optim.full_state_dict(trainer.model, trainer._zero())
    assert stored and all(torch.equal(tensor, masters[name]) for name, tensor in stored.items())


def test_a_save_that_is_interrupted_leaves_no_masters_of_an_earlier_run(tmp_path: Path) -> None:
    """Files of two runs in one folder would be resumed as one checkpoint."""
    trainer = trainer_of(tmp_path, save_steps=1)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    with mock.patch.object(Trainer, "_save_rng_state", side_effect=KeyError), pytest.raises(KeyError):
        trainer._save_checkpoint(trainer.model, None)
    with pytest.raises(FileNotFoundError, match="trainer_state"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(folder))
    with mock.patch.object(Trainer, "_save", side_effect=KeyError), pytest.raises(KeyError):
        trainer._save_checkpoint(trainer.model, None)
    assert not [*(folder / "zerocast").iterdir()]


def test_a_plain_parameter_that_is_unfrozen_raises(tmp_path: Path) -> None:
    """An optimizer that the Trainer builds also refuses a parameter that is unfrozen later."""
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.model.model.norm.requires_grad_(True)
    assert "model.norm.weight: the optimizer has no masters of them" in error_of(trainer.train)


def test_refused_where_a_run_would_not_reduce_its_gradients(tmp_path: Path) -> None:
    """Several GPUs in one process, a model without quantized weights, and an optimizer that is not ours are refused."""
    trainer = trainer_of(tmp_path)
    trainer.args._n_gpu += 2
    for call in (trainer.train, lambda: trainer.evaluate(ROWS)):
        assert "start a process a GPU (torchrun" in error_of(call)
    arguments = trainer_of(tmp_path).args
    said = error_of(Trainer(plain_model(), arguments, train_dataset=ROWS).train)
    assert "call zerocast.quantize_(model, recipe) before" in said
    net = model()
    sgd = torch.optim.SGD([p for p in net.parameters() if type(p) is torch.nn.Parameter], lr=0.1)
    assert "not SGD" in error_of(Trainer(net, arguments, train_dataset=ROWS, optimizers=(sgd, None)).train)


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: Accelerator(cpu=True).save_state(URL),
        lambda folder: Accelerator(cpu=True).load_state(URL),
        lambda folder: trainer_of(URL),
        lambda folder: trainer_of(folder).train(resume_from_checkpoint=f"{URL}/checkpoint-1"),
    ],
    ids=["save_state", "load_state", "output_dir", "resume_from_checkpoint"],
)
def test_files_are_local(tmp_path: Path, call: Callable[[Path], object]) -> None:
    """accelerate and transformers write and read local files, and say so."""
    with pytest.raises(ValueError, match="is a URL, expected a local path"):
        call(tmp_path)
