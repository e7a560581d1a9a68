"""job.toml. It is refused in words, or gives a spec that the coordinator takes and a script without foreign lines."""

from google.protobuf import json_format

from muster.daemon.coordinator.services import job_specs
from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.launcher.submission.script import Submission, node_options, render
from muster.slurm.client import names
from muster.v1.common_pb2 import JobSpec


def check(data: bytes) -> None:
    """`data` as the text of a job.toml."""
    try:
        job = parse(data.decode(errors="replace"), "job.toml")
    except WrongInput as error:
        assert "job.toml" in str(error)
        assert len(str(error)) <= 1_000 + 100 * len(data)
        return
    names.check_job(job.name)
    spec = job.to_proto("/work")
    spec.node_options.extend(node_options(job, ()))
    assert JobSpec.FromString(spec.SerializeToString()) == spec
    event = job_specs.gang_submitted("gang", 1, 1000, spec)
    assert event.spec.nodes == job.nodes
    assert json_format.Parse(event.spec_json, JobSpec()) == spec
    try:
        script = render(Submission(job, spec, "gang", "host:7070"))
    except WrongInput:
        return  # an sbatch option that Muster sets itself
    _check_script(script)


def _check_script(script: str) -> None:
    """Nothing of the user's is a line of its own."""
    head, begin, rest = script.partition("MUSTER_SPEC=$(cat <<'END_OF_SPEC'\n")
    body, end, tail = rest.partition("\nEND_OF_SPEC\n")
    assert begin
    assert end
    json_format.Parse(body, JobSpec())
    allowed = ("#", "unset MUSTER_", "export MUSTER_", "")
    assert all(line.startswith(allowed[:3]) or not line for line in head.split("\n"))
    assert tail.split("\n")[:4] == [")", "export MUSTER_SPEC", "", "exec muster-agent batch -- \\"]
