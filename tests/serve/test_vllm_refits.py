"""vLLM takes refits: its loaders, fusing, processing, calls and scheduler, in another process and environment (`make vllm`).

Products are stand-ins (`examples/rollout/vllm_stand_in.py`): one that reads weights in place, one that packs them. On a CPU with
AMX, and for int4 on every one, a kernel of vLLM runs too.
"""

import contextlib
import copy
import json
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from examples.rollout.toy import requantized
from tests.serve.models import dequantized as plain
from tests.serve.models import in_bf16, quantized
from tests.serve.test_vllm import NEEDS_VLLM, VLLM, fused
from tests.serve.vllm_messages import dumped, loaded
from zerocast.export import export_hf
from zerocast.serve import EngineSender, RefitError, Sender

ROOT = Path(__file__).parents[2]
SITE = ROOT / "examples/rollout/vllm_site"

NEEDS_AMX = pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="vLLM has no such product on this CPU"
)

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(600)]


class RemoteEngine:
    """An `EngineClient` of a vLLM in another process, and what a test asks of it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.answer()

    def answer(self) -> Any:
        found = loaded(self._connection.recv_bytes())
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["value"]

    def ask(self, call: str, **arguments: Any) -> Any:
        self._connection.send_bytes(dumped((call, arguments)))
        return self.answer()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.ask("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ask("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask("finish_weight_update", weight_version=weight_version)

    def pause(self) -> None:
        self.ask("pause")

    def resume(self) -> None:
        self.ask("resume")


@contextlib.contextmanager
def running(
    folder: Path, tmp_path: Path, ranks: int = 1, stand_in: str = "in place", load_format: str = "dummy"
) -> Iterator[RemoteEngine]:
    """vLLM on a folder, whose weights it does not read unless the load format is another one. With no stand-in it computes with
    kernels of its own.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)]), "ZEROCAST_STAND_IN": stand_in}
    socket, log = str(tmp_path / "socket"), tmp_path / "log"
    command = [VLLM, "-m", "tests.serve.vllm_engine", socket, str(folder), str(ranks), load_format]
    with Listener(socket) as listener, log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            listener._listener._socket.settimeout(200)  # type: ignore[attr-defined]
            with listener.accept() as connection:
                yield RemoteEngine(connection)
                connection.send_bytes(dumped(None))
                process.wait(30)
        except (TimeoutError, EOFError):
            pytest.fail(log.read_text()[-6000:])
        finally:
            process.kill()
            process.wait()


class Run:
    """A Llama that a ZeroAdamW trains, and an engine of its format."""

    def __init__(self, fmt: str, tmp_path: Path, name: str = "llama", naming: str = "") -> None:
        self.naming = naming or ("deepseek" if fmt == "fp8_block" else "compressed-tensors")
        self.model: Any = quantized(name, fmt, "llama")
        self.optimizer = zerocast.ZeroAdamW(self.model.named_parameters(), lr=1e-3)
        self.folder = tmp_path / "exported"
        export_hf(self.model, self.folder, self.naming)
        self.sender = Sender(self.model, self.naming, dtype=torch.bfloat16, bucket_bytes=300_000)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.sender.refit)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.optimizer.step()

    def check(self, engine: RemoteEngine) -> None:
        """What the layers of each rank multiply with is the trainer's to the bit, cut as vLLM cuts it."""
        wanted = {name: value.bfloat16() for name, value in fused(self.model).items()}
        wanted |= {
            name.removesuffix(".weight"): parameter.detach().bfloat16()
            for name, parameter in self.model.named_parameters()
            if not isinstance(parameter, zerocast.QuantizedWeight)
        }
        ranks = engine.ask("matrices")
        for rank, found in enumerate(ranks):
            assert wanted.keys() - found.keys() <= {"lm_head"} and found.keys() <= wanted.keys()
            for name, value in found.items():
                heads = self.model.config.num_key_value_heads
                assert torch.equal(value, cut(name, wanted[name], rank, len(ranks), heads)), (name, rank)


def cut(name: str, value: Tensor, rank: int, ranks: int, heads: int) -> Tensor:
    """The rows or columns of a rank. Query, key and value, of heads of 64, and gate and up are cut one by one."""
    layer = name.rpartition(".")[2]
    if layer in ("o_proj", "down_proj"):
        return value.chunk(ranks, 1)[rank]
    if layer == "qkv_proj":
        return torch.cat([part.chunk(ranks)[rank] for part in value.split([256, 64 * heads, 64 * heads])])
    if layer == "gate_up_proj":
        return torch.cat([part.chunk(ranks)[rank] for part in value.chunk(2)])
    if layer in ("embed_tokens", "lm_head"):
        # vLLM pads the vocabulary to a multiple of 64.
        return nn.functional.pad(value, (0, 0, 0, -len(value) % 64)).chunk(ranks)[rank]
    return value


