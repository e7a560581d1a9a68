"""The whole sbatch script, compared with golden files. MUSTER_GOLDEN=write writes them again; read the diff."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from google.protobuf import json_format

from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.launcher.submission.script import Submission, node_options, render
from muster.slurm.client.batch_script import MAX_SPEC_BYTES, spec_text
from muster.slurm.client.parsing.sbatch_request import read_request
from muster.slurm.client.sbatch_options import read_words
from muster.v1.common_pb2 import JobSpec

GOLDEN = Path(__file__).parent / "golden"
PLAIN = """
name = "plain"
nodes = 2
command = ["./train", "it's \\"quoted\\"", "$HOME"]
run_dir = "/shared/with blank"
"""
RICH = """
name = "rich"
nodes = 6
spares = 2
gpus_per_node = 4
requeue = false
command = "python3 train.py"
run_dir = "/shared/rich"
[slurm]
partition = "gpu"
account = "physics"
time = "2-12:00:00"
mem = "400G"
switches = "1@10:00"
comment = "seven # eight"
options = ["--nice=10", "--mail-type=END"]
"""


def submission(text: str, *options: str) -> Submission:
    """The result of `muster submit` for `text`, with a fixed gang id."""
    job = parse(text, "job.toml")
    spec = job.to_proto(work_dir="/home/alice")
    return Submission(job, spec, f"{job.name}-0011aabb", "ctl:7070", tuple(read_words(options)))


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [("plain", PLAIN, ()), ("rich", RICH, ("--begin=now+60", "--comment", "from the command line"))],
)
def test_golden(name: str, text: str, options: tuple[str, ...]) -> None:
    path, rendered = GOLDEN / f"{name}.sbatch", render(submission(text, *options))
    if os.environ.get("MUSTER_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendered)
    assert rendered == path.read_text()


@pytest.mark.parametrize("text", [PLAIN, RICH])
def test_a_shell_hands_the_spec_to_the_agent_unchanged(text: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nprintf "%s\\n" "$MUSTER_GANG" "$MUSTER_COORDINATOR" "$*" "$MUSTER_SPEC"\n')
    agent.chmod(0o755)
    given = submission(text)
    script = render(Submission(given.job, given.spec, given.gang, given.coordinator, agent=str(agent)))
    done = subprocess.run(["bash", "-s"], input=script, text=True, capture_output=True, timeout=30, check=True)
    gang, coordinator, arguments, spec = done.stdout.split("\n", 3)
    assert (gang, coordinator) == (given.gang, "ctl:7070")
    assert arguments.startswith("batch -- srun --ntasks-per-node=1 --no-kill ")
    assert arguments.endswith(f"{agent} run")
    assert json_format.Parse(spec, JobSpec()) == given.spec


@pytest.mark.parametrize("more", ['[env]\nLONG = "{}"', 'command = ["./train", "{}"]'])
def test_settings_that_no_program_could_be_started_with_are_refused(more: str, tmp_path: Path) -> None:
    base = 'name = "large"\nnodes = 2\nrun_dir = "/shared/large"\n'
    base += 'command = ["./train"]\n' if "command" not in more else ""
    free = MAX_SPEC_BYTES - len(spec_text(submission(base + more.format("x")).spec))
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\necho started\n")
    agent.chmod(0o755)
    most = submission(base + more.format("x" * (free + 1)))
    script = render(Submission(most.job, most.spec, most.gang, most.coordinator, agent=str(agent)))
    done = subprocess.run(["bash", "-s"], input=script, text=True, capture_output=True, timeout=30, check=True)
    assert done.stdout == "started\n"
    with pytest.raises(WrongInput, match=f"have {MAX_SPEC_BYTES + 1} bytes"):
        render(submission(base + more.format("x" * (free + 2))))


def test_slurm_reads_the_options_as_intended() -> None:
    request = read_request(render(submission(RICH, "--comment", "from the command line")), [], "/")
    assert (request.nodes, request.name, request.no_kill, request.requeue) == (8, "rich", True, False)
    assert (request.comment, request.time_limit_s) == ("from the command line", 60 * 3600)


@pytest.mark.parametrize(
    "option", ["--nodes=3", "-N3", "--arr=1", "-HN3", "--array=1-4", "--no-requeue", "--wrap=true", "-W",
               "-G8", "--gpus-per-task=1", "-s", "--exclusive=user"]
)  # fmt: skip
def test_an_option_that_contradicts_the_spec_is_refused(option: str) -> None:
    with pytest.raises(WrongInput, match="is not allowed"):
        render(submission(PLAIN, option))


def test_without_an_address_nodes_use_their_own_settings() -> None:
    given = submission(PLAIN)
    script = render(Submission(given.job, given.spec, given.gang, ""))
    assert "MUSTER_COORDINATOR" not in script


def test_gpus_per_node_among_the_options_leaves_of_a_gres_what_is_no_gpu() -> None:
    """sbatch refuses both."""
    job = parse(f"{RICH}gres = 'nvme:1'\n", "job.toml")
    found = node_options(job, read_words(["--gpus-per-node=h100:2"]))
    assert found == ["--account=physics", "--mem=400G", "--gres=nvme:1", "--gpus-per-node=h100:2"]
    later = "--gres=nvme:1,gpu:h100:2"
    assert node_options(job, read_words(["--gpus-per-node=2", later]))[2:] == ["--gres=nvme:1", later]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), ["--account=physics", "--mem=400G", "--gres=gpu:4"]),
        (("--mem", "10G"), ["--account=physics", "--mem=400G", "--gres=gpu:4", "--mem=10G"]),
        (("--mem-per-cpu", "1G"), ["--account=physics", "--gres=gpu:4", "--mem-per-cpu=1G"]),
        (
            ("-c8", "-A", "maths"),
            [*["--account=physics", "--mem=400G", "--gres=gpu:4", "--cpus-per-task=8", "--account=maths"]],
        ),
        (("--wckey=grant7",), ["--account=physics", "--mem=400G", "--gres=gpu:4", "--wckey=grant7"]),
        (("--mcs-label=blue",), ["--account=physics", "--mem=400G", "--gres=gpu:4", "--mcs-label=blue"]),
        (("--gpus-per-node=2", "-p", "big"), ["--account=physics", "--mem=400G", "--gpus-per-node=2"]),
    ],
)
def test_pool_nodes_get_the_options_of_a_single_node(options: tuple[str, ...], found: list[str]) -> None:
    assert node_options(parse(RICH, "job.toml"), read_words(options)) == found
