"""[checkpoint] of job.toml: how often checkpoints become durable, and how long they stay."""

import pytest

from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.v1.common_pb2 import JobSpec

TOP = 'name = "a"\nnodes = 2\ncommand = "x"\nrun_dir = "/r"\ndurable_dir = "/d"\n[checkpoint]\n'


def spec_of(table: str) -> JobSpec:
    return parse(TOP + table, "job.toml").to_proto("/w")


@pytest.mark.parametrize(
    ("every", "steps", "seconds", "auto"),
    [
        ("", 0, 0.0, False),
        ("1 step", 1, 0.0, False),
        ("500 steps", 500, 0.0, False),
        ("1 minute", 0, 60.0, False),
        ("90 minutes", 0, 5400.0, False),
        ("auto", 0, 0.0, True),
    ],
)
def test_how_often(every: str, steps: int, seconds: float, auto: bool) -> None:
    spec = spec_of(f'durable_every = "{every}"')
    assert (spec.durable_every_steps, spec.durable_every_s, spec.durable_auto) == (steps, seconds, auto)


def test_how_long_they_stay_and_how_often_nodes_fail() -> None:
    spec = spec_of("durable_keep = 3\ndurable_keep_hours = 0.5\nnode_mtbf_hours = 100\n")
    assert (spec.durable_keep, spec.durable_keep_s, spec.node_mtbf_s) == (3, 1800.0, 360_000.0)


def test_on_how_many_nodes_a_state_is_kept() -> None:
    text = TOP.replace("nodes = 2", "nodes = 3")
    assert parse(text + "copies = 3", "job.toml").to_proto("/w").more_copies == 1
    assert spec_of("").more_copies == 0
    with pytest.raises(WrongInput, match=r"checkpoint\.copies = 3 must not be more than nodes = 2"):
        spec_of("copies = 3")
    with pytest.raises(WrongInput, match=r"checkpoint\.copies"):
        parse(text + "copies = 1", "job.toml")


def test_parities_in_place_of_copies() -> None:
    text = TOP.replace("nodes = 2", "nodes = 4")
    assert parse(text + "parity = 4", "job.toml").to_proto("/w").parity_nodes == 4
    assert spec_of("parity = 0").parity_nodes == 0
    for wrong, why in (
        ("parity = 2", r"checkpoint\.parity = 2: must be the nodes of a group, 3 to 32, or 0"),
        ("parity = 33", r"checkpoint\.parity = 33"),
        ("parity = 5", r"checkpoint\.parity = 5 must not be more than nodes = 4"),
        (
            "parity = 3\ncopies = 3",
            r"checkpoint\.parity = 3 is in place of copies, and checkpoint\.copies = 3 asks for more",
        ),
    ):
        with pytest.raises(WrongInput, match=why):
            parse(text + wrong, "job.toml")


@pytest.mark.parametrize("every", ["5", "0 steps", "5 hours", "-1 steps", "1.5 minutes", "often", "5 steps "])
def test_anything_else_is_refused_with_what_would_be_right(every: str) -> None:
    with pytest.raises(WrongInput) as refused:
        spec_of(f'durable_every = "{every}"')
    assert f"checkpoint.durable_every = '{every}'" in refused.value.message
    assert 'must be a number of steps or minutes, or "auto": "500 steps", "30 minutes"' in refused.value.message


@pytest.mark.parametrize("text", [TOP.replace('durable_dir = "/d"\n', ""), TOP + "memory = false\n"])
def test_durable_checkpoints_are_written_from_memory_to_a_folder(text: str) -> None:
    with pytest.raises(WrongInput, match=r"checkpoint\.durable_every needs durable_dir"):
        parse(text + 'durable_every = "auto"', "job.toml")


URL = TOP.replace('"/d"', '"s3://bucket/jobs/"')


def test_a_store_of_objects_may_be_named_by_its_url_where_it_is_trusted() -> None:
    spec = parse(URL + "trust_durable_store = true", "job.toml").to_proto("/w")
    assert (spec.durable_dir, spec.trust_durable_store) == ("s3://bucket/jobs", True)
    with pytest.raises(WrongInput, match=r"does not say who has written a checkpoint.*trust_durable_store = true"):
        parse(URL, "job.toml")
    with pytest.raises(WrongInput, match=r"trust_durable_store is for a durable_dir that is a URL"):
        parse(TOP + "trust_durable_store = true", "job.toml")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///jobs", "file:///shared/x", "s3://user:secret@bucket/x", "S3://bucket", "s3://b/x?y=1"]
)
def test_a_url_that_names_no_bucket_or_a_secret_is_refused(url: str) -> None:
    with pytest.raises(WrongInput, match=r"must be an absolute path, or a URL of a store of objects"):
        parse(TOP.replace('"/d"', f'"{url}"') + "trust_durable_store = true", "job.toml")
