"""Live weights are what an export would hold, without its files: views, in buckets, of one step."""

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.fsdp2 import models as sharded_models
from tests.fsdp2.models import Net
from tests.serve.models import quantized
from tests.serve.test_export import CASES, model, read
from tests.workers import on_ranks
from zerocast import CastPlan, Recipe
from zerocast.export import export_hf, export_safetensors
from zerocast.serve import Receiver, Sender, dequantized, named_tensors
from zerocast.serve.weight_source import ShardedModel, WholeWeights

NAMINGS = [(naming, fmt) for naming, fmt in CASES if "floor" not in fmt and "False" not in fmt]


def collected(*arguments: Any, **options: Any) -> dict[str, Tensor]:
    """Copies of all tensors by name."""
    return {name: t.clone() for bucket in named_tensors(*arguments, **options) for name, t in bucket}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor))), name


@pytest.mark.parametrize(
    ("naming", "fmt", "bucket_bytes"), [*((*case, 40_000) for case in NAMINGS), ("modelopt", "nvfp4", 1)]
)
def test_live_weights_are_those_of_an_export(tmp_path: Path, naming: str, fmt: str, bucket_bytes: int) -> None:
    source = model(fmt, fmt if naming == "bf16" else "identity")
    export_safetensors(source, tmp_path / "out", naming)
    sizes = []
    for bucket in named_tensors(source, naming, bucket_bytes=bucket_bytes):
        assert all(tensor.is_contiguous() for _, tensor in bucket)
        sizes.append((bucket.nbytes, len(bucket)))
    assert all(count == 1 or (count and nbytes <= bucket_bytes) for nbytes, count in sizes)
    assert len(sizes) < 8 or bucket_bytes == 1
    assert_same(collected(source, naming, bucket_bytes=bucket_bytes), read(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "naming", "fmt"), [("qwen3_moe", "deepseek", "fp8_block"), ("llama", "bf16", "nvfp4")]
)
def test_names_of_a_transformers_model(tmp_path: Path, name: str, naming: str, fmt: str) -> None:
    """Experts one by one, also where they are dequantized."""
    source = quantized(name, fmt)
    export_hf(source, tmp_path / "out", naming)
    assert_same(collected(source, naming, dtype=torch.bfloat16, bucket_bytes=10**5), read(tmp_path / "out"))


