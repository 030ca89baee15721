"""GPT pre-training on megatron-core's model and optimizer."""
