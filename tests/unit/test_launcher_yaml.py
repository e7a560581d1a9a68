"""A job in YAML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.launcher.spec.yaml_text import YamlError, loads

JOB = """
name: tiny
nodes: 4
command: [python3, train.py, --lr, "1e-3"]
run_dir: /shared/tiny
env: {OMP_NUM_THREADS: "4"}
parallelism:
  tensor: 2
  order: tp-cp-ep-dp-pp
model:
  parameters: 70e9
slurm:
  time: 4:00:00
"""


def test_yaml_and_toml_give_the_same_job() -> None:
    toml = """
    name = "tiny"
    nodes = 4
    command = ["python3", "train.py", "--lr", "1e-3"]
    run_dir = "/shared/tiny"
    env = { OMP_NUM_THREADS = "4" }
    parallelism = { tensor = 2, order = "tp-cp-ep-dp-pp" }
    model = { parameters = 70e9 }
    slurm = { time = "4:00:00" }
    """
    assert parse(JOB, "job.yaml") == parse(JOB, "job.yml") == parse(toml, "job.toml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("4:00:00", "4:00:00"), ("no", "no"), ("yes", "yes"), ("true", True), ("2026-01-01", "2026-01-01")),
        *(("70e9", 70e9), ("1.5", 1.5), ("-3", -3), ("010", 10), ("0x10", "0x10"), ("1_000", "1_000"), ("~", None)),
        *(("", None), ("on", "on"), (".inf", ".inf"), ("'7'", "7"), ("<<", "<<"), ("=", "=")),
    ],
)
def test_values_are_what_they_look_like(text: str, value: object) -> None:
    found = loads(f"key: {text}")["key"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1]\nb: *x", r"line 2, column 4: an alias \(\*\): write the value again"),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is there twice"),
        ("1: 2", "line 1, column 1: a key must be a text"),
        ("[a]: 2", "a key must be a text"),
        ("- a", "it is no table"),
        ("", "it is no table"),
        ("a: [1", "line 1, column 6"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: " + "[" * 5000, "more than 32 tables and lists|line"),
        ("a: " + "[" * 40 + "]" * 40, "more than 32 tables and lists"),
        ("a: " + "9" * 5000, "an integer has more than 64 bits|Exceeds the limit"),
        ("a: 99999999999999999999", "an integer has more than 64 bits"),
        ("a: \x00", "special characters are not allowed"),
        ("a: 1\n---\nb: 2", "line 2"),
    ],
)
def test_what_is_no_job_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(YamlError, match=words) as refused:
        loads(text)
    assert len(str(refused.value)) < 400
    with pytest.raises(WrongInput, match=r"job\.yaml is not YAML: "):
        parse(text, "job.yaml")


def test_a_wrong_value_is_explained_as_in_toml() -> None:
    with pytest.raises(WrongInput, match=r"nodes = 'four': must be a whole number"):
        parse(JOB.replace("nodes: 4", "nodes: four"), "job.yaml")


@given(st.text(alphabet="a:-[]{}&*!|>'\" \n0e.~#%@\t,", max_size=60))
def test_any_text_is_a_table_or_refused(text: str) -> None:
    try:
        found = loads(text)
    except YamlError:
        return
    assert isinstance(found, dict)
