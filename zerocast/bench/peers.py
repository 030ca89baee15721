"""Peers: other implementations of the same work, timed in the same process on the same shapes.

torch's fused AdamW and copies are always timed, TransformerEngine if it can be imported. There the
peers are `quantize_master_weights`, `post_all_gather_processing` and `FusedAdam`, over weights that
have rowwise data only (both directions for mxfp8), which is its faster setting. Its casts need a
process group even on one rank, so one is made over an in-memory store, with NCCL. Its FP4
conversion exists on Blackwell only.
"""

import atexit
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocast.bench.row import Build
from zerocast.bench.traffic import NOMINAL
from zerocast.bench.work import HYPERPARAMETERS, STANDARD_DEVIATION, Moments, in_a_graph
from zerocast.bench.workload import BenchEnv, Job, Workload


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        name: the name in the report.
        works: dict from the name of a kind of work that the peer can do to the function that sets
            it up.
    """

    name: str
    works: Mapping[str, Build]


def fused_adamw(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of one step of torch.optim.AdamW with fused=True on the flat shard. Its bits
    differ from zerocast's.
    """
    random = env.generator()
    numel = workload.owned
    master = torch.empty(numel, device=env.device).normal_(0, STANDARD_DEVIATION, generator=random)
    parameter = torch.nn.Parameter(master)
    parameter.grad = Moments(numel, env.device, random).grad
    optimizer = torch.optim.AdamW([parameter], fused=True, **HYPERPARAMETERS)
    return Job(optimizer.step, lambda: [parameter.detach()])


def copies(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of one copy for every layer: 3/4 byte per element read and written, which is
    as much traffic as `upcast` has. No kernel that is launched once per layer can be faster.
    """
    layer_bytes = sum(map(math.prod, workload.layer)) * 3 // 4
    sources = [torch.ones(layer_bytes, dtype=torch.uint8, device=env.device) for _ in range(workload.layers)]
    targets = [torch.empty_like(source) for source in sources]

    def run() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return Job(in_a_graph(run, env.device), lambda: targets)


TORCH = Peer("torch fused", {"Adam": fused_adamw})
COPIES = Peer("torch copies", {"upcast": copies, "upcast transposed": copies})


PACKAGE = "transformer_engine"
TENSOR = f"{PACKAGE}.pytorch.tensor"
FP4_NEEDS = (10, 0)


def is_importable() -> bool:
    """Return True if TransformerEngine is installed and its PyTorch extension loads."""
    if importlib.util.find_spec(PACKAGE) is None:
        return False
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    except (ImportError, OSError):
        # An OSError says that one of its shared libraries does not load.
        return False
    return True


def _quantizer(fmt: str, device: torch.device) -> Any:
    def of(module: str, name: str, *args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(f"{TENSOR}.{module}"), name)(*args, **options)

    e4m3 = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3
    one_way = {"rowwise": True, "columnwise": False}
    makers: dict[str, Callable[[], Any]] = {
        "fp8_current": lambda: of("float8_tensor", "Float8CurrentScalingQuantizer", e4m3, device, **one_way),
        "fp8_block": lambda: of(
            "float8_blockwise_tensor",
            "Float8BlockQuantizer",
            e4m3,
            force_pow_2_scales=True,
            block_scaling_dim=2,
            **one_way,
        ),
        "mxfp8": lambda: of("mxfp8_tensor", "MXFP8Quantizer", e4m3, rowwise=True, columnwise=True),
        "nvfp4": lambda: of("nvfp4_tensor", "NVFP4Quantizer", with_2d_quantization=True, **one_way),
    }
    if fmt == "nvfp4" and torch.cuda.get_device_capability(device) < FP4_NEEDS:
        raise RuntimeError("its FP4 conversion needs compute capability 10.0 or higher")
    return makers[fmt]()


def _group(device: torch.device) -> Any:
    if not dist.is_initialized():
        atexit.register(dist.destroy_process_group)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    return dist.group.WORLD


class _Shard:
    """TransformerEngine weights, and masters that are views of one flat tensor."""

    def __init__(self, workload: Workload, fmt: str, env: BenchEnv) -> None:
        spans = list(workload.spans(workload.rank))
        quantizers = [_quantizer(fmt, env.device) for _ in spans]
        self.weights = [
            quantizer.make_empty(shape, dtype=NOMINAL, device=env.device)
            for quantizer, shape in zip(quantizers, workload.shapes, strict=True)
        ]
        self.flat = torch.empty(workload.owned, device=env.device)
        self.flat.normal_(0, STANDARD_DEVIATION, generator=env.generator())
        masters = self.flat.split([span.numel for span in spans])
        self.masters: list[Tensor | None] = [master if master.numel() else None for master in masters]
        self.starts = [span.start if span.numel else None for span in spans]
        self._calls = importlib.import_module(f"{TENSOR}.utils")
        self._group = _group(env.device)

    def cast(self) -> None:
        """Call `quantize_master_weights` as Megatron does: columnwise copies stay allocated."""
        self._calls.quantize_master_weights(
            self.weights, self.masters, self.starts, self._group, manual_post_all_gather_processing=True
        )

    def post_all_gather(self) -> None:
        """Make the columnwise copies of all weights."""
        self._calls.post_all_gather_processing(self.weights)


def cast(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the peer's cast: `quantize_master_weights`."""
    return Job(_Shard(workload, fmt, env).cast, list)


def transpose(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the peer's columnwise copies: `post_all_gather_processing`, after one
    cast.
    """
    shard = _Shard(workload, fmt, env)
    shard.cast()
    return Job(shard.post_all_gather, list)


def _optimizer(master: Tensor, env: BenchEnv) -> Any:
    parameter = torch.nn.Parameter(master)
    parameter.grad = Moments(master.numel(), env.device, env.generator()).grad
    fused = importlib.import_module(f"{PACKAGE}.pytorch.optimizers").FusedAdam
    return fused([parameter], adam_w_mode=True, **HYPERPARAMETERS)


def adam(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the peer's Adam step: `FusedAdam` on one flat parameter, in its AdamW
    mode.
    """
    master = torch.empty(workload.owned, device=env.device)
    master.normal_(0, STANDARD_DEVIATION, generator=env.generator())
    return Job(_optimizer(master, env).step, list)


def step(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the peer's whole step: `FusedAdam`, then `quantize_master_weights`; it has
    no fused form.
    """
    shard = _Shard(workload, fmt, env)
    optimizer = _optimizer(shard.flat, env)

    def run() -> None:
        optimizer.step()
        shard.cast()

    return Job(run, list)


TRANSFORMER_ENGINE = Peer(PACKAGE, {"cast": cast, "transpose": transpose, "Adam": adam, "whole step": step})


def usable(device_type: str) -> list[Peer]:
    """Return the peers that can run on a device of this type."""
    peers = [TORCH, COPIES]
    if device_type == "cuda" and is_importable():
        peers.append(TRANSFORMER_ENGINE)
    return peers
