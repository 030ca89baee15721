"""Formats as values: names, options, texts."""

import copy
import pickle
from typing import Any

import pytest

import zerocast
from tests.casts import FORMATS
from zerocast import FormatSpec, get_format
from zerocast.formats import format_names

OPTIONS: dict[str, dict[str, Any]] = {
    "fp8_delayed": {"element": "e4m3", "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"},
    "fp8_current": {"element": "e4m3", "power_of_2_scale": False, "amax_epsilon": 0.0},
    "fp8_block": {"element": "e4m3", "power_of_2_scale": True, "amax_epsilon": 0.0},
    "mxfp8": {"block": "1x32"},
    "mxfp4": {"scale_rounding": "up", "exact_in_fp8": True},
    "nvfp4": {"exact_in_fp8": False},
    "int4": {},
    "identity": {},
}


def test_the_names() -> None:
    assert set(format_names()) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults(name: str) -> None:
    fmt = get_format(name)
    for option, value in OPTIONS[name].items():
        read: dict[str, Any] = {"element": lambda: fmt.element and fmt.element.name}
        read |= {"block": lambda: "{}x{}".format(*fmt.block or ())}
        read["exact_in_fp8"] = lambda: fmt.exact_scales or bool(fmt.scale_group)
        assert (read[option]() if option in read else getattr(fmt, option)) == value
    assert get_format(name, **OPTIONS[name]) == fmt
    assert str(fmt) == name


def test_inline_and_keyword_options_are_the_same() -> None:
    keyword = get_format("fp8_current", element="e5m2", amax_epsilon=1)
    assert keyword == get_format("fp8_current: element = e5m2, amax_epsilon=1.0")
    assert str(keyword) == "fp8_current:amax_epsilon=1.0,element=e5m2"
    assert get_format("fp8_current:element=e5m2", element="e4m3") == get_format("fp8_current")
    assert get_format("nvfp4:exact_in_fp8") == get_format("nvfp4", exact_in_fp8=True)


@pytest.mark.parametrize("text", FORMATS)
def test_formats_are_plain_values(text: str) -> None:
    fmt = get_format(text)
    for twin in (pickle.loads(pickle.dumps(fmt)), copy.deepcopy(fmt)):
        assert twin == fmt
        assert hash(twin) == hash(fmt)
        assert str(twin) == str(fmt)
    with pytest.raises(AttributeError):
        fmt.margin = 3  # type: ignore[misc]


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("fp4", {}, ValueError, "unknown format 'fp4'; did you mean 'nvfp4'\\? known: fp8_block, fp8_current"),
    ("", {}, ValueError, "unknown format"),
    ("element", {}, ValueError, "unknown format 'element'"),
    ("spec", {}, ValueError, "unknown format 'spec'"),
    ("nvfp4", {"element": "e5m2"}, ValueError, "nvfp4 has no option 'element'; it has: exact_in_fp8"),
    ("mxfp8", {"power_of_2_scale": True}, ValueError, "mxfp8 has no option"),
    ("mxfp8:block=32x32,element=e5m2", {}, ValueError, "mxfp8 has no option 'element'; it has: block"),
    ("mxfp4", {"scale_rounding": "down"}, ValueError, "scale_rounding must be one of .*, got 'down'"),
    ("mxfp8:block=16x16", {}, ValueError, "block must be one of .*, got '16x16'"),
    ("fp8_current", {"margin": 1}, ValueError, "it has: element, power_of_2_scale, amax_epsilon"),
    ("fp8_delayed", {"amax_epsilon": 0.1}, ValueError, "no option 'amax_epsilon'"),
    ("fp8_current", {"element": "e2m1"}, ValueError, "element must be one of"),
    ("fp8_current", {"element": 4}, TypeError, "element of fp8_current is a str, got 4"),
    ("fp8_block", {"power_of_2_scale": 1}, TypeError, "power_of_2_scale of fp8_block is a bool, got 1"),
    ("fp8_block", {"power_of_2_scale": "yes"}, TypeError, "is a bool"),
    ("fp8_block", {"amax_epsilon": -1.0}, ValueError, "finite and not negative"),
    ("fp8_block", {"amax_epsilon": float("nan")}, ValueError, "finite and not negative"),
    ("fp8_block", {"amax_epsilon": float("inf")}, ValueError, "finite and not negative"),
    ("fp8_delayed", {"amax_history_len": 0}, ValueError, "at least 1"),
    ("fp8_delayed", {"amax_history_len": 2.0}, TypeError, "is a int"),
    ("fp8_delayed", {"margin": True}, TypeError, "margin of fp8_delayed is a int, got True"),
    ("fp8_delayed", {"amax_compute_algo": "mean"}, ValueError, "amax_compute_algo must be one of"),
    ("fp8_block:element", {}, TypeError, "element of fp8_block is a str, got True"),
    ("nvfp4:exact", {}, ValueError, "nvfp4 has no option 'exact'; it has: exact_in_fp8"),
    ("fp8_block:element=e9m9", {}, ValueError, "element must be one of"),
    ("fp8_block:size=64", {}, ValueError, "no option 'size'"),
]


@pytest.mark.parametrize(("name", "options", "kind", "message"), WRONG)
def test_what_is_no_format(name: str, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    for known in OPTIONS:  # an earlier good call with an equal value must not hide the mistake
        get_format(known)
    get_format("fp8_block", power_of_2_scale=True)
    get_format("fp8_delayed", margin=1)
    get_format("fp8_delayed", amax_history_len=2)
    with pytest.raises(kind, match=message):
        get_format(name, **options)


def test_options_beside_a_format() -> None:
    with pytest.raises(TypeError, match="go with a format name"):
        get_format(get_format("fp8_block"), element="e5m2")


@pytest.mark.parametrize("name", [None, 4, ["nvfp4"]])
def test_names_of_another_type(name: Any) -> None:
    with pytest.raises(TypeError):
        get_format(name)


def test_the_public_names() -> None:
    assert isinstance(zerocast.get_format("nvfp4"), FormatSpec)
    for name in zerocast.__all__:
        assert getattr(zerocast, name).__doc__, name
