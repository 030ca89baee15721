"""The choice of tests to run first for a file: those of its room, then those that name it."""

import ast
import re
from pathlib import Path

ROOMS = {
    "integrations/huggingface": "trainers",
    "integrations/lightning": "trainers",
    "csrc": "backends",
    "zerocast/inspection": "cli",
    "zerocast/footprint": "cli",
}


def nearest_tests(root: Path, path: str, function: str = "") -> list[str]:
    """Return the files of tests, nearest first: those of the room of the file, then those that name its module, each by the
    words that they share with the names of the file and of the mutated function.
    """
    room = root / "tests" / _room(path)
    stem = Path(path).parent.name if Path(path).stem == "__init__" else Path(path).stem
    words = {word for word in re.split(r"[_\W]+", f"{stem} {function}".lower()) if len(word) > 2}
    shared = {}
    for test in sorted((root / "tests").rglob("test_*.py")):
        text = test.read_text().lower()
        if room in test.parents or re.search(rf"\b{re.escape(stem.lower())}\b", text):
            shared[test] = sum((word in text) + 3 * (word in test.stem) for word in words)
    chosen = sorted(shared, key=lambda test: (room not in test.parents, -shared[test], test))
    return [str(test.relative_to(root)) for test in chosen]


def _room(path: str) -> str:
    for folder, room in ROOMS.items():
        if path.startswith(f"{folder}/"):
            return room
    return Path(path).parts[1]


def enclosing_function(path: str, source: bytes, line: int) -> str:
    """Return the name of the innermost function or class that holds a line of a Python file; empty without one."""
    if not path.endswith(".py"):
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and node.lineno <= line <= node.end_lineno
    ]
    return max(around, key=lambda node: node.lineno).name if around else ""
