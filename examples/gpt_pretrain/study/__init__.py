"""The study: the quality of quantized training against bf16, with three seeds a format."""
