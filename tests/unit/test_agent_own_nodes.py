"""What the variables of a user's batch script say of its nodes, and how its helpers are started."""

from __future__ import annotations

from muster.daemon.agent.user_script import helper_call, launch
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.agent.user_script.own_nodes import Nodes, divide, gpus_option, on_nodes, variables
from muster.slurm.client.srun_options import read_srun
from muster.v1.common_pb2 import JobSpec

NODES = divide(("n0", "n1", "n2"), 1)


def test_variables_describe_the_scripts_own_nodes() -> None:
    given = {
        "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)",
        "SLURM_JOB_CPUS_PER_NODE": "8,16(x2)", "SLURM_GPUS": "gpu:a100:12", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    assert variables(given, NODES) == {
        "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_CPUS_PER_NODE": "8,16", "SLURM_GPUS": "gpu:a100:8",
    }  # fmt: skip


def test_a_job_without_spares_has_its_own_variables() -> None:
    given = {"SLURM_NNODES": "2", "SLURM_NODELIST": "n[4,2]", "SLURM_TASKS_PER_NODE": "2,1"}
    assert variables(given, divide(("n4", "n2"), 0)) == given | {"SLURM_NODELIST": "n4,n2"}
    assert divide(("n0",), 1) == Nodes(("n0",), ()), "one node is always the script's own"


def test_a_helper_runs_on_the_seats_and_one_that_stages_on_spares_too() -> None:
    words = read_srun(("-l", "hostname", "-s"))
    assert helper_call.helper_words(words, NODES, ("n0", "n2")) == ["-l", "--exclude=n1", "hostname", "-s"]
    assert helper_call.spread_words(words, NODES, 2) == ["-l", "--nodes=3", "--ntasks=6", "hostname", "-s"]
    own = read_srun(("-w", "n1", "-n1", "hostname"))
    assert helper_call.helper_words(own, NODES, ("n0", "n1")) == ["-w", "n1", "-n1", "hostname"]
    without = read_srun(("-N1", "-x", "n0", "hostname"))
    assert helper_call.helper_words(without, NODES, ("n0", "n1"))[-2:] == ["--exclude=n0,n2", "hostname"]
    assert on_nodes({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "A": "1"}, ("n0", "n2")) == {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[0,2]",
        "A": "1",
    }


def test_a_launch_is_the_job_and_its_options_end_no_gang() -> None:
    words = read_srun(("--wait=60", "-K1", "-lu", "-D", "sub", "--site=1", "python", "train.py"), {"site": True})
    decision = Decision(Kind.RANKS, 2)
    spec = launch.launch_spec(JobSpec(name="a", min_nodes=1), decision, words, NODES, "/jobs")
    assert (spec.nodes, spec.spares, spec.min_nodes, spec.ranks_per_node, spec.work_dir) == (2, 1, 1, 2, "/jobs/sub")
    assert (list(spec.own_nodes), list(spec.command)) == (["n0", "n1"], ["python", "train.py"])
    assert spec.ranks_of_srun
    argv = launch.agents_srun("/usr/bin/srun", "/opt/muster-agent", decision, words, 3, ["site"])
    assert argv[-3:] == ["--site=1", "/opt/muster-agent", "run"]
    assert {"--overlap", "--nodes=3", "--kill-on-bad-exit=0", "--wait=0"} < {*argv}
    assert not {"--wait=60", "-K1", "-l"} & {*argv}, "agents label what ranks print"
    assert "-u" not in argv, "on a terminal agents would colour what ranks print"


def test_agents_of_a_job_with_gpus_ask_for_those_of_each_node() -> None:
    """`SLURM_GPUS` counts those of the script's own two nodes."""
    decision, words = Decision(Kind.RANKS, 2), read_srun(("python", "train.py"))
    option = gpus_option({"SLURM_GPUS": "a100:2,h100:4"}, NODES)
    assert option == "--gpus-per-node=a100:1,h100:2"
    assert option in launch.agents_srun("srun", "agent", decision, words, 3, [], gpus=option)
    assert "" not in launch.agents_srun("srun", "agent", decision, words, 3, [])
    given = {"SLURM_GPUS": "4", "SLURM_GPUS_PER_NODE": "3"}
    assert gpus_option(given, NODES) == "--gpus-per-node=3"
    assert gpus_option({"SLURM_GPUS": "h100:5"}, NODES) == "", "Slurm chooses how many each node has"
    assert gpus_option({"SLURM_GPUS": "a100"}, NODES) == "", "the type of one GPU is no number"
    assert gpus_option({"SLURM_GPUS_PER_NODE": "3"}, NODES) == "", "the step has them from its job"


def test_a_launcher_is_started_by_the_agents() -> None:
    words, decision = read_srun(("torchrun", "train.py")), Decision(Kind.LAUNCHER, 1)
    spec = launch.launch_spec(JobSpec(name="a"), decision, words, NODES, "/jobs")
    assert (spec.min_nodes, spec.ranks_per_node, list(spec.command), spec.ranks_of_srun) == (2, 0, [], False)
    assert launch.agents_srun("srun", "agent", decision, words, 3, [])[-5:] == [
        *("agent", "run", "--", "torchrun", "train.py"),
    ]


def test_agents_get_nothing_that_harms_them() -> None:
    script = {
        "PATH": "/bin", "PYTHONPATH": "/x", "PYTHONHOME": "/y", "LD_PRELOAD": "z", "SLURM_NTASKS": "4",
        "SLURM_JOB_ID": "7", "SRUN_CPUS_PER_TASK": "2", "SLURM_EXPORT_ENV": "NONE", "BASH_ENV": "/b",
        "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    assert launch.agents_environment(script).keys() == {"PATH", "SLURM_JOB_ID", "NCCL_DEBUG"}


def test_export_of_the_launch_is_that_of_its_ranks() -> None:
    script = {"A": "1", "B": "2", "SLURM_JOB_ID": "7"}
    assert launch.launch_environment(script, None) == script
    assert launch.launch_environment(script, "ALL,A=5,C=3") == {**script, "A": "5", "C": "3"}
    assert launch.launch_environment(script, "B,C=3") == {"B": "2", "C": "3", "SLURM_JOB_ID": "7"}
    assert launch.launch_environment(script, "NONE") == {"SLURM_JOB_ID": "7"}
