"""A prepared model that FSDP2 does not gather raises at its first forward pass, and does not train in FP32."""

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
from tests.workers import Ranks, error_of

RECIPE = zerocast.Recipe({"*weight*": "fp8_current"})
X = torch.ones(4, 8)


def prepared(model: nn.Module) -> nn.Module:
    """With all its weights, and nothing sharded."""
    return zerocast.fsdp2.prepare(model, RECIPE)


class Parts(nn.Module):
    """A layer within a model whose forward pass is not called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def attention() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Torch's, which has a path of one operator for inference."""
    x = torch.ones(2, 4, 8)
    return nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x)


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "Linear": lambda: (nn.Linear(8, 8), (X,)),
    "Linear of three dimensions": lambda: (nn.Linear(8, 8, bias=False), (torch.ones(2, 3, 8),)),
    "Bilinear": lambda: (nn.Bilinear(8, 8, 8), (X, X)),
    "RNN": lambda: (nn.RNN(8, 8), (X,)),
    "LSTM": lambda: (nn.LSTM(8, 8), (X,)),
    "GRU": lambda: (nn.GRU(8, 8), (X,)),
    "RNNCell": lambda: (nn.RNNCell(8, 8), (X,)),
    "LSTMCell": lambda: (nn.LSTMCell(8, 8), (X,)),
    "GRUCell": lambda: (nn.GRUCell(8, 8), (X,)),
    "MultiheadAttention": attention,
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), (X[None],)),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    LAYERS["LinearCrossEntropyLoss"] = lambda: (nn.LinearCrossEntropyLoss(8, 8), (X, torch.zeros(4, dtype=torch.int64)))


@pytest.mark.notices(
    "`fsdp2.prepare` without `fully_shard`: a forward pass would compute in FP32",
    where="FSDP2",
    answer="the first forward pass raises, of any module with a prepared weight",
)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_raises(name: str) -> None:
    """Of the model and of a layer in it, in training, evaluation and inference mode."""
    for train, context in ((True, torch.enable_grad), (False, torch.no_grad), (False, torch.inference_mode)):
        layer, inputs = LAYERS[name]()
        model = prepared(Parts(layer.train(train)))
        with context(), pytest.raises(RuntimeError, match=r"is prepared, .*call fully_shard on the model"):
            model.layer(*inputs)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of layers that torch calls deprecated
