"""A prepared model that FSDP2 does not gather raises at its first forward pass, and does not train in FP32."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.workers import error_of, on_ranks

RECIPE = zerocast.Recipe({"*weight*": "fp8_current"})
X = torch.ones(4, 8)


def prepared(model: nn.Module) -> nn.Module:
    """Prepare all weights of a model, and shard nothing."""
    return zerocast.fsdp2.prepare(model, RECIPE)


class Parts(nn.Module):
    """A layer within a model whose forward pass is not called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def attention() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return torch's attention, which has a path of one operator for inference."""
    x = torch.ones(2, 4, 8)
    return nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x)


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "Linear": lambda: (nn.Linear(8, 8), (X,)),
    "Linear of three dimensions": lambda: (nn.Linear(8, 8, bias=False), (torch.ones(2, 3, 8),)),
    "Bilinear": lambda: (nn.Bilinear(8, 8, 8), (X, X)),
    **{
        kind.__name__: lambda kind=kind: (kind(8, 8), (X,))
        for kind in (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
    },
    "MultiheadAttention": attention,
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), (X[None],)),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    LAYERS["LinearCrossEntropyLoss"] = lambda: (nn.LinearCrossEntropyLoss(8, 8), (X, torch.zeros(4, dtype=torch.int64)))


@pytest.mark.notices(
    "`prepare` without `fully_shard`, within DistributedDataParallel or FSDP1, or of a weight in no FSDP2 group",
    where="FSDP2",
    answer="the first forward pass raises",
)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_raises(name: str) -> None:
    """A layer of a prepared model raises in training, evaluation and inference mode."""
    for train, context in ((True, torch.enable_grad), (False, torch.no_grad), (False, torch.inference_mode)):
        layer, inputs = LAYERS[name]()
        model = prepared(Parts(layer.train(train)))
        with context(), pytest.raises(RuntimeError, match=r"is prepared, .*call fully_shard on the model"):
            model.layer(*inputs)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of layers that torch calls deprecated
def test_every_layer_of_torch_is_among_these() -> None:
    """`LAYERS` names every layer of torch that has a weight of two or more dimensions, or holds such a layer.
    Add the layers of a new torch to it.
    """
    named = {name.split(" ")[0] for name in LAYERS}
    refused_or_made_of_them = {
        "Embedding",
        "EmbeddingBag",
        *(f"Conv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3)),
        "Transformer",
        "TransformerDecoderLayer",
        "AdaptiveLogSoftmaxWithLoss",
    }
    abstract = {"RNNBase", "RNNCellBase", "NonDynamicallyQuantizableLinear", "LayerNorm", "RMSNorm"}
    found = set()
    modules = (kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module))
    for kind in {kind for kind in modules if not issubclass(kind, nn.modules.lazy.LazyModuleMixin)}:
        for arguments in ((8, 8), (8, 2), (8, 8, 3), (8, 8, 8), (8, 20, [10]), ("RNN_TANH", 8, 8), (8, 8, True, 1)):
            try:
                parameters = list(kind(*arguments).parameters())
            except Exception:
                continue
            if any(parameter.dim() > 1 for parameter in parameters):
                found.add(kind.__name__)
    assert found - abstract - refused_or_made_of_them == named


def one_block_sharded(model: Any) -> Any:
    prepared(model)
    fully_shard(model.blocks[1], mesh=models.mesh())
    return model


