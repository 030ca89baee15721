"""The table "what works" of integrations/huggingface/README.md: each row is a test here, and each test a row."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zerocast
from tests.docs.page import ROOT
from tests.optim.test_update import EACH, distance
from tests.trainers.test_arguments import RECIPE, ROWS, model, plain_model
from tests.workers import Ranks, error_of
from zerocast import QuantizedWeight, ZeroAdamW, optim

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make readers")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make readers")

from zerocast.integrations.huggingface import Accelerator, Trainer  # noqa: E402

LOW_RANK, RATE = 4, 1e-2


def trainer_of(folder: Path, net: Any, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=3,
        logging_steps=1,
        learning_rate=RATE,
        **options,
    )
    return Trainer(net, arguments, train_dataset=ROWS)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without anything special."""
    trainer = trainer_of(tmp_path_factory.mktemp("ordinary"), model(), save_strategy="no")
    trainer.train()
    return losses(trainer)


def test_the_table_has_these_rows() -> None:
    page = (ROOT / "integrations/huggingface/README.md").read_text()
    table = page.partition("## What works")[2].partition("\n## ")[0]
    rows = re.findall(r"`(test_\w+)`", table)
    assert rows == [name for name in globals() if name.startswith("test_") and name != "test_the_table_has_these_rows"]


# -- adapters


