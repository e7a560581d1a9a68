"""Scripts as people run them: what `muster submit` expects of each call of srun, and what it is when it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from muster.daemon.agent.user_script.launch_rule import Kind, Script, decide
from muster.launcher.scripts.launch_choice import choose
from muster.slurm.client.srun_options import read_srun

SCRIPTS = Path(__file__).parent / "batch_scripts"
SITE = """
srun() { printf '%s\\0' "${BASH_LINENO[*]}" "$@" END >> calls; }
scontrol() { [ "$1" = show ] && printf 'n0\\nn1\\n'; }
module() { :; }
"""
"""A site without Slurm: srun writes down its words."""


def calls(script: Path, folder: Path, nodes: int, each: int) -> list[list[str]]:
    """The lines, those of functions and a 0 included, and the words of each call of srun."""
    (folder / "site.sh").write_text(SITE)
    (folder / "activate").write_text("")
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "BASH_ENV": str(folder / "site.sh"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NODELIST": "n[0-1]",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_NTASKS": str(nodes * each),
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    subprocess.run(["bash", script, "--lr", "1"], env=environ, cwd=folder, capture_output=True, timeout=60)
    return [call.split("\0")[:-1] for call in (folder / "calls").read_text().split("END\0")[:-1]]


@pytest.mark.parametrize(
    ("name", "nodes", "each", "kinds"),
    [
        ("accelerate", 2, 1, [Kind.LAUNCHER]),
        ("container", 2, 1, [Kind.LAUNCHER]),
        ("fsdp", 4, 1, [Kind.LAUNCHER]),
        ("native", 2, 2, [Kind.RANKS]),
        ("sweep", 2, 2, [Kind.RANKS]),
        ("titan", 4, 1, [Kind.HELPER, Kind.LAUNCHER]),
        ("../../../examples/own_script/train", 2, 1, [Kind.LAUNCHER]),
    ],
)
def test_the_line_that_submit_expects_is_the_one_that_launches(
    name: str, nodes: int, each: int, kinds: list[Kind], tmp_path: Path
) -> None:
    script = SCRIPTS / f"{name}.sbatch"
    launch = choose(script.read_text(), nodes).launch
    assert launch is not None
    found = {}
    for lines, *words in calls(script, tmp_path, nodes, each):
        line = lines.split()[0]
        decision = decide(read_srun(words), Script(nodes, nodes * each, 0, launch), (int(line),), lambda _: "")
        found[int(line)] = decision.kind
        if decision.kind is not Kind.HELPER:
            assert decision.tasks_per_node == each
    assert list(found.values()) == kinds
    assert [line for line, kind in found.items() if kind is not Kind.HELPER] == [launch.line]


@pytest.mark.parametrize(
    "command",
    [
        'srun \\\n  --label \\\n  bash -c "$RUN"',
        'A=1 \\\nB=2 \\\nsrun bash -c "$RUN"',
        'if ! srun \\\n  bash -c "$RUN"; then exit 1; fi',
        'run() { "$@"; }\nrun \\\n  srun bash -c "$RUN"',
        'time srun bash -c "\ncd .\n$RUN\n" \\\n  again',
    ],
)
def test_a_command_of_several_lines_is_the_line_that_submit_expects(command: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(f"#!/bin/bash\nRUN='python train.py'\n{command}\n")
    launch = choose(script.read_text(), 2).launch
    [(lines, *words)] = calls(script, tmp_path, 2, 2)
    at = tuple(map(int, lines.split()[:-1]))
    assert decide(read_srun(words), Script(2, 4, 2, launch), at, lambda _: "").kind is Kind.RANKS
