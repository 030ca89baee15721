"""Megatron's own GPT under its own schedules, with tensor, pipeline and expert parallelism, on the ranks of a pool."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from tests.hosts.stopping import limit_collectives
from tests.megatron import muon
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.ranks_host import device, groups, host
from tests.megatron.training import METADATA, NARROW, Case, Run, build_optimizer
from tests.workers import error_of
from zerocast import verify
from zerocast.integrations import megatron as integration

if not WHY_NOT:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

FORMATS = {"*.linear_qkv.weight": "fp8_current", "*.linear_proj.weight": "fp8_block", "*.linear_fc?.weight": NARROW}
VOCABULARY, SEQUENCE, BATCH, MICROBATCHES = 64, 16, 2, 2


@dataclass(frozen=True)
class Parallel:
    """How many ranks share a layer's weights, the layers, the experts; over how many groups states are repeated."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    instances: int = 1
    experts: int | None = None
    overlap: bool = False
    muon: bool = False  # whole matrices by layers
    formats: str = ""  # one for all that `pattern` names, in the place of FORMATS
    pattern: str = "*.linear_*.weight"

    def sizes(self) -> dict[str, int]:
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "expert_model_parallel_size": self.expert,
            "num_distributed_optimizer_instances": self.instances,
        }


def _configuration(parallel: Parallel) -> Any:
    mixture = {"num_moe_experts": parallel.experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=parallel.experts is None,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        **(mixture if parallel.experts else {}),
    )


def _build(parallel: Parallel) -> tuple[Run, Any]:
    torch.manual_seed(3)
    config = _configuration(parallel)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    layers = get_gpt_layer_local_spec(num_experts=parallel.experts)
    model = GPTModel(
        config,
        layers,
        VOCABULARY,
        SEQUENCE,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=parallel.pipeline > 1,
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=parallel.overlap,
        overlap_param_gather=parallel.overlap,
        bucket_size=10_000,
        grad_reduce_in_fp32=True,
        num_distributed_optimizer_instances=parallel.instances,
    )
    case = Case(overlap=parallel.overlap, options=muon.SETTINGS if parallel.muon else {})
    recipe = {parallel.pattern: parallel.formats} if parallel.formats else FORMATS
    with integration.quantized_params():
        # only the first stage of a pipeline, and with shared embeddings the last one's output layer, has an embedding
        embeddings = {"*embedding*": "identity"} if first else {}
        zerocast.quantize_(model.to(device(), torch.bfloat16), zerocast.Recipe({**embeddings, **recipe}))
        full_layout = {"full_param_layout": muon.full_layout(model, ddp_config)} if parallel.muon else {}
        ddp = DistributedDataParallel(config, ddp_config, model, **full_layout)
        optimizer = build_optimizer(case, [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap:
        config.no_sync_func = ddp.no_sync
    return Run(ddp, optimizer, case), integration.attach(optimizer, ddp)


def _texts(step: int, sequence: int) -> Iterator[Tensor]:
    """Microbatches of a language in which a token's successor is three further on; the same few in turn."""
    replica = parallel_state.get_data_parallel_rank()
    for number in range(MICROBATCHES):
        first = torch.arange(BATCH)[:, None] * 7 + 11 * replica + 5 * number + step % 2
        yield ((first + 3 * torch.arange(sequence + 1)) % VOCABULARY).to(device())


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def _forward(texts: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    text = next(texts)
    length = text.shape[1] - 1
    positions = torch.arange(length, device=text.device).expand(BATCH, -1)
    mask = torch.ones(length, length, device=text.device).tril().logical_not()[None, None]
    return model(text[:, :-1].contiguous(), positions, mask, labels=text[:, 1:].contiguous()), partial(_loss)


def step(run: Run, number: int, sequence: int = SEQUENCE) -> float:
    """Take one step of training under Megatron's schedule. Returns the loss, 0 where there is none."""
    run.ddp.zero_grad_buffer()
    run.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=_texts(number, sequence),
        model=[run.ddp],
        num_microbatches=MICROBATCHES,
        seq_length=sequence,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    done, norm, _ = run.optimizer.step()
    assert done and norm > 0
    return sum(float(found["loss"]) for found in losses)


def check_attributes(parallel: Parallel) -> None:
    """What an update by Muon reads of each master is the same without quantized weights and with them."""
    with groups(**parallel.sizes()), host(), muon.muon_in_the_host():
        found = []
        for fmt in ("identity", parallel.formats):
            run, _ = _build(replace(parallel, formats=fmt))
            names = {id(param): name for name, param in run.ddp.module.named_parameters()}
            (part,) = run.optimizer.chained_optimizers[0].chained_optimizers
            found.append({names[id(param)]: vars(param.main_param) for group in part.float16_groups for param in group})
            dist.barrier()
        assert found[0] == found[1]
        assert {name for name, held in found[1].items() if held.get("is_qkv")} == {
            f"decoder.layers.{number}.self_attention.linear_qkv.weight" for number in range(2)
        }


def save_with_partial_weights(parallel: Parallel) -> None:
    """All ranks save where the last one has partial weights: all raise, and none at a timeout."""
    with groups(**parallel.sizes()), host():
        run, attached = _build(parallel)
        step(run, 0)
        if dist.get_rank() == dist.get_world_size() - 1:
            attached._guard.validity.failed_partway("an all-gather", masters=False)
        model = run.ddp.module.sharded_state_dict(metadata=METADATA)
        limit_collectives(5)
        started = time.monotonic()
        # What is written next is collective.
        said = error_of(lambda: (run.optimizer.sharded_state_dict(model, metadata=METADATA), dist.barrier()))
        seconds = time.monotonic() - started
        limit_collectives(30)
        assert "an all-gather failed partway" in said and seconds < 4


def train(parallel: Parallel, plans: int | None = None) -> None:
    """Train, and check the bytes and the number of plans."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(groups(**parallel.sizes()))
        stack.enter_context(host())
        if parallel.muon:
            stack.enter_context(muon.muon_in_the_host())
        run, attached = _build(parallel)
        losses = [step(run, number) for number in range(4)]
        run.force_sync()
        assert not run.stale_bytes() and verify(attached).ok
        assert plans in (None, len(attached.plans))
        assert not parallel_state.is_pipeline_last_stage() or losses[-1] < losses[0]
        dist.barrier()
