"""Places where a source file can be mutated: small mistakes that a test should notice."""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
EXTREMES = {"min": "max", "max": "min"}
# Annotations and decorators say little that a test could see. The positions of nodes in an f-string are wrong before Python 3.12.
UNTOUCHED_FIELDS = {"annotation", "returns", "decorator_list"}

CPP_NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE
)
# clang-format puts a space on both sides of a binary operator, and none into the brackets of a template.
CPP_OPERATORS = re.compile(r"(?<= )(?:<=|>=|==|!=|&&|\|\||[<>+*/]|-)(?= )")
CPP_OTHER_OPERATOR = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
}
CPP_INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.'])")
CPP_EXTREME = re.compile(r"(?<=std::)(?:min|max)\b")
CPP_RETURN = re.compile(r"(?<=\breturn )[^;{}]+(?=;)")
CPP_CALL = re.compile(r"[;{}]\s*\n[ \t]*(?P<call>(?:[\w:.]|->)+\([^;{}]*\));(?=\s*\n)")
CPP_IF = re.compile(r"\bif (?:constexpr )?(?=\()")


@dataclass(frozen=True)
class Site:
    """One mutant of one file: the bytes from `start` to `stop` become `replacement`."""

    path: str
    line: int
    what: str
    start: int
    stop: int
    replacement: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with this mutant in place of its code."""
        return source[: self.start] + self.replacement.encode() + source[self.stop :]


def sites(path: str, source: bytes) -> list[Site]:
    """Return every mutant of a Python or C++ file, in the order of their lines."""
    found = _python_sites(path, source) if path.endswith(".py") else _cpp_sites(path, source)
    return sorted(found, key=lambda site: (site.line, site.start, site.replacement))


def _site(path: str, source: bytes, start: int, stop: int, replacement: str) -> Site:
    before = " ".join(source[start:stop].decode().split())
    line = source.count(b"\n", 0, start) + 1
    return Site(path, line, f"`{_shortened(before)}` -> `{_shortened(replacement)}`", start, stop, replacement)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _python_sites(path: str, source: bytes) -> Iterator[Site]:
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    for node in _nodes(ast.parse(source)):
        for changed, replacement in _python_mutations(node):
            start = line_starts[changed.lineno - 1] + changed.col_offset
            stop = line_starts[changed.end_lineno - 1] + changed.end_col_offset
            yield _site(path, source, start, stop, replacement)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and what is below it, where a change could be seen at run time."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in UNTOUCHED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _python_mutations(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield what to replace at a node, and by which text."""
    yield from _mutations_of_conditions(node)
    match node:
        case ast.Compare(ops=[operator]):
            yield node, _with(node, ops=[COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
            yield node, _with(node, op=ARITHMETIC[type(operator)]())
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, str(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Call(func=ast.Name(id=("min" | "max") as name)):
            yield node.func, EXTREMES[name]


def _mutations_of_conditions(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.BoolOp(op=operator):
            yield node, f"({_with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())})"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.comprehension(ifs=[test]):
            yield test, f"not ({ast.unparse(test)})"


def _with(node: ast.expr, **changes: object) -> str:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return ast.unparse(changed)


def _cpp_sites(path: str, source: bytes) -> Iterator[Site]:
    # One character a byte. What is no code is blank, so that all positions stay.
    text = CPP_NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source.decode("latin-1"))
    for match in CPP_OPERATORS.finditer(text):
        yield _site(path, source, *match.span(), CPP_OTHER_OPERATOR[match[0]])
    for match in CPP_INTEGER.finditer(text):
        yield _site(path, source, *match.span(), str(int(match[0]) + 1))
    for match in CPP_EXTREME.finditer(text):
        yield _site(path, source, *match.span(), EXTREMES[match[0]])
    for match in CPP_RETURN.finditer(text):
        yield _site(path, source, *match.span(), "{}")
    for match in CPP_CALL.finditer(text):
        yield _site(path, source, *match.span("call"), "")
    for match in CPP_IF.finditer(text):
        stop = _closing_bracket(text, match.end())
        condition = source[match.end() : stop].decode()
        yield _site(path, source, match.end(), stop, f"(!{condition})")


def _closing_bracket(text: str, opening: int) -> int:
    """Return the position after the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError("a bracket is not closed")
