"""One line before pretrain() of megatron.training."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.megatron import pretraining
from tests.megatron.host_on_cpu import cuda_on_cpu, host_memory
from tests.megatron.pretraining import (
    FLAG,
    FLAGS,
    ON_CPU,
    RECIPE,
    WHY_NOT,
    Trained,
    installed,
    module_or_none,
    needs_training,
    pretrain,
)
from tests.megatron.training import NARROW, Case, Run
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import error_of, on_ranks
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host, installation, offload

if not WHY_NOT:
    import megatron.training.training as loop

pytestmark = needs_training

PLACES = (
    "TRAINING",
    "CHECKPOINTING",
    "ARGUMENTS",
    "MODEL_BUILDERS",
    "FP8",
    "FP4",
    "BUFFER",
    "DDP",
    "OPTIMIZER",
    "FACTORIES",
)
TILES = "mxfp8:block=32x32"
SECONDS = 150.0  # a pretrain() takes longer than other cases
ONE_STEP = ("--train-iters", "1")
OFFLOAD = ("--optimizer-cpu-offload", "--optimizer-offload-fraction", "1", "--use-precision-aware-optimizer")
TE_LAYERS = {name for name in pretraining.CASES if "MXFP8Tensor" in name or "tiles" in name or "one tensor" in name}


@on_ranks(2, timeout=SECONDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_te if name in TE_LAYERS else ()) for name in pretraining.CASES]
)
def test_mistakes(name: str) -> None:
    """The error says what to do, and nothing is installed afterwards."""
    mistake, message = pretraining.CASES[name]
    said = error_of(mistake)
    assert re.match(message, said), said
    assert installation._installed is None


@on_ranks(2, timeout=SECONDS)
def test_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    """The resumed run is that of a script that has an extra_args_provider and no call of install(), with overlap."""
    flags = ("--train-iters", "4")
    through = pretraining.train(*flags, *pretraining.saving_to(tmp_path))
    assert len(through.formats) == 4 and set(through.formats.values()) == {NARROW, "fp8_block"}
    assert through.losses[4] < through.losses[1] and len(through.evaluated) >= 2
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather")
    with pretraining.uninstalled_afterwards():
        by_flag = (*FLAG, "--zerocast-verify-every", "1")
        arguments = (*by_flag, *flags, *overlap, *pretraining.loading_from(tmp_path))
        resumed = pretrain(*arguments, extra_args_provider=integration.add_arguments, after=pretraining.left)
    through.check_resumed(resumed)


@on_ranks(2, timeout=SECONDS)
@needs_te
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "overlap"])
def test_weights_of_transformer_engine(overlap: bool) -> None:
    """With an empty recipe they are cast, MXFP8 in tiles too, in buffers of bytes."""
    flags = ("--overlap-grad-reduce", "--overlap-param-gather") if overlap else ()
    left = pretraining.train_te_layers(TILES, "--train-iters", "4", *flags)
    assert left.losses[4] < left.losses[1]
    assert set(left.formats.values()) == {TILES} and len(left.formats) == 2


@pytest.mark.slow
@on_ranks(2, timeout=SECONDS)
def test_a_checkpoint_in_bf16_gives_masters_as_they_are(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    written = pretraining.plain(*ONE_STEP, "--save", folder, "--save-interval", "1").masters
    first: dict[str, torch.Tensor] = {}
    step = loop.train_step

    def look(forward_step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        first.update(first or Run(model[0], optimizer, Case()).masters())
        return step(forward_step, data, model, optimizer, *args, **kwargs)

    with installed(RECIPE), mock.patch.object(loop, "train_step", look):
        pretrain(*ONE_STEP, "--finetune", "--load", folder)
    assert first.keys() == written.keys()
    assert all(torch.equal(master, written[name].bfloat16().float()) for name, master in first.items())


@on_ranks(2, timeout=SECONDS)
def test_the_norm_of_masters_in_host_memory() -> None:
    """megatron.training computes it by kernels that ask for addresses."""

    def after(trained: Trained) -> None:
        run = trained.run
        assert run is not None
        norm_of = installation.training().calc_params_l2_norm
        utils = sys.modules[norm_of.__module__]
        apply = utils.multi_tensor_applier

        def by_address(kernel: Any, noop: Any, lists: Any, *args: Any) -> Any:
            assert all(tensor.data_ptr() for tensors in lists for tensor in tensors)
            return apply(kernel, noop, lists, *args)

        with mock.patch.object(utils, "multi_tensor_applier", by_address):
            norm = float(norm_of(run.ddp))
        assert norm == pytest.approx(sum(float(m.double().square().sum()) for m in run.masters().values()) ** 0.5)
        assert any(offload.cpu_copies(one.optimizer) for one in host.distributed_optimizers(run.optimizer))

    unpinned = ("--no-pin-cpu-grads", "--no-pin-cpu-params")
    with cuda_on_cpu(), host_memory(), installed(RECIPE):
        pretrain(*OFFLOAD, *unpinned, *ONE_STEP, "--log-params-norm", after=after)


@pytest.mark.slow
@on_ranks(2, timeout=SECONDS)
def test_values_are_hashed_and_masters_normed() -> None:
    pretraining.train(*ONE_STEP, "--log-params-norm", "--check-weight-hash-across-dp-replicas-interval", "1")


@pytest.mark.slow
@on_ranks(2, timeout=SECONDS)
def test_nothing_is_done_without_a_recipe() -> None:
    without = pretraining.plain("--train-iters", "2")
    with installed():
        found = pretraining.plain("--train-iters", "2")
    without.check_same(found)
    assert not found.formats


@pytest.mark.slow
@on_ranks(2, timeout=SECONDS)
def test_uninstall_gives_everything_back() -> None:
    """Every name of Megatron's is what it was, the optimizer refuses to step, and a run without zerocast quantizes nothing."""
    modules = [one for place in PLACES if (one := module_or_none(getattr(host, place)))]
    before = [{name: value for name, value in vars(module).items() if callable(value)} for module in modules]
    with installed(RECIPE):
        optimizer = pretrain(*ONE_STEP, after=lambda trained: trained.run.optimizer)
    for module, values in zip(modules, before, strict=True):
        assert [name for name, value in values.items() if vars(module).get(name) is not value] == []
    with pytest.raises(RuntimeError, match=r"step of .* which was detached"):
        optimizer.step()
    assert not pretraining.plain(*ONE_STEP).formats


