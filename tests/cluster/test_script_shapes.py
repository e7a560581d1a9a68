"""The shapes in which people write batch scripts: each trains on after a rank is killed and a node is lost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.script_training import ScriptTraining

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.training import EXAMPLE, SLOW_STEPS, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SCRIPTS = Path(__file__).parents[1] / "unit" / "batch_scripts"
"""As people run them."""
ACCELERATE_STAND_IN = """
import sys
from torch.distributed import run
words, given = sys.argv[1:], {}
while words[0].startswith("--"):
    given[words[0]] = words[1]
    del words[:2]
nodes = int(given["--num_machines"])
run.main([f"--nnodes={nodes}", f"--nproc-per-node={int(given['--num_processes']) // nodes}",
    f"--node-rank={given['--machine_rank']}", f"--role={given['--role']}", f"--tee={given['--tee']}",
    f"--master-addr={given['--main_process_ip']}", f"--master-port={given['--main_process_port']}", *words])
"""
PLUGIN = (
    ("#SBATCH --environment=/shared/env/train.toml\n", ""),
    ("#SBATCH --container-writable\n", ""),
    ("#SBATCH --container-workdir=/shared/meg\n", ""),
)
"""Options that a plug-in of the site has added."""
PROGRAMS = {"numactl": 'shift; exec "$@"', "torchrun": 'exec python3 -m torch.distributed.run "$@"'}
"""The image has no numactl, and a torchrun of another Python."""
SUBMIT = "muster submit --parsable --spares=1"
KILL = "pkill -KILL -u alice -x rank{rank} || pkill -KILL -u alice -f 'python -u train.py'"
"""A shell that is a rank has the name of its program."""
TRAIN = (
    (EXAMPLE / "train.py")
    .read_text()
    .replace("    main()\n", f"    import sys\n    sys.argv[1:] = {['--until', 'finish', *SLOW_STEPS]!r}\n    main()\n")
)


TWO_RANKS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --mem=1g --output=out.%a.txt
srun python3 -u sum.py
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (1 + dist.get_rank())
dist.all_reduce(total)
print("sum", total.item())
"""
VARIABLES = {
    "requeue": "SBATCH_REQUEUE=1",
    "no-requeue": "SBATCH_NO_REQUEUE=1",
    "array": "SBATCH_ARRAY_INX=0-1",
    "open-mode": "SBATCH_OPEN_MODE=truncate",
    "output": "SBATCH_OUTPUT=other.txt",
    "job-name": "SBATCH_JOB_NAME=other",
    "wait": "SBATCH_WAIT=1",
    "export": "SBATCH_EXPORT=NONE",
    "time": "SBATCH_TIMELIMIT=10",
    "exclusive": "SBATCH_EXCLUSIVE=user",
    "signal": "SBATCH_SIGNAL=USR1@30",
    "clusters": "SBATCH_CLUSTERS=other",
    "gpus": "SBATCH_GPUS_PER_NODE=1",
    "segment": "SBATCH_SEGMENT_SIZE=1",
    "time-of-step": "SLURM_TIMELIMIT=10",
    "cpus": "SRUN_CPUS_PER_TASK=1",
    "memory": "SLURM_MEM_PER_CPU=100",
    "distribution": "SLURM_DISTRIBUTION=arbitrary",
    "exact": "SLURM_EXACT=1",
    "overcommit": "SLURM_OVERCOMMIT=1",
    "label": "SLURM_LABELIO=1",
    "hostfile": "SLURM_HOSTFILE=hosts",
    "another-job": "SLURM_JOB_ID=1 SLURM_NNODES=7 SLURM_NTASKS=9 SLURM_JOB_NODELIST=n0 SLURM_RESTART_COUNT=3",
}
REFUSED = {
    "requeue": "sbatch: error: Invalid --requeue specification",
    "clusters": "SBATCH_CLUSTERS of this shell: --clusters=other sends the job to another",
    "gpus": "sbatch: error: ",
    "hostfile": "sbatch: error: --nodes is incompatible with --distribution=arbitrary",
}
"""What is said of a job that is not queued."""


@dataclass(frozen=True)
class Shape:
    """A script, and what it prints.

    changes: what the test cluster does not have, and what takes its place.
    output: the files with what the ranks print, and `line`, how a line of rank 0 begins there.
    once: files, and lines that stand there once.
    """

    nodes: int
    ranks: int
    output: str
    line: str
    changes: tuple[tuple[str, str], ...] = ()
    once: tuple[tuple[str, str], ...] = ()


