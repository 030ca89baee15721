"""Exports hold the weight: decoded here by the rules of each naming, they give what `dequantize` gives."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests.serve import modelopt_reader
from zerocast import Recipe
from zerocast.export import export_safetensors
from zerocast.serve.write import INDEX

safetensors = pytest.importorskip("safetensors")

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Model(nn.Module):
    """Matrices with padding in their scale buffers, experts in one weight, a tied head, a bias, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 160)
        self.up = nn.Linear(160, 288)
        self.zeros = nn.Linear(32, 32, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 128, 96))
        self.head = nn.Linear(160, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("dropped", torch.arange(3.0), persistent=False)
        nn.init.zeros_(self.zeros.weight)


def model(fmt: str, experts: str = "identity") -> nn.Module:
    torch.manual_seed(0)
    recipe = Recipe({"up.weight": fmt, "zeros.weight": fmt, "experts": experts})
    return zerocast.quantize_(Model().to(torch.bfloat16), recipe)


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors, by way of the index."""
    found = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def unpack(packed: Tensor) -> Tensor:
    """Even elements are in the low half of a byte."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return E2M1[codes.long()]


def spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    return scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : shape[-2], : shape[-1]]


def compressed(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    assert found[f"{name}_global_scale"].shape == (1,)
    scale = found[f"{name}_scale"]
    assert scale.dtype == torch.float8_e4m3fn and scale.shape == (*shape[:-1], shape[-1] // 16)
    return unpack(found[f"{name}_packed"]) * (spread(scale, 1, 16, shape) / found[f"{name}_global_scale"])


def compressed_mx(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    scale = found[f"{name}_scale"]
    assert scale.dtype == torch.uint8 and scale.shape == (*shape[:-1], shape[-1] // 32)
    assert f"{name}_global_scale" not in found
    return unpack(found[f"{name}_packed"]) * torch.exp2(spread(scale, 1, 32, shape) - 127)


def compressed_int4(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    packed, scale = found[f"{name}_packed"], found[f"{name}_scale"]
    assert packed.dtype == torch.int32 and packed.shape == (shape[0], shape[1] // 8)
    assert scale.dtype == torch.bfloat16 and scale.shape == (shape[0], shape[1] // 32)
    assert found[f"{name}_shape"].tolist() == list(shape)
    codes = (packed[..., None] >> 4 * torch.arange(8)) & 15  # the first of eight in the lowest bits
    return (codes.reshape(shape) - 8) * spread(scale, 1, 32, shape)


def modelopt(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    assert found[f"{name}_scale_2"].shape == ()
    return unpack(found[name]) * (spread(found[f"{name}_scale"], 1, 16, shape) * found[f"{name}_scale_2"])


def deepseek(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    scale = found[f"{name}_scale_inv"]
    assert found[name].dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return found[name].float() * spread(scale, 128, 128, shape)


def compressed_fp8(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    assert found[name].dtype == torch.float8_e4m3fn and found[f"{name}_scale"].shape == (1,)
    return found[name].float() * found[f"{name}_scale"]


def row_scales(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    assert found[name].dtype == torch.float8_e4m3fn and found[f"{name}_scale"].shape == (shape[0],)
    return found[name].float() * found[f"{name}_scale"][:, None]


def blocks(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    scale = found[f"{name}_scale"]
    scale = scale.squeeze(1).squeeze(-1) if scale.dim() == 4 else scale
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    return found[name].float() * spread(scale, 128, 128, shape)


def mxfp8(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    scale = found[f"{name}_scale"]
    assert scale.dtype == torch.uint8 and scale.shape == (shape[0], shape[1] // 32)
    return found[name].float() * torch.exp2(spread(scale, 1, 32, shape) - 127)


def plain(found: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    assert found[name].dtype == torch.bfloat16 and found[name].shape == shape
    return found[name].float()


CASES = [
    ("compressed-tensors", "nvfp4", compressed),
    ("compressed-tensors", "nvfp4:exact_in_fp8=True", compressed),
    ("compressed-tensors", "mxfp4", compressed_mx),
    ("compressed-tensors", "mxfp4:exact_in_fp8=False,scale_rounding=floor", compressed_mx),
    ("compressed-tensors", "int4", compressed_int4),
    ("compressed-tensors", "fp8_current", compressed_fp8),
    ("compressed-tensors", "fp8_delayed", compressed_fp8),
    ("compressed-tensors", "fp8_block", blocks),
    ("compressed-tensors", "mxfp8", mxfp8),
    ("compressed-tensors", "mxfp8:block=32x32", mxfp8),
    ("modelopt", "nvfp4", modelopt),
    ("modelopt", "nvfp4:exact_in_fp8=True", modelopt),
    ("modelopt", "fp8_current", row_scales),
    ("modelopt", "fp8_block", blocks),
    ("modelopt", "mxfp8", mxfp8),
    ("deepseek", "fp8_block", deepseek),
    ("deepseek", "fp8_block:power_of_2_scale=False", deepseek),
    *(("bf16", fmt, plain) for fmt in ("nvfp4", "fp8_block", "fp8_current:element=e5m2", "fp8_delayed")),
]


# One file in every format and naming, then files of a size that experts alone exceed, and one for each tensor.
FILES = [
    *((*case, 10**9) for case in CASES),
    ("modelopt", "nvfp4", modelopt, 26_000),
    ("modelopt", "nvfp4", modelopt, 1),
    ("bf16", "nvfp4", plain, 1),
]


@pytest.mark.parametrize(
    ("naming", "fmt", "decode", "shard_bytes"), FILES, ids=lambda value: "" if callable(value) else str(value)
)
def test_decodes_to_the_weight(tmp_path, naming, fmt, decode, shard_bytes):
    source = model(fmt, fmt if naming == "bf16" else "identity")
    files = export_safetensors(source, tmp_path / "out", naming, shard_bytes)
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    assert len(files) == {10**9: 2, 26_000: 5, 1: 7}[shard_bytes], "with the index"
    found = read(tmp_path / "out")
    for name in ("up.weight", "zeros.weight", *(["experts"] if naming == "bf16" else [])):
        weight = source.get_parameter(name)
        decoded, wanted = decode(found, name, weight.shape), weight.dequantize().float()  # type: ignore[operator]
        assert decoded.shape == wanted.shape
        torch.testing.assert_close(decoded, wanted, rtol=2**-8, atol=0.0)  # the rounding to bf16 of `dequantize`
        if naming == "bf16":
            assert torch.equal(decoded, wanted)
    assert torch.equal(found["up.bias"], source.get_parameter("up.bias"))
    assert torch.equal(found["embed.weight"], source.get_parameter("embed.weight"))
    assert torch.equal(found["kept"], source.get_buffer("kept"))
    assert not {"head.weight", "dropped"} & set(found)
    if naming == "deepseek":
        codes = source.get_parameter("up.weight").rowwise_data  # type: ignore[attr-defined]
        assert torch.equal(found["up.weight"].view(torch.uint8), codes)


@pytest.mark.parametrize(
    ("naming", "fmt", "message"),
    [
        ("gguf", "nvfp4", "naming is one of bf16, compressed-tensors, modelopt, deepseek, got 'gguf'"),
        ("deepseek", "nvfp4", "up.weight is nvfp4; deepseek has names for fp8_block"),
        ("modelopt", "mxfp4", "up.weight is mxfp4; modelopt has names for nvfp4 and mxfp8"),
        ("deepseek", "fp8_block:element=e5m2", "with E2M1, E4M3 or INT4 codes: export it as bf16"),
    ],
)
def test_what_has_no_place(tmp_path, naming, fmt, message):
    with pytest.raises(ValueError, match=message):
        export_safetensors(model(fmt), tmp_path / "out", naming)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="is not empty: export into a new folder"):
        export_safetensors(model("nvfp4"), tmp_path)


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4:exact_in_fp8", "mxfp8", "fp8_block", "fp8_current"])
def test_the_tensors_of_modelopt_decode_its_naming(tmp_path, fmt):
    """They do to the bit."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: make readers")
    source = model(fmt)
    export_safetensors(source, tmp_path / "out", "modelopt")
    found = modelopt_reader.decoded(read(tmp_path / "out"))
    for name in ("up.weight", "zeros.weight"):
        assert torch.equal(found[name], source.get_parameter(name).dequantize())
