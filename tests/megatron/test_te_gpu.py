"""Beside an installed TransformerEngine, on GPUs over NCCL: the cases of the CPU, and Megatron's GPT of its layers."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import casts
from tests.devices import gpus
from tests.megatron import attaching, ranks_host
from tests.megatron.attaching import offloaded
from tests.megatron.gpt import VOCABULARY, step
from tests.megatron.host_on_cpu import WHY_NOT, needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.test_precision_aware import case as precise
from tests.megatron.test_te import PARALLEL
from tests.megatron.training import ALL_LAYERS, FORMATS, Case, Run, build_optimizer, resume, train
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks
from zerocast import verify
from zerocast.integrations import megatron as integration

if not WHY_NOT:
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

SEQUENCE, STEPS = 64, 4


def _configuration(recipe: str, experts: int | None) -> Any:
    mixture = {
        "num_moe_experts": experts,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "allgather",
    }
    return TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        fp8="hybrid",
        fp8_recipe=recipe,
        fp8_param=True,
        attention_backend=AttnBackend.unfused,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        add_bias_linear=experts is None,
        **(mixture if experts else {}),
    )


def _build(recipe: str, overlap: bool, experts: int | None) -> Run:
    importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    config = _configuration(recipe, experts)
    layers = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=experts is not None)
    model = GPTModel(config, layers, VOCABULARY, SEQUENCE)
    model.embedding.bfloat16()  # whose table of positions is FP32
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=200_000,
        grad_reduce_in_fp32=True,
        fp8_param_gather=True,
    )
    ddp = DistributedDataParallel(config, ddp_config, model.cuda())
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = ddp.no_sync
    case = Case(overlap=overlap, options={"fp8_recipe": recipe})
    return Run(ddp, build_optimizer(case, [ddp]), case)


def train_gpt(
    recipe: str, overlap: bool, by_zerocast: bool, experts: int | None = None
) -> tuple[list[float], dict[str, casts.Bytes], dict[str, int], bool, int]:
    """Losses; in the end the bytes of FP8 weights, what is stale, whether verify is content, and how many weights there are."""
    with host("all"):
        if by_zerocast:
            with integration.quantized_params():
                run = _build(recipe, overlap, experts)
            attached = integration.attach(run.optimizer, run.ddp)
        else:
            run = _build(recipe, overlap, experts)
        losses = [step(run, number, SEQUENCE) for number in range(STEPS)]
        run.force_sync()
        torch.cuda.synchronize()
        scales = {name: float(w._quantizer.scale) for name, w in run.te_tensors.items() if recipe == "delayed"}
        held = {name: ranks_host.te_bytes_of(weight)[1] for name, weight in run.te_tensors.items()}
        ok = verify(attached).ok if by_zerocast else True
        stale = run.stale_bytes(scales) if by_zerocast else {}
        dist.barrier()
        return losses, held, stale, ok, len(held)


ONE, TWO = [pytest.param(1, marks=gpus(1)), pytest.param(2, marks=gpus(2))]
SECONDS = 300.0  # the first case sets the GPUs up
RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_block"}

pytestmark = [needs_megatron, needs_te, pytest.mark.te]


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda recipe: [RECIPES[recipe]])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_a_gpt_of_its_layers(gpu_ranks: Ranks, world: int, recipe: str, overlap: bool) -> None:
    for losses, _, stale, ok, weights in gpu_ranks(world)(train_gpt, recipe, overlap, True, timeout=SECONDS):
        assert weights == 8 and ok and not stale
        assert losses[3] < losses[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_grouped_experts(gpu_ranks: Ranks, world: int, recipe: str) -> None:
    """Its grouped products, each expert with a weight of its own."""
    for losses, _, stale, ok, weights in gpu_ranks(world)(train_gpt, recipe, True, True, 4, timeout=SECONDS):
        assert weights == 20 and ok and not stale
        assert losses[3] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_the_same_training_as_without_zerocast(gpu_ranks: Ranks, world: int, recipe: str) -> None:
    """Losses and bytes equal, to the bit, those of Megatron alone, which casts by TransformerEngine."""
    theirs = gpu_ranks(world)(train_gpt, recipe, True, False, timeout=SECONDS)
    ours = gpu_ranks(world)(train_gpt, recipe, True, True, timeout=SECONDS)
    for (their_losses, their_bytes, *_), (losses, found, *_) in zip(theirs, ours, strict=True):
        assert losses == their_losses
        for name, expected in their_bytes.items():
            same = {buffer: expected[buffer] for buffer in ("rowwise_data", "rowwise_scale_inv", "columnwise_data")}
            casts.assert_same_bytes(found[name], same, name)


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["nvfp4", "te", "tiles"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_live_bytes_are_the_cast_of_the_masters(gpu_ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    """NVFP4 and MXFP8 too, which TransformerEngine cannot cast here."""
    gpu_ranks(world)(train, Case(formats, overlap, te=ALL_LAYERS), timeout=SECONDS)


@pytest.mark.parametrize("world", [TWO])
def test_beside_quantized_weights(gpu_ranks: Ranks, world: int) -> None:
    case = Case("te", True, bucket_size=10_000, experts=True, te="023")
    gpu_ranks(world)(train, case, timeout=SECONDS)


@pytest.mark.parametrize("world", [TWO])
def test_delayed_scaling_is_left_to_transformer_engine(gpu_ranks: Ranks, world: int) -> None:
    gpu_ranks(world)(attaching.train_delayed, "delayed", ALL_LAYERS, timeout=SECONDS)


RESUMED = {
    "dp_reshardable": Case("te", overlap=True, te="02"),
    "fully_reshardable": Case("te", overlap=True, te="02"),
    **{f"moments {dtype}": precise(dtype, overlap=True) for dtype in (torch.float32, torch.bfloat16)},
    **{f"offloaded {part}": offloaded(fraction=part, precise=True, overlap=True) for part in (1.0, 0.5)},
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_resume_is_exact(gpu_ranks: Ranks, tmp_path: Path, world: int, name: str) -> None:
    kind = "dp_reshardable" if name == "dp_reshardable" else "fully_reshardable"
    gpu_ranks(world)(resume, RESUMED[name], str(tmp_path), kind, timeout=SECONDS)


@pytest.mark.parametrize("formats", ["te", "tiles"])
@pytest.mark.parametrize("world", [TWO])
def test_every_byte_counts(gpu_ranks: Ranks, world: int, formats: str) -> None:
    gpu_ranks(world)(attaching.flip_every_buffer, formats, timeout=SECONDS)


@pytest.mark.parametrize("world", [ONE, TWO])
def test_tiles_are_one_byte_an_element(gpu_ranks: Ranks, world: int) -> None:
    """Products of TransformerEngine cannot read them here, so directions are read by its layouts of scales."""
    gpu_ranks(world)(attaching.train_tiles, True, timeout=SECONDS)


@pytest.mark.parametrize("world", [ONE])
def test_a_recipe_of_tiles(gpu_ranks: Ranks, world: int) -> None:
    """Megatron's own recipe and TransformerEngine's quantizers of it."""
    gpu_ranks(world)(attaching.check_recipes, timeout=SECONDS)


@pytest.mark.parametrize("world", [ONE])
def test_detach_and_partial_tensors(gpu_ranks: Ranks, world: int) -> None:
    gpu_ranks(world)(attaching.detach, Case("te", te=ALL_LAYERS), timeout=SECONDS)
    gpu_ranks(world)(attaching.break_a_gather, timeout=SECONDS)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_precision_aware_optimizer(gpu_ranks: Ranks, world: int, moments: torch.dtype) -> None:
    """Its FusedAdam with moments of each dtype, FP8 as uint8."""
    gpu_ranks(world)(train, precise(moments, overlap=True), timeout=SECONDS)


@pytest.mark.parametrize("streams", [False, True], ids=["one optimizer", "one a master"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_optimizer_cpu_offload(gpu_ranks: Ranks, world: int, fraction: float, streams: bool) -> None:
    """Masters that are updated on the host, the others by its FusedAdam."""
    case = offloaded(fraction=fraction, streams=streams, precise=True, overlap=True, bucket_size=10_000)
    assert all(gpu_ranks(world)(attaching.train_offloaded, case, timeout=SECONDS))
