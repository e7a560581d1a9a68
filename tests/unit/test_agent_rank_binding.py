"""Each rank has the processors and GPUs that srun would give to a task in its place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from muster.daemon.agent.launch import task_binding
from muster.daemon.agent.launch.task_binding import TaskBinding
from muster.daemon.agent.user_script import rank_binding
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.agent.user_script.own_nodes import Nodes
from muster.daemon.testing.scripted_gang import scripted_gang
from muster.slurm.client.launch_settings import binding_file
from muster.slurm.client.srun_options import read_srun
from muster.v1.agent_pb2 import RANK_PHASE_EXITED

NODES = Nodes(("n0",), ("n1",))
RANKS, LAUNCHER = Decision(Kind.RANKS, 2), Decision(Kind.LAUNCHER, 1)
SRUN = """#!/bin/bash
echo "$*" | head -n 1 > $0.words
echo "of the site's prolog"
for node in {nodes}; do for task in 0 1; do
  echo "muster-binding $node $task $task,4-5 $task 2,3"
done; done
exit {code}
"""


class Site:
    """A site with an srun of its own."""

    def __init__(self, folder: Path) -> None:
        self.srun, self.path = folder / "srun", folder / "binding"

    def keep(self, words: str, decision: Decision = RANKS, environ: dict[str, str] | None = None) -> None:
        given = {"PATH": os.environ["PATH"], **(environ or {})}
        rank_binding.keep(str(self.path), read_srun(words.split()), given, decision, NODES, str(self.srun))

    def answers(self, nodes: str, code: int = 0) -> None:
        self.srun.write_text(SRUN.format(nodes=nodes, code=code))
        self.srun.chmod(0o755)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.answers("n0 n1")
    return site


def test_srun_itself_says_what_each_task_would_have_on_spares_too(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.keep("-o out_%t -c 4 --cpu-bind=cores --gres=gpu:2 python train.py")
    sizes = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --overlap --mpi=none --input=none"
    assert Path(f"{site.srun}.words").read_text().startswith(f"-c 4 --cpu-bind=cores --gres=gpu:2 {sizes} sh -c ")
    for node in ("n0", "n1"):
        found = task_binding.read(str(site.path), node, [2, 3])
        assert found[1] == TaskBinding(frozenset({1, 4, 5}), {"CUDA_VISIBLE_DEVICES": "1"})
    assert task_binding.read(str(site.path), "n2", []) == {}
    assert capsys.readouterr().err == ""


def test_tasks_for_each_gpu_are_not_counted_by_nodes_too(site: Site) -> None:
    """srun refuses --ntasks-per-node beside --ntasks-per-gpu."""
    site.keep("python train.py", environ={"SLURM_NTASKS_PER_GPU": "1"})
    assert Path(f"{site.srun}.words").read_text().startswith("--nodes=2 --ntasks=4 --overlap ")
    assert task_binding.read(str(site.path), "n0", [2, 3])[1].variables == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("--gpu-bind=single:1 python a", "--gpus-per-node=h100:2 --gpu-bind=single:1 --nodes=2 "),
        ("--gpus-per-task=h100:1 python a", "--gpus-per-task=h100:1 --nodes=2 "),
        ("--gpu-bind=single:1 --gres=gpu:2 python a", "--gpu-bind=single:1 --gres=gpu:2 --nodes=2 "),
    ],
)
def test_each_node_has_as_many_gpus_in_a_job_that_counts_all(site: Site, words: str, begins: str) -> None:
    site.keep(words, environ={"SLURM_GPUS": "h100:2"})  # of the script's own node, without those of the spare
    assert Path(f"{site.srun}.words").read_text().startswith(begins)


@pytest.mark.parametrize("words", ["python train.py", "--cpu-bind=none python train.py", "-l --mpi=pmi2 python a"])
def test_a_launch_that_asks_for_no_binding_asks_nobody(site: Site, words: str) -> None:
    site.path.write_text("muster-binding n0 0 1 0 0")
    site.keep(words)
    assert task_binding.read(str(site.path), "n0", []) == {}
    assert not Path(f"{site.srun}.words").exists()


def test_variables_of_srun_ask_for_a_binding_too(site: Site) -> None:
    site.keep("python train.py", environ={"SLURM_GPUS_PER_TASK": "1"})
    assert set(task_binding.read(str(site.path), "n0", [])) == {0, 1}


@pytest.mark.parametrize(
    ("words", "decision", "nodes", "said"),
    [
        ("-c2 --gpu-bind=closest python a", RANKS, "n1", "--cpus-per-task, --gpu-bind"),
        ("-c2 --mem-bind=local python a", RANKS, "n0 n1", "--mem-bind"),
        ("-c2 --cpu-bind=cores torchrun", LAUNCHER, "n0 n1", "--cpu-bind"),
    ],
    ids=["srun could not say it", "memory", "one task a node"],
)
def test_what_is_not_carried_is_said(
    site: Site, capsys: pytest.CaptureFixture[str], words: str, decision: Decision, nodes: str, said: str
) -> None:
    site.answers(nodes, code=1)
    site.keep(words, decision)
    assert capsys.readouterr().err == f"muster: not carried to the ranks: {said}\n"


@pytest.mark.parametrize(
    ("visible", "files", "own", "variables"),
    [
        ("0", "3", [0, 1, 2, 3], {"CUDA_VISIBLE_DEVICES": "3"}),
        ("1,0", "0,1,2,3", [0, 1, 2, 3], {"CUDA_VISIBLE_DEVICES": "1,0"}),
        ("0", "10", [2, 10], {"CUDA_VISIBLE_DEVICES": "1"}),
        ("GPU-1f", "2", [2], {"CUDA_VISIBLE_DEVICES": "GPU-1f"}),
        ("1", "", [], {"CUDA_VISIBLE_DEVICES": "1"}),
        ("unset", "0", [0], {}),
    ],
    ids=["a cgroup for each task", "none", "a cgroup for the job", "by UUID", "no such files", "no GPUs"],
)
def test_a_gpu_is_the_same_one_whatever_cgroups_hide(
    tmp_path: Path, visible: str, files: str, own: list[int], variables: dict[str, str]
) -> None:
    (tmp_path / "binding").write_text(f"muster-binding n0 0 0 {visible} {files}\n")
    found = task_binding.read(str(tmp_path / "binding"), "n0", own)
    assert found == {0: TaskBinding(frozenset({0}), variables)}


def test_a_task_says_what_this_process_has(tmp_path: Path) -> None:
    environ = {"SLURMD_NODENAME": "n0", "SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "1"}
    said = subprocess.run(["sh", "-c", task_binding.TASK], env=environ, capture_output=True, text=True).stdout
    (tmp_path / "binding").write_text(said)
    found = task_binding.read(str(tmp_path / "binding"), "n0", task_binding.open_gpus())
    assert found == {3: TaskBinding(frozenset(os.sched_getaffinity(0)), {"CUDA_VISIBLE_DEVICES": "1"})}


def test_only_gpus_that_this_process_may_open_count(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia3"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia3").unlink()
    (tmp_path / "nvidia3").symlink_to("nothing")
    assert task_binding.open_gpus(str(tmp_path)) == [2, 10]


async def test_a_rank_starts_with_what_it_is_bound_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environment").write_bytes(b"PATH=/bin:/usr/bin\0CUDA_VISIBLE_DEVICES=0,1,2,3\0")
    monkeypatch.setenv("MUSTER_RANK_ENVIRONMENT", str(tmp_path / "environment"))
    processor = max(os.sched_getaffinity(0))
    async with scripted_gang(tmp_path) as gang:
        path = binding_file(str(gang.folder), "g")
        Path(path).write_text(f"muster-binding n0 0 {processor} 3 \n")
        show = "echo $CUDA_VISIBLE_DEVICES; grep Cpus_allowed_list /proc/self/status"
        await gang.start(1, "/bin/sh", "-c", show, ranks_of_srun=True)
        gang.fence(0)
        await gang.until(lambda: gang.status("n0").store_generation == 1)
        gang.coordinator.order(gang.run_order(1))
        await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
        assert gang.output(0, 1).split() == ["3", "Cpus_allowed_list:", str(processor)]
