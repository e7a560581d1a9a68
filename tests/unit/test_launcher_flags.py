"""Keys of job.toml as options of the command line."""

from __future__ import annotations

import argparse

import pytest

from muster.launcher.errors import WrongInput
from muster.launcher.main import parser
from muster.launcher.spec.flags import flags
from muster.launcher.spec.spec import parse

LEAST = """
name = "tiny"
nodes = 4
command = "python3 train.py"
run_dir = "/shared/tiny"
"""


def given(*words: str) -> argparse.Namespace:
    return parser().parse_args(["submit", *words, "job.toml"])


def test_each_key_with_one_value_is_an_option() -> None:
    options = {flag.option for flag in flags()}
    assert {"--nodes", "--ranks-per-node", "--parallelism.tensor", "--placement.expert", "--slurm.time"} <= options
    assert {"--stop-signal", "--model.parameters", "--checkpoint.memory", "--parallelism.order"} <= options
    assert not options & {"--command", "--env", "--preload", "--slurm.options", "--placement.spread-replicas"}


def test_no_help_of_an_option_ends_within_a_sentence() -> None:
    assert [flag.option for flag in flags() if flag.help and not flag.help.endswith(".")] == []


def test_an_option_replaces_the_files_value() -> None:
    options = given("--nodes", "8", "--parallelism.tensor", "2", "--slurm.time", "30", "--requeue", "false")
    job = parse(f"{LEAST}parallelism = {{ pipeline = 2 }}", "job.toml", options)
    assert (job.nodes, job.parallelism.tensor, job.parallelism.pipeline) == (8, 2, 2)
    assert (job.slurm.time, job.requeue) == ("30", False)


def test_numbers_are_read_as_in_the_file() -> None:
    options = given("--model.parameters", "70e9", "--hang-after", "7.5", "--placement.tensor", "require node")
    job = parse(LEAST, "job.toml", options)
    assert (job.model.parameters, job.hang_after, str(job.placement.tensor)) == (70 * 10**9, 7.5, "require node")


def test_gpus_replace_the_files_nodes() -> None:
    job = parse(LEAST, "job.toml", given("--gpus", "16", "--gpus-per-node", "8"))
    assert job.nodes == 2


def test_without_options_the_file_stands() -> None:
    assert parse(LEAST, "job.toml", given()) == parse(LEAST, "job.toml")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--nodes", "many"), "nodes = 'many': must be a whole number"),
        (("--nodes", "1\nspares = 2"), "must be a whole number"),
        (("--nodes", "9" * 400), "must be a whole number of at most 18 digits"),
        (("--requeue", "yes"), "requeue = 'yes': must be true or false"),
        (("--slurm.time", "soon"), "slurm.time = 'soon': must be a Slurm time"),
    ],
)
def test_a_wrong_value_is_refused_as_in_the_file(words: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(WrongInput) as refused:
        parse(LEAST, "job.toml", given(*words))
    assert refusal in refused.value.message


@pytest.mark.parametrize("words", [["plan", "job.toml", "--price", "-1"], ["submit"]])
def test_a_wrong_option_is_one_line_below_a_short_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser(words[:1]).parse_args(words)
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: muster {words[0]} [options] job.toml")
    assert error.startswith(f"muster {words[0]}: ")


def test_a_table_that_is_none_is_refused() -> None:
    with pytest.raises(WrongInput, match=r"slurm = 3: must be a table"):
        parse(f"{LEAST}slurm = 3", "job.toml", given("--slurm.time", "30"))
