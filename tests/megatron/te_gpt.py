"""Megatron's GPT of TransformerEngine's layers with FP8 primary weights, cast by Megatron and TransformerEngine or by zerocast."""

import importlib
from typing import Any

import torch
import torch.distributed as dist

from tests import casts
from tests.megatron import te
from tests.megatron.gpt import VOCABULARY, step
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.ranks_host import host
from tests.megatron.training import Case, Run, build_optimizer
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


def train(
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
        held = {name: te.bytes_of(weight)[1] for name, weight in run.te_tensors.items()}
        ok = verify(attached).ok if by_zerocast else True
        stale = run.stale_bytes(scales) if by_zerocast else {}
        dist.barrier()
        return losses, held, stale, ok, len(held)
