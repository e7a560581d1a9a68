"""The simulator's invariants recognise some facts by the words of their reason. The core must use these words."""

import ast
from pathlib import Path

import pytest

from muster.simulator.coverage.reason_phrases import ReasonPhrase

CORE = Path(__file__).parents[2] / "daemon" / "coordinator" / "core"


def _strings(path: Path) -> list[str]:
    """Every string of a module's code, without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize("phrase", ReasonPhrase)
def test_the_core_uses_each_phrase(phrase: str) -> None:
    decisions = [path for path in CORE.rglob("*.py") if path.parent.name in ("detection", "recovery")]
    assert any(phrase in text for path in decisions for text in _strings(path))