def compiled_by_block(model: Any) -> Any:
    prepared(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model.blocks[0]


def functional(model: Any) -> Any:
    prepared(model)
    plain = {name: parameter.detach() + 0 for name, parameter in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, plain, (x,))


FSDP1 = {"use_orig_params": True, "device_id": torch.device("cpu")}
HOW: dict[str, Callable[[Any], Any]] = {
    "nothing sharded": prepared,
    "one block sharded": one_block_sharded,
    "ignored": lambda model: fully_shard(
        prepared(model), mesh=models.mesh(), ignored_params={model.blocks[0][1].weight}
    ),
    "in DDP": lambda model: DistributedDataParallel(prepared(model)),
    "in FSDP1": lambda model: FullyShardedDataParallel(prepared(model), **FSDP1),
    "compiled": lambda model: torch.compile(prepared(model), backend="eager"),
    "compiled by block": compiled_by_block,
    "a module alone": lambda model: prepared(model).blocks[0],  # type: ignore[index]
    "functional": functional,
}


@pytest.mark.notices(
    "`prepare` without `fully_shard`, within DistributedDataParallel or FSDP1, or of a weight in no FSDP2 group",
    where="FSDP2",
    answer="the first forward pass raises",
)
@pytest.mark.parametrize("how", HOW)
@on_ranks(1, 2)
def test_the_first_forward_pass_raises(world: int, how: str) -> None:
    """The first forward pass raises. In FSDP1 over several ranks, FSDP1's flat parameter raises before it."""
    for grad in (True, False):
        model = Net(("fp8_current", "nvfp4"), 64, 96)
        with torch.set_grad_enabled(grad):
            said = error_of(lambda model=model: HOW[how](model)(models.batch(0, 64)))
        if how == "in FSDP1" and world > 1:
            assert said
            continue
        assert "is prepared, and" in said
        assert "call fully_shard on the model" in said
        assert ("another parameter is in its place" in said) == (how in ("in FSDP1", "functional"))
        assert "takes the place of DistributedDataParallel" in said


@on_ranks(2)
def test_what_looks_at_weights_raises() -> None:
    model = prepared(Net(("fp8_current",), 64, 96))
    for look in (zerocast.verify, zerocast.fsdp2.refresh, zerocast.fsdp2.state_dict):
        with pytest.raises(RuntimeError, match=r"is prepared, and no FSDP module.*call fully_shard"):
            look(model)  # type: ignore[operator]


@on_ranks(2)
def test_what_is_no_product_passes() -> None:
    model = Net(("fp8_current",), 64, 96)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    weight = model.blocks[0][1].weight
    for init in (nn.init.orthogonal_, nn.init.kaiming_normal_, nn.init.trunc_normal_, nn.init.xavier_uniform_):
        init(weight)
    with torch.no_grad():
        weight.mul_(2).add_(torch.ones_like(weight), alpha=0.1)
        weight[:3] *= 2
        torch.linalg.vector_norm(weight)
        torch.linalg.svdvals(weight)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average([weight.clone()], [weight], None)
    nn.utils.parameters_to_vector(model.parameters())
    model.load_state_dict(model.state_dict())
    models.sharded(model, prepare=False)
    models.forward(model)
    models.check(model, "used before")


def test_shapes_are_probed_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net(("fp8_current",), 64, 96)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    assert model(torch.empty(8, 64, device="meta")).shape == (8, 64)


@on_ranks(2)
def test_a_shard_may_be_analysed() -> None:
    model = models.sharded(Net(("fp8_current",), 64, 96))
    zerocast.fsdp2.refresh(model)
    local = models.held(model)[2].detach().to_local()
    assert bool((local @ local.t()).isfinite().all()) and dist.is_initialized()


@on_ranks(2)
def test_a_gathered_weight_knows_its_name() -> None:
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96))
    found = [(name, weight.state.name) for name, weight in models.unsharded(model)]
    assert len(found) == 4
    assert all(name == known for name, known in found)


OPTIMIZERS = (torch.optim.SGD, torch.optim.AdamW, zerocast.fsdp2.FusedAdamW)


@pytest.mark.notices(
    "an optimizer steps that was built before prepare, fully_shard or load_state_dict(assign=True)",
    where="FSDP2",
    answer="its first step after a backward pass raises",
)
@pytest.mark.parametrize("built_before", ["prepare", "fully_shard", "load_state_dict(assign=True)"])
@on_ranks(2)
def test_an_optimizer_of_other_parameters(built_before: str) -> None:
    model = Net(("fp8_current", "nvfp4"), 64, 96)

    def optimizers_if(moment: str) -> list[torch.optim.Optimizer]:
        return [make(model.parameters(), lr=1e-3) for make in OPTIMIZERS] if moment == built_before else []

    optimizers = optimizers_if("prepare")
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    optimizers += optimizers_if("fully_shard")
    models.sharded(model, prepare=False)
    if not optimizers:
        optimizers = optimizers_if("load_state_dict(assign=True)")
        models.train(model, optimizers[0], range(1), 64)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(models.batch(1, 64)).sum().backward()
    advice = "build the optimizer after fully_shard(), and build it again after load_state_dict(assign=True)"
    assert all(advice in error_of(optimizer.step) for optimizer in optimizers)
    new = torch.optim.AdamW(model.parameters(), lr=1e-3)
    models.train(model, new, range(2, 3), 64)
    assert error_of(new.step) == ""
    models.check(model, "with a new optimizer")


# -- gathered weights have an owner, their master: a step does not count them as weights without an optimizer


@pytest.mark.parametrize(
    ("kind", "message", "count"),
    [
        ("all", "", 0),
        ("two optimizers", "", 0),
        ("frozen", "", 0),
        ("a part", "1 prepared weights have gradients, and no optimizer", 1),
        ("twice", "RuntimeError: this AdamW lists", 3),
    ],
)
@on_ranks(2)
def test_weights_that_nobody_trains_or_that_are_trained_twice(kind: str, message: str, count: int) -> None:
    model = models.sharded(Net(("nvfp4", "mxfp8"), 64, 128))
    named = dict(model.named_parameters())
    first = named[models.manager(model).weights[0].name]
    others = [parameter for parameter in named.values() if parameter is not first]
    optimizer = torch.optim.AdamW(others if kind != "all" else [first, *others])
    if kind == "twice":
        optimizer.param_groups[0]["params"].append(others[0])
    optimizers = [optimizer, torch.optim.SGD([first], lr=0.1)] if kind == "two optimizers" else [optimizer]
    if kind == "frozen":
        first.requires_grad_(False)
    said: list[str] = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(models.batch(step, 64)).float().square().mean().backward()
            for each in optimizers:
                said += [error for error in [error_of(each.step)] if error]
            model.zero_grad()
        said += [str(warning.message) for warning in caught if "prepared weights" in str(warning.message)]
    assert len(said) == count, said
    assert all(one.startswith(message) for one in said), said
