"""Ranks are forked with megatron-core imported, which takes seconds."""

from tests.workers import preload

preload("tests.megatron.training")
