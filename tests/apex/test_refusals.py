"""Mistakes and unsupported settings are errors that say what was found, on every rank; wrong hosts are named."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.apex import refusal_cases
from tests.apex.host_on_cpu import importable, needs_apex
from tests.apex.training import MIXED
from tests.workers import Ranks

PACKAGE = "zerocast.integrations.apex"
OPTIONS = {
    "overlap_param_sync": "before the masters of the others have stepped",
    "capturable": "a CUDA graph would replay the kernels",
    "contiguous_param_buffer": "one buffer a bucket already",
    "store_param_remainders": "masters would be in bf16 parameters",
    "with_scaled_states": "a cast needs them in FP32",
    "store_params": "FP32 masters: dtype=torch.float32 and store_params=True, got torch.float32 and False",
    "dtype": "store_params=True, got torch.bfloat16 and True",
}


@needs_apex
@pytest.mark.parametrize("name", OPTIONS)
def test_options(host_ranks: Ranks, name: str) -> None:
    (said,) = host_ranks(1)(refusal_cases.with_option, name)
    assert said.startswith("ValueError") and OPTIONS[name] in said


@needs_apex
def test_a_weight_has_one_owner(host_ranks: Ranks) -> None:
    ((again, after_zero),) = host_ranks(1)(refusal_cases.twice)
    assert again.startswith("RuntimeError: weight belongs to a DistributedFusedAdam already")
    assert after_zero.startswith("RuntimeError: weight belongs to a ZeroAdamW already")


@needs_apex
@pytest.mark.parametrize("world", [2])
def test_what_is_wrong_on_one_rank_raises_on_all(host_ranks: Ranks, world: int) -> None:
    for said in host_ranks(world)(refusal_cases.foreign, 1):
        assert said.startswith("TypeError: rank 1: bias is a Foreign, which zerocast does not know")
    for said in host_ranks(world)(refusal_cases.other_weights):
        assert "weight: fp8_block (32, 64) torch.bfloat16 on rank 0 and weight: nvfp4" in said


@needs_apex
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_is_trained_is_listed_once(host_ranks: Ranks) -> None:
    ((frozen, again),) = host_ranks(1)(refusal_cases.not_to_be_trained)
    assert frozen.startswith("ValueError: weight needs no gradient, but weight decay would change it")
    assert again.startswith("ValueError: again is listed twice: a parameter has one master")


@needs_apex
def test_no_more_parameters(host_ranks: Ranks) -> None:
    assert host_ranks(1)(refusal_cases.more_parameters)[0].startswith(
        "RuntimeError: parameters cannot be added to this optimizer"
    )


@needs_apex
def test_the_first_state_dict_format(host_ranks: Ranks) -> None:
    for said in host_ranks(1)(refusal_cases.first_format)[0]:
        assert said.startswith("ValueError: state dicts of format 2 hold quantized weights' masters, got format 1")


@needs_apex
def test_an_apex_of_another_shape(host_ranks: Ranks) -> None:
    (said,) = host_ranks(1)(refusal_cases.without, "default_shard_size")
    assert said.startswith("RuntimeError: DistributedFusedAdam has no default_shard_size: this Apex has an API that")
    assert "this Apex has a layout that" in host_ranks(1)(refusal_cases.of_another_layout)[0]


@needs_apex
@pytest.mark.parametrize("world", [2])
def test_states_that_do_not_fit(host_ranks: Ranks, world: int) -> None:
    """On one rank: all of them refuse, and nothing is changed on any."""
    for said, changed in host_ranks(world)(refusal_cases.other_states, 1):
        assert changed == []
        lacks = "ValueError: rank 1: the state does not fit this optimizer: it lacks "
        assert [text.startswith(lacks) for text in said] == [True, True, True, False, False], said
        assert "'param_groups'" in said[0] and str(len(MIXED) - 1) in said[1] and "'exp_avg'" in said[2]
        assert (
            "'param': (3,), 'exp_avg': (3,), 'exp_avg_sq': (3,)} in the state and (50, 24) in this optimizer" in said[3]
        )
        first, second = (sum(spec.group == group for spec in MIXED) for group in (0, 1))
        groups = f"the state has groups of [{first - 1}, {second}] parameters, this optimizer of [{first}, {second}]"
        assert groups in said[4]


@needs_apex
@pytest.mark.parametrize("world", [2])
def test_weights_and_masters_changed_by_hand(host_ranks: Ranks, world: int) -> None:
    assert host_ranks(world)(refusal_cases.moved) == [[]] * world
    assert host_ranks(world)(refusal_cases.masters_by_hand) == [(True, [])] * world


@needs_apex
def test_without_quantized_weights(host_ranks: Ranks) -> None:
    assert host_ranks(1)(refusal_cases.plain_only) == [(0, False)]


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing of either package had been imported, afterwards too."""
    names = [n for n in sys.modules if n == "apex" or n.startswith(("apex.", PACKAGE))]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n == "apex" or n.startswith(("apex.", PACKAGE))]:
        del sys.modules[name]


def _package(folder: Path, files: dict[str, str]) -> str:
    for path, content in files.items():
        (folder / "apex" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "apex" / path).write_text(content)
    return str(folder)


OPTIMIZER = "contrib/optimizers/distributed_fused_adam.py"
INIT = {"__init__.py": "", "contrib/__init__.py": "", "contrib/optimizers/__init__.py": ""}
HOSTS = {
    "the index's": ({"__init__.py": "raise SystemExit", "lib/libapex.py": ""}, ImportError, "a toolkit for logins"),
    "no extensions": ({**INIT, OPTIMIZER: "import amp_C_is_missing"}, ImportError, "with the extensions amp_C and"),
    "no class": ({**INIT, OPTIMIZER: ""}, RuntimeError, "has no DistributedFusedAdam"),
    "no seam": (
        {**INIT, OPTIMIZER: "class DistributedFusedAdam:\n    def param_sync(self): ..."},
        RuntimeError,
        "has no _broadcast_params, _check_params_shard_dtypes, _init_param_state",
    ),
}


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("name", HOSTS)
def test_wrong_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """The `apex` of the package index is another project: it is named, and not run."""
    files, error, said = HOSTS[name]
    monkeypatch.syspath_prepend(_package(tmp_path, files))
    with pytest.raises(error, match=said):
        importlib.import_module(PACKAGE)


@pytest.mark.usefixtures("afresh")
def test_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="NVIDIA Apex is not installed, and is on no package index"):
        importlib.import_module(PACKAGE)


@needs_apex
@pytest.mark.usefixtures("afresh")
def test_this_host_can_be_imported_again() -> None:
    """What the tests above see is not for want of the right one."""
    with importable():
        assert isinstance(importlib.import_module(PACKAGE), ModuleType)
