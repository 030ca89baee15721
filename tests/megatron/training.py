"""A small model on the real DistributedDataParallel and DistributedOptimizer, trained on every rank of a pool, its bytes, and all
that it holds with its attachment; and its saving and loading through the host's distributed checkpoints.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import zerocast
from tests import casts
from tests.megatron import ranks_host
from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS, WHY_NOT
from tests.megatron.ranks_host import device, host
from tests.transformer_engine import tensors
from zerocast import QuantizedWeight
from zerocast.checkpoint.untrained import own_buffers
from zerocast.formats import Columnwise
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.offload import memory_of
from zerocast.integrations.megatron.primary import is_primary, weight_of
from zerocast.integrations.megatron.shards import shares

if not WHY_NOT:
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import MegatronModule, TransformerConfig
else:
    MegatronModule = nn.Module

NARROW = "nvfp4" if KNOWS_FOUR_BITS else "fp8_block"
FORMATS = {
    "fp8_block": {"*.weight": "fp8_block"},
    "fp8_current": {"*.weight": "fp8_current"},
    "nvfp4": {"*.weight": "nvfp4"},
    "mxfp4": {"layers.[01].*": "mxfp4"},
    "mxfp8": {"layers.0.*": "mxfp8"},
    "fp8": {"layers.[02].*": "fp8_block", "layers.[13].*": "fp8_current"},
    "frozen": {"layers.0.*": "mxfp8", "layers.[12].*": NARROW, "layers.3.*": "fp8_block"},
    # of all kinds, where layers 0 and 1 are frozen
    "all kinds": {"layers.0.*": "fp8_current", "layers.2.*": NARROW, "layers.3.*": "fp8_delayed:amax_history_len=3"},
    "other kinds": {
        "layers.0.*": "fp8_current",
        "layers.2.*": "fp8_block",
        "layers.3.*": "fp8_delayed:amax_history_len=3",
    },
    "experts": {"weight1": "fp8_current"},
    "plain": {},
    "half": {"layers.[01].*": "fp8_current"},
    "other half": {"layers.[23].*": "fp8_current"},
    "delayed": {"layers.[02].*": "fp8_delayed:amax_history_len=3", "layers.[13].*": "fp8_current"},
    "narrow experts": {"layers.0.*": "mxfp4", "layers.1.*": "mxfp8:block=32x32", "layers.[23].*": "nvfp4"},
    "mixed": {
        "layers.0.*": "mxfp4",
        "layers.1.*": "mxfp8:block=32x32",
        "layers.2.*": "nvfp4",
        "layers.3.*": "fp8_block",
    },
    "square": {"layers.[01].*": "mxfp8:block=32x32"},
    # formats that TransformerEngine has tensors for, then those of one set of codes for both directions
    "te": {"layers.[02].*": "nvfp4", "layers.1.*": "fp8_current", "layers.3.*": "fp8_block"},
    "tiles": {"layers.[01].*": "mxfp8:block=32x32", "layers.2.*": "nvfp4", "layers.3.*": "fp8_current"},
}
MIXED = "mixed" if KNOWS_FOUR_BITS else "fp8"  # as many formats as the host's buffers can hold
ALL = ["fp8_block", "fp8_current", *(["nvfp4", "mixed"] if KNOWS_FOUR_BITS else ["fp8"])]
ALL_LAYERS = "0123"
WIDTHS = (64, 192, 96, 208, 64)  # boundaries of ranks fall inside weights


@dataclass(frozen=True)
class Case:
    formats: str = NARROW
    overlap: bool = False
    busbw: bool = False
    bucket_size: int | None = None
    experts: bool = False  # the last two layers in buffers and an optimizer of their own
    te: str = ""  # layers whose weights are tensors of TransformerEngine
    fused_adam: bool = False  # TransformerEngine's
    in_fp32: bool = False  # one of the biases
    kind: str = ""  # of the model: frozen plain, frozen quantized, buffers or tied
    seed: int = 7
    steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer's config
    ddp_options: dict[str, Any] = field(default_factory=dict)

    def host(self) -> Any:
        """The host that this runs in."""
        return host(self.te, self.fused_adam, self.options.get("optimizer_cpu_offload", False))


class Model(MegatronModule):
    def __init__(self, config: Any, te_layers: str = "", kind: str = "") -> None:
        super().__init__(config)
        self.kind = kind
        pairs = list(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
        kinds = [ColumnParallelLinear, RowParallelLinear] * 2
        self.layers = nn.ModuleList(
            ranks_host.TELinear(*pair) if str(number) in te_layers else self._layer(kind, *pair)
            for number, (kind, pair) in enumerate(zip(kinds, pairs, strict=True))
        )
        if self.kind == "buffers":
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("decay", torch.rand(WIDTHS[-1]))
        if self.kind == "tied":
            self.again = self._layer(ColumnParallelLinear, *pairs[0])
            self.again.weight = self.layers[0].weight

    def _layer(self, kind: Any, inputs: int, outputs: int) -> nn.Module:
        more = {} if kind is ColumnParallelLinear else {"input_is_parallel": True, "skip_bias_add": False}
        return kind(inputs, outputs, config=self.config, init_method=self.config.init_method, bias=True, **more)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
            x = torch.tanh(x)
        if self.kind == "buffers":
            self.seen += 1
            self.decay *= 0.9
            x = x * (1 + self.decay / self.seen)
        if self.kind == "tied":
            x = x + self.again(x)[0][..., : x.shape[-1]]
        return x


@dataclass
class Run:
    ddp: Any
    optimizer: Any
    case: Case

    @property
    def weights(self) -> dict[str, Any]:
        """Quantized weights by name, zerocast's and TransformerEngine's."""
        return {n: p for n, p in self.ddp.module.named_parameters() if is_primary(p)}

    @property
    def te_tensors(self) -> dict[str, Any]:
        return {n: p for n, p in self.weights.items() if not isinstance(p, QuantizedWeight)}

    def train(self, steps: int = 3) -> None:
        """Steps whose losses fall. No byte is stale after the last one."""
        losses = [self.step(number) for number in range(steps)]
        assert losses[-1] < losses[0]
        self.force_sync()
        assert not self.stale_bytes()

    def step(self, number: int) -> float:
        loss = self.forward_and_backward(number)
        done, norm, _ = self.optimizer.step()
        assert done and norm > 0
        return loss

    def forward_and_backward(self, number: int) -> float:
        return self.backward(self.forward(number))

    def forward(self, number: int) -> Tensor:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number % 2 + 2 * dist.get_rank())
        x = torch.randn(8, WIDTHS[0], generator=generator).bfloat16().to(device())
        loss: Tensor = (self.ddp(x) - x.roll(1, -1)).float().square().mean()
        return loss

    def backward(self, loss: Tensor) -> float:
        loss.backward()
        self.ddp.finish_grad_sync()
        return loss.item()

    def force_sync(self) -> None:
        """Gather all weights, as a loop does before an evaluation or a checkpoint."""
        self.ddp.start_param_sync(force_sync=True)

    def masters(self) -> dict[str, Tensor]:
        """The whole FP32 masters, from the shards of all ranks."""
        return self.gathered(lambda one, master: master)

    def moments(self, key: str) -> dict[str, Tensor]:
        """Unsharded moments by parameter; `key` is exp_avg or exp_avg_sq."""
        return self.gathered(lambda one, master: _unscaled(one.optimizer, master, key))

    def gathered(self, of: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
        """Return by parameter, whole, what is `of` an optimizer and the master of a shard."""
        names = {id(param): name for name, param in self.ddp.module.named_parameters()}
        everyone: list[Any] = []
        for one in distributed_optimizers(self.optimizer):
            for share in shares(one):
                mine = {}
                for param, master, start, _ in share.masters():
                    values = of(one, master).detach().cpu().view(-1).clone()
                    mine[names.get(id(param), "of another chunk")] = start, values
                its_ranks: list[Any] = [None] * share.process_group.size()
                dist.all_gather_object(its_ranks, mine, group=share.process_group)
                everyone += its_ranks
        whole = {}
        for name, param in self.ddp.module.named_parameters():
            flat = torch.full((param.numel(),), torch.nan)
            for start, shard in (shards[name] for shards in everyone if name in shards):
                flat[start : start + shard.numel()] = shard
            assert not flat.isnan().any(), name
            whole[name] = flat.view(param.shape)
        return whole

    def cast_scales(self) -> dict[str, float]:
        """What delayed scaling says that it cast with; see test_delayed.py for whether that is right."""
        ours = (weight for weight in self.weights.values() if isinstance(weight, QuantizedWeight))
        owners = {id(weight.master_owner): weight.master_owner for weight in ours}
        shown = [
            owned for owner in owners.values() if owner for source in owner.master_views() for owned in source.masters
        ]
        names = {id(weight_of(param).state): name for name, param in self.weights.items()}
        scales = {names.get(id(o.weight.state), ""): float(o.scale) for o in shown if o.scale is not None}
        return {name: scale for name, scale in scales.items() if name}

    def stale_bytes(self, scales: Mapping[str, float] | None = None) -> dict[str, int]:
        """Count by weight and buffer the live bytes that differ from the unsharded cast of the masters, where any does.

        `scales` are what delayed scaling cast with, by default what it says.
        """
        masters, wrong, scales = self.masters(), {}, self.cast_scales() if scales is None else scales
        for name, weight in self.weights.items():
            fmt, found = ranks_host.te_bytes_of(weight) if name in self.te_tensors else _bytes_of(weight)
            expected = casts.unsharded(fmt, masters[name], weight.dtype, scales.get(name, 1.0))
            if name in self.te_tensors:
                expected = tensors.with_shared_codes(fmt, expected)
            for buffer, content in ((name, expected[name]) for name in found if name in expected):
                differ = int((found[buffer] != content).sum())
                if differ:
                    wrong[f"{name}.{buffer}"] = differ
        for name, param in self.ddp.module.named_parameters():
            if name not in self.weights and not torch.equal(param.data.cpu(), masters[name].to(param.dtype)):
                wrong[name] = param.numel()
        return wrong


def _unscaled(inner: Any, master: Tensor, key: str) -> Tensor:
    """A moment as numbers, which a fused Adam keeps with a scale where they are FP16."""
    found: Tensor = (
        inner.get_unscaled_state(master, key) if hasattr(inner, "get_unscaled_state") else inner.state[master][key]
    )
    return found


def _bytes_of(weight: QuantizedWeight) -> tuple[str, casts.Bytes]:
    assert weight.state.columnwise_is_fresh()
    found = casts.bytes_of(weight)
    shared = {"columnwise_data"} if weight.format.columnwise is Columnwise.SHARED else set()
    assert {"rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"} - shared <= found.keys()
    return str(weight.format), found


def configuration() -> Any:
    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        init_method_std=0.1,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
    )


def build_chunk(case: Case, disable_bucketing: bool = False, model: Any = None, layout: Any = None) -> Any:
    """A model in its DistributedDataParallel: one of `case`, or this one, with a layout of its parameters that `layout` makes."""
    config = configuration()
    if model is None:
        torch.manual_seed(case.seed)
        model = Model(config, case.te, case.kind)
    model.to(device())
    recipe = zerocast.Recipe(FORMATS[case.formats])
    ours = ranks_host.use_te_tensors(model, recipe, device()) if case.te else recipe
    if case.in_fp32:
        model.layers[3].bias.data = model.layers[3].bias.data.float()
    for param in model.layers[2:].parameters() if case.experts else ():
        param.allreduce = False
    if ours is not None:
        zerocast.quantize_(model, ours)
    for layer in model.layers[:2] if case.kind.startswith("frozen") else ():
        layer.weight.requires_grad_(False)
    return wrap(case, config, model, disable_bucketing, layout)


def wrap(case: Case, config: Any, model: nn.Module, disable_bucketing: bool = False, layout: Any = None) -> Any:
    """The model in its DistributedDataParallel."""
    options = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": case.overlap,
        "overlap_param_gather": case.overlap,
        "pad_buckets_for_high_nccl_busbw": case.busbw,
        "bucket_size": case.bucket_size,
        "grad_reduce_in_fp32": True,
        **case.ddp_options,
    }
    ddp_config = DistributedDataParallelConfig(**options)
    more = {"full_param_layout": layout(model, ddp_config)} if layout else {}
    return DistributedDataParallel(config, ddp_config, model, disable_bucketing, **more)


def build_attached(case: Case, **options: Any) -> tuple[Run, Any]:
    """A run over quantized weights and its attachment. Inside `host_on_cpu`."""
    with integration.quantized_params():
        run = build(case)
    return run, integration.attach(run.optimizer, run.ddp, **options)


def build(case: Case) -> Run:
    """Built inside `host_on_cpu` and, for quantized weights, `quantized_params`."""
    ddp = build_chunk(case)
    return Run(ddp, build_optimizer(case, [ddp]), case)


def build_optimizer(case: Case, chunks: list[Any]) -> Any:
    with torch.set_grad_enabled(not case.in_fp32):  # by which its HybridDeviceOptimizer takes FP32 parameters
        return get_megatron_optimizer(optimizer_config(case), chunks)


def optimizer_config(case: Case) -> Any:
    options = {"optimizer": "adam", "lr": 3e-3, "weight_decay": 0.01, "clip_grad": 1.0, "bf16": True}
    options |= {"use_distributed_optimizer": True, "overlap_param_gather": case.overlap, **case.options}
    return OptimizerConfig(**options)


def train(case: Case) -> None:
    """Train an attached model, and check its bytes."""
    with case.host():
        run, attached = build_attached(case)
        assert len(attached.plans) == (2 if case.experts else 1)
        run.train()


def train_chunks(case: Case) -> None:
    """Train two model chunks under one optimizer, and check the bytes of both."""
    with host():
        with integration.quantized_params():
            chunks = [build_chunk(replace(case, seed=1)), build_chunk(replace(case, seed=2), disable_bucketing=True)]
            optimizer = build_optimizer(case, chunks)
        attached = integration.attach(optimizer, chunks)
        runs = [Run(chunk, optimizer, case) for chunk in chunks]
        for number in range(case.steps):
            for run in runs:
                run.forward_and_backward(number)
            optimizer.step()
        for run in runs:
            run.force_sync()
        names = [owned.name for source in attached.master_views() for owned in source.masters]
        assert len(names) == len(set(names)) == sum(len(list(chunk.parameters())) for chunk in chunks)
        attached.refresh()
        assert zerocast.verify(attached).ok
        assert not any(run.stale_bytes() for run in runs)


def finetune(case: Case, with_state: bool = False) -> None:
    """Masters are the values that are loaded into the model, or those of a state dict. No byte is stale."""
    with case.host():
        run, _ = build_attached(case)
        values = {name: torch.randn(p.shape).bfloat16().to(p.device) for name, p in run.ddp.module.named_parameters()}
        run.ddp.module.load_state_dict({**run.ddp.module.state_dict(), **values})
        cast = {name: weight_of(weight).dequantize() for name, weight in run.weights.items()}
        assert not any(torch.equal(cast[name], values[name]) for name in cast)
        run.optimizer.reload_model_params(**({"state_dict": dict(values)} if with_state else {}))
        expected = values if with_state else {**values, **cast}
        masters = run.masters()
        assert all(torch.equal(masters[name], expected[name].float()) for name in masters)
        assert not run.stale_bytes()


METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


class Attached:
    """A run with its attachment, and its optimizers' state in memory, which goes back by the host's own `load_state_dict`."""

    def __init__(self, case: Case) -> None:
        with integration.quantized_params():
            self.run = build(case)
        self.attachment = integration.attach(self.run.optimizer, self.run.ddp)
        self.own = self.run.optimizer.chained_optimizers

    def saved(self) -> Any:
        """Return the state that `dp_reshardable` checkpoints hold."""
        self.run.force_sync()
        states = {index: self._saved(one) for index, one in enumerate(self.own)}
        return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), states if len(states) > 1 else states[0])

    def _saved(self, one: Any) -> dict[str, Any]:
        state = one.get_parameter_state_dp_reshardable()
        for entries in (t for buckets in _dicts(state) for bucket in _first(buckets) for t in bucket):
            entries["padding"] = False
        return {**one.state_dict(), "param_state": state, "param_state_sharding_type": "dp_reshardable"}

    def load(self, state: Any) -> None:
        """Load as a resumed run does: first what is to be filled, then the state."""
        model = self.run.ddp.module.sharded_state_dict(metadata=METADATA)
        self.run.optimizer.sharded_state_dict(model, is_loading=True, metadata=METADATA)
        integration.dequantize_(model, is_loading=True)
        self.run.optimizer.load_state_dict(tree_map_only(torch.Tensor, torch.clone, state))

    def everything(self) -> casts.Bytes:
        """Masters, moments and the bytes of all parameters, as this rank holds them."""
        self.run.force_sync()
        found = {f"own.{name}.{key}": casts.raw(memory_of(value)).copy() for name, key, value in self._owned()}
        for name, param in self.run.ddp.module.named_parameters():
            weight = weight_of(param) if name in self.run.weights else None
            held = {"": casts.raw(param).copy()} if weight is None else casts.bytes_of(weight)
            found |= {f"{name}.{key}": value for key, value in held.items()}
        return found

    def _owned(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for i, one in enumerate(self.own):
            for j, param in enumerate(p for group in one.optimizer.param_groups for p in group["params"]):
                yield f"{i}.{j}", "master", param
                yield from ((f"{i}.{j}", key, value) for key, value in one.optimizer.state[param].items())


def _dicts(state: dict[Any, Any]) -> list[Any]:
    return [value for key, value in state.items() if isinstance(key, int)]


def _first(buckets: dict[Any, Any]) -> Any:
    return next(iter(buckets.values()))


State = dict[str, dict[str, torch.Tensor]]


def checkpoint_metadata(kind: str) -> dict[str, Any]:
    """The metadata of a sharding type, gathered over gloo, since NCCL's way asks for CUDA."""
    return {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": True}


def checkpoint_content(run: Run, is_loading: bool, kind: str) -> dict[str, Any]:
    model = run.ddp.module.sharded_state_dict(metadata=checkpoint_metadata(kind))
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=checkpoint_metadata(kind))
    return integration.dequantize_({"model": model, "optimizer": optimizer}, is_loading)


