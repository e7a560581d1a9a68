"""The rules of the core, and what fails without each: `python -m muster.simulator.planted_bugs --rules WORD...`

Nobody writes this list. It is read from what checks the rules: the invariants, the planted bugs, the scenarios
and the unit tests of the core. Only a checkout has the last two.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from muster.simulator import invariants
from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS

_ROOT = Path(__file__).resolve().parents[2]


class Rule(NamedTuple):
    """`words`: the rule, or of a planted bug what happens without it. `where`: what to run or to read."""

    words: str
    where: str


def rules(words: Sequence[str]) -> Iterator[Rule]:
    """The rules in which all `words` occur, in the rule itself or in the name of its test."""
    wanted = [word.casefold() for word in words]
    for rule in (*_of_invariants(), *_of_planted_bugs(), *_of_scenarios(), *_of_unit_tests()):
        text = f"{rule.words} {rule.where}".casefold()
        if all(word in text for word in wanted):
            yield rule


def _of_invariants() -> Iterator[Rule]:
    for found in pkgutil.iter_modules(invariants.__path__):
        module = importlib.import_module(f"{invariants.__name__}.{found.name}")
        yield Rule(" ".join((module.__doc__ or "").split()), f"simulator/invariants/{found.name}.py")


def _of_planted_bugs() -> Iterator[Rule]:
    for name, bug in PLANTED_BUGS.items():
        module, function = bug.place
        path = module.removeprefix("muster.").replace(".", "/")
        yield Rule(f"(bug) {bug.words}", f"{path}.py, {function}: python -m muster.simulator.planted_bugs {name}")


def _of_scenarios() -> Iterator[Rule]:
    for path in sorted([*_ROOT.glob("docs/scenarios/*.txt"), *_ROOT.glob("tests/unit/scenarios/*.txt")]):
        title = path.read_text().partition("\n>")[0]
        yield Rule(" ".join(title.replace("#", " ").split()), str(path.relative_to(_ROOT)))


def _of_unit_tests() -> Iterator[Rule]:
    for path in sorted(_ROOT.glob("tests/unit/test_core_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = ast.get_docstring(node) or ""
                words = node.name.removeprefix("test_").replace("_", " ")
                yield Rule(" ".join(f"{words}. {said}".split()), f"tests/unit/{path.name}::{node.name}")
