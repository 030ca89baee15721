"""On a GPU too transformers decodes what was exported there to the values of the live weights."""

from pathlib import Path

import pytest
import torch

from tests.serve.models import dequantized, logits, quantized, transformers
from tests.serve.test_export_hf import ULP
from zerocast.export import export_hf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"


@pytest.mark.parametrize(
    ("naming", "fmt", "rounding"), [("deepseek", "fp8_block", 0.0), ("compressed-tensors", "nvfp4", ULP)]
)
def test_transformers_reads_what_was_trained(tmp_path: Path, naming: str, fmt: str, rounding: float) -> None:
    """FP8 blocks are decoded as they are loaded: products of FP8 would round the inputs too."""
    pytest.importorskip("accelerate")
    if naming == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = quantized("llama", fmt, "llama").to(DEVICE)
    export_hf(model, tmp_path / "out", naming)
    decoding = transformers.FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    options = {"quantization_config": decoding} if naming == "deepseek" else {}
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map=DEVICE, **options).eval()
    wanted = dequantized(model)
    logits(found)  # compressed-tensors decompresses at the first forward pass
    weights = dict(found.named_parameters())
    for key, value in wanted.named_parameters():
        assert weights[key].device.type == DEVICE
        torch.testing.assert_close(weights[key], value, rtol=rounding, atol=0.0)
    if not rounding:
        assert torch.equal(logits(found), logits(wanted))
    else:
        bound = 8 * ULP * logits(wanted).abs().max().item()
        torch.testing.assert_close(logits(found), logits(wanted), rtol=0.0, atol=bound)