def save_checkpoint(run: Run, folder: str, kind: str) -> None:
    """Save as a training loop does."""
    run.force_sync()
    with mock.patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False):  # the host forks to write
        dist_checkpointing.save(checkpoint_content(run, False, kind), folder)


def load_checkpoint(run: Run, folder: str, kind: str) -> None:
    """Load as a resumed run does."""
    state = dist_checkpointing.load(checkpoint_content(run, True, kind), folder)
    run.ddp.module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])


def _state(run: Run) -> State:
    return {"master": run.masters(), "exp_avg": run.moments("exp_avg"), "exp_avg_sq": run.moments("exp_avg_sq")}


def saved(case: Case, folder: str, kind: str) -> State:
    """Trained and saved: masters and moments."""
    with case.host():
        run, _ = build_attached(case)
        for number in range(case.steps):
            run.step(number)
        save_checkpoint(run, folder, kind)
        return _state(run)


def check_loaded(case: Case, folder: str, kind: str, written: State, rounding: float = 0.0) -> None:
    """Another run loads what was written after three steps. No byte is stale then, nor after two more steps.

    `rounding` is that of moments, relative to the largest of a parameter.
    """
    with case.host():
        run, _ = build_attached(case)
        load_checkpoint(run, folder, kind)
        state = _state(run)
        for key, whole in written.items():
            for name, tensor in whole.items():
                bound = 0.0 if key == "master" else float(tensor.abs().max()) * rounding
                assert float((state[key][name] - tensor).abs().max()) <= bound, (key, name)
        assert _steps(run) == {3.0} and not run.stale_bytes()
        for number in range(2):
            run.step(number)
        run.force_sync()
        assert not run.stale_bytes()


