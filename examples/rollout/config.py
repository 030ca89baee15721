"""The options of the example."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class RolloutConfig:
    """A trainer and a generator on the CPU."""

    format: Literal["fp8_block", "nvfp4"] = "fp8_block"
    """The weight format of the trainer, and of the generator in the first run."""
    steps: int = 60
    """Steps, each with a refit before."""
    batch_size: int = 64
    """Answers a step."""
    lr: float = 3e-4
    """Learning rate."""
    seed: int = 1
    """Of the answers that are drawn."""
    requantize: bool = False
    """Run only the control: send bf16 weights, which are quantized again by a different rule."""
    vllm: Path = Path("build/hosts/vllm/bin/python")
    """The Python of an environment with vLLM. Where there is none, transformers generate."""
    plot: Path | None = None
    """A picture to write, of rewards and KL by step."""
