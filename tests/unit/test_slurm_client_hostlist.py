"""Node lists are expanded as Slurm expands them. The cluster tests compare them with `scontrol show hostnames`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.slurm.client.parsing.hostlist import collapse, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n3,n1", ("n3", "n1")),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[1,3-4],login", ("n1", "n3", "n4", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("gpu-[1-2]-ib", ("gpu-1-ib", "gpu-2-ib")),
    ],
)
def test_expand(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-2", "n1]", "n[a-b]", "n[[1]]", "n[]", "n[2-1]"])
def test_malformed_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[0-999999]",
        "n[0-9][0-9][0-9][0-9][0-9][0-9]",
        ",".join(["n[1-60000]"] * 2),
        f"n[{1:0300d}]",
        "n[1]" + "x" * 300,
    ],
)
def test_a_list_longer_than_any_cluster_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand(text)


def test_a_name_may_have_any_number_of_groups() -> None:
    assert expand("n" + "[1]" * 200) == ("n" + "1" * 200,)
    with pytest.raises(ValueError, match="node list"):
        expand("n" + "[1]" * 5000)


def test_a_digit_of_another_script_is_an_error() -> None:
    with pytest.raises(ValueError, match="node list"):
        expand("n[²]")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), ""),
        (("n3",), "n3"),
        (("n10", "n9", "n8", "login"), "login,n[8-10]"),
        (("n08", "n09", "n10", "n12"), "n[08-10,12]"),
        (("n8", "n08", "n9"), "n08,n[8-9]"),
        (("r1n1-ib", "r1n2-ib"), "r1n[1-2]-ib"),
        (("n0", "n1", "n1"), "n[0-1]"),
    ],
)
def test_names_are_written_in_short(names: tuple[str, ...], text: str) -> None:
    assert collapse(names) == text


@given(st.lists(st.from_regex(r"[a-c]{1,2}[0-9]{0,12}(-[x0-9]{0,3})?", fullmatch=True), max_size=20))
def test_what_was_written_in_short_comes_back(names: list[str]) -> None:
    assert sorted(expand(collapse(names))) == sorted(set(names))