@pytest.mark.parametrize(("naming", "fmt"), NAMINGS)
def test_stored_weights_have_the_values_of_the_live_ones(naming: str, fmt: str) -> None:
    source = model(fmt)
    found = dict(dequantized(collected(source, naming)))
    assert set(found) == {name for name, _ in source.named_parameters()} | {"kept"}
    for name in ("up.weight", "zeros.weight"):
        wanted = source.get_parameter(name).dequantize()  # type: ignore[operator]
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"w": torch.zeros(16, 16, dtype=torch.uint8)}, r"no naming stores a weight as w torch.uint8 \(16, 16\)"),
        (
            {
                "w": torch.zeros(16, 8, dtype=torch.uint8),
                "w_scale": torch.zeros(16, 1).to(torch.float8_e4m3fn),
                "w_scale_2": torch.tensor(0.3),
            },
            "no tensor amax of dtype torch.bfloat16 gives w the global scale 0.3",
        ),
        (
            {"w": torch.zeros(2, 4).to(torch.float8_e4m3fn), "w_scale": torch.tensor([1.0, 2.0])},
            "no naming stores a weight as",
        ),
    ],
)
def test_what_is_stored_otherwise(stored: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(dequantized(stored))


def test_codes_are_views_and_one_bucket_is_alive() -> None:
    """What is copied beside them is less than a bucket, also of many, and is freed with it."""
    source = zerocast.quantize_(
        nn.Sequential(*(nn.Linear(160, 288, bias=False) for _ in range(12))).bfloat16(), {"*": "nvfp4"}
    )
    own = {p.state.rowwise_data.data_ptr() for p in source.parameters()}  # type: ignore[attr-defined]
    most, buckets = 60_000, 0

    copies: list[weakref.ref[Tensor]] = []
    for bucket in named_tensors(source, "modelopt", bucket_bytes=most):
        codes = [t for name, t in bucket if name.endswith("weight")]
        assert all(t.data_ptr() in own for t in codes)
        own -= {t.data_ptr() for t in codes}
        copies += [weakref.ref(t) for name, t in bucket if not name.endswith("weight")]
        assert 0 < sum(t.nbytes for t in (reference() for reference in copies) if t is not None) <= most
        buckets += 1
    assert not own and buckets > 4 and sum(reference() is not None for reference in copies) == 0


def test_masters_that_are_written_between_two_buckets() -> None:
    """They are compared again for each bucket, though not for each weight."""
    weights = [zerocast.QuantizedWeight.empty((32, 32), "nvfp4") for _ in range(12)]
    masters = [torch.randn(1024) for _ in weights]
    plan = CastPlan(weights, masters, [0] * 12, names=[f"{i}.weight" for i in range(12)])
    for _ in range(2):  # masters are observed from the second cast on
        plan.cast()
        plan.post_all_gather()
        collected(plan, "modelopt", allow_unequal_scales=True)
    buckets = named_tensors(plan, "modelopt", bucket_bytes=1500, allow_unequal_scales=True)
    next(buckets)
    masters[0].add_(1.0)
    with pytest.raises(RuntimeError, match="its masters have been written since its last cast"):
        next(buckets)


@pytest.mark.notices(
    "masters are written by hand, or read from a checkpoint in place, between two refits",
    where=("ZeroAdamW", "CastPlan"),
    answer="the second one raises, if a cast came between the first and the write",
)
def test_masters_of_zero_adamw_that_are_written() -> None:
    """They are observed from the first cast after a refit on."""
    source, optimizer = trained()
    collected(source, "modelopt")
    step(source, optimizer)
    collected(source, "modelopt")
    optimizer.state_dict()["model"]["up.weight"].mul_(2.0)
    for what in (source, optimizer):
        with pytest.raises(
            RuntimeError, match="its masters have been written since its last cast: after writing masters"
        ):
            collected(what, "modelopt")


def step_of_all(source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(source, optimizer)


def step_of_an_adapter(source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No cast counts this step."""
    source.adapter.grad = torch.ones(8)
    torch.optim.SGD([source.adapter], lr=0.1).step()


def other_values(source: nn.Module) -> zerocast.QuantizedWeight:
    weight: Any = next(p for p in source.parameters() if isinstance(p, zerocast.QuantizedWeight))
    return casts.cast_whole(str(weight.format), torch.randn(weight.shape), weight.dtype)


def a_copy_into_a_weight(source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copy other values into a weight, as `model.load_state_dict` does."""
    with torch.no_grad():
        next(p for p in source.parameters() if isinstance(p, zerocast.QuantizedWeight)).copy_(other_values(source))


def other_data_of_a_weight(source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(p for p in source.parameters() if isinstance(p, zerocast.QuantizedWeight)).data = other_values(source)


def other_data_of_an_adapter(source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    source.adapter.data = torch.ones(8)


@pytest.mark.notices(
    "an optimizer, also of plain parameters alone, steps while an export or a refit reads the weights",
    where=("ZeroAdamW", "FSDP2"),
    answer="the export or refit raises: what it has read is of two steps",
)
@pytest.mark.parametrize(
    "change",
    [step_of_all, step_of_an_adapter, a_copy_into_a_weight, other_data_of_a_weight, other_data_of_an_adapter],
)
@pytest.mark.parametrize("read", ["buckets", "export"])
def test_a_step_while_weights_are_read(tmp_path: Path, read: str, change: Any) -> None:
    source, optimizer = trained()
    source.adapter = nn.Parameter(torch.zeros(8))
    batches = WholeWeights.batches

    def stepped_between(self: WholeWeights) -> Any:
        for number, batch in enumerate(batches(self)):
            if number == 2:
                change(source, optimizer)
            yield batch

    with (
        mock.patch.object(WholeWeights, "batches", stepped_between),
        pytest.raises(RuntimeError, match="changed while they were read, so those that were read are of two steps"),
    ):
        collected(source, "bf16", bucket_bytes=1) if read == "buckets" else export_safetensors(
            source, tmp_path / "a", "bf16"
        )
    assert not [*tmp_path.iterdir()]
    collected(source, "bf16", bucket_bytes=1)
    export_safetensors(source, tmp_path / "a", "bf16")


def test_parameters_that_are_replaced_while_weights_are_read() -> None:
    """Those that were there at the beginning are read to the end."""
    source, _ = trained()
    before, found = collected(source, "bf16"), {}
    for bucket in named_tensors(source, "bf16", bucket_bytes=1):
        found.update({name: tensor.clone() for name, tensor in bucket})
        others = model("nvfp4").state_dict()
        source.load_state_dict(others, assign=True)
    assert_same(found, before)


@on_ranks(2)
def test_a_step_while_weights_of_fsdp2_are_read(tmp_path: Path) -> None:
    net = sharded_models.sharded(Net(("nvfp4", "fp8_block"), 64, 96))
    net.adapter = plain = nn.Parameter(torch.zeros(8))
    folder = tmp_path / "never"
    batches = ShardedModel.batches

    def written_between(self: ShardedModel) -> Any:
        for number, batch in enumerate(batches(self)):
            if number == 2:
                step_of_an_adapter(net, torch.optim.SGD([plain]))
            yield batch

    said = "changed while they were read, so those that were read are of two steps"
    with mock.patch.object(ShardedModel, "batches", written_between):
        for read in (lambda: collected(net, "bf16"), lambda: export_safetensors(net, folder, "bf16")):
            with pytest.raises(RuntimeError, match=said):
                read()


@on_ranks(2)
def test_tensors_that_replace_those_of_a_model_of_fsdp2() -> None:
    """A Sender reads the tensors that the model has now, and says what it has no name for."""
    net = sharded_models.sharded(Net(("nvfp4", "fp8_block"), 64, 96))
    net.register_buffer("count", torch.zeros(3))
    sender, receiver = Sender(net, "modelopt"), Receiver()
    net.count = torch.ones(3)
    name, plain = next((name, p) for name, p in net.named_parameters() if p.dim() == 1)
    net.load_state_dict({name: torch.full_like(plain, 3.0)}, strict=False, assign=True)
    for message in sender.named_tensors():
        receiver.accept(message.header, message.tensors)
    assert torch.equal(receiver.tensors["count"], torch.ones(3))
    assert torch.all(receiver.tensors[name] == 3.0)
    net.adapter = nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match="the model has got adapter since its weights were named: make another Sender"):
        next(sender.named_tensors())


def test_a_bucket_that_was_given_up_says_so() -> None:
    buckets = list(named_tensors(model("nvfp4"), "modelopt", bucket_bytes=1))
    with pytest.raises(RuntimeError, match=r"given up when the next one was asked for.* do not collect"):
        list(buckets[0])


def trained(fmt: str = "nvfp4", **options: Any) -> tuple[nn.Module, zerocast.ZeroAdamW]:
    source = model(fmt)
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=0.1, config=zerocast.ZeroConfig(**options))
    step(source, optimizer)
    return source, optimizer


def set_gradients(source: nn.Module) -> None:
    for parameter in source.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def step(source: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    set_gradients(source)
    optimizer.step()


@on_ranks(2)
def test_under_zero_adamw() -> None:
    """Any rank reads the model and the optimizer, alone, with a gather in flight."""
    source, optimizer = trained(overlap_all_gather=True)
    if torch.distributed.get_rank() == 1:
        found = collected(source, "modelopt")
        plain = {name for name, _ in source.named_parameters()} | {"up.weight_scale", "up.weight_scale_2"}
        assert found.keys() == plain | {"zeros.weight_scale", "zeros.weight_scale_2", "kept"}
        del found["kept"]  # no parameter
        assert_same(collected(optimizer, "modelopt"), found)
        weight: Any = source.get_parameter("up.weight")
        assert torch.equal(dict(dequantized(found))["up.weight"], weight.dequantize())
    torch.distributed.barrier()
    step(source, optimizer)
    buckets = named_tensors(optimizer, "modelopt", bucket_bytes=1)
    next(buckets)
    step(source, optimizer)
    with pytest.raises(RuntimeError, match="changed while they were read, so those that were read are of two steps"):
        next(buckets)


@on_ranks(2)
def test_under_fsdp2() -> None:
    """Group by group, also of what a forward pass without gradients left gathered; all ranks have all of it."""
    net = Net(("nvfp4", "fp8_block"), 64, 96)
    sharded = sharded_models.sharded(net)
    whole = zerocast.quantize_(Net(("nvfp4", "fp8_block"), 64, 96), Recipe(net.recipe), dtype=torch.bfloat16)
    wanted = collected(whole, "modelopt", dtype=torch.bfloat16)
    assert_same(collected(sharded, "modelopt", bucket_bytes=4000), wanted)
    with torch.no_grad():
        sharded(torch.randn(8, 64, device=sharded_models.place()))
    assert_same(collected(sharded, "modelopt"), wanted)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1, fused=True)
    sharded(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    changed = collected(sharded, "modelopt")
    assert not torch.equal(changed["blocks.0.1.weight"], wanted["blocks.0.1.weight"])
    assert zerocast.verify(sharded).ok
    buckets = named_tensors(sharded, "modelopt", bucket_bytes=1)
    next(buckets)
    optimizer.step()
    with pytest.raises(RuntimeError, match="cast or changed while they were read"):
        next(buckets)
    with pytest.raises(TypeError, match=r"got AdamW; under FSDP2 pass the model"):
        named_tensors(optimizer, "modelopt")


def _partial() -> Any:
    source, optimizer = trained()
    with pytest.raises(ZeroDivisionError), optimizer._plan.validity.transaction("a step"):
        raise ZeroDivisionError
    return source


def _never_cast() -> Any:
    source = nn.Module()
    source.weight = nn.Parameter(zerocast.QuantizedWeight.empty((16, 16), "nvfp4"), requires_grad=False)
    return source


ROWS = {"up.weight": {"a": [range(300)]}}
REFUSED: dict[str, tuple[Any, str, dict[str, Any], type[Exception], str]] = {
    "no bucket": (model, "bf16", {"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1, got 0"),
    "a format": (lambda _: model("mxfp4"), "modelopt", {}, ValueError, "modelopt has names for nvfp4"),
    "an unknown name": (model, "bf16", {"names": {"down": "x"}}, ValueError, "names has down, and the parameters are"),
    "a name for two": (model, "bf16", {"names": {"up.weight": "up.bias"}}, ValueError, "are both called up.bias"),
    "rows that there are not": (model, "bf16", {"names": ROWS}, ValueError, r"a the rows range\(0, 300\) of up.weight"),
    "no model": (lambda _: 3, "bf16", {}, TypeError, "live weights are those of a model, .* got int"),
    "unequal scales": (
        lambda _: quantized("llama", "nvfp4"),
        "modelopt",
        {},
        ValueError,
        "q_proj.weight, .* have different tensor amaxes",
    ),
    "partial": (lambda _: _partial(), "modelopt", {}, RuntimeError, "a step failed partway"),
    "never cast": (lambda _: _never_cast(), "modelopt", {}, RuntimeError, "has never been cast"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, naming, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        collected(make("nvfp4"), naming, **options)


def test_scales_that_are_shared() -> None:
    found = collected(quantized("llama", "nvfp4", "llama"), "modelopt")
    scales = {float(found[f"model.layers.0.self_attn.{part}_proj.weight_scale_2"]) for part in "qkv"}
    assert len(scales) == 1
    collected(quantized("llama", "nvfp4"), "modelopt", allow_unequal_scales=True)