@pytest.mark.parametrize(
    ("fmt", "naming", "ranks", "stand_in"),
    [
        ("fp8_block", "deepseek", 1, "packed"),
        ("fp8_block", "deepseek", 2, "in place"),
        ("fp8_block", "modelopt", 1, "in place"),
        ("fp8_current", "compressed-tensors", 1, "in place"),
        ("fp8_current", "compressed-tensors", 2, "packed"),
        ("fp8_current", "modelopt", 1, "packed"),
        ("nvfp4", "compressed-tensors", 1, "in place"),
        ("nvfp4", "compressed-tensors", 2, "packed"),
        ("nvfp4", "modelopt", 1, "packed"),
        ("nvfp4", "modelopt", 2, "in place"),
        ("mxfp4", "compressed-tensors", 1, "in place"),
        ("mxfp4", "compressed-tensors", 2, "packed"),
        ("mxfp8", "compressed-tensors", 1, "in place"),
        ("mxfp8", "modelopt", 1, "in place"),
        ("mxfp8", "modelopt", 2, "packed"),
        ("int4", "compressed-tensors", 1, "in place"),
        ("int4", "compressed-tensors", 2, "packed"),
    ],
)
def test_refits(fmt: str, naming: str, ranks: int, stand_in: str, tmp_path: Path) -> None:
    """Refits come in full into weights that were never loaded, then by changes, at the same addresses."""
    run = Run(fmt, tmp_path, "llama, four heads" if ranks == 2 else "llama", naming)
    with running(run.folder, tmp_path, ranks, stand_in) as engine:
        addresses = engine.ask("addresses")
        sender = EngineSender(run.sender, engine, tmp_path)
        sender.refit()
        full_nbytes = sender.nbytes
        run.check(engine)
        for _ in range(2):
            run.step()
            sender.refit()
            assert sender.nbytes < full_nbytes
            run.check(engine)
        assert run.sender.refit == 3 and engine.ask("version") == f"{run.sender.run}-3"
        assert engine.ask("addresses") == addresses


def test_an_engine_and_its_trainers(tmp_path: Path, record_property: Any) -> None:
    """Trainers that do not fit are refused with nothing changed. Probabilities are then the trainer's own, far closer than those of
    bf16 weights that an engine quantizes again; they follow the weights, as no cache outlives a refit.
    """
    run = Run("fp8_block", tmp_path)
    with running(run.folder, tmp_path) as engine:
        for told, spoken in (({"protocol": 9}, 9), ({}, 0)):
            with pytest.raises(RuntimeError, match=f"trainer speaks protocol {spoken} of refits, and this plugin 1"):
                engine.init_weight_transfer_engine({**told, "folder": str(tmp_path)})
        calls = engine.ask("trainer_calls", folder=str(tmp_path))
        rest = ["end", "apply", "finish"]
        assert calls == ["init", "init", "start", "full", *rest, "init", "start", "delta", *rest]
        settings = "vLLM's loaders do not accept .* with these settings of quantization and this tensor-parallel size"
        with pytest.raises(RefitError, match=settings):
            EngineSender(Sender(run.model, "modelopt", dtype=torch.bfloat16), engine, tmp_path).refit()
        dtypes = "the engine keeps .* as torch.bfloat16, and the sender stores .* as torch.float32"
        with pytest.raises(RefitError, match=dtypes):
            EngineSender(Sender(run.model, run.naming), engine, tmp_path).refit()

        sender = EngineSender(run.sender, engine, tmp_path)
        sender.refit()
        first = engine.ask("logprobs")
        run.step()
        sender.refit()
        second = engine.ask("logprobs")
        own = kl(run, second)
        assert not torch.equal(first, second)

        # After a wake-up from sleep level 2 the bytes are gone. Changes are refused, and a full refit follows.
        engine.ask("zero")
        run.step()
        sender.refit()
        assert run.sender.refit == 4
        run.check(engine)

    other = plain(run.model)
    for name, parameter in other.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = requantized(parameter.data)
    other.save_pretrained(tmp_path / "requantized")
    with running(tmp_path / "requantized", tmp_path, load_format="auto") as engine:
        again = kl(run, engine.ask("logprobs"))
    record_property("kl", f"{own:.2e} with the trainer's bytes, {again:.2e} quantized again")
    assert own < again / 10


def test_an_application_that_breaks_off_on_one_rank(tmp_path: Path) -> None:
    """Neither rank serves, also if something lets requests go on, until a full refit. No answer of a rank to a refused call is
    taken for one to a later call, nor is a refit that another trainer left open in the way.
    """
    run = Run("fp8_block", tmp_path, "llama, four heads")
    with running(run.folder, tmp_path, ranks=2, stand_in="packed") as engine:
        sender = EngineSender(run.sender, engine, tmp_path)
        sender.refit()
        run.step()
        engine.ask("break_once")
        with pytest.raises(RefitError, match=r"while it was written: rank 1 of 2: MemoryError: .* serves nothing"):
            sender.refit(full=True)
        engine.resume()
        with pytest.raises(RuntimeError, match=r"this engine has no weights to serve: .* a refit failed while"):
            engine.ask("logprobs")
        sender.refit()
        run.check(engine)
        engine.start_weight_update()
        run.step()
        sender.refit()
        assert run.sender.refit == 4
        run.check(engine)