SHAPES = {
    "sweep": Shape(
        2, 4, "slurm_logs/*.out", "0: step 5 ",
        (("=480g", "=4g"), ("0-3%2", "0-1%2"), ("${SLURM_NODELIST:0:9}${SLURM_NODELIST:10:3}", "$(hostname)")),
    ),
    "fsdp": Shape(4, 8, "logs/*.out", "0: step 5 "),
    "titan": Shape(
        4, 8, "out.txt", "step 5 ",
        (("--gpus-per-task=2", "--output=out.txt"), ("=train\n", "=main\n")),
        (("profiler.log", "profile --pause"), ("profiler.log", "profile --resume")),
    ),
    "accelerate": Shape(2, 4, "main_log.txt", "[0:0]:step 5 "),
    "native": Shape(2, 4, "out.txt", "step 5 ", (("--open-mode", "-o out.txt --open-mode"),)),
    "container": Shape(
        2, 4, "logs/*.out", "0: step 5 ",
        (*PLUGIN, ("MASTER_PORT=25678", "MASTER_PORT=25678 PATH=$PWD/bin:$PATH")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_script_as_people_write_it_trains_on_without_a_rank_and_a_node(healthy: Cluster, name: str) -> None:
    """A rank is killed, then the node of the last rank crashes. The script ends with the exit code of its launch."""
    shape, text = SHAPES[name], (SCRIPTS / f"{name}.sbatch").read_text()
    for old, new in shape.changes:
        text = text.replace(old, new)
    spec = TrainingSpec(name, nodes=shape.nodes, spares=1, script=TRAIN)
    with ScriptTraining(healthy, spec, text, f"PATH=$PWD/bin:$PATH {SUBMIT}") as training:
        lay_out(training)
        job = training.submit()
        training.wait_step(5)
        healthy.sh(training.node_of(shape.ranks - 1), KILL.format(rank=shape.ranks - 1))
        training.wait_recovered(2)
        lost = training.node_of(shape.ranks - 1)
        healthy.crash(lost)
        training.wait_left(lost)
        training.finish_done()
        wait_until(lambda: seen(healthy, job) == {("COMPLETED", "0", "0:0")}, 60, "the script has ended, and ran once")
        output = "".join(path.read_text() for path in training.folder.glob(shape.output))
        assert any(line.startswith(shape.line) for line in output.splitlines()), output[:3000]
        for file, line in shape.once:
            assert (training.folder / file).read_text().splitlines().count(line) == 1


def seen(cluster: Cluster, job: int) -> set[tuple[str, str, str]]:
    """What Slurm says of a job and of each task of an array: its state, how often it was requeued, its exit code."""
    told = cluster.sh(CONTROLLER, f"scontrol show job {job}")
    return {*zip(*(re.findall(rf" {key}=(\S+)", told) for key in ("JobState", "Restarts", "ExitCode")), strict=True)}


def lay_out(training: ScriptTraining) -> None:
    """The folders and programs that the scripts name."""
    for folder in ("logs", "slurm_logs", "titan", "bin", "accelerate/commands"):
        (training.folder / folder).mkdir(parents=True, exist_ok=True)
    (training.folder / "titan/train.py").write_text('import runpy\nrunpy.run_path("train.py", run_name="__main__")\n')
    (training.folder / "accelerate/commands/launch.py").write_text(ACCELERATE_STAND_IN)
    for name, line in PROGRAMS.items():
        program = training.folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)


def test_options_of_a_plugin_that_slurm_does_not_have_are_refused_by_slurm(healthy: Cluster) -> None:
    """The message is that of sbatch, with the option's name, and nothing is queued."""
    text = (SCRIPTS / "container.sbatch").read_text()
    refused = "sbatch: unrecognized option '--environment=/shared/env/train.toml'"
    with (
        ScriptTraining(healthy, TrainingSpec("plugin"), text, SUBMIT) as training,
        pytest.raises(EngineError, match=refused),
    ):
        training.submit()
    assert not healthy.sh(CONTROLLER, "squeue --noheader")


@pytest.mark.parametrize("group", range(2))
def test_a_variable_of_the_shell_that_submits_harms_no_job(healthy: Cluster, group: int) -> None:
    """Each job trains, or is refused in words."""
    jobs = {name: queue(healthy, name, VARIABLES[name]) for name in list(VARIABLES)[group::2]}
    wait_until(lambda: not healthy.sh(CONTROLLER, "squeue --noheader"), 240, "no job is left")
    for name, refused in jobs.items():
        if (expected := REFUSED.get(name)) is None:
            output = "".join(path.read_text() for path in (healthy.shared / "jobs" / name).glob("*.txt"))
            assert "muster: supervised: " in output, (name, refused)
            assert len(re.findall(r"^(?:\d: )?sum 3.0$", output, re.M)) == (4 if name == "array" else 2), (name, output)
        else:
            assert expected in refused, name


def queue(cluster: Cluster, name: str, variables: str) -> str:
    """Submit a job of two ranks from a shell with `variables`; what was said."""
    folder, inside = cluster.shared / "jobs" / name, f"/shared/jobs/{name}"
    folder.mkdir(parents=True)
    (folder / "sum.py").write_text(SUM)
    (folder / "a.sbatch").write_text(TWO_RANKS)
    (folder / "hosts").write_text("n8\nn9\n")
    cluster.sh(LOGIN, f"chown -R alice: {inside}")
    words = f"cd {inside} && env {variables} timeout 200 muster submit --force a.sbatch"
    return cluster.exec(LOGIN, "bash", "-c", words, user="alice", check=False).stderr
