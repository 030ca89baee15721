"""What the state is: fixed keys, plain tensors, nothing of ours; what does not fit is refused everywhere with nothing changed."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests import casts
from tests.optim.probe import BF16, FP32, MIXED, Spec
from tests.optim.runs import ADAM, Run, Trainer, assert_equals, snapshot
from tests.optim.undistributed import Undistributed
from zerocast import ZeroConfig, optim

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
HYPERPARAMETERS = ("lr", "eps", "weight_decay", "beta1", "beta2")
DELAYED = ("delayed", "recent")
KEYS = (
    {f"model.{spec.name}" for spec in MIXED}
    | {f"optim.state.{spec.name}.{key}" for spec in MIXED for key in MOMENTS}
    | {f"optim.param_groups.{spec.name}.{key}" for spec in MIXED for key in HYPERPARAMETERS}
    | {f"zerocast.{name}.{key}" for name in DELAYED for key in ("scale", "amax_history", "cast_scale")}
)


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix[1:]: state}
    return {name: leaf for key, value in state.items() for name, leaf in flat(value, f"{prefix}.{key}").items()}


def shapes(path: str | None) -> dict[str, Any]:
    """Keys, shapes and dtypes of a rank's state; saved on the way."""
    trainer = Trainer(Run())
    trainer.train(range(2))
    if path is not None:
        dcp.save(trainer.optimizer.state_dict(), checkpoint_id=path)
    return {name: (tuple(t.shape), t.dtype) for name, t in flat(trainer.optimizer.state_dict()).items()}


@pytest.mark.parametrize("world", [1, 3])
def test_keys_are_fixed_and_the_same_on_every_rank(ranks, tmp_path, world):
    first, *others = ranks(world)(shapes, str(tmp_path / "checkpoint"))
    assert set(first) == KEYS
    assert all(other == first for other in others)
    for spec in MIXED:
        for name in (f"model.{spec.name}", f"optim.state.{spec.name}.exp_avg", f"optim.state.{spec.name}.exp_avg_sq"):
            assert first[name] == (spec.shape, FP32)
        assert first[f"optim.state.{spec.name}.step"] == ((), FP32)
    assert first["zerocast.recent.amax_history"] == ((4,), FP32)
    metadata = dcp.FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    assert set(metadata) == KEYS
    assert not [name for name, entry in metadata.items() if isinstance(entry, BytesStorageMetadata)]
    for spec in MIXED:
        assert metadata[f"model.{spec.name}"].size == torch.Size(spec.shape)
        assert len(metadata[f"model.{spec.name}"].chunks) <= 3 * world


def test_torch_save_with_one_process():
    trainer, other = Trainer(Run()), Trainer(Run())
    trainer.train(range(3))
    file = io.BytesIO()
    torch.save(trainer.optimizer.state_dict(), file)
    file.seek(0)
    other.train(range(7))
    other.optimizer.load_state_dict(torch.load(file, weights_only=True))
    casts.assert_same_bytes(snapshot(other), snapshot(trainer))


