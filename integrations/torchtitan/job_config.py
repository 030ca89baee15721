"""Additions to torchtitan's JobConfig: the section `quantize.linear.zerocast`, and one more
implementation of AdamW.

torchtitan merges this class into its own, and reads types and defaults from it, so that everything
can come from TOML or from the command line.
"""

from dataclasses import dataclass, field
from typing import Literal

from .section import Zerocast


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
