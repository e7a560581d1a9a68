"""What the variables of a shell do to a job that is submitted from it: all that sbatch 26.05 and srun 26.05 read."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from muster.daemon.transport.site_config import Site
from muster.launcher.commands.check import CheckOptions, _srun
from muster.launcher.commands.submit import prepare
from muster.launcher.errors import WrongInput
from muster.launcher.main import parser
from muster.launcher.submission.script import render
from muster.slurm.client.batch_script import SRUN
from muster.slurm.client.sbatch_options import read_script, read_words, value_of
from muster.slurm.client.submit_environment import for_own_srun, for_sbatch, ignored, site_options

# Found in the programs themselves, without those that the file below asks for (strings of sbatch and srun 26.05.5).
OF_SBATCH = """
ACCTG_FREQ ARRAY_INX BATCH BURST_BUFFER CLUSTER_CONSTRAINT CONSOLIDATE_SEGMENTS CONSTRAINT CONTAINER CONTAINER_ID
CONTAINER_TYPE CORE_SPEC CPUS_PER_GPU CPU_FREQ_REQ DEBUG DELAY_BOOT DISTRIBUTION ERROR EXCLUSIVE EXPORT GET_USER_ENV
GPUS GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GRES GRES_FLAGS HINT IGNORE_PBS INPUT JOB_NAME
MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NETWORK NO_KILL NO_REQUEUE OPEN_MODE OUTPUT OVERCOMMIT POWER PROFILE
REQUEUE REQ_SWITCH SEGMENT_SIZE SIGNAL SPREAD_JOB SPREAD_SEGMENTS THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND
TRES_PER_TASK USE_MIN_NODES WAIT WAIT4SWITCH WAIT_ALL_NODES
"""
CHOICES = {"ACCOUNT": "account", "PARTITION": "partition", "QOS": "qos", "RESERVATION": "reservation", "WCKEY": "wckey"}
OF_SRUN = """
ACCTG_FREQ ARBITRARY_NODELIST ARRAY_JOB_ID ARRAY_TASK_ID BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTER_CONSTRAINT COMPRESS
CONSOLIDATE_SEGMENTS CONSTRAINT CONTAINER CONTAINER_ID CONTAINER_TYPE CORE_SPEC CPUS_PER_GPU CPUS_PER_TASK CPU_BIND
CPU_FREQ_REQ DEBUG DELAY_BOOT DEPENDENCY DISABLE_STATUS DISTRIBUTION EPILOG EXACT EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE
EXPORT_ENV EXTERNAL_LAUNCHER GPUS GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GRES GRES_FLAGS
HET_SIZE HINT HOSTFILE JOBID JOB_ACCOUNT JOB_CPUS_PER_NODE JOB_DEPENDENCY JOB_ID JOB_NAME JOB_NODELIST JOB_NUM_NODES
JOB_PARTITION JOB_QOS JOB_RESERVATION JOB_SEGMENT_SIZE KILL_BAD_EXIT LABELIO MEM_BIND MEM_PER_CPU MEM_PER_GPU
MEM_PER_NODE MPI_TYPE NCORES_PER_SOCKET NETWORK NNODES NODELIST NO_KILL NPROCS NSOCKETS_PER_NODE NTASKS
NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_TRES OOM_KILL_STEP OPEN_MODE OVERCOMMIT OVERLAP PACK_SIZE
POWER PROFILE PROLOG REMOTE_CWD REQ_SWITCH RESTART_COUNT RESV_PORTS SCRIPT_CONTEXT SEND_LIBS SIGNAL SPANK_X SPREAD_JOB
SPREAD_SEGMENTS SRUN_MULTI SRUN_REDUCE_TASK_EXIT_MSG STDERRMODE STDINMODE STDOUTMODE STEP_GRES STEP_ID TASK_EPILOG
TASK_PROLOG TEST_EXEC THREADS THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND TRES_PER_TASK UMASK UNBUFFEREDIO
USE_MIN_NODES WAIT WAIT4SWITCH WORKING_CLUSTER WORKING_DIR
"""
OWN_OF_SRUN = "CONTAINER CONTAINER_ID CONTAINER_TYPE CPUS_PER_TASK DEBUG ERROR EXPORT_ENV INPUT OUTPUT SEGMENT_SIZE"
SHELL = {"PATH": "/bin", "HOME": "/home/ada", "OMP_NUM_THREADS": "4", "SLURM_CONF": "/etc/slurm.conf"}
SET = {
    **{f"SBATCH_{name}": "7" for name in OF_SBATCH.split()},
    **{f"SLURM_{name}": "7" for name in OF_SRUN.split()},
    **{f"SRUN_{name}": "7" for name in OWN_OF_SRUN.split()},
    **dict.fromkeys(("SLURM_RLIMIT_NOFILE", "SLURM_SPANK_X", "_SLURM_SPANK_OPTION_pyxis_image"), "7"),
    **dict.fromkeys(("SLURMD_NODENAME", "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION"), "7"),
}


def shell(monkeypatch: pytest.MonkeyPatch, folder: Path, more: dict[str, str], keys: str = "") -> Namespace:
    """`muster submit` in a shell with these variables."""
    path = folder / "job.toml"
    path.write_text(f'name = "a"\nnodes = 1\ncommand = "true"\nrun_dir = "{folder}"\n{keys}')
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    return parser().parse_args(["submit", str(path)])


def test_nothing_of_a_shell_reaches_sbatch_but_what_says_how_slurm_is_reached() -> None:
    assert for_sbatch({**SHELL, **SET}) == SHELL


def test_the_script_is_the_same_whatever_a_shell_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch reads variables one by one. Those of srun are set together."""
    own = "'--network=a', '--profile=b', '--acctg-freq=1', '--cluster-constraint=c'"
    keys = f"slurm.time = 30\nslurm.constraint = 'gpu'\nslurm.options = [{own}]\n"
    plain = render(prepare(shell(monkeypatch, tmp_path, {}, keys), Site()))
    for prefix in (*sorted(name for name in SET if name.startswith("SBATCH_")), "SLURM", "SRUN_", "_"):
        some = {name: SET[name] for name in SET if name.startswith(prefix)}
        with monkeypatch.context() as shell_of_its_own:
            given = render(prepare(shell(shell_of_its_own, tmp_path, some, keys), Site()))
        assert read_script(given) == read_script(plain), prefix


