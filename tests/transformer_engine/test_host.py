"""Hosts that are not there, or that are another shape: the error names what was looked for. Needs no TransformerEngine."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest

import zerocast.fsdp2  # what it imports of torch cannot be imported twice
import zerocast.integrations

PACKAGE = "zerocast.integrations.transformer_engine"


@contextlib.contextmanager
def imported_beside(modules: dict[str, ModuleType | None]) -> Iterator[ModuleType]:
    """The integration, imported again with these modules in the place of the host's."""
    with mock.patch.dict(sys.modules), mock.patch.dict(vars(zerocast.integrations)):
        for name in [name for name in sys.modules if name.startswith((PACKAGE, "transformer_engine"))]:
            del sys.modules[name]
        sys.modules.update(modules)  # type: ignore[arg-type]
        yield importlib.import_module(PACKAGE)


@pytest.mark.parametrize("package", [None, ModuleType("transformer_engine")], ids=["none", "without its tensors"])
def test_no_transformer_engine(package: ModuleType | None) -> None:
    said = "looked for transformer_engine.pytorch.tensor of TransformerEngine: "
    with pytest.raises(ImportError, match=said), imported_beside({"transformer_engine": package}):
        pass


def test_a_name_that_is_missing() -> None:
    names = ("transformer_engine", *(f"transformer_engine.pytorch{part}" for part in ("", ".tensor", ".utils")))
    with imported_beside({name: ModuleType(name) for name in names}) as integration:
        adapters, host = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("adapters", "host"))
        with pytest.raises(ImportError, match=r"looked for transformer_engine.pytorch.tensor.utils of"):
            integration.redirect().__enter__()
        assert adapters.table() == {} and adapters.hybrid() is None  # classes that this host has not
        said = "utils' has no attribute 'is_non_tn_fp8_gemm_supported': this TransformerEngine has an API that"
        with pytest.raises(RuntimeError, match=said):
            host.reads_transposes()
