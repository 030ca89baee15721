"""torchtitan: FSDP2 gathers quantized bytes under its Trainer, and its AdamW may be FusedAdamW.

Importing this package imports torchtitan, and finds out which of two shapes it has. From 0.3 on,
`quantized` makes a Trainer.Config of a Trainer.Config, and `--module
zerocast.integrations.torchtitan` has torchtitan's own configurations so. Up to 0.2, it registers
the converter `quantize.linear.zerocast` and the model `llama3_zerocast`, and has the JobConfig that
torchtitan merges into its own: `--job.custom_config_module=zerocast.integrations.torchtitan` does
it all. ImportError or RuntimeError say what was looked for where torchtitan is missing or has
another shape; a name that is for the other shape raises ImportError.
"""

from typing import Any

from . import host
from .section import NAME

if host.HAS_MODEL_SPECS:
    from .trainer import Optimizers, quantized

    __all__ = ["Optimizers", "quantized"]
    OF_THE_OTHER_SHAPE = [
        "FusedOptimizers",
        "JobConfig",
        "MasterWeightConverter",
        "build_optimizers",
        "with_fused_optimizers",
        "with_tensor_parallelism",
    ]
    INSTEAD = (
        "up to 0.2, whose models are TrainSpecs. This one has ModelSpecs: call "
        "zerocast.integrations.torchtitan.quantized(config, recipe) in a config registry"
    )
else:
    from .converter import MasterWeightConverter
    from .job_config import JobConfig
    from .train_spec import FusedOptimizers, build_optimizers, with_fused_optimizers, with_tensor_parallelism

    __all__ = [
        "FusedOptimizers",
        "JobConfig",
        "MasterWeightConverter",
        "build_optimizers",
        "with_fused_optimizers",
        "with_tensor_parallelism",
    ]
    OF_THE_OTHER_SHAPE = ["Optimizers", "quantized"]
    INSTEAD = (
        "from 0.3 on, whose models are ModelSpecs. This one has TrainSpecs and model converters: list "
        f"{NAME} in model.converters, as integrations/torchtitan/README.md shows"
    )
    host.register_model_converter(MasterWeightConverter, NAME)
    host.register_train_spec(
        "llama3_zerocast", with_tensor_parallelism(with_fused_optimizers(host.get_train_spec("llama3")))
    )


def __getattr__(name: str) -> Any:
    """ImportError for a name that is for torchtitan of the other shape."""
    if name in OF_THE_OTHER_SHAPE:
        raise ImportError(f"{name} is for torchtitan {INSTEAD}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
