"""The section `quantize.linear.zerocast` of a JobConfig: its name, how its recipe is read, and
what it makes of a model.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerocast
from zerocast.fsdp2 import prepare

NAME = "quantize.linear.zerocast"


def recipe_of(entries: list[str]) -> zerocast.Recipe:
    """The recipe of entries `pattern=format`. Raises as `Recipe.parse`."""
    return zerocast.Recipe.parse(entries, f"{NAME}.recipe")


def prepare_model(model: nn.Module, section: Any, weight_mesh: DeviceMesh | None = None) -> None:
    """Make FP32 masters of the weights that the recipe matches.

    Raises as `zerocast.fsdp2.prepare`, and ValueError for experts whose products torchtitan takes
    one by one.
    """
    recipe = recipe_of(section.recipe)
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(module_name, recurse=False):
            if not getattr(module, "use_grouped_mm", True) and recipe.format_of(name).element is not None:
                raise ValueError(
                    f"{name} holds experts whose products are taken one by one, use_grouped_mm=False: quantized experts take part "
                    "in grouped products alone; match them with 'identity'"
                )
    prepare(model, recipe, weight_mesh=weight_mesh, verify_every=section.verify_every or None)
