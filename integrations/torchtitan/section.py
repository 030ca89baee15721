"""zerocast's section of a torchtitan configuration: its name, its recipe, and the preparation of a
model by it; and for torchtitan up to 0.2 the additions to its JobConfig.

torchtitan merges JobConfig into its own class, and reads types and defaults from it, so that every
option can come from TOML or from the command line.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerocast
from zerocast.fsdp2 import prepare

from . import host

NAME = "zerocast" if host.HAS_MODEL_SPECS else "quantize.linear.zerocast"


@dataclass
class Zerocast:
    """The section, `zerocast` of a Trainer.Config and `quantize.linear.zerocast` of a JobConfig."""

    recipe: list[str] = field(default_factory=list)
    """
    Comma separated list of pattern=format, as `layers.*.feed_forward.*=nvfp4`: glob patterns on
    names of parameters, of which the first that matches gives the format (nvfp4, fp8_block,
    fp8_current, fp8_delayed, mxfp8, identity). What none of them matches stays as it is.
    """

    verify_every: int = 0
    """Compare all gathered bytes with an unsharded cast of the masters after this number
    of optimizer steps; 0 for never
    """


@dataclass
class Linear:
    """The section `quantize.linear` of a job."""

    zerocast: Zerocast = field(default_factory=Zerocast)


@dataclass
class Quantize:
    """The section `quantize` of a job."""

    linear: Linear = field(default_factory=Linear)


@dataclass
class Optimizer:
    """The section `optimizer` of a job."""

    implementation: Literal["for-loop", "foreach", "fused", "zerocast"] = "fused"
    """
    As torchtitan's, and 'zerocast': AdamW of zerocast.fsdp2.FusedAdamW, whose update measures the
    amaxes of the next cast. Needs a model whose TrainSpec has zerocast's optimizers, such as
    llama3_zerocast.
    """


@dataclass
class JobConfig:
    """Given to torchtitan with --job.custom_config_module=zerocast.integrations.torchtitan."""

    quantize: Quantize = field(default_factory=Quantize)
    optimizer: Optimizer = field(default_factory=Optimizer)


def recipe_of(section: Zerocast) -> zerocast.Recipe:
    """Return the recipe of the section's entries `pattern=format`. Raises the errors of
    `Recipe.parse`.
    """
    recipe = zerocast.Recipe.parse(section.recipe, f"{NAME}.recipe")
    return zerocast.Recipe(dict(recipe.patterns), share_amax=getattr(section, "share_amax", ()))


def prepare_model(model: nn.Module, section: Zerocast, weight_mesh: DeviceMesh | None = None) -> None:
    """Make FP32 masters of the weights that the recipe matches. Raises as
    `zerocast.fsdp2.prepare`.
    """
    prepare(model, recipe_of(section), weight_mesh=weight_mesh, verify_every=section.verify_every or None)
