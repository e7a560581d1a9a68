"""Planting a bug: the code of one function is replaced while the process runs.

A bug names the function and a condition or a call in it, not a line of text. So it stays where it is when the function
moves to another module, when its code is formatted anew, and when a field moves into another record.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType

_PACKAGE = Path(__file__).parents[2]
_Place = ast.expr | ast.stmt


class PlantedBugDoesNotFit(ValueError):
    """The product has changed, and a planted bug has no place in it, or several."""


@dataclass(frozen=True)
class PlantedBug:
    """A bug in words, and the change of one function that makes it.

    `function`: the end of its full name, as long as it must be to be the only one: `name`, `module.name`,
    `Class.name`. `code`: an expression or a statement that is in the function once. A name stands for itself, and for
    a field of that name, whatever has the field. A single capital letter stands for any expression. `bug`: what takes
    its place, with the same letters.
    """

    words: str
    function: str
    code: str
    bug: str

    @cached_property
    def place(self) -> tuple[str, str]:
        """The module of the function, and the function's name in it.

        Raises:
            PlantedBugDoesNotFit: no function has the name, or several have.
        """
        named = [place for place in _functions(self.function) if f".{'.'.join(place)}".endswith(f".{self.function}")]
        if len(named) != 1:
            found = ", ".join(map(".".join, named)) or "none"
            raise PlantedBugDoesNotFit(
                f"{self.function} is to be the name of one function of Muster. It is of: {found}"
            )
        return named[0]

    def function_with_bug(self) -> CodeType:
        """The function with the bug.

        Raises:
            PlantedBugDoesNotFit: as `place`, or `code` is not in the function once.
        """
        module, name = self.place
        path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        tree = ast.parse(_sources()[path])
        replacement = _Replacement(*_parsed(self.code, self.bug))
        for definition in [node for found, node in _definitions(tree) if found == name]:
            replacement.generic_visit(definition)
        if replacement.count != 1:
            raise PlantedBugDoesNotFit(
                f"{module}.{name} has {replacement.count} times what is to be there once: {self.code}"
            )
        return next(code for code in _codes(compile(tree, str(path), "exec")) if code.co_qualname == name)


@contextmanager
def planted(planted_bug: PlantedBug) -> Iterator[None]:
    """The bug is in this process for as long as the context lasts, for whoever has imported the function, too.

    Raises:
        PlantedBugDoesNotFit: as `PlantedBug.function_with_bug`.
    """
    function, code = _function(*planted_bug.place), planted_bug.function_with_bug()
    function.__code__, whole = code, function.__code__
    try:
        yield
    finally:
        function.__code__ = whole


def _function(module: str, name: str) -> FunctionType:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = inspect.unwrap(getattr(found, "__func__", found))  # type: ignore[arg-type]
    assert isinstance(found, FunctionType), f"{module}.{name} is no function"
    return found


@dataclass
class _Replacement(ast.NodeTransformer):
    """Puts `bug` in each place that looks like `code`, and counts them."""

    code: _Place
    bug: list[_Place]
    count: int = 0

    def visit(self, node: ast.AST) -> ast.AST | list[_Place]:
        looks = _Looks()
        if not looks.alike(self.code, node):
            visited: ast.AST = self.generic_visit(node)
            return visited
        self.count += 1
        new = [_Filling(looks.letters).visit(deepcopy(one)) for one in self.bug]
        for part in (part for one in new for part in ast.walk(one)):
            ast.copy_location(part, node)
        return new if isinstance(node, ast.stmt) else new[0]


@dataclass
class _Looks:
    """Whether code looks like a pattern, and what its letters stand for."""

    letters: dict[str, ast.expr] = field(default_factory=dict)

    def alike(self, pattern: object, node: object) -> bool:
        if isinstance(pattern, ast.Name) and isinstance(node, ast.expr):
            if _is_letter(pattern.id):
                return ast.unparse(self.letters.setdefault(pattern.id, node)) == ast.unparse(node)
            return pattern.id == (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None))
        if isinstance(pattern, ast.expr_context):
            return True
        if isinstance(pattern, ast.AST):
            return type(pattern) is type(node) and all(
                self.alike(getattr(pattern, name), getattr(node, name)) for name in pattern._fields
            )
        if isinstance(pattern, list) and isinstance(node, list):
            return len(pattern) == len(node) and all(map(self.alike, pattern, node))
        return pattern == node and type(pattern) is type(node)


@dataclass
class _Filling(ast.NodeTransformer):
    """Puts what the letters stand for in their places."""

    letters: dict[str, ast.expr]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not _is_letter(node.id):
            return node
        filled = deepcopy(self.letters[node.id])
        if isinstance(filled, ast.Name | ast.Attribute | ast.Subscript):
            filled.ctx = node.ctx
        return filled


def _is_letter(name: str) -> bool:
    return len(name) == 1 and name.isupper()


def _parsed(code: str, bug: str) -> tuple[_Place, list[_Place]]:
    """Two expressions; or, if one of the texts is none, a statement and what takes its place."""
    (old,), new = ast.parse(code).body, ast.parse(bug).body
    if isinstance(old, ast.Expr) and len(new) == 1 and isinstance(new[0], ast.Expr):
        return old.value, [new[0].value]
    return old, [*new]


@cache
def _sources() -> dict[Path, str]:
    """Of the product without its simulator."""
    rooms = [_PACKAGE / room for room in ("checkpoint", "daemon", "fabric", "launcher", "slurm")]
    return {path: path.read_text() for room in rooms for path in room.rglob("*.py")}


def _functions(name: str) -> Iterator[tuple[str, str]]:
    """(module, name in the module) of each function whose name ends like `name`."""
    for path, source in _sources().items():
        if f"def {name.rpartition('.')[2]}(" in source:
            module = ".".join((_PACKAGE.name, *path.relative_to(_PACKAGE).with_suffix("").parts))
            yield from ((module, found) for found, _ in _definitions(ast.parse(source)))


def _definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{inside}{node.name}.")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
