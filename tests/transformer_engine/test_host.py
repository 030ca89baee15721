"""Hosts that are not there, or that are another shape: the error names what was looked for. Needs no TransformerEngine."""

import importlib
import sys
from types import ModuleType
from unittest import mock

import pytest

import zerocast.integrations

PACKAGE = "zerocast.integrations.transformer_engine"


def import_beside(modules: dict[str, ModuleType | None]) -> None:
    """Import the integration anew, with these modules in the place of the host's."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    with mock.patch.dict(sys.modules), mock.patch.dict(vars(zerocast.integrations)):
        for name in [name for name in sys.modules if name.startswith(PACKAGE)] + list(ours):
            del sys.modules[name]
        sys.modules.update(modules)  # type: ignore[arg-type]
        importlib.import_module(PACKAGE)


@pytest.mark.parametrize("package", [None, ModuleType("transformer_engine")], ids=["none", "without its tensors"])
def test_no_transformer_engine(package: ModuleType | None) -> None:
    with pytest.raises(ImportError, match=r"looked for transformer_engine.pytorch.tensor of TransformerEngine: "):
        import_beside({"transformer_engine": package})


def test_a_name_that_is_missing() -> None:
    tensors, utils = ModuleType("transformer_engine.pytorch.tensor"), ModuleType("transformer_engine.pytorch.utils")
    names = ("transformer_engine", "transformer_engine.pytorch")
    host = {**{name: ModuleType(name) for name in names}, tensors.__name__: tensors, utils.__name__: utils}
    with mock.patch.dict(sys.modules), mock.patch.dict(vars(zerocast.integrations)):
        for name in [name for name in sys.modules if name.startswith((PACKAGE, "transformer_engine."))]:
            del sys.modules[name]
        sys.modules.update(host)
        importlib.import_module(PACKAGE)
        adapters, names_of_host = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("adapters", "host"))
        with pytest.raises(ImportError, match=r"looked for transformer_engine.pytorch.tensor.utils of"):
            importlib.import_module(PACKAGE).redirect().__enter__()
        assert adapters.table() == {} and adapters.hybrid() is None  # classes that this host has not
        said = "utils' has no attribute 'is_non_tn_fp8_gemm_supported': this TransformerEngine has an API that"
        with pytest.raises(RuntimeError, match=said):
            names_of_host.reads_transposes()
