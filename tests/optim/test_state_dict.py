"""The state has fixed keys and plain tensors. A state that does not fit is refused on all ranks, and nothing changes."""

import io
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import zerocast
from tests import casts
from tests.observed import same_on_all
from tests.optim.probe import BF16, FEW, FP32, Spec
from tests.optim.runs import ADAM, Run, Trainer, boxes, refused, snapshot
from tests.workers import error_of, on_ranks
from zerocast import ZeroConfig, optim
from zerocast.optim import full_state_dict
from zerocast.optim.pretrained import _gathered

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
HYPERPARAMETERS = ("lr", "eps", "weight_decay", "beta1", "beta2")
KEYS = (
    {f"model.{spec.name}" for spec in FEW}
    | {f"optim.state.{spec.name}.{key}" for spec in FEW for key in MOMENTS}
    | {f"optim.param_groups.{spec.name}.{key}" for spec in FEW for key in HYPERPARAMETERS}
    | {f"zerocast.delayed.{key}" for key in ("scale", "amax_history", "cast_scale")}
)


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix[1:]: state}
    return {name: leaf for key, value in state.items() for name, leaf in flat(value, f"{prefix}.{key}").items()}


@on_ranks(1, 3)
def test_keys_are_fixed_and_the_same_on_every_rank(tmp_path, world):
    trainer = Trainer(Run())
    trainer.train(range(2))
    dcp.save(trainer.optimizer.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    state = same_on_all({name: (tuple(t.shape), t.dtype) for name, t in flat(trainer.optimizer.state_dict()).items()})
    assert set(state) == KEYS
    for spec in FEW:
        for name in (f"model.{spec.name}", f"optim.state.{spec.name}.exp_avg", f"optim.state.{spec.name}.exp_avg_sq"):
            assert state[name] == (spec.shape, FP32)
        assert state[f"optim.state.{spec.name}.step"] == ((), FP32)
    assert state["zerocast.delayed.amax_history"] == ((3,), FP32)
    metadata = dcp.FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    assert set(metadata) == KEYS
    assert not [name for name, entry in metadata.items() if isinstance(entry, BytesStorageMetadata)]
    for spec in FEW:
        assert metadata[f"model.{spec.name}"].size == torch.Size(spec.shape)
        assert len(metadata[f"model.{spec.name}"].chunks) <= 3 * world


@on_ranks(2)
def test_shards_are_no_values():
    """Reads of a whole tensor are refused where a rank holds only a part, instead of returning noise."""
    trainer = Trainer(Run())
    shard = trainer.optimizer.state_dict()["model"]["nv"]
    reads: list[Callable[[], object]] = [
        lambda: shard.norm(), lambda: shard + 1, lambda: torch.empty(48, 112).copy_(shard), lambda: shard.tolist(),
        lambda: shard.clone(), lambda: shard.cpu(), lambda: pickle.dumps(shard),
        lambda: torch.save(trainer.optimizer.state_dict(), io.BytesIO()), lambda: float(shard.sum()),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(TypeError, match=r"TensorShard|several ranks"):
            read()
    assert "span=" in repr(shard)


def test_a_lost_scale_is_seeded_with_a_warning(tmp_path, caplog):
    """A scale that a run without delayed scaling lacks is seeded. What the optimizer had seen before plays no part."""
    plain = Trainer(Run((Spec("w", (32, 64), "nvfp4"),), options=(ADAM,)))
    plain.train(range(2))
    optim.save(plain.optimizer, tmp_path / "checkpoint")
    found = []
    for steps in (0, 4):
        delayed = Trainer(Run((Spec("w", (32, 64), "fp8_delayed"),), options=({**ADAM, "lr": 1.0},)))
        delayed.train(range(steps))
        with caplog.at_level(logging.WARNING, "zerocast"):
            optim.load(delayed.optimizer, tmp_path / "checkpoint")
        assert "seeded" in caplog.text
        caplog.clear()
        weight = delayed.probe.get_parameter("w")
        amax = plain.optimizer.state_dict()["model"]["w"].to(BF16).abs().amax().float()
        assert weight.scale == torch.tensor(448.0) / amax
        assert weight.rowwise_scale_inv == 1 / weight.scale
        found.append(snapshot(delayed))
    casts.assert_same_bytes(*found)


@on_ranks(2)
def test_shards_of_other_buckets_are_refused():
    """The state of an optimizer with other buckets is refused in memory."""
    trainer, other = Trainer(Run()), Trainer(Run(config=ZeroConfig(bucket_size=1)))
    said = refused(trainer, lambda: trainer.optimizer.load_state_dict(other.optimizer.state_dict()))
    assert said.startswith("ValueError") and "sharded differently" in said


def test_hooks_of_states_run() -> None:
    """The hooks of torch.optim.Optimizer run, and a state that they return replaces the state."""
    optimizer = Trainer(Run()).optimizer
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("after saving") or {**state, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: (
            calls.append("before loading") or {key: value for key, value in state.items() if key != "epoch"}
        )
    )
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    state = optimizer.state_dict()
    assert state["epoch"] == 3
    optimizer.load_state_dict(state)
    assert calls == ["before saving", "after saving", "before loading", "after loading"]
    assert state["epoch"] == 3


@on_ranks(1, 3)
def test_the_attribute_state_shows_copies():
    trainer = Trainer(Run())
    trainer.train(range(2))
    optimizer = trainer.optimizer
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            expected, looked = optimizer.state_dict()["optim"]["state"][name], optimizer.state[parameter]
            assert looked.keys() == expected.keys()
            for key, value in looked.items():
                ours, theirs = (getattr(value, "flat", value), getattr(expected[key], "flat", expected[key]))
                assert torch.equal(ours, theirs)
                ours.fill_(3.0)
                assert not ours.numel() or not torch.equal(ours, theirs)
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(1)]
    assert list(optimizer.state.items()) == []


@pytest.mark.notices(
    "optimizer.state is cleared, assigned or replaced, to reset moments",
    where="ZeroAdamW",
    answer="raises, for a replaced one at the next step; nothing changed",
)
def test_the_attribute_state_cannot_be_changed():
    optimizer = Trainer(Run()).optimizer
    parameter = optimizer.param_groups[0]["params"][0]
    changes: list[Callable[[], object]] = [
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(parameter),
        lambda: optimizer.state.update({parameter: {}}),
        lambda: optimizer.state.__setitem__(parameter, {}),
        lambda: optimizer.state.__delitem__(parameter),
    ]
    for change in changes:
        assert "changes nothing, since its moments are in flat shards" in error_of(change)
    optimizer.state = defaultdict(dict)
    with pytest.raises(RuntimeError, match=r"optimizer\.state = \.\.\. of a ZeroAdamW or ZeroMuon changes nothing"):
        optimizer.step()


LARGE = (
    Spec("a", (128, 256), "nvfp4"),
    Spec("b", (256, 128), "fp8_delayed:amax_history_len=4"),
    Spec("c", (128, 128), dtype=FP32),
)


@on_ranks(2, 4)
def test_no_rank_holds_the_full_state(tmp_path, world):
    """A rank holds a part of the state in its dictionary and in its file of a checkpoint, which it writes alone."""
    numel = 2 * 128 * 256 + 128 * 128
    trainer = Trainer(Run(LARGE, config=ZeroConfig(bucket_size=2**14)))
    sizes = [part.nbytes for value in flat(trainer.optimizer.state_dict()).values() for _, part in boxes(value)]
    assert sum(sizes) <= 12 * numel / world + 1024
    assert max(sizes) <= 4 * 128 * 256 / 2
    optim.save(trainer.optimizer, tmp_path / "checkpoint")
    files = [file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.distcp")]
    assert len(files) == world
    assert max(files) <= 1.3 * sum(files) / world


# -- masters under the names of the model, also where the optimizer has other names


class Around(nn.Module):
    """A quantized net inside a model whose own names are those of the net's parameters too."""

    def __init__(self, inner: str = "nvfp4") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        self.add_module("0", nn.Linear(64, 32))  # of another shape: 0.weight is net.1.weight's
        zerocast.quantize_(self.net, {"*.weight": inner}, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def masters_of(optimizer: zerocast.ZeroAdamW) -> dict[str, Tensor]:
    """Return the masters whole on every rank, by the optimizer's names."""
    group = zerocast.distributed.group.Group.of(optimizer.process_group)
    return {name: _gathered(master, group, name).clone() for name, master in optimizer.state_dict()["model"].items()}


@on_ranks(1, 2)
def test_an_optimizer_of_a_part_has_other_names() -> None:
    model = Around()
    optimizer = zerocast.ZeroAdamW(model.net.named_parameters(), lr=0.05)
    model(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    state, masters = full_state_dict(model, optimizer, dtype=FP32), masters_of(optimizer)
    if dist.is_initialized() and dist.get_rank():
        assert state == {}
        return
    for name, master in masters.items():
        assert torch.equal(state[f"net.{name}"], master)
    weight = model.net[0].weight
    assert not torch.equal(state["net.0.weight"], weight.dequantize().float())
    assert torch.equal(state["0.weight"], model.get_parameter("0.weight"))


@on_ranks(1, 2)
def test_a_full_state_is_copies() -> None:
    """A full state keeps its values in the next step. Its tensors share no storage, of which accelerate would
    write only one.
    """
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    zerocast.quantize_(model, {"*.weight": "nvfp4"}, dtype=FP32)
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=0.05)
    state = full_state_dict(model, optimizer)
    before = {name: tensor.clone() for name, tensor in state.items()}
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)


@on_ranks(2)
def test_a_weight_whose_master_is_elsewhere() -> None:
    """`full_state_dict` raises for a trainable weight without an optimizer, even if the weight
    requires a gradient on rank 1 only.
    """
    model = Around()
    first = [(name, p) for name, p in model.net.named_parameters() if name != "1.weight"]
    rank = dist.get_rank()
    optimizer = zerocast.ZeroAdamW(first)
    everywhere = error_of(lambda: full_state_dict(model, optimizer))
    model.net[1].weight.requires_grad_(rank == 1)
    for said in (everywhere, error_of(lambda: full_state_dict(model, optimizer))):
        assert said.startswith("ValueError")
        assert "net.1.weight requires a gradient and is not a parameter of this ZeroAdamW" in said


def test_frozen_weights_are_dequantized() -> None:
    model = Around()
    model.net[1].weight.requires_grad_(False)
    state = full_state_dict(model, zerocast.ZeroAdamW(model.net.named_parameters()))
    assert torch.equal(state["net.1.weight"], model.net[1].weight.dequantize())
