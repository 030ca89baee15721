"""Run peers' own tests with zerocast in them: python -m tests.suites SOURCES [--only SUITE]. See README.md."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


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


HERE = Path(__file__).parent
# pytest's own status for a run without tests.
NOTHING_RAN = 5


@dataclass(frozen=True)
class Compared:
    """The results of a suite without zerocast and with it."""

    suite: str
    passed_without: frozenset[str]
    passed_with: frozenset[str]
    expected: frozenset[str]

    @property
    def new(self) -> list[str]:
        """The tests that fail with zerocast alone, and are not expected to."""
        return sorted(self.passed_without - self.passed_with - self.expected)

    @property
    def outdated(self) -> list[str]:
        """The expected differences that are none any more."""
        return sorted(self.expected - (self.passed_without - self.passed_with))

    @property
    def counts(self) -> str:
        """One line for the table."""
        expected = len(self.expected) - len(self.outdated)
        return (
            f"{self.suite:<20} {len(self.passed_without):>6} passed without zerocast, {len(self.passed_with):>6} of these with it; "
            f"{expected} expected differences, {len(self.new)} new, {len(self.outdated)} outdated"
        )


def expected_differences(path: Path) -> dict[str, frozenset[str]]:
    """Return the tests that are expected to fail with zerocast, by suite. ValueError for one without a reason or listed twice."""
    listed: dict[str, set[str]] = {}
    tests: set[str] | None = None
    for line in path.read_text().splitlines():
        test = line.strip()
        if not test or line.startswith("#"):
            continue
        if not line.startswith(" "):
            suite, _, reason = line.partition(": ")
            tests = listed.setdefault(suite, set()) if reason else None
            continue
        if tests is None:
            raise ValueError(f"{path}: no suite and reason for {test}")
        if test in tests:
            raise ValueError(f"{path}: listed twice: {test}")
        tests.add(test)
    return {suite: frozenset(tests) for suite, tests in listed.items()}


def pins(path: Path) -> dict[str, tuple[str, str]]:
    """Return (commit or version, where it comes from) by the name of a source."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (pin, " ".join(origin)) for name, pin, *origin in lines}


def problem_of(folder: Path, pin: str) -> str:
    """Return why a checkout is not the pinned one. Empty if it is."""
    if not folder.is_dir():
        return f"{folder} is not there"
    # Source packages of PyPI and of Debian tell their version.
    package, changelog = folder / "PKG-INFO", folder / "debian" / "changelog"
    if package.exists():
        lines = package.read_text().splitlines()
        return "" if f"Version: {pin}" in lines else f"{folder} is not version {pin}"
    if changelog.exists():
        newest, *_ = changelog.read_text().splitlines()
        return "" if f"({pin})" in newest else f"{folder} is not version {pin}"
    said = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return "" if said.stdout.strip() == pin else f"{folder} is not at {pin}"


def copied(suite: Suite, sources: Path, scratch: Path) -> Path:
    """Copy a suite's tests, with other texts where it says so."""
    copy = scratch / suite.name
    shutil.copytree(sources / suite.source / suite.root, copy)
    for file in copy.rglob("*.py") if suite.texts else ():
        text = file.read_text()
        for old, new in suite.texts.items():
            text = text.replace(old, new)
        file.write_text(text)
    return copy


def passed(suite: Suite, changes: Sequence[str], folder: Path, tests: Sequence[str]) -> frozenset[str]:
    """Run tests in `folder` and return those that passed. What they print is in a file beside it."""
    run = f"{suite.name} {changes[-1]}" if suite.zerocast in changes else suite.name
    results, arguments, log = (folder.parent / f"{run}.{kind}" for kind in ("results", "arguments", "log"))
    arguments.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-p", "peer_plugin", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-q", "--timeout", "180", "-p", "no:cacheprovider", *(["-k", suite.selected] if suite.selected else [])]
    environment = os.environ | {
        # Not the root of the repository: peers have packages of the name `tests` too.
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
        "ZEROCAST_CHANGES": " ".join(changes),
        "ZEROCAST_RESULTS": str(results),
    }
    with log.open("w") as output:
        subprocess.run(
            [*command, f"@{arguments}"], cwd=folder, env=environment, stdout=output, stderr=output, check=False
        )
    if not results.exists():
        raise RuntimeError(f"{suite.name}: no test was run with {changes}:\n{log.read_text()[-2000:]}")
    outcomes = {line["test"]: line["outcome"] for line in map(json.loads, results.read_text().splitlines())}
    return frozenset(test for test, outcome in outcomes.items() if outcome == "passed")


def compare(suite: Suite, sources: Path, scratch: Path, expected: frozenset[str]) -> Compared:
    """Run a suite without zerocast, and what passed of it with zerocast."""
    folder = copied(suite, sources, scratch)
    without = passed(suite, suite.changes, folder, suite.tests)
    with_zerocast = passed(suite, (*suite.changes, suite.zerocast), folder, sorted(without))
    return Compared(suite.name, without, with_zerocast, expected)


def run(
    suites: Iterable[Suite], sources: Path, pinned: dict[str, tuple[str, str]], expected: dict[str, frozenset[str]]
) -> int:
    """Run suites and print their counts. Returns the exit status: 1 for a difference that is new or outdated."""
    compared = []
    scratch = Path(tempfile.mkdtemp(prefix="zerocast-suites-"))
    print(f"outputs of the tests: {scratch}")
    for suite in suites:
        pin, origin = pinned[suite.source]
        problem = problem_of(sources / suite.source, pin)
        if problem:
            print(f"SKIPPED {suite.name}: {problem}, which is {origin} at {pin}")
            continue
        compared.append(compare(suite, sources, scratch, expected.get(suite.name, frozenset())))
        print(compared[-1].counts, flush=True)
    for each in compared:
        for test in each.new:
            print(f"NEW {each.suite}: {test} passes without zerocast and fails with it")
        for test in each.outdated:
            print(f"OUTDATED {each.suite}: {test} is no difference any more: take it out of expected.txt")
    if not compared:
        print("no suite was run")
        return NOTHING_RAN
    return int(any(each.new or each.outdated for each in compared))


def main() -> int:
    """Read which suites to run, and where their sources are, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("sources", type=Path, help="the folder with the checkouts that sources.txt names")
    parser.add_argument("--only", choices=[suite.name for suite in SUITES], help="one suite")
    given = parser.parse_args()
    suites = [suite for suite in SUITES if given.only in (None, suite.name)]
    return run(suites, given.sources, pins(HERE / "sources.txt"), expected_differences(HERE / "expected.txt"))


if __name__ == "__main__":
    sys.exit(main())
