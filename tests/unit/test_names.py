"""Names that reach command lines, logs and paths: what is none is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.slurm.client import names

HOSTILE = [
    "",
    "-w",
    "--json",
    "n1\n",
    "n1\nJob 1 is cancelled",
    "n1,n2",
    "n[1-9]",
    "n1 n2",
    "../etc",
    "n1/..",
    "n1\x1b[2J",
    "n1\0",
    "n1=",
    ".",
    "nö",
    "n١",
]


@pytest.mark.parametrize("check", [names.check_node, names.check_gang, names.check_job])
@pytest.mark.parametrize("name", [*HOSTILE, "n" * 254])
def test_what_is_no_name_is_refused(check: Callable[[str], str], name: str) -> None:
    with pytest.raises(names.InvalidName, match="of which the first is"):
        check(name)


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (names.check_node, "n1"),
        (names.check_node, "gpu-rack-03.cluster.example.org"),
        (names.check_node, "_login"),
        (names.check_node, "n" * 253),
        (names.check_gang, "tiny-5c0ffee5"),
        (names.check_gang, f"{'j' * 64}-5c0ffee5"),
        (names.check_job, "j" * 64),
        (names.check_word, "[fe80::1%eth0]:4711"),
        (names.check_word, ""),
    ],
)
def test_names_of_nodes_gangs_and_jobs(check: Callable[[str], str], name: str) -> None:
    assert check(name) == name


@pytest.mark.parametrize("word", ["a b", "a\tb", "a\n", "\x1b[2J", "ö"])
def test_a_word_is_printable(word: str) -> None:
    with pytest.raises(names.InvalidName, match="must be one word of printable ASCII characters"):
        names.check_word(word)


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "\x1b[2J", "a\x0bb", "a\x85b", "a\u2028b", "\x7f"])
def test_control_characters_make_no_line(text: str) -> None:
    assert not names.is_one_line(text)


def test_other_characters_make_a_line() -> None:
    assert names.is_one_line("größer\u00a0als\t# „ein“ 节点")
