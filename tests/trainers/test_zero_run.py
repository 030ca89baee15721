"""zero_run: what the trainers' integrations share, without any of them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zerocast
from tests.workers import error_of
from zerocast.integrations import zero_run


def quantized() -> tuple[nn.Module, zerocast.ZeroAdamW]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    zerocast.quantize_(model, {"0.weight": "nvfp4"}, dtype=torch.bfloat16)
    return model, zerocast.ZeroAdamW(model.named_parameters())


def test_parameters_without_an_owner() -> None:
    model, optimizer = quantized()
    zero_run.check_owners([optimizer], [model])
    biases = zerocast.ZeroAdamW([("bias", model[0].bias)])
    assert "0.weight requires a gradient but is in no ZeroAdamW" in error_of(
        lambda: zero_run.check_owners([biases], [model])
    )
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert "scale requires a gradient" in error_of(lambda: zero_run.check_owners([optimizer], [model]))
    model.scale.requires_grad_(False)
    zero_run.check_owners([optimizer], [model])


@pytest.mark.parametrize(
    ("one", "other"), [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("meta", "cpu"), ("cuda:1", "cuda:0")]
)
def test_other_devices(one: str, other: str) -> None:
    assert not zero_run.is_same_device(torch.device(one), torch.device(other))
    assert zero_run.is_same_device(torch.device(one), torch.device(one))


def test_a_device_without_index() -> None:
    assert zero_run.is_same_device(torch.device("mps:0"), torch.device("mps"))
    if torch.cuda.is_available():
        current = torch.cuda.current_device()
        assert zero_run.is_same_device(torch.device("cuda", current), torch.device("cuda"))
        assert not zero_run.is_same_device(torch.device("cuda", current + 1), torch.device("cuda"))
        zero_run.check_device(nn.Linear(2, 2, device="cuda"), torch.device("cuda"))


def test_a_parameter_elsewhere_is_named_with_both_devices() -> None:
    said = error_of(lambda: zero_run.check_device(nn.Linear(2, 2, device="meta"), torch.device("cpu")))
    assert "weight is on meta, expected cpu" in said


def test_another_number_of_optimizers(tmp_path: Path) -> None:
    (first, one), (second, two) = quantized(), quantized()
    zero_run.save(tmp_path, [one, two], [first, second])
    said = error_of(lambda: zero_run.load(tmp_path, [one], [first]))
    assert said.startswith("ValueError")
    assert "the states of 2 ZeroAdamWs, but 1 were passed" in said
    zero_run.load(tmp_path, [one, two], [first, second])
    zero_run.save(tmp_path, [one], [first])
    assert "the states of 1 ZeroAdamWs, but 2 were passed" in error_of(
        lambda: zero_run.load(tmp_path, [one, two], [first, second])
    )
    zero_run.load(tmp_path, [one], [first])


def test_a_model_without_its_optimizer(tmp_path: Path) -> None:
    model, _optimizer = quantized()
    for call in (zero_run.save, zero_run.load):
        assert "it has the masters" in error_of(lambda call=call: call(tmp_path, [], [model]))
    assert not [*tmp_path.iterdir()]
