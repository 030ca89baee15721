"""torchtitan 0.3 on the CPU over gloo: what its Trainer needs there, a small llama3 in a config registry, and runs of it.

The integration needs nothing of this, and most is as for 0.2 (`host_on_cpu.py`). Its language models attend by torch's flex
attention, which has no backward pass on CPUs: torchtitan's attention by torch's `scaled_dot_product_attention` is in its place.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import debug

from tests.torchtitan import training
from tests.torchtitan.corpus import Text
from tests.torchtitan.host_on_cpu import device_of, importable, process_on_cpu

WHY_NOT = ""

with importable():
    try:
        import torchtitan.trainer
        from torchtitan.components import metrics
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.tokenizer import BaseTokenizer
        from torchtitan.components.validate import Validator
        from torchtitan.config import ConfigManager
        from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
        from torchtitan.models.llama3.config_registry import llama3_debugmodel
    except ImportError as error:
        WHY_NOT = f"this is not torchtitan 0.3: {error}"
    else:
        if not hasattr(torch.distributed, "set_timeout"):
            WHY_NOT = "torchtitan 0.3 trains with torch 2.14 and newer: it calls torch.distributed.set_timeout"

        from zerocast.integrations.torchtitan import quantized

        class Numbers(ParallelAwareDataloader):
            """The text of tests, without a tokenizer: bytes are tokens."""

            @dataclass(kw_only=True, slots=True)
            class Config(ParallelAwareDataloader.Config):
                infinite: bool = True  # validation asks for it

            def __init__(
                self, config: Any, *, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **_: Any
            ) -> None:
                text = Text(dp_rank, seq_len)
                super().__init__(text, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)

        class NoTokenizer(BaseTokenizer):
            @dataclass(kw_only=True, slots=True)
            class Config(BaseTokenizer.Config):
                pass

            def __init__(self, config: Any, **_: Any) -> None:
                super().__init__()

            encode = decode = get_vocab_size = lambda self, *given: 0


needs_model_specs = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
MIXED = "layers.0.*=nvfp4,layers.1.attention.*=mxfp8:block=32x32,layers.1.feed_forward.*=mxfp8,lm_head.*=fp8_block"
ALL = "layers.*={0},lm_head.*={0}"


def plain() -> Any:
    """Return torchtitan's debug model of llama3, with two of its layers."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    del model.layers[2:]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return dataclasses.replace(
        config,
        dataloader=Numbers.Config(),
        tokenizer=NoTokenizer.Config(),
        validator=Validator.Config(freq=2, steps=2, dataloader=Numbers.Config()),
        activation_checkpoint=None,
    )


def tiny() -> Any:
    """Return `plain`, quantized by the recipe of the command line."""
    return quantized(plain())


class Case(training.Case):
    """A case of torchtitan 0.3, which has no converters."""

    def arguments(self, folder: str) -> list[str]:
        """Return the command line of this case. Without a recipe it is that of the plain configuration."""
        entries = self.recipe if "=" in self.recipe else ALL.format(self.recipe)
        given = [
            "--module=tests.torchtitan.trainer_on_cpu",
            f"--config={'tiny' if self.recipe else 'plain'}",
            f"--dump_folder={folder}",
            f"--optimizer.implementation={self.implementation}",
            f"--training.steps={self.steps}",
            "--training.local_batch_size=2",
            "--training.seq_len=64",
            "--debug.seed=7",
        ]
        recipe = [f"--zerocast.recipe={entries}"] if self.recipe else []
        return [*given, *recipe, *self.options]

    def config(self, folder: str) -> Any:
        """Return the configuration that torchtitan makes of the command line."""
        with importable():
            return ConfigManager().parse_args(self.arguments(folder))


@contextlib.contextmanager
def trainer_on_cpu() -> Iterator[None]:
    """While the context is open, one Trainer of torchtitan 0.3 runs on this rank of the default
    gloo group.
    """
    debug._clear_sharding_prop_cache()  # it has the mesh of this process's last Trainer, and FSDP2 asks for the same object
    with process_on_cpu(), device_of(metrics, torchtitan.trainer), importable():
        yield


@contextlib.contextmanager
def trainer(case: Case, folder: str) -> Iterator[Any]:
    """Yield a Trainer of this case, and end it like torchtitan's `main`."""
    with trainer_on_cpu():
        made = case.config(folder).build()
        training.record_losses(made)
        try:
            yield made
        finally:
            made.close()
