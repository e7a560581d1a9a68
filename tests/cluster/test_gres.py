"""Ranks get the GPUs that a job asks for: typed ones, and parts of GPUs. A job starts once its nodes are powered up.

The nodes have names as sites have them, and GPUs of two types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.cluster.script_training import ScriptTraining

from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import EXAMPLE, SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

BOTH, ONE_EACH = [("2,3", "0"), ("2,3", "1")] * 2, [("2", "0"), ("3", "1")] * 2
"""What each of four ranks sees of two h100 GPUs on each node, behind two others, and its local rank."""
KINDS = (
    "gpu-a-[001-002,015] Gres=gpu:a100:2,gpu:h100:4 Features=h100,ib",
    "r1n[01-02] Gres=gpu:1g.10gb:7 Features=mig,rack1",
    "r2n[01-02] Gres=gpu:1g.10gb:7 Features=mig,rack2",
)
EXTRA = (
    *("ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=100000"),
    *("SuspendTimeout=2", "ResumeTimeout=120"),
)
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --output=output.txt {{options}}
srun python3 -u train.py --until finish {" ".join(SLOW_STEPS)}
"""
TRAIN = (
    (EXAMPLE / "train.py")
    .read_text()
    .replace(
        "    main()\n",
        "    import os\n    names = ('MUSTER_GENERATION', 'RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')\n"
        "    print('place', *(os.environ[name] for name in names), flush=True)\n    main()\n",
    )
)
"""Each rank says which GPUs it sees, and which of them it takes."""


@pytest.fixture(scope="module")
def site(suite: str) -> Iterator[Cluster]:
    with Cluster.up(ClusterSpec(kinds=KINDS, requeue_delay=1, extra=EXTRA, suite=suite)) as cluster:
        yield cluster


@pytest.fixture
def healthy(site: Cluster) -> Cluster:
    site.restore_all()
    return site


def places(training: Training) -> list[tuple[str, str]]:
    """The GPUs that each rank of the running generation sees, and the local rank, which says which of them it takes."""
    texts = [path.read_text() for path in training.folder.rglob("rank*.log")]
    found = re.findall(rf"^place {training.generation} (\d+) (\d+) (\S+)$", "\n".join(texts), re.MULTILINE)
    return [(gpus, local) for _, local, gpus in sorted(found, key=lambda place: int(place[0]))]


def outlive_a_rank_and_a_node(training: Training) -> None:
    training.kill_rank(3)
    training.wait_recovered(2)
    lost = training.node_of(3)
    training.cluster.crash(lost)
    training.wait_left(lost)


def job_toml(cluster: Cluster, name: str, *settings: str, spares: int = 0) -> Training:
    given = ("ranks_per_node = 2", "[slurm]", *settings)
    return Training(cluster, TrainingSpec(name, 2, spares, arguments=SLOW_STEPS, settings=given, script=TRAIN))


def end(training: Training) -> None:
    training.finish()
    assert training.wait_final()["phase"] == "DONE"


def nodes_of(training: Training) -> set[str]:
    return {str(rank["node"]) for rank in training.view["ranks"]}


def test_ranks_of_a_job_get_gpus_of_the_type_that_it_asks_for_also_after_faults(healthy: Cluster) -> None:
    """Two jobs side by side: h100 GPUs of nodes that have others first, and a rank for each part of a GPU."""
    with (
        job_toml(healthy, "typed", 'gres = "gpu:h100:2"', spares=1) as typed,
        job_toml(healthy, "parts", 'gres = "gpu:1g.10gb:7"', spares=1) as parts,
    ):
        typed.submit()
        parts.submit()
        typed.wait_step(5)
        assert places(typed) == BOTH
        outlive_a_rank_and_a_node(typed)
        assert places(typed) == BOTH
        parts.wait_step(5)
        assert places(parts)[3] == ("0,1,2,3,4,5,6", "1")
        outlive_a_rank_and_a_node(parts)
        assert places(parts)[3] == ("0,1,2,3,4,5,6", "1")
        end(typed)
        end(parts)


def script_job(cluster: Cluster, name: str, options: str) -> ScriptTraining:
    return ScriptTraining(cluster, TrainingSpec(name, 2, 1, script=TRAIN), SCRIPT.format(options=options))


def test_ranks_of_a_script_get_the_gpus_that_srun_would_give_them_also_after_faults(healthy: Cluster) -> None:
    with script_job(healthy, "task", "--ntasks-per-node=2 --gpus-per-task=h100:1") as training:
        training.submit()
        training.wait_step(5)
        assert places(training) == ONE_EACH
        outlive_a_rank_and_a_node(training)
        assert places(training) == ONE_EACH
        training.finish_done()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gres", "--ntasks-per-node=2 --gres=gpu:h100:2", BOTH),
        ("gpus", "--ntasks-per-node=2 --gpus=h100:4", BOTH),
        ("bound", "--ntasks-per-node=2 --gpus=h100:4 --gpu-bind=single:1", ONE_EACH),
        ("tasks", "--ntasks-per-gpu=1 --gpus-per-node=h100:2", ONE_EACH),
    ],
)
def test_each_way_to_ask_gives_ranks_the_gpus_that_are_asked_for(
    healthy: Cluster, name: str, options: str, expected: list[tuple[str, str]]
) -> None:
    with script_job(healthy, name, options) as training:
        training.submit()
        training.wait_step(1)
        assert places(training) == expected
        training.finish_done()


def test_a_job_starts_once_its_node_is_powered_up(healthy: Cluster) -> None:
    node = "r2n02"
    healthy.stop_service(node, "slurmd")
    healthy.exec(CONTROLLER, "scontrol", "update", f"nodename={node}", "state=power_down_force")
    wait_until(lambda: healthy.node_states()[node] == "idle~", 60, f"{node} is powered down")
    with job_toml(healthy, "booted", 'gres = "gpu:1g.10gb:7"', 'options = ["--nodelist=r2n[01-02]"]') as training:
        training.submit()
        boots = f"Slurm to start job {training.job} (it boots {node})"
        training.wait(lambda view: view.get("waiting_for") == boots, 60, f"{node} powers up")
        healthy.exec(node, "slurmd", "-b")  # as after a boot
        training.wait_step(1)
        assert healthy.node_states()[node] == "allocated"
        assert nodes_of(training) == {"r2n01", node}
        end(training)
    healthy.exec(node, "pkill", "-x", "slurmd")
