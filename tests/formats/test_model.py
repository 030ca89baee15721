"""The numpy model: held by the published goldens, and itself holding the reference backend on inputs that no golden has."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import casts
from tests.casts import CONTENTS, TINY, lcg_matrix, matrix
from tests.formats import model, own_goldens
from tests.formats.test_goldens import GOLDENS
from zerocast.backends.reference.stages import rolled
from zerocast.formats import get_format

OWN: list[dict[str, Any]] = json.loads(own_goldens.PATH.read_text())
BF16 = "bfloat16"


def format_text(name: str, settings: model.Settings) -> str:
    """Return the format that the library calls by this text."""
    options = {k: v for k, v in vars(settings).items() if k != "scale" and v != getattr(model.Settings(), k)}
    if name == "fp8_block":
        options["power_of_2_scale"] = settings.power_of_2_scale
    return ":".join([name, ",".join(f"{k}={v}" for k, v in options.items())]) if options else name


def test_model_gives_the_published_bytes() -> None:
    mx = model.Cast("mxfp8", BF16).of(lcg_matrix(32, 64, 1))
    nv = model.Cast("nvfp4", BF16).of(lcg_matrix(32, 80, 2))
    keys = {"data_sha": "rowwise_data", "scale_sha": "rowwise_scale_inv"}
    keys |= {"cdata_sha": "columnwise_data", "cscale_sha": "columnwise_scale_inv"}
    assert {k: casts.sha(mx[v]) for k, v in keys.items()}.items() <= GOLDENS["mxfp8_32x64"].items()
    assert {k: casts.sha(nv[v]) for k, v in keys.items()}.items() <= GOLDENS["nvfp4_2d_32x80"].items()
    for pow2 in (False, True):
        cast = model.Cast("fp8_block", BF16, model.Settings(power_of_2_scale=pow2))
        assert (
            casts.sha(cast.of(lcg_matrix(144, 272, 0))["rowwise_data"])
            == GOLDENS[f"block128_144x272_pow2={int(pow2)}"]["data_sha"]
        )
        current = model.Cast("fp8_current", BF16, model.Settings(power_of_2_scale=pow2)).of(TINY)
        assert current["rowwise_data"].tobytes().hex() == GOLDENS[f"current_2x4_pow2={int(pow2)}"]["data"]
    delayed = model.Cast("fp8_delayed", BF16, model.Settings(scale=64.0)).of(TINY)
    assert delayed["rowwise_data"].tobytes().hex() == GOLDENS["delayed_2x4_scale64"]["data"]


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_model_encodes_the_published_specials(element: str) -> None:
    x = np.array([float(value) for value in GOLDENS["specials"]["x"]], np.float32)
    assert model.encode(element, x).tobytes().hex() == GOLDENS["specials"][element]


@pytest.mark.long_interpreted
@pytest.mark.parametrize(("name", "settings"), own_goldens.CASES, ids=str)
def test_own_goldens(backend_anywhere: str, name: str, settings: model.Settings) -> None:
    """Of every nominal dtype and content, and of experts."""
    wrong = []
    for golden in OWN:
        if (golden["format"], model.Settings(**golden["settings"])) != (name, settings):
            continue
        shape = tuple(golden.get("shape", own_goldens.SHAPE))
        master = torch.from_numpy(own_goldens.master(golden["content"], shape))
        fmt, nominal = format_text(name, settings), getattr(torch, golden["nominal"])
        weight = casts.cast_whole(fmt, master, nominal, backend_anywhere, settings.scale)
        found = {name: casts.sha(data) for name, data in casts.bytes_of(weight).items() if name in golden}
        expected = {name: value for name, value in golden.items() if name in casts.CAST_BUFFERS}
        wrong += [] if found == expected else [(golden, found)]
    assert wrong == []


def test_own_goldens_are_what_the_model_gives() -> None:
    """The first entry of each format, and all of experts, are what the model gives."""
    every = len(own_goldens.NOMINAL) * len(own_goldens.CONTENTS)
    of_matrices, of_experts = OWN[: every * len(own_goldens.CASES) : every], OWN[every * len(own_goldens.CASES) :]
    for (name, settings), golden in zip(own_goldens.CASES, of_matrices, strict=True):
        assert own_goldens.golden(name, golden["nominal"], golden["content"], settings) == golden
    for (name, settings), golden in zip(own_goldens.OF_EXPERTS, of_experts, strict=True):
        assert own_goldens.golden(name, "bfloat16", "wide", settings, own_goldens.EXPERTS) == golden


@given(data=st.data())
def test_reference_equals_the_model(data: st.DataObject) -> None:
    name, settings = data.draw(st.sampled_from(own_goldens.CASES))
    sides = [st.integers(1, 272 // k).map(lambda n, k=k: n * k) for k in get_format(name).multiple]  # type: ignore[misc]
    content, nominal = data.draw(st.sampled_from(sorted(CONTENTS))), data.draw(st.sampled_from(own_goldens.NOMINAL))
    if settings.element == "e4m3" and name != "mxfp8":
        epsilon = data.draw(st.sampled_from([0.0, 1e-30, 0.5])) if name in ("fp8_current", "fp8_block") else 0.0
        settings = replace(settings, amax_epsilon=epsilon)
    rows, columns, experts = *map(data.draw, sides), data.draw(st.sampled_from([None, 1, 2]))
    x = matrix(content, rows * (experts or 1), columns, data.draw(st.integers(0, 2**31)))
    x = x if experts is None else x.reshape(experts, rows, columns)
    expected = model.Cast(name, nominal, settings).of(x)
    found = casts.unsharded(format_text(name, settings), torch.from_numpy(x), getattr(torch, nominal), settings.scale)
    wanted = {key: np.ascontiguousarray(value).reshape(-1).view(np.uint8) for key, value in expected.items()}
    casts.assert_same_bytes(found, wanted, f"{name} {nominal} {content} {x.shape}")
    assert found.keys() == wanted.keys()


AMAXES = st.sampled_from([0.0, 0.0, 1e-45, 1e-38, 3e38, float("inf")]) | st.floats(0, 100, width=32)


@given(data=st.data())
def test_delayed_update_equals_the_model(data: st.DataObject) -> None:
    length, algo = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["max", "most_recent"]))
    margin, element = data.draw(st.integers(-3, 3)), data.draw(st.sampled_from(["e4m3", "e5m2"]))
    history = np.array(data.draw(st.lists(AMAXES, min_size=length, max_size=length)), np.float32)
    amax, scale = data.draw(AMAXES), data.draw(st.sampled_from([1.0, 64.0, float("inf")]))
    fmt = get_format("fp8_delayed", element=element, margin=margin, amax_history_len=length, amax_compute_algo=algo)
    new, fresh = rolled(fmt, torch.tensor([amax]), torch.tensor([scale]), torch.from_numpy(history))
    expected, wanted = model.delayed_update(history, amax, scale, model.MAX[element], margin, algo)
    assert new.tolist() == expected.tolist()
    assert fresh.item() == wanted
