"""Ranks are forked with megatron-core and megatron.training imported, which takes seconds.

Not beside an installed TransformerEngine: megatron-core imports that too, it may begin with CUDA, and then nothing can be forked.
"""

import importlib.util

from tests.workers import preload

if importlib.util.find_spec("transformer_engine") is None:
    preload("tests.megatron.training")
    preload("tests.megatron.pretraining")
