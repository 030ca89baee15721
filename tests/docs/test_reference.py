"""The reference has every public name, once."""

import ast
import inspect
import re

import pytest

from tests.docs.page import ROOT
from zerocast.cli import app

ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
HOSTS = ("integrations.apex", "integrations.megatron", "integrations.torchtitan", "integrations.transformer_engine")
SURFACES = ("zerocast", "zerocast.optim", "zerocast.fsdp2", "zerocast.metrics", "zerocast.serve", *HOSTS)
ELSEWHERE = {f"zerocast.{name}": f"zerocast.optim.{name}" for name in ("ZeroAdamW", "ZeroConfig", "ZeroMuon")}


def public_names(package: str) -> list[str]:
    """Return `__all__` without importing a host, all of them if a package has one for each shape of its host."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    names = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert names
    return [f"{package}.{name}" for each in names for name in each]


def entries() -> list[str]:
    return [name for path in sorted((ROOT / "docs/reference").glob("*.md")) for name in ENTRY.findall(path.read_text())]


@pytest.mark.parametrize("package", SURFACES)
def test_every_public_name_has_an_entry(package: str) -> None:
    """A function that is called as its module is listed as `module.function`, or the module would be shown."""
    found = entries()
    names = {name: ELSEWHERE.get(name, name) for name in public_names(package)}
    counts = {
        name: found.count(entry) + found.count(f"{entry}.{entry.rpartition('.')[2]}") for name, entry in names.items()
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_every_command_has_its_options() -> None:
    found, commands = entries(), (ROOT / "zerocast/cli/app.py").read_text()
    for name in re.findall(r"^commands\.command\((\w+)\)", commands, re.MULTILINE):
        annotated = inspect.signature(getattr(app, name)).parameters["config"].annotation
        config = getattr(annotated, "__origin__", annotated)
        assert any(entry.endswith(f".{config.__name__}") for entry in found), name
