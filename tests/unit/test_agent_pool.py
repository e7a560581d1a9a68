"""An agent asks for nodes of the shared pool: once for each request, with what a node of the job gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from muster.daemon.agent.pool_jobs import PoolRequestDefaults, PoolRequests, job_end_time
from muster.slurm.client.batch_script import PoolJob
from muster.slurm.client.errors import SlurmRefused, SlurmTimeout
from muster.v1.agent_pb2 import PoolAnswer, PoolRequest
from muster.v1.common_pb2 import JobSpec


class Slurm:
    """Takes scripts, or refuses them."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.reason = "Priority"
        self.scripts: list[str] = []
        self.environ: Mapping[str, str] | None = {}
        self.cancelled: list[int] = []
        self.cancels = True
        self.meanwhile: dict[str, Callable[[], object]] = {}

    async def submit(self, script: Path, *, cwd: Path, env: Mapping[str, str] | None, timeout_s: float) -> int:
        """See Sbatch."""
        self.scripts.append(script.read_text())
        self.environ = env
        self.meanwhile.get("submit", int)()
        if self.refuses:
            raise SlurmRefused("submit", self.refuses)
        return 40 + len(self.scripts)

    async def cancel(self, job: int, *, timeout_s: float) -> None:
        """See Sbatch."""
        self.cancelled.append(job)
        if not self.cancels:
            raise SlurmTimeout("scancel: no answer")

    async def pending_reason(self, job: int) -> str:
        """See Sbatch."""
        self.meanwhile.get("pending_reason", int)()
        return self.reason


class Asking:
    """One agent's pool."""

    def __init__(self, folder: Path, slurm: Slurm, environ: Mapping[str, str] = {}) -> None:
        spec = JobSpec(name="tiny", run_dir=str(folder), node_options=["--gres=gpu:8", "--account=physics"])
        self.news = 0
        job = PoolJob("tiny-0a", spec, 3, "ctl:7070", "/opt/muster-agent", rank_environment="/run/it's.environment")
        self.pool = PoolRequests(PoolRequestDefaults(job, None, environ), slurm, self._changed)

    def _changed(self) -> None:
        self.news += 1

    async def order(self, *serials: int) -> None:
        """The newest order names these requests."""
        for request in self.pool.new_requests([PoolRequest(serial=s, options=["--partition=shared"]) for s in serials]):
            await self.pool.submit(request)


async def test_each_request_is_made_once_however_often_the_order_comes(tmp_path: Path) -> None:
    slurm = Slurm()
    asking = Asking(tmp_path, slurm)
    await asking.order(1)
    await asking.order(1, 2)
    assert asking.pool.answers() == [PoolAnswer(serial=1, slurm_job_id=41), PoolAnswer(serial=2, slurm_job_id=42)]
    assert (len(slurm.scripts), asking.news) == (2, 2)


async def test_the_pool_job_gets_what_a_node_of_the_job_gets_and_knows_what_it_comes_of(tmp_path: Path) -> None:
    slurm = Slurm()
    kept = {"SLURM_CONF": "/slurm.conf", "MUSTER_AUTH": "munge", "PATH": "/bin"}
    given = {**kept, "SLURM_JOB_ID": "7", "SBATCH_PARTITION": "x", "MUSTER_SPEC": "{}", "SLURM_JOB_QOS": "long"}
    asking = Asking(tmp_path, slurm, given)
    await asking.order(5)
    for line in (
        """export MUSTER_RANK_ENVIRONMENT='/run/it'"'"'s.environment'""",
        "#SBATCH --nodes=1",
        "#SBATCH --no-requeue",
        '#SBATCH --comment="muster: a node for job 7 (tiny)"',
        "#SBATCH --gres=gpu:8",
        "#SBATCH --account=physics",
        "#SBATCH --partition=shared",
        "#SBATCH --qos=long",
        "export MUSTER_GANG=tiny-0a",
        "export MUSTER_COORDINATOR=ctl:7070",
        "export MUSTER_POOL=5 MUSTER_RESTARTS=3",
    ):
        assert line in slurm.scripts[0].splitlines()
    assert slurm.environ == kept, "the pool job is no part of the job at hand"


