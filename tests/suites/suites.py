"""The suites of peers' tests, and what zerocast replaces in each."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """Some tests of one source, run without zerocast and with it.

    Attributes:
        name: the name in expected.txt.
        source: the folder in SOURCES, and the line of sources.txt that pins it.
        root: the folder of the source that is copied, and that the tests are run in.
        tests: files and folders in it.
        zerocast: the change of `peer_plugin.CHANGES` that puts zerocast in place.
        changes: the changes of every run.
        texts: what is written differently in the copy, such as the name of a device.
        selected: the argument of pytest's -k.
    """

    name: str
    source: str
    root: str
    tests: tuple[str, ...]
    zerocast: str
    changes: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    selected: str = ""


# torch_npu keeps copies of torch's tests, which name its device where torch's name CUDA's.
CPU = ("gloo", "torch_npu")
DEVICE = {'"npu"': '"cpu"', '"npu:0"': '"cpu"'}
# The tests of AdamW's family and of what every optimizer does, among those of all optimizers.
ADAMW = "adam or hook or invalid or duplicate or noop or load_state"
FSDP2 = ("distributed/fsdp2", "distributed/_composable")
SCHEDULERS = ("optim/test_lrscheduler.py",)
# The tests of FSDP2 in torch that torch_npu has not copied.
TORCH = (
    *(
        f"_composable/fsdp/test_fully_shard_{name}.py"
        for name in ("grad_scaler", "init", "mixed_precision", "training")
    ),
    "checkpoint/fsdp/test_fsdp_dsd.py",
    "checkpoint/test_state_dict.py",
)
# Torch's tests are of torch 2.6: first what later versions have renamed, then what names a GPU,
# in torch_npu's words. Compiled models take minutes on a CPU.
ON_CPU = {
    "predivide_factor, postdivide_factor =": "predivide_factor, postdivide_factor, *_ =",
    "_dim_group_infos": "_dim_group_names",
    "    test_compiled_fsdp,\n": "",
    "    @test_compiled_fsdp(compile_compute_on_module=Transformer)\n": "",
    '"compile_model": [True, False]': '"compile_model": [False]',
    'torch.device("cuda", torch.cuda.current_device())': 'torch.device("cpu")',
    'torch.device("cuda", 0)': 'torch.device("cpu")',
    "GradScaler(init": 'GradScaler("cpu", init',
    "grad._local_tensor.device.index == 1": "grad.device_mesh.get_rank() == 1",
    "CPUOffloadPolicy()": "CPUOffloadPolicy(pin_memory=False)",
    "not TEST_CUDA": "False",
    "torch.cuda.": "torch.npu.",
    ".cuda()": ".npu()",
    '"cuda"': '"cpu"',
    **{f"min_world_size = {ranks}": "min_world_size = 2" for ranks in (4, 8)},
}

ACCELERATE = tuple(
    f"tests/test_{name}.py"
    for name in (
        "accelerator",
        "cpu",
        "dataclasses",
        "grad_sync",
        "kwargs_handlers",
        "memory_utils",
        "optimizer",
        "scheduler",
        "state_checkpointing",
    )
)
# A test compares the memory that is free on the whole machine.
ALONE = "not free_memory"
TRAINER = tuple(f"tests/trainer/test_trainer{name}.py" for name in ("", "_callback", "_utils"))
LIGHTNING = (
    "tests_pytorch/callbacks/test_finetuning_callback.py",
    "tests_pytorch/callbacks/test_gradient_accumulation_scheduler.py",
    "tests_pytorch/callbacks/test_lr_monitor.py",
    "tests_pytorch/callbacks/test_stochastic_weight_avg.py",
    "tests_pytorch/callbacks/test_weight_averaging.py",
    "tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py",
    "tests_pytorch/checkpointing/test_model_checkpoint.py",
    "tests_pytorch/checkpointing/test_torch_saving.py",
    "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
    "tests_pytorch/core/test_lightning_optimizer.py",
    "tests_pytorch/loops/optimization",
    "tests_pytorch/strategies/test_common.py",
    "tests_pytorch/strategies/test_custom_strategy.py",
    "tests_pytorch/models/test_restore.py",
    "tests_pytorch/strategies/test_single_device.py",
    "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
    "tests_pytorch/trainer/optimization",
    "tests_pytorch/tuner/test_lr_finder.py",
)
# Not those that count or read the files of a checkpoint, which is a folder under ZeroStrategy.
ZERO_STRATEGY = (
    "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
    "tests_pytorch/core/test_lightning_optimizer.py",
    "tests_pytorch/loops/optimization",
    "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
    "tests_pytorch/trainer/optimization",
)
# Names that transformers has no longer, which one test of these uses.
GLUE = {f"        {name},\n": "" for name in ("GlueDataset", "GlueDataTrainingArguments")}

SUITES = (
    Suite("fsdp2", "torch_npu", "test", FSDP2, "prepare", CPU, DEVICE),
    Suite("FSDP2 of torch", "torch", "test/distributed", TORCH, "prepare", CPU, ON_CPU),
    Suite("schedulers", "torch_npu", "test", SCHEDULERS, "zero_adamw", CPU, DEVICE),
    Suite("schedulers, ZeroMuon", "torch_npu", "test", SCHEDULERS, "zero_muon", CPU, DEVICE),
    Suite("schedulers, fused", "torch_npu", "test", SCHEDULERS, "fused_adamw", CPU, DEVICE),
    Suite("optimizers", "torch_npu", "test", ("optim/test_optim.py",), "zero_adamw", CPU, DEVICE, ADAMW),
    Suite("optimizers, ZeroMuon", "torch_npu", "test", ("optim/test_optim.py",), "zero_muon", CPU, DEVICE, ADAMW),
    Suite("optimizers, fused", "torch_npu", "test", ("optim/test_optim.py",), "fused_adamw", CPU, DEVICE, ADAMW),
    Suite("averages", "torch_npu", "test", ("optim/test_swa_utils.py",), "averages", CPU, DEVICE),
    Suite("accelerate", "accelerate", ".", ACCELERATE, "accelerator", selected=ALONE),
    Suite("accelerate, ZeroAdamW", "accelerate", ".", ACCELERATE, "accelerator_zero_adamw", selected=ALONE),
    Suite("transformers", "transformers", ".", TRAINER, "zero_adamw", (), GLUE),
    Suite("Lightning", "lightning", "tests", LIGHTNING, "zero_adamw"),
    Suite(
        "Lightning, ZeroStrategy",
        "lightning",
        "tests",
        ZERO_STRATEGY,
        "zero_strategy",
        selected="not fsspec and not cross_device and not storage_options",
    ),
)
