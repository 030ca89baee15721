"""The model converter prepares the weights while torchtitan's model is on the meta device.

torchtitan builds a model on the meta device, lets converters change it, then wraps blocks for
activation checkpointing, compiles and shards them, and finally allocates and initializes the
parameters. `zerocast.fsdp2.prepare` has to come before `fully_shard`, so the converter calls it.
With tensor parallelism weights are sliced first, and prepared after that (`parallelize.py`). A step
of any torch optimizer marks a cast as due, and the next forward pass begins with it. So
torchtitan's hook after the step does nothing.
"""

from typing import Any

from torch import nn

from . import host
from .section import prepare_model, recipe_of
from .validate import validate_job

_Host: Any = host.QuantizationConverter


class MasterWeightConverter(_Host):  # type: ignore[misc]
    """`quantize.linear.zerocast` of `model.converters`.

    Raises, on every rank alike: RuntimeError for a JobConfig without the section of that name,
    ValueError for an option of torchtitan that is not supported, with the reason, and for a recipe
    that cannot be read.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        # A seed checkpoint is written by one rank, which shards nothing, and has only the masters.
        self.enabled = not job_config.checkpoint.create_seed_checkpoint
        self._sliced = parallel_dims.tp > 1
        if not self.enabled:
            return
        validate_job(job_config, parallel_dims)
        super().__init__(job_config, parallel_dims)
        self._section = job_config.quantize.linear.zerocast
        recipe_of(self._section)

    def convert(self, model: nn.Module) -> None:
        """Make FP32 masters of the weights that the recipe matches. Raises as `prepare_model`."""
        if self.enabled and not self._sliced:
            prepare_model(model, self._section)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: the optimizer's step has marked a cast as due."""
