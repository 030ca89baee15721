"""Pre-train a small GPT with quantized weights and sharded FP32 masters; see README.md."""

from examples.gpt_pretrain import interrupt as _interrupt  # noqa: F401 - before all that takes time to import
