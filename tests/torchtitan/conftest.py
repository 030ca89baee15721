"""Ranks are forked with torchtitan imported, which takes seconds."""

from tests.workers import preload

preload("tests.torchtitan.training")
preload("tests.torchtitan.trainer_on_cpu")
