"""Ranks are forked with megatron-core imported, which takes seconds."""

from tests.workers import context

context.set_forkserver_preload(["torch.distributed", "hypothesis", "pytest", "zerocast", "tests.megatron.training"])