def shards_are_no_values() -> None:
    """Where a rank holds a part only, what would read the whole is refused, not answered with noise."""
    trainer = Trainer(Run())
    shard = trainer.optimizer.state_dict()["model"]["nv"]
    reads: list[Callable[[], object]] = [
        lambda: shard.norm(), lambda: shard + 1, lambda: torch.empty(48, 112).copy_(shard), lambda: shard.tolist(),
        lambda: shard.clone(), lambda: copy.deepcopy(shard), lambda: shard.cpu(), lambda: pickle.dumps(shard),
        lambda: torch.save(trainer.optimizer.state_dict(), io.BytesIO()), lambda: float(shard.sum()),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(TypeError, match=r"TensorShard|several ranks"):
            read()
    assert "span=" in repr(shard)


def test_shards_are_no_values(ranks):
    ranks(2)(shards_are_no_values)


def test_a_lost_scale_is_seeded_with_a_warning(tmp_path, caplog):
    """From a run without delayed scaling; what the optimizer had seen before it loaded plays no part."""
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


def broken(kind: str, culprit: int) -> tuple[str, str]:
    """(type, message) of what loading a broken state raises; nothing has changed and training goes on."""
    trainer, reference = Trainer(Run()), Undistributed(MIXED)
    state = trainer.optimizer.state_dict()
    if trainer.rank == culprit:
        BREAK[kind](state)
    before = snapshot(trainer)
    try:
        trainer.optimizer.load_state_dict(state)
    except ValueError as error:
        raised = type(error).__name__, str(error)
    else:
        raised = "nothing", ""
    casts.assert_same_bytes(snapshot(trainer), before, kind)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    trainer.step(0)
    reference.step({s.name: trainer.run.rounds(s, 0, ranks) for s in MIXED}, trainer.run.options)
    assert_equals(trainer, reference, kind)
    return raised


BREAK: dict[str, Callable[[Any], object]] = {
    "a name less": lambda s: s["model"].pop("nv"),
    "a name more": lambda s: s["model"].update(other=torch.zeros(3)),
    "another shape": lambda s: s["model"].update(nv=torch.zeros(112, 48)),
    "another shape of a moment": lambda s: s["optim"]["state"]["nv"].update(exp_avg_sq=torch.zeros(3)),
    "no moments": lambda s: s["optim"]["state"].pop("nv"),
    "one moment": lambda s: s["optim"]["state"]["nv"].pop("exp_avg"),
    "two step counts": lambda s: s["optim"]["state"]["nv"].update(step=torch.tensor(7.0)),
    "two learning rates": lambda s: s["optim"]["param_groups"]["nv"].update(lr=torch.tensor(7.0)),
    "no beta": lambda s: s["optim"]["param_groups"]["nv"].pop("beta1"),
    "hyper-parameters of a stranger": lambda s: s["optim"]["param_groups"].update(x={"lr": torch.tensor(1.0)}),
    "no model": lambda s: s.pop("model"),
    "no optimizer": lambda s: s.pop("optim"),
}


@pytest.mark.parametrize("kind", BREAK)
def test_what_does_not_fit_is_refused_everywhere(ranks, kind):
    assert broken(kind, 0)[0] == "ValueError"
    for name, message in ranks(2)(broken, kind, 1):
        assert name == "ValueError"
        assert "rank 1" in message


def cut_otherwise() -> str:
    """The state of an optimizer with other buckets, handed over in memory."""
    trainer, other = Trainer(Run()), Trainer(Run(config=ZeroConfig(bucket_size=1)))
    before = snapshot(trainer)
    with pytest.raises(ValueError, match="sharded differently") as raised:
        trainer.optimizer.load_state_dict(other.optimizer.state_dict())
    casts.assert_same_bytes(snapshot(trainer), before)
    return str(raised.value)


def test_shards_of_other_buckets_are_refused(ranks):
    ranks(2)(cut_otherwise)


def handed_over() -> None:
    """From one optimizer to another that cuts alike, in memory, and a whole tensor where a shard could be."""
    trainer, other = Trainer(Run()), Trainer(Run())
    trainer.train(range(3))
    state = trainer.optimizer.state_dict()
    other.optimizer.load_state_dict(state)
    casts.assert_same_bytes(snapshot(other), snapshot(trainer))


def test_state_of_another_optimizer(ranks):
    handed_over()
    ranks(2)(handed_over)


def test_hooks_of_states_run() -> None:
    """Those of torch.optim.Optimizer, with what they return in place of the state."""
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


def looks_at_state() -> bool:
    """Whether `state[parameter]` is what `state_dict` has, and a write to it changes nothing."""
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
    return list(optimizer.state.items()) == []


@pytest.mark.parametrize("world", [1, 3])
def test_the_attribute_state_shows_copies(ranks, world):
    assert ranks(world)(looks_at_state) == [True] * world
