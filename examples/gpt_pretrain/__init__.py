"""Pre-train a small GPT with quantized weights and sharded FP32 masters; see README.md."""