class LowRank(nn.Module):
    """A linear layer with an adapter beside it, as docs/quickstart/lora.md has it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(32, LOW_RANK, bias=False), nn.Linear(LOW_RANK, 32, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + 4.0 * self.up(self.down(x))
        return added


def with_adapters(net: Any) -> Any:
    """Put adapters beside all projections of a frozen model."""
    net.requires_grad_(False)
    torch.manual_seed(1)
    layer = net.model.layers[0]
    for name in ("q_proj", "v_proj", "o_proj"):
        setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return net


def plain_copy(net: Any) -> Any:
    """Return the same model with the values of its quantized weights in plain weights."""
    other = plain_model()
    with torch.no_grad():
        for (name, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
            assert ours.shape == theirs.shape, name
            theirs.copy_(ours.dequantize() if isinstance(ours, QuantizedWeight) else ours)
    return other


def adapters_beside_plain() -> tuple[float, bool]:
    """Return the distance in ulp of adapters from those that torch's AdamW trains beside plain weights of the
    same values, and whether the base is as it was.
    """
    base = zerocast.quantize_(plain_model(), RECIPE, dtype=torch.float32)
    theirs = with_adapters(plain_copy(base))
    ours = with_adapters(base)
    before = {n: p.dequantize() for n, p in ours.named_parameters() if isinstance(p, QuantizedWeight)}
    optimizer = ZeroAdamW(ours.named_parameters(), lr=RATE)
    oracle = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=RATE, foreach=False)
    tokens = torch.arange(8)[None]
    steps = 4
    with zerocast.gemm.use("dequantize"):
        for _ in range(steps):
            for net, stepped in ((ours, optimizer), (theirs, oracle)):
                net(input_ids=tokens, labels=tokens).loss.backward()
                stepped.step()
                stepped.zero_grad()
    same = all(torch.equal(ours.get_parameter(name).dequantize(), value) for name, value in before.items())
    masters = optim.full_state_dict(ours, optimizer) or {}
    expected = dict(theirs.named_parameters())
    trained = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert trained == [name for name, parameter in expected.items() if parameter.requires_grad]
    return max((distance(masters[n], expected[n].detach(), RATE) for n in trained if masters), default=0.0), same


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_of_your_own(ranks: Ranks, world: int) -> None:
    for furthest, same in [adapters_beside_plain()] if world == 1 else ranks(world)(adapters_beside_plain):
        assert furthest <= 100 * EACH
        assert same


def adapters_of_peft() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: make hosts")
    torch.manual_seed(1)
    return peft.get_peft_model(model(), peft.LoraConfig(r=LOW_RANK, target_modules=["q_proj", "v_proj"]))


def test_adapters_of_peft(tmp_path: Path) -> None:
    """The Trainer trains, saves and resumes adapters, and `from_pretrained` of peft reads what it saves."""
    whole = trainer_of(tmp_path / "whole", adapters_of_peft(), save_steps=2)
    whole.train()
    trained = {name for group in whole._zero().param_groups for name in group["param_names"]}
    assert trained and all("lora_" in name for name in trained)
    resumed = trainer_of(tmp_path / "again", adapters_of_peft(), save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    masters, again = (optim.full_state_dict(each.model, each._zero()) for each in (whole, resumed))
    assert all(torch.equal(masters[name], again[name]) for name in masters)
    assert any(masters[name].any() for name in trained if "lora_B" in name)
    folder = tmp_path / "whole" / "checkpoint-3"
    stored = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in trained} == stored.keys()
    assert all(torch.equal(masters[name], stored[name.replace(".default", "")]) for name in trained)
    import peft

    read = peft.PeftModel.from_pretrained(model(), folder)
    for name in trained:
        assert torch.equal(read.get_parameter(name), masters[name])


def test_merge_and_unload(tmp_path: Path) -> None:
    """Merging adds in place, so it raises with nothing changed. With plain weights it gives the sum, which can
    be quantized again.
    """
    adapted = adapters_of_peft()
    trainer = trainer_of(tmp_path, adapted, save_strategy="no")
    trainer.train()
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    before = layer.base_layer.weight.dequantize()
    assert "add to weight.dequantize() and quantize_ the sum" in error_of(adapted.merge_and_unload)
    assert torch.equal(layer.base_layer.weight.dequantize(), before)
    added = layer.scaling["default"] * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    for name, parameter in list(adapted.named_parameters()):
        if isinstance(parameter, QuantizedWeight):
            layer_name, _, attribute = name.rpartition(".")
            plain = nn.Parameter(parameter.dequantize(), requires_grad=False)
            setattr(adapted.get_submodule(layer_name), attribute, plain)
    merged = adapted.merge_and_unload()
    weight = merged.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(weight.float(), before.float() + added, rtol=2.0**-8, atol=2.0**-12)
    assert added.any()
    zerocast.quantize_(merged, RECIPE)
    assert isinstance(merged.model.layers[0].self_attn.q_proj.weight, QuantizedWeight)


# -- fields of TrainingArguments


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(tmp_path: Path, ordinary: list[float], reentrant: bool) -> None:
    net = model()
    options = {"use_reentrant": reentrant}
    trainer = trainer_of(
        tmp_path, net, save_strategy="no", activation_checkpointing=True, activation_checkpointing_kwargs=options
    )
    with mock.patch.object(torch.utils.checkpoint, "checkpoint", wraps=torch.utils.checkpoint.checkpoint) as calls:
        trainer.train()
    assert net.is_activation_checkpointing or calls.called
    assert losses(trainer) == ordinary


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_torch_compile(tmp_path: Path, ordinary: list[float], backend: str) -> None:
    torch._dynamo.reset()
    net = model()
    trainer = trainer_of(tmp_path, net, save_strategy="no", torch_compile=True, torch_compile_backend=backend)
    trainer.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert losses(trainer) == pytest.approx(ordinary, rel=1e-2)
    assert zerocast.verify(trainer._zero()).ok


def test_device_map(tmp_path: Path, ordinary: list[float]) -> None:
    """The whole model may have one device. Over several, or with offloaded layers, there is no one device for masters."""
    plain_model().save_pretrained(tmp_path / "plain")

    def read(device_map: Any) -> Any:
        read = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "plain", device_map=device_map, offload_folder=str(tmp_path / "off"), dtype=torch.float32
        )
        return zerocast.quantize_(read, RECIPE, dtype=torch.bfloat16)

    trainer = trainer_of(tmp_path, read("cpu"), save_strategy="no")
    trainer.train()
    assert losses(trainer) == ordinary
    spread = trainer_of(tmp_path, read({"model": "cpu", "lm_head": "disk"}), save_strategy="no")
    assert "the parameters of one optimizer are on one device, got ['cpu', 'meta']" in error_of(spread.train)


def test_push_to_hub(tmp_path: Path) -> None:
    """The Trainer pushes the folder that it saves, with the masters and without the state. No network is used here."""
    sent: dict[str, Any] = {}

    def upload(**given: Any) -> Any:
        sent.update(given)
        sent["files"] = {path.name for path in Path(given["folder_path"]).iterdir()}
        sent["weights"] = safetensors.torch.load_file(Path(given["folder_path"]) / "model.safetensors")
        return mock.MagicMock()

    hub = mock.MagicMock(upload_folder=upload)
    hub.create_repo.return_value.repo_id = "owner/name"
    with (
        mock.patch.object(transformers.trainer, "hf_api", return_value=hub),
        mock.patch.object(transformers.Trainer, "create_model_card"),
    ):
        trainer = trainer_of(tmp_path, model(), push_to_hub=True, hub_model_id="owner/name", save_strategy="no")
        trainer.train()
        trainer.push_to_hub()
    masters = optim.full_state_dict(trainer.model, trainer._zero())
    assert sent["repo_id"] == "owner/name"
    assert {"model.safetensors", "config.json"} <= sent["files"]
    assert sent["weights"].keys() <= masters.keys()
    assert all(torch.equal(value, masters[name]) for name, value in sent["weights"].items())


# -- states


class Remembering(nn.Module):
    """A model with a buffer that grows with each input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros(0, 32))
        zerocast.quantize_(self, {"net.weight": "nvfp4"})

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x[:1].detach()])
        loss: Tensor = self.net(x).square().mean()
        return loss


