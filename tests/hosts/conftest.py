"""Ranks are forked with the hosts imported, which takes seconds; see tests/megatron."""

import importlib.util

from tests.workers import preload

if importlib.util.find_spec("transformer_engine") is None:
    preload("tests.hosts.megatron")
