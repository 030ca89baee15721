"""Which tests to ask about a file first: those that few imports lie between."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOMS = {
    "integrations/huggingface": "trainers",
    "integrations/lightning": "trainers",
    "csrc": "backends",
    "zerocast/inspection": "cli",
}


def module_name(path: str) -> str:
    """Return the name by which a file of the tree is imported."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "integrations":
        parts = ("zerocast", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports:
    """Who imports whom among the modules of the product and of its tests, function bodies included.

    A name that a package re-exports leads to the module that defines it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        files = [path for top in ("zerocast", "integrations", "tests") for path in sorted((root / top).rglob("*.py"))]
        self.paths = {module_name(str(path.relative_to(root))): path for path in files}
        # The names that imports bind in a module, with (module, name there); a module itself has no name there.
        self._bound: dict[str, dict[str, tuple[str, str]]] = {}
        self._importers: dict[str, set[str]] = {}
        attributes = {}
        for name, path in self.paths.items():
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
            self._bound[name] = dict(_bindings(nodes))
            attributes[name] = {_dotted(node) for node in nodes if isinstance(node, ast.Attribute)}
        for name in self.paths:
            for imported in self._imported(name, attributes[name]):
                self._importers.setdefault(imported, set()).add(name)

    def _imported(self, module: str, attributes: set[tuple[str, ...]]) -> Iterator[str]:
        for first, *rest in [*attributes, *((name,) for name in self._bound[module])]:
            source, name = self._bound[module].get(first, ("", ""))
            definer = self._definer(source, name)
            for attribute in rest:
                definer = self._definer(definer, attribute)
            yield definer

    def _definer(self, module: str, name: str) -> str:
        """Return the module that defines `module.name`."""
        if not name or module not in self._bound:
            return module
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}"
        source, there = self._bound[module].get(name, ("", ""))
        return self._definer(source, there) if source in self.paths and source != module else module

    def distances(self, module: str) -> dict[str, int]:
        """Return the number of imports between a module and each that imports it, directly or not."""
        distances = {module: 0}
        reached = [module]
        for name in reached:
            for importer in sorted(self._importers.get(name, ())):
                if importer not in distances:
                    distances[importer] = distances[name] + 1
                    reached.append(importer)
        return distances

    def nearest_tests(self, path: str, function: str = "") -> list[str]:
        """Return the files of tests, nearest first: by imports, with those of the same room two nearer, then by
        the words that they share with the names of the file and of the mutated function.
        """
        room = f"tests.{_room(path)}."
        distances = self.distances(module_name(path))
        words = {word for word in re.split(r"[_\W]+", f"{Path(path).stem} {function}".lower()) if len(word) > 2}

        def key(name: str) -> tuple[int, int, str]:
            text = self.paths[name].read_text().lower()
            shared = sum((word in text) + 3 * (word in name) for word in words)
            return distances.get(name, 9) - 2 * name.startswith(room), -shared, name

        tests = (name for name in self.paths if name.startswith("tests.") and ".test_" in name)
        chosen = sorted((name for name in tests if name in distances or name.startswith(room)), key=key)
        return [str(self.paths[name].relative_to(self._root)) for name in chosen]


def _bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as source, level=0):
                yield from ((alias.asname or alias.name, (source, alias.name)) for alias in node.names)
            case ast.Import():
                for alias in node.names:
                    # Without `as`, `import a.b` binds `a`.
                    package = alias.name.split(".")[0]
                    yield (alias.asname, (alias.name, "")) if alias.asname else (package, (package, ""))


def _dotted(node: ast.expr) -> tuple[str, ...]:
    """Return the names of `a.b.c`; a first name of "" stands for what is no name."""
    if isinstance(node, ast.Attribute):
        return (*_dotted(node.value), node.attr)
    return (node.id if isinstance(node, ast.Name) else "",)


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