def remembering() -> tuple[Any, Any, Any]:
    accelerator, net = Accelerator(cpu=True), Remembering()
    return accelerator, *accelerator.prepare(net, ZeroAdamW(net.named_parameters()))


def test_buffers_that_grow(tmp_path: Path) -> None:
    """A load says both shapes, with nothing changed, as torch's own does. Given the saved shape the buffer is loaded."""
    accelerator, net, optimizer = remembering()
    for _ in range(3):
        accelerator.backward(net(torch.randn(4, 32)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "state"))
    other, fresh, _ = remembering()
    weight = fresh.net.weight.dequantize()
    error = error_of(lambda: other.load_state(str(tmp_path / "state")))
    assert "seen has shape (3, 32) in the checkpoint, expected (0, 32)" in error
    assert torch.equal(fresh.net.weight.dequantize(), weight)
    fresh.seen = torch.zeros(3, 32)
    other.load_state(str(tmp_path / "state"))
    assert torch.equal(fresh.seen, net.seen)
    assert torch.equal(fresh.net.weight.dequantize(), net.net.weight.dequantize())


def test_save_pretrained(tmp_path: Path) -> None:
    """`save_pretrained` asks for the storage of each tensor, which quantized weights refuse. It can be given
    the masters.
    """
    net = model()
    optimizer = ZeroAdamW(net.named_parameters())
    error = error_of(lambda: net.save_pretrained(tmp_path / "bytes"))
    assert "zerocast.optim.full_state_dict(model, optimizer) for save_pretrained" in error
    assert not list((tmp_path / "bytes").glob("*.safetensors"))
    masters = optim.full_state_dict(net, optimizer)
    net.save_pretrained(tmp_path / "masters", state_dict=masters)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "masters", dtype=torch.float32)
    assert all(torch.equal(read.state_dict()[name], value.float()) for name, value in masters.items())


def test_the_stock_accelerator(tmp_path: Path) -> None:
    """The stock Accelerator trains on one rank. The error of its save names ours."""
    accelerator, net = accelerate.Accelerator(cpu=True), model()
    net, optimizer = accelerator.prepare(net, ZeroAdamW(net.named_parameters()))
    before = net.model.layers[0].mlp.up_proj.weight.dequantize()
    accelerator.backward(net(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
    optimizer.step()
    assert not torch.equal(net.model.layers[0].mlp.up_proj.weight.dequantize(), before)
    error = error_of(lambda: accelerator.save_state(str(tmp_path)))
    assert "or zerocast.integrations.huggingface" in error


def test_the_stock_trainer(tmp_path: Path) -> None:
    net = model()
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, bf16=True, report_to=[], disable_tqdm=True, max_steps=1
    )
    error = error_of(transformers.Trainer(net, arguments, train_dataset=ROWS).train)
    assert "step its FP32 masters with zerocast.ZeroAdamW" in error
