"""What quantized weights cost in quality: the same GPT in every format, three seeds each, against bf16; see README.md."""
