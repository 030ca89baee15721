"""Private names of torch are used only as the table says, and a torch that lacks one is refused."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zerocast
from zerocast import torch_names
from zerocast.torch_names import FIRST, FSDP2, LAST, OTHERS, REPLACED, PrivateName, Replaced

PACKAGE = Path(zerocast.__file__).parent
INTEGRATIONS = PACKAGE.parent / "integrations"
TABLE = PACKAGE / "torch_names.py"
# Private names of Python and transformers, our compiled module, and texts that look like names.
NOT_TORCH = {
    "_asdict",
    "_available",
    "_cuda",
    "_exit",
    "_from_config",
    "_getframe",
    "_global_scale",
    "_keep_in_fp32_modules_strict",
    "_model_mapping",
    "_name_or_path",
    "_of_ranks",
    "_scale_2",
    "_scale_inv",
    "_shape",
    "_slice_file",
}


# Prints as JSON the attributes of modules and classes of torch that are others after a model was prepared.
REPLACING = """
import json, sys
import torch
import torch._dynamo  # this import itself replaces torch.manual_seed
from zerocast import fsdp2

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update({f"{name}:{key}.{method}": it for method, it in list(vars(value).items())})
    return found

before = attributes()
fsdp2.prepare(torch.nn.Linear(32, 32), {"weight": "nvfp4"})
after = attributes()
print(json.dumps([name for name in before if callable(before[name]) and after.get(name) is not before[name]]))
"""


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Return the files of the package, without the table."""
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")) if path != TABLE]


def is_private(name: str) -> bool:
    """Return whether this is a private name by Python's convention."""
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def defined(node: ast.AST) -> str | None:
    """Return the name that a node defines, if any: a function, class, argument, variable or attribute of its object."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id in ("self", "cls", "part") else None
    return None


def used(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node may refer to: attributes, imports, and texts, which `getattr` takes."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        yield from (node.module or "").split(".")
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
        yield from str(node.value).split(".")


def foreign_names() -> dict[str, str]:
    """Return the private names that the package uses and does not define, each with a file."""
    nodes = [(path, node) for path, tree in trees() for node in ast.walk(tree)]
    own = {defined(node) for _, node in nodes}
    return {
        name: path.name
        for path, node in nodes
        for name in used(node)
        if is_private(name) and name not in own and not name.startswith("_zerocast_")
    }


def test_private_names_are_in_the_table() -> None:
    known = {name.name for name in (*FSDP2, *OTHERS)}
    found = foreign_names()
    assert "_unsharded_param" in found
    assert {name: file for name, file in found.items() if name not in known | NOT_TORCH} == {}


def test_integrations_use_private_names_of_the_table() -> None:
    """They also use private names of their hosts, so only those that are written with torch's name are compared."""
    known = {name.name for name in (*FSDP2, *OTHERS)}
    found = set()
    for path in INTEGRATIONS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            imported = list(used(node)) if isinstance(node, ast.ImportFrom) else []
            names = dotted.split(".") if re.fullmatch(r"torch(\.\w+)+", dotted) else imported
            found |= {name for name in names if is_private(name)}
    assert "_foreach_copy_" in found
    assert found <= known


def test_the_table_has_nothing_beyond_what_is_used() -> None:
    text = "\n".join(path.read_text() for path, _ in trees())
    words = set(re.findall(r"\b_\w+", text))
    assert [name.name for name in (*FSDP2, *OTHERS) if name.name not in words] == []


def test_this_torch_has_the_names() -> None:
    assert torch_names.missing_names((*FSDP2, *OTHERS)) == []


def test_prepare_replaces_nothing_of_torch_beyond_its_table(tmp_path: Path) -> None:
    """Every class of torch is compared, in a process of its own, before and after a model is prepared."""
    script = tmp_path / "replaced.py"
    script.write_text(REPLACING)
    answer = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    there = {f"{r.owner}.{r.name}" for r in REPLACED if hasattr(DTensor, r.name)}
    assert set(json.loads(answer)) == there


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.name)
def test_a_test_shows_that_a_replacement_is_needed(replaced: Replaced) -> None:
    """The test that is named calls torch's own method."""
    file, _, name = replaced.shown_by.partition("::")
    tree = ast.parse((PACKAGE.parent / file).read_text())
    (test,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    words = ast.unparse(test)
    assert replaced.name in words and "__wrapped__" in words


@pytest.fixture
def fresh_check() -> Iterator[None]:
    """Let the check, which looks once a process, look again."""
    torch_names.check_fsdp2.cache_clear()
    yield
    torch_names.check_fsdp2.cache_clear()


def test_prepare_refuses_a_torch_that_lacks_a_name(fresh_check: None) -> None:
    gone = PrivateName("_gone_in_this_torch", "torch.autograd", "a test", "none")
    refused = pytest.raises(RuntimeError, match="_gone_in_this_torch, which this torch lacks")
    with mock.patch.object(torch_names, "FSDP2", (gone,)), refused:
        zerocast.fsdp2.prepare(nn.Linear(32, 32), {"weight": "nvfp4"})


def test_prepare_warns_of_a_release_that_was_not_tested(fresh_check: None) -> None:
    later = f"{LAST[0]}.{LAST[1] + 1}.0"
    with mock.patch.object(torch, "__version__", later), pytest.warns(UserWarning, match=f"not with {later}"):
        zerocast.fsdp2.prepare(nn.Linear(32, 32), {"weight": "nvfp4"})
    assert torch_names.untested_release() is None
    assert FIRST <= torch_names.installed_release() <= LAST