@pytest.mark.slow
@on_ranks(2, timeout=SECONDS)
def test_a_chunk_without_quantized_weights() -> None:
    """One chunk has quantized weights, of two pipeline stages of two chunks each."""

    def after(trained: Trained) -> list[dict[str, str]]:
        (attachment,) = own.attachments
        assert zerocast.verify(attachment).ok
        return [pretraining.left(trained, run).formats for run in trained.chunks]

    stages = (
        "--num-layers",
        "4",
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "1",
    )
    with installed({"decoder.layers.2.mlp.*.weight": NARROW}) as own:
        first, second = pretrain(*stages, "--train-iters", "2", "--global-batch-size", "8", after=after)
    assert not first
    assert list(second.values()) == ([NARROW] * 2 if dist.get_rank() == 0 else [])


def test_the_flags() -> None:
    read: Any = pretraining.parsed(*FLAG, "*.out=identity", "--zerocast-verify-every", "100")
    assert read.zerocast_recipe == [*FLAG[1:], "*.out=identity"] and read.zerocast_verify_every == 100
    assert pretraining.parsed().zerocast_recipe is None


@pytest.mark.parametrize("checkout", os.environ.get("ZEROCAST_MEGATRON", "").split(os.pathsep))
def test_the_stock_script(checkout: str, tmp_path: Path) -> None:
    """pretrain_gpt.py of a checkout of Megatron-LM, as it is: train, evaluate, save; resume on another number of ranks."""
    if not os.path.isdir(checkout):
        pytest.skip("ZEROCAST_MEGATRON names no checkout of Megatron-LM: make test-hosts")
    script, folder, here = Path(checkout, "pretrain_gpt.py"), tmp_path / "checkpoint", Path(__file__).parents[2]
    paths = os.pathsep.join([checkout, str(here), os.environ.get("PYTHONPATH", "")])
    # Megatron compiles with the Python of the path, and asks python3-config, which no virtual environment has, for a suffix.
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    suffix = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    buffers = Path(checkout, "megatron/core/distributed/param_and_grad_buffer.py").read_text()
    fmt = "nvfp4" if "nvfp4_packed" in buffers else "fp8_block"

    def run(ranks: int, *flags: str) -> str:
        launch = f"-m torch.distributed.run --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint localhost:0"
        own = ["--zerocast-recipe", f"*.linear_*.weight={fmt}", "--zerocast-verify-every", "1"]
        line = [sys.executable, *launch.split(), "-m", "tests.megatron.pretraining", str(script), *FLAGS.split()]
        environment = {**os.environ, "PYTHONPATH": paths, "PATH": binaries, "MAKEFLAGS": suffix}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        command = [*line, *ON_CPU.split(), *own, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    said = run(2, "--train-iters", "2", "--save", str(folder), "--save-interval", "2")
    assert "successfully saved checkpoint from iteration       2" in said
    assert re.search(r"validation loss at iteration 2 .*lm loss value: \d", said)
    said = run(3, "--train-iters", "4", "--load", str(folder), "--override-opt_param-scheduler")
    assert "successfully loaded checkpoint" in said and re.search(r"iteration +4/ +4 .*lm loss: \d", said)