def test_what_a_site_chooses_for_its_users_is_a_line_of_the_script_unless_the_job_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = {f"SBATCH_{name}": f"of-{option}" for name, option in CHOICES.items()} | {"SBATCH_TIMELIMIT": "1:00:00"}
    keys = 'slurm.partition = "own"\nslurm.options = ["-q own"]\n'
    submission = prepare(shell(monkeypatch, tmp_path, site, keys), Site())
    options = read_script(render(submission))
    found = {name: value_of(options, name) for name in (*CHOICES.values(), "time")}
    assert found == {
        **{"account": "of-account", "partition": "own", "qos": "own", "reservation": "of-reservation"},
        **{"wckey": "of-wckey", "time": "1:00:00"},
    }
    assert {"--account=of-account", "--wckey=of-wckey"} <= set(submission.spec.node_options), "also for pool nodes"
    left = {name for name in for_sbatch({**SHELL, **site}, submission.options) if name.startswith("SBATCH_")}
    assert left == {"SBATCH_ACCOUNT", "SBATCH_RESERVATION", "SBATCH_WCKEY", "SBATCH_TIMELIMIT"}


def test_the_user_is_told_which_variables_the_job_does_not_follow() -> None:
    environ = {"SBATCH_EXPORT": "NONE", "SBATCH_QOS": "long", "SBATCH_ACCOUNT": "physics", "SBATCH_WAIT": ""}
    taken = site_options(environ, read_words(["--qos=short"]))
    assert [str(option) for option in taken] == ["--account=physics"]
    assert ignored(environ, taken) == ["SBATCH_EXPORT", "SBATCH_QOS"]


@pytest.mark.parametrize("name", ["SBATCH_CLUSTERS", "SLURM_CLUSTERS"])
def test_another_cluster_is_refused_in_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = shell(monkeypatch, tmp_path, {name: "other"})
    with pytest.raises(WrongInput, match=f"{name} = 'other' sends jobs to another cluster") as refused:
        prepare(options, Site())
    assert f"unset {name}" in refused.value.hint


def test_agents_have_an_environment_whatever_export_says() -> None:
    """With SLURM_EXPORT_ENV=NONE in the job, srun would start its tasks without what the script exports."""
    assert "--export=ALL" in SRUN
    assert "--export=ALL" in _srun(["n1"], CheckOptions("python3", "", pairs=False), "check")


def test_a_check_gets_an_allocation_of_its_own_also_inside_a_job() -> None:
    choices = {"SLURM_ACCOUNT": "physics", "SLURM_PARTITION": "gpu", "SLURM_QOS": "short"}
    assert for_own_srun({**SHELL, **SET, **choices}) == {**SHELL, **choices}