def test_every_layer_of_torch_is_among_these() -> None:
    """Those that have a weight of two or more dimensions, or hold such a layer; a new one in a
    new torch is to be added.
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


def nothing_sharded(model: Any) -> Any:
    return prepared(model)


def one_block_sharded(model: Any) -> Any:
    prepared(model)
    fully_shard(model.blocks[1], mesh=models.mesh())
    return model


def ignored(model: Any) -> Any:
    prepared(model)
    return fully_shard(model, mesh=models.mesh(), ignored_params={model.blocks[0][1].weight})


def in_ddp(model: Any) -> Any:
    return DistributedDataParallel(prepared(model))


def in_fsdp1(model: Any) -> Any:
    return FullyShardedDataParallel(prepared(model), use_orig_params=True, device_id=torch.device("cpu"))


def compiled(model: Any) -> Any:
    return torch.compile(prepared(model), backend="eager")


def compiled_by_block(model: Any) -> Any:
    prepared(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model.blocks[0]


def a_module_alone(model: Any) -> Any:
    return prepared(model).blocks[0]


def functional(model: Any) -> Any:
    prepared(model)
    plain = {name: parameter.detach() + 0 for name, parameter in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, plain, (x,))


HOW = [nothing_sharded, one_block_sharded, ignored, in_ddp, compiled, compiled_by_block, a_module_alone, functional]


def first_forward(how: Callable[[Any], Any], grad: bool) -> str:
    """What the first forward pass raises."""
    model = how(Net(("fp8_current", "nvfp4"), 64, 96))
    with torch.set_grad_enabled(grad):
        return error_of(lambda: model(models.batch(0, 64)))


@pytest.mark.notices(
    "a prepared model is passed to DistributedDataParallel or FSDP1, or a weight is in no FSDP2 group",
    where="FSDP2",
    answer="the first forward pass raises on all ranks",
)
@pytest.mark.parametrize("how", HOW)
def test_the_first_forward_pass_raises(ranks: Ranks, how: Callable[[Any], Any]) -> None:
    for grad in (True, False):
        for said in ranks(2)(first_forward, how, grad):
            assert "is prepared, and" in said
            assert "call fully_shard on the model" in said
            assert "takes the place of DistributedDataParallel" in said


def test_fsdp1_raises_as_well(ranks: Ranks) -> None:
    """Over several ranks its own flat parameter does, before a forward pass gets to the model."""
    assert all("call fully_shard on the model" in said for said in ranks(1)(first_forward, in_fsdp1, True))
    assert all(said for said in ranks(2)(first_forward, in_fsdp1, True))


def looked_at() -> list[str]:
    """What is said of a model that was not sharded, and has run nothing."""
    model = prepared(Net(("fp8_current",), 64, 96))
    looks: tuple[Any, ...] = (zerocast.verify, zerocast.fsdp2.refresh, zerocast.fsdp2.state_dict)
    return [error_of(lambda look=look: look(model)) for look in looks]


def test_what_looks_at_weights_raises(ranks: Ranks) -> None:
    for found in ranks(2)(looked_at):
        assert len(found) == 3
        assert all("is prepared, and no FSDP module" in text and "call fully_shard" in text for text in found)


def used_before() -> list[str]:
    """Complaints after all that is done with a prepared model before it is sharded."""
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
    with torch.no_grad():
        model(models.batch(0, 64))
    return models.complaints(model, "used before")


def test_what_is_no_product_passes(ranks: Ranks) -> None:
    assert ranks(2)(used_before) == [[], []]


def test_shapes_are_probed_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net(("fp8_current",), 64, 96)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    assert model(torch.empty(8, 64, device="meta")).shape == (8, 64)


def analysed() -> bool:
    """Whether products with a shard, which no module computes, go on as before once the model is sharded and cast."""
    model = models.sharded(Net(("fp8_current",), 64, 96))
    zerocast.fsdp2.refresh(model)
    local = models.held(model)[2].detach().to_local()
    return bool((local @ local.t()).isfinite().all()) and dist.is_initialized()


def test_a_shard_may_be_analysed(ranks: Ranks) -> None:
    assert ranks(2)(analysed) == [True, True]


def names() -> list[tuple[str, str]]:
    """The names of gathered weights in the model, and what they are called in a log."""
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96))
    return [(name, weight.state.name) for name, weight in models.unsharded(model)]


def test_a_gathered_weight_knows_its_name(ranks: Ranks) -> None:
    for found in ranks(2)(names):
        assert len(found) == 4
        assert all(name == known for name, known in found)


OPTIMIZERS = (torch.optim.SGD, torch.optim.AdamW, zerocast.fsdp2.FusedAdamW)


def orphaned(early: bool) -> list[str]:
    """What the steps of optimizers say whose parameters are no longer the model's."""
    model = Net(("fp8_current", "nvfp4"), 64, 96)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    optimizers = [make(model.parameters(), lr=1e-3) for make in OPTIMIZERS] if early else []
    models.sharded(model, prepare=False)
    if not early:
        optimizers = [make(model.parameters(), lr=1e-3) for make in OPTIMIZERS]
        models.train(model, optimizers[0], range(1), 64)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(models.batch(1, 64)).sum().backward()
    said = [error_of(optimizer.step) for optimizer in optimizers]
    new = torch.optim.AdamW(model.parameters(), lr=1e-3)
    models.train(model, new, range(2, 3), 64)
    return [*said, error_of(new.step), *models.complaints(model, "with a new optimizer")]


@pytest.mark.notices(
    "an optimizer steps that was built before fully_shard or load_state_dict(assign=True)",
    where="FSDP2",
    answer="raises at its first step after a backward pass: another parameter has the gradient",
)
@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_of_other_parameters(ranks: Ranks, early: bool) -> None:
    for *said, new in ranks(2)(orphaned, early):
        assert len(said) == len(OPTIMIZERS)
        assert all(
            "build the optimizer after fully_shard(), and build it again after load_state_dict(assign=True)" in s
            for s in said
        )
        assert new == ""