@pytest.mark.parametrize(
    ("option", "inherited"),
    [("--nodelist=n7", ["--partition=long", "--reservation=week"]), ("--partition=shared", ["--partition=shared"])],
)
async def test_only_a_node_of_the_job_itself_is_requested_in_its_reservation(
    tmp_path: Path, option: str, inherited: list[str]
) -> None:
    slurm = Slurm()
    asking = Asking(tmp_path, slurm, {"SLURM_JOB_PARTITION": "long", "SLURM_JOB_RESERVATION": "week"})
    for request in asking.pool.new_requests([PoolRequest(serial=1, options=[option])]):
        await asking.pool.submit(request)
    lines = [line.removeprefix("#SBATCH ") for line in slurm.scripts[0].splitlines()]
    assert [line for line in lines if line.startswith(("--partition", "--reservation"))] == inherited


@pytest.mark.parametrize("call", ["submit", "pending_reason"])
async def test_a_job_that_comes_of_a_request_that_is_over_is_taken_back(tmp_path: Path, call: str) -> None:
    slurm = Slurm()
    asking = Asking(tmp_path, slurm)
    slurm.meanwhile = {call: lambda: asking.pool.new_requests([])}
    await asking.order(1)
    assert (slurm.cancelled, asking.pool.answers()) == ([41], [])


async def test_slurms_refusal_is_told_in_its_words(tmp_path: Path) -> None:
    asking = Asking(tmp_path, Slurm(refuses="Invalid partition name specified"))
    await asking.order(1)
    (answer,) = asking.pool.answers()
    assert answer.slurm_job_id == 0
    assert "Invalid partition name specified" in answer.error


@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize(
    ("reason", "waits"),
    [
        *((reason, False) for reason in ("QOSMaxJobsPerUserLimit", "AssocGrpJobsLimit", "QOSMaxNodePerJobLimit")),
        *((reason, False) for reason in ("AssocMaxWallDurationPerJobLimit", "MaxJobsPerAccount", "PartitionConfig")),
        *((reason, False) for reason in ("MaxMemPerLimit", "AssociationJobLimit", "QOSMaxGRESPerNode")),
        *((reason, True) for reason in ("", "Resources", "QOSGrpNodeLimit", "AssocGrpGRES", "QOSMaxNodePerUserLimit")),
    ],
)
async def test_a_pool_job_is_taken_back_that_a_limit_keeps_from_starting(
    tmp_path: Path, reason: str, waits: bool, cancels: bool
) -> None:
    """The gang would wait for it in vain. A limit of nodes is no longer reached once Slurm has let go of a lost one."""
    slurm = Slurm()
    slurm.reason, slurm.cancels = reason, cancels
    asking = Asking(tmp_path, slurm)
    await asking.order(1)
    (answer,) = asking.pool.answers()
    said = f"no node of the shared pool: the limit {reason}"
    assert (answer.slurm_job_id, answer.error) == ((41, "") if waits else (0, said))
    assert slurm.cancelled == ([] if waits else [41])


async def test_a_full_disk_is_an_answer_too(tmp_path: Path) -> None:
    asking = Asking(tmp_path / "gone", Slurm())
    await asking.order(1)
    (answer,) = asking.pool.answers()
    assert "No such file" in answer.error


@pytest.mark.parametrize(("text", "end"), [("1790000000", 1790000000.0), ("", None), ("4294967294", None), ("x", None)])
def test_the_jobs_end_is_what_slurm_says(text: str, end: float | None) -> None:
    assert job_end_time({"SLURM_JOB_END_TIME": text}) == end


@pytest.mark.parametrize("partition", ["a\n#SBATCH --uid=0", "a\rb", "a\x1b[2J"])
async def test_what_is_no_line_makes_no_script(tmp_path: Path, partition: str) -> None:
    slurm = Slurm()
    asking = Asking(tmp_path, slurm, {"SLURM_JOB_QOS": partition})
    await asking.order(1)
    (answer,) = asking.pool.answers()
    assert "must be one line without control characters" in answer.error
    assert slurm.scripts == []
