"""torchtitan: FSDP2 gathers quantized bytes under its Trainer, and its AdamW may be FusedAdamW.

Importing this package imports torchtitan and detects which of two interfaces it has. From 0.3 on,
`quantized` turns a Trainer.Config into one with quantized weights, and `--module
zerocast.integrations.torchtitan` does so for torchtitan's own configurations. Up to 0.2, importing
this package registers the converter `quantize.linear.zerocast` and the model `llama3_zerocast`, and
torchtitan merges its JobConfig with `--job.custom_config_module=zerocast.integrations.torchtitan`.
If torchtitan is missing or has neither interface, ImportError or RuntimeError lists the missing
names. A name of the other interface raises ImportError.
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
    from .optimizer import FusedOptimizers, build_optimizers
    from .section import JobConfig
    from .train_spec import MasterWeightConverter, with_fused_optimizers, with_tensor_parallelism

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
    """Raise ImportError for a name that needs torchtitan's other interface."""
    if name in OF_THE_OTHER_SHAPE:
        raise ImportError(f"{name} is for torchtitan {INSTEAD}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
