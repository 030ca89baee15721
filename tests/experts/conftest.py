"""Ranks are forked with what transformers takes seconds to import."""

from tests.workers import preload

preload("transformers.modeling_utils")
