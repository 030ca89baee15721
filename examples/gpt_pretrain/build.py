"""The use of zerocast: a GPT with quantized matrices, and the optimizer that owns their masters."""

import torch
from torch import nn

import zerocast
from examples.gpt_pretrain import fsdp2
from examples.gpt_pretrain.config import Format, TrainConfig
from examples.gpt_pretrain.model import GPT

Zero = zerocast.ZeroAdamW | zerocast.ZeroMuon
Optimizer = Zero | fsdp2.Fsdp2AdamW


def build_model(config: TrainConfig, device: torch.device) -> GPT:
    """Make the same model on every rank: block matrices in the chosen format, embedding in BF16,
    norms in FP32.

    Quantization starts from FP32 values, which zerocast keeps until the optimizer copies them to
    its masters. Under FSDP2 the FP32 parameters themselves are the masters.
    """
    torch.manual_seed(config.seed)
    model = GPT(config.model).to(device)
    if config.parallel != "zero":
        return fsdp2.shard(model, config, device)
    if config.quantized != "bf16":
        zerocast.quantize_(model, recipe(config.quantized), dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() >= 2 and not isinstance(parameter, zerocast.QuantizedWeight):
            parameter.data = parameter.data.bfloat16()
    return model


def recipe(name: Format) -> zerocast.Recipe:
    """Return the matrices of the blocks in a format, or all in bf16."""
    return zerocast.Recipe({"blocks.*.weight": "identity" if name == "bf16" else name})


def build_optimizer(model: GPT, config: TrainConfig) -> Optimizer:
    """AdamW, or Muon for the matrices of the blocks, with masters and moments sharded over the
    ranks; only these matrices decay.
    """
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        is_matrix = name.startswith("blocks.") and parameter.dim() >= 2
        (matrices if is_matrix else others).append((name, parameter))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.parallel != "zero":
        return fsdp2.Fsdp2AdamW(model, groups, config)
    zero = zerocast.ZeroConfig(
        bucket_size=config.bucket_size,
        overlap_all_gather=config.overlap,
        grad_wire=config.grad_wire,
        deterministic=config.deterministic,
        moment_dtype=config.moment_dtype,
    )
    betas, eps = (config.beta1, config.beta2), config.eps
    if config.optimizer == "adamw":
        return zerocast.ZeroAdamW(groups, lr=config.lr, betas=betas, eps=eps, stage=config.stage, config=zero)
    by_muon = [groups[0] | {"use_muon": True}, groups[1] | {"use_muon": False, "betas": betas, "eps": eps}]
    return zerocast.ZeroMuon(by_muon, lr=config.lr, adjust_lr_fn="match_rms_adamw", stage=config.stage, config=zero)


@torch.no_grad()
def forget_masters(optimizer: Zero) -> None:
    """Round the masters to the decoded weights, as if training kept no masters."""
    (source,) = optimizer.master_views()
    for owned in source.masters:
        if owned.weight.format.element is not None and owned.master is not None:
            held = owned.weight.dequantize().view(-1)
            owned.master.copy_(held[owned.span.start : owned.span.stop])