def _steps(run: Run) -> set[float]:
    """Return the numbers of steps, which torch's Adam counts by parameter, and a fused one by group."""
    inner = [one.optimizer for one in run.optimizer.chained_optimizers]
    states = [state for one in inner for state in one.state.values() if "step" in state]
    return {float(held["step"]) for held in states or [group for one in inner for group in one.param_groups]}


def resume(case: Case, folder: str, sharding: str) -> None:
    """A run that is saved, and resumed with a fresh initialisation, is as the run that went on. No byte is stale."""
    with case.host():
        (straight, _), (resumed, attachment) = build_attached(case), build_attached(replace(case, seed=8))
        for number in range(3):
            straight.step(number)
        save_checkpoint(straight, folder, sharding)
        load_checkpoint(resumed, folder, sharding)
        assert zerocast.verify(attachment).ok
        for number in (3, 4):
            straight.step(number)
            resumed.step(number)
        for run in (straight, resumed):
            run.force_sync()
        assert zerocast.verify(attachment).ok
        casts.assert_same_bytes(_read(resumed), _read(straight))


def _read(run: Run) -> casts.Bytes:
    """All that a step reads: masters of this rank, bytes of weights, plain parameters and buffers."""
    module, found = run.ddp.module, {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in run.te_tensors:
            own: Mapping[str, Any] = ranks_host.te_bytes_of(tensor)[1]
        else:
            held = own_buffers(tensor) if isinstance(tensor, QuantizedWeight) else {"": tensor}
            own = {buffer: casts.raw(value) for buffer, value in held.items()}
        found |= {f"{name}.{buffer}": value for buffer, value in own.items()}
    for at, one in enumerate(distributed_optimizers(run.optimizer)):
        masters = [master for share in shares(one) for _, master, _, _ in share.masters()]
        found |= {f"master {at} {number}": casts.raw(master) for number, master in enumerate(masters)}
    return found
