"""Reading TOML of any content."""

import tomllib

import pytest

from muster.daemon.host import toml_text

LONG = ".".join("a" * 40)


@pytest.mark.parametrize(
    "text",
    [f"{LONG} = 1", f"[{LONG}]", f"[[{LONG}]]", f"x = {{ {LONG} = 1 }}", " . ".join(['"a"'] * 40) + " = 1"],
    ids=["key", "table", "list", "inline", "quoted"],
)
def test_a_key_of_many_parts_is_nested_too_deeply(text: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError, match="more than 32 tables and lists inside each other"):
        toml_text.loads(text)


@pytest.mark.parametrize(
    "text", [f'x = "{LONG}"', f"x = '{LONG}'", f'x = """\n{LONG}"""', f"x = '''\n{LONG}'''", f"x = 1 # {LONG}"]
)
def test_a_text_with_many_dots_is_a_value(text: str) -> None:
    assert toml_text.loads(text) == tomllib.loads(text)


def test_the_work_for_a_key_does_not_grow_with_the_square_of_its_parts() -> None:
    for text in (
        ".".join("a" * 100_000),
        "a" * 1_000_000,
        "a." * 31 + "a" * 1_000_000,
        "'" * 100_001,
        '"""' + "\\" * 99_999,
    ):
        with pytest.raises(tomllib.TOMLDecodeError):
            toml_text.loads(text)
