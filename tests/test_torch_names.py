"""Private names of torch are used only if they are known, and a torch that lacks one is refused."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import zerocast
from zerocast import torch_names
from zerocast.torch_names import FIRST, FSDP2, LAST, OTHERS

PACKAGE = Path(zerocast.__file__).parent
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
# Names of instances, of operators, and names that code asks for before it uses them: they cannot be looked up.
OF_INSTANCES = {
    "_all_gather_result",
    "_all_reduce_hook",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_cuda_getCurrentRawStream",
    "_foreach_",
    "_foreach_lerp",
    "_foreach_lerp_",
    "_foreach_sub",
    "_foreach_sub_",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_fused_",
    "_is_mkldnn_bf16_supported",
    "_is_param",
    "_lazy_clone",
    "_local_scalar_dense",
    "_local_tensor",
    "_module_info",
    "_non_persistent_buffers_set",
    "_opt_called",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_step_post_hooks",
    "_orig_size",
    "_overloadname",
    "_param_fqn",
    "_parameters",
    "_pin_memory",
    "_reduce_scatter_comm",
    "_reduce_scatter_process_group",
    "_scaled_mm_v2",
    "_schema",
    "_sharded_local_tensor",
    "_stable_hash_for_caching",
    "_state_ctx",
    "_to_copy",
    "_to_dense",
    "_to_sharded",
    "_to_sparse",
    "_to_unsharded",
    "_training_state",
    "_unsharded_inner_tensors",
    "_unsharded_param",
    "_use_post_forward_mesh",
}
KNOWN = OF_INSTANCES.union(*FSDP2.values(), *OTHERS.values())


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Return the files of the package, without the table of names."""
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
    found = foreign_names()
    assert "_unsharded_param" in found
    assert {name: file for name, file in found.items() if name not in KNOWN | NOT_TORCH} == {}


def test_the_table_has_nothing_beyond_what_is_used() -> None:
    text = "\n".join(path.read_text() for path, _ in trees())
    words = set(re.findall(r"\b_\w+", text))
    assert KNOWN - words == set()


def test_this_torch_has_the_names() -> None:
    assert torch_names.missing_names(FSDP2, OTHERS) == []


@pytest.fixture
def fresh_check() -> Iterator[None]:
    """Let the check, which looks once a process, look again."""
    torch_names.check_fsdp2.cache_clear()
    yield
    torch_names.check_fsdp2.cache_clear()


def test_prepare_refuses_a_torch_that_lacks_a_name(fresh_check: None) -> None:
    refused = pytest.raises(RuntimeError, match="_gone_in_this_torch, which this torch lacks")
    with mock.patch.object(torch_names, "FSDP2", {"torch.autograd": ("_gone_in_this_torch",)}), refused:
        zerocast.fsdp2.prepare(nn.Linear(32, 32), {"weight": "nvfp4"})


def test_prepare_warns_of_a_release_that_was_not_tested(fresh_check: None) -> None:
    later = f"{LAST[0]}.{LAST[1] + 1}.0"
    with mock.patch.object(torch, "__version__", later), pytest.warns(UserWarning, match=f"not with {later}"):
        zerocast.fsdp2.prepare(nn.Linear(32, 32), {"weight": "nvfp4"})
    assert torch_names.untested_release() is None
    assert FIRST <= torch_names.installed_release() <= LAST