@pytest.mark.parametrize("stand_in", ["packed", "packed into a buffer"])
def test_a_kernel_that_reads_something_else(stand_in: str, tmp_path: Path) -> None:
    """Bytes that a kernel laid out again are compared too: with those that something else wrote, though no stored tensor has
    changed, and with those that vLLM does not renew, in a buffer that is not persistent.
    """
    run = Run("fp8_block", tmp_path)
    with running(run.folder, tmp_path, stand_in=stand_in) as engine:
        sender = EngineSender(run.sender, engine, tmp_path)
        if stand_in == "packed into a buffer":
            with pytest.raises(RefitError, match="does not compute with the codes that vLLM's processing made"):
                sender.refit()
            return
        sender.refit()
        engine.ask("zero", ending="qkv_proj.weight")
        sender.refit()
        assert run.sender.refit == 3
        run.check(engine)


@pytest.mark.parametrize(
    ("fmt", "kernel", "codes"),
    [
        pytest.param("fp8_block", "CPUFp8BlockScaledMMKernel", "weight", marks=NEEDS_AMX),
        ("int4", "CPUWNA16LinearKernel", "weight_packed"),
    ],
)
def test_a_kernel_of_vllm(fmt: str, kernel: str, codes: str, tmp_path: Path, record_property: Any) -> None:
    """What it packed in refits, in full and by changes, is what it packs where it loads an export of the same weights."""
    run = Run(fmt, tmp_path)
    with running(run.folder, tmp_path, stand_in="") as engine:
        sender = EngineSender(run.sender, engine, tmp_path)
        sender.refit()
        for _ in range(2):
            run.step()
            sender.refit()
        record_property("kl", f"{kl(run, engine.ask('logprobs')):.2e}")
        assert run.sender.refit == 3 and engine.ask("kernels") == [[kernel]]
        refitted = engine.ask("logprobs")
        assert kl(run, refitted) < 1e-2
        engine.ask("zero", ending=f"qkv_proj.{codes}")
        sender.refit()
        assert run.sender.refit == 5 and torch.equal(engine.ask("logprobs"), refitted)
    export_hf(run.model, tmp_path / "now", run.naming)
    with running(tmp_path / "now", tmp_path, stand_in="", load_format="auto") as engine:
        assert torch.equal(engine.ask("logprobs"), refitted)


def test_scales_of_which_vllm_takes_one(tmp_path: Path) -> None:
    """Changes that part them are refused like all weights that have them, with nothing changed."""
    run = Run("nvfp4", tmp_path)
    with running(run.folder, tmp_path) as engine:
        sender = EngineSender(run.sender, engine, tmp_path)
        sender.refit()
        before = engine.ask("logprobs")
        run.model.model.layers[0].self_attn.k_proj.weight.amax.mul_(2)
        with pytest.raises(RefitError, match=r"qkv_proj.weight_global_scale would be .*, and it takes one for all"):
            sender.refit()
        assert torch.equal(engine.ask("logprobs"), before)


def test_loaders_that_do_more_than_copy() -> None:
    """Zeros are padding. Other values that a loader writes are refused: the engine would not have the sender's bytes."""
    command = [VLLM, "-m", "tests.serve.vllm_loaders"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert found.pop("padding") == [[[2, 8], [8, 1], 16]]
    assert found.pop("strides") == (
        "vLLM keeps layer.weight with strides (1, 4), and only contiguous tensors are refitted"
    )
    for name, operator in {"ones": "fill_.Scalar", "doubled": "mul_.Tensor", "by index": "index_copy_.default"}.items():
        assert f"writes to layer.weight by aten.{operator}" in found.pop(name)
    assert not found


def kl(run: Run, engine: Tensor) -> float:
    """The mean divergence of an engine's probabilities from the trainer's, in nats."""
    with torch.no_grad():
        logits = in_bf16(copy.deepcopy(run.model))(torch.arange(24).view(2, 12)).logits
    ours = logits[:, :-1].double().log_softmax(-1)
    return (ours.exp() * (ours - engine.double())).sum(-1).mean().item()


def test_a_tensor_parallel_size_that_divides_a_block(tmp_path: Path) -> None:
    """The refit is refused, and the engine, which never had weights, serves nothing."""
    run = Run("fp8_block", tmp_path)  # Two key-value heads of 64 rows.
    with running(run.folder, tmp_path, ranks=2) as engine:
        with pytest.raises(RefitError, match=r"do not accept .* this tensor-parallel size"):
            EngineSender(run.sender, engine, tmp_path).refit()
        with pytest.raises(RuntimeError, match="this engine has no weights to serve: none came yet"):
            engine.ask("logprobs")
