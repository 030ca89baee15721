"""torchtitan 0.3, whose models are ModelSpecs: the lines of its README, on the CPU, by torchtitan's own model and parallelize_fn.

Its language models attend by torch's flex attention, which has no backward pass on the CPU: `_attention` stands for it.
"""

import dataclasses
import functools
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import zerocast
from tests.fsdp2 import models
from tests.torchtitan.host_on_cpu import importable
from tests.workers import Ranks

WHY_NOT = ""
if importlib.util.find_spec("torchtitan") is None:
    WHY_NOT = "torchtitan is not installed"
elif importlib.util.find_spec("torchtitan.protocols.model_spec") is None:
    WHY_NOT = "this torchtitan has TrainSpecs, as before 0.3"
else:
    with importable():
        from torch.nn.attention.flex_attention import create_block_mask
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.common.attention import FlexAttention
        from torchtitan.models.llama3.config_registry import llama3_debugmodel

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
RECIPE = {"layers.*.attention.*.weight": "fp8_block", "layers.*.feed_forward.*": "nvfp4"}
LENGTH = 64


def quantized(spec: Any, recipe: dict[str, str]) -> Any:
    """As the README has it."""

    def parallelize(model: nn.Module, **given: Any) -> nn.Module:
        zerocast.fsdp2.prepare(model, recipe)
        return spec.parallelize_fn(model, **given)

    return dataclasses.replace(spec, parallelize_fn=parallelize)


def _attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), None


@functools.cache
def dims() -> Any:
    """Made once a process, since torchtitan keeps the meshes of the first."""
    size = torch.distributed.get_world_size()
    return ParallelDims(dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=1, world_size=size)


def built(recipe: dict[str, str] | None) -> Any:
    """The debug model as torchtitan's Trainer makes it: on the meta device, sharded, then given values."""
    config = llama3_debugmodel()
    config.training.seq_len = LENGTH
    spec = config.model_spec if recipe is None else quantized(config.model_spec, recipe)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    options = {"training": config.training, "parallelism": config.parallelism, "compile_config": config.compile}
    recomputed = config.activation_checkpoint
    model = spec.parallelize_fn(model, parallel_dims=dims(), **options, ac_config=recomputed, dump_folder="nowhere")
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies first
    return model


def losses(recipe: dict[str, str] | None) -> tuple[list[float], list[str], int]:
    """Of four steps on this rank; complaints about gathered bytes, and how many weights were compared."""
    with mock.patch.object(FlexAttention, "compiled_flex_attn", staticmethod(_attention)):
        model, found = built(recipe), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        masks = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
        for step in range(4):
            seed = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
            tokens = torch.randint(0, 200, (2, LENGTH), generator=seed)
            places = torch.arange(LENGTH).expand(2, LENGTH)
            scores = model(tokens, attention_masks=masks, positions=places)
            loss = F.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        complaints = [] if recipe is None else models.complaints(model, "torchtitan 0.3")
        return found, complaints, len(models.masters(model))


def test_a_model_spec_that_prepares(ranks: Ranks) -> None:
    """The bytes of the unsharded cast, and the losses of the plain model but for what formats round."""
    plain = ranks(2)(losses, None, timeout=200)
    for (expected, _, none), (found, complaints, prepared) in zip(
        plain, ranks(2)(losses, RECIPE, timeout=200), strict=True
    ):
        assert (complaints, none, prepared) == ([], 0, 6 * 5)  # query, key and value are one
        assert found[-1] < found[0]
        assert found == pytest.approx(expected, rel=0.02)
