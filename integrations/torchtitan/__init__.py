"""torchtitan: a model converter that makes FSDP2 gather quantized bytes, and an optimizer container
around FusedAdamW.

Importing this package imports torchtitan, registers the converter `quantize.linear.zerocast` and
the model `llama3_zerocast`, and has the JobConfig that torchtitan merges into its own:
`--job.custom_config_module=zerocast.integrations.torchtitan` does it all. ImportError or
RuntimeError say what was looked for where torchtitan is missing or has another shape.
"""

from . import host
from .converter import MasterWeightConverter
from .job_config import JobConfig
from .optimizer import FusedOptimizers, build_optimizers
from .section import NAME
from .train_spec import with_fused_optimizers, with_tensor_parallelism

__all__ = [
    "FusedOptimizers",
    "JobConfig",
    "MasterWeightConverter",
    "build_optimizers",
    "with_fused_optimizers",
    "with_tensor_parallelism",
]

host.register_model_converter(MasterWeightConverter, NAME)
host.register_train_spec(
    "llama3_zerocast", with_tensor_parallelism(with_fused_optimizers(host.get_train_spec("llama3")))
)
