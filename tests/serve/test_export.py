"""Exports hold the weight: decoded here by the rules of each naming, they give what `dequantize` gives."""

import json
from pathlib import Path
from typing import NamedTuple

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


class Layout(NamedTuple):
    """What a naming stores of a weight, as its readers expect it: names behind that of the weight, dtypes, and scales."""

    codes: str
    dtype: torch.dtype
    scales: str = ""
    scale_dtype: torch.dtype = torch.float32
    # The elements that a scale is of, rows and columns; () where one is of all, and (1,) where each row has its own.
    block: tuple[int, ...] = ()
    # Of the whole weight, by which the other scales are multiplied, or divided.
    factor: str = ""
    divisor: str = ""


E4M3, BYTES = torch.float8_e4m3fn, torch.uint8
BLOCKS = Layout("", E4M3, "_scale", block=(128, 128))
MXFP8 = Layout("", E4M3, "_scale", BYTES, (1, 32))
LAYOUTS = {
    "compressed-tensors": {
        "nvfp4": Layout("_packed", BYTES, "_scale", E4M3, (1, 16), divisor="_global_scale"),
        "mxfp4": Layout("_packed", BYTES, "_scale", BYTES, (1, 32)),
        "int4": Layout("_packed", torch.int32, "_scale", torch.bfloat16, (1, 32)),
        "fp8_current": Layout("", E4M3, "_scale"),
        "fp8_delayed": Layout("", E4M3, "_scale"),
        "fp8_block": BLOCKS,
        "mxfp8": MXFP8,
    },
    "modelopt": {
        "nvfp4": Layout("", BYTES, "_scale", E4M3, (1, 16), factor="_scale_2"),
        "fp8_current": Layout("", E4M3, "_scale", block=(1,)),
        "fp8_block": BLOCKS,
        "mxfp8": MXFP8,
    },
    "deepseek": {"fp8_block": Layout("", E4M3, "_scale_inv", block=(128, 128))},
    "bf16": dict.fromkeys(("nvfp4", "fp8_block", "fp8_current", "fp8_delayed"), Layout("", torch.bfloat16)),
}


def unpack(codes: Tensor) -> Tensor:
    """Values of codes. Of 4 bits, the first one of a byte or a word is in its lowest bits."""
    if codes.dtype == torch.int32:
        return ((codes[..., None] >> 4 * torch.arange(8)) & 15).flatten(-2) - 8.0
    if codes.dtype == torch.uint8:
        return E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return codes.float()


def decode(found: dict[str, Tensor], name: str, shape: torch.Size, layout: Layout) -> Tensor:
    codes = found[name + layout.codes]
    value = unpack(codes)
    assert codes.dtype == layout.dtype and value.shape == shape
    if layout.dtype == torch.int32:
        assert found[f"{name}_shape"].tolist() == list(shape)
    if not layout.scales:
        return value
    scale, block = found[name + layout.scales], layout.block
    if scale.dim() == 4:  # modelopt's blocks
        scale = scale.squeeze(1).squeeze(-1)
    wanted = [-(-size // of) for size, of in zip(shape, block, strict=False)] if block else [1]
    assert scale.dtype == layout.scale_dtype and list(scale.shape) == wanted
    scale = torch.exp2(scale.float() - 127) if scale.dtype == BYTES else scale.float()
    scale = scale.view(*scale.shape, *[1] * (2 - scale.dim()))
    for dim, size in enumerate(block):
        scale = scale.repeat_interleave(size, dim)
    scale = scale[: shape[0], : shape[1]]
    scale = scale * found[name + layout.factor] if layout.factor else scale
    return value * (scale / found[name + layout.divisor] if layout.divisor else scale)


CASES = [
    *((naming, fmt) for naming, layouts in LAYOUTS.items() for fmt in layouts),
    *((naming, "nvfp4:exact_in_fp8=True") for naming in ("compressed-tensors", "modelopt")),
    ("compressed-tensors", "mxfp4:exact_in_fp8=False,scale_rounding=floor"),
    ("compressed-tensors", "mxfp8:block=32x32"),
    ("deepseek", "fp8_block:power_of_2_scale=False"),
    ("bf16", "fp8_current:element=e5m2"),
]


# One file in every format and naming, then files of a size that experts alone exceed, and one for each tensor.
FILES = [
    *((*case, 10**9) for case in CASES),
    ("modelopt", "nvfp4", 26_000),
    ("modelopt", "nvfp4", 1),
    ("bf16", "nvfp4", 1),
]


@pytest.mark.parametrize(("naming", "fmt", "shard_bytes"), FILES)
def test_decodes_to_the_weight(tmp_path, naming, fmt, shard_bytes):
    layout = LAYOUTS[naming][fmt.partition(":")[0]]
    source = model(fmt, fmt if naming == "bf16" else "identity")
    files = export_safetensors(source, tmp_path / "out", naming, shard_bytes)
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    assert len(files) == {10**9: 2, 26_000: 5, 1: 7}[shard_bytes], "with the index"
    found = read(tmp_path / "out")
    for name in ("up.weight", "zeros.weight", *(["experts"] if naming == "bf16" else [])):
        weight = source.get_parameter(name)
        decoded, wanted = decode(found, name, weight.shape, layout), weight.dequantize().float()  # type: ignore[operator]
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
