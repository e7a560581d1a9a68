"""Numbers and lists of names in sentences, and that sentences use them."""

import ast
import re
from pathlib import Path

import pytest

from muster.wording import counted, listed

ROOT = Path(__file__).parents[2]
PACKAGES = ("launcher", "fabric", "slurm/client", "slurm/hooks", "daemon", "checkpoint")
NOUNS = re.compile(
    r" (nodes|ranks|spares|steps|jobs|failures|GPUs|agents|groups|pieces|processes|days|others|transfers|names)\b"
)
OF_MANY = re.compile(r"(of|at most|more than) $")
"""Before a number whose noun is that of many things: "1 of 3 nodes"."""
ADDED_S = re.compile(r"""['"]s['"] \*""")


def counted_by_hand(source: str) -> list[str]:
    """The sentences of a module in which a length, which may be 1, stands before several things, or an s is added."""
    sentences = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr))
    return [ast.unparse(one) for one in sentences if _counts_a_length(one) or ADDED_S.search(ast.unparse(one))]


def _counts_a_length(sentence: ast.JoinedStr) -> bool:
    words = ["{}" if isinstance(part, ast.FormattedValue) else part.value for part in sentence.values]  # type: ignore[attr-defined]
    return any(
        isinstance(part, ast.FormattedValue)
        and isinstance(part.value, ast.Call)
        and ast.unparse(part.value.func) == "len"
        and NOUNS.match("".join(words[at + 1 : at + 2]))
        and not OF_MANY.search("".join(words[:at]))
        for at, part in enumerate(sentence.values)
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (counted(1, "node"), "1 node"),
        (counted(0, "node"), "0 nodes"),
        (counted(1, "leaf switch", "leaf switches"), "1 leaf switch"),
        (counted(2, "node was", "nodes were"), "2 nodes were"),
        (counted(1024, "node", form=","), "1,024 nodes"),
        (counted(1.0, "minute", form="g"), "1 minute"),
    ],
)
def test_one_thing_is_no_several(words: str, expected: str) -> None:
    assert words == expected


def test_a_list_names_the_first_ones_and_cuts_long_names() -> None:
    assert listed(["n1", "n2"]) == "n1 n2"
    assert listed((f"n{at}" for at in range(10)), ", ") == "n0, n1, n2, n3, n4, n5, n6, n7 and 2 more"
    assert len(listed(["n" * 5000] * 5000)) < 1000


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_counted_is_counted_in_one_way(package: str) -> None:
    found = {
        str(path): by_hand for path in (ROOT / package).rglob("*.py") if (by_hand := counted_by_hand(path.read_text()))
    }
    assert found == {}, "use muster.wording.counted"


@pytest.mark.parametrize("sentence", ["f'{len(x)} nodes are left'", "f'1 node{\"s\" * many}'"])
def test_a_count_by_hand_is_seen(sentence: str) -> None:
    assert counted_by_hand(sentence)


@pytest.mark.parametrize("sentence", ["f'{len(x)} of {len(y)} nodes'", "f'{counted(len(x), \"node\")} left'"])
def test_a_count_of_many_is_fine(sentence: str) -> None:
    assert not counted_by_hand(sentence)
