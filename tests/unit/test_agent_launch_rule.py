"""Which call of srun in a user's batch script becomes the gang."""

from __future__ import annotations

import pytest

from muster.daemon.agent.user_script.launch_rule import Decision, Kind, Script, decide, script_of
from muster.slurm.client.launch_settings import BY_LAUNCHER, KNOWN_WHEN_IT_RUNS, NAMED_BY_USER, LaunchLine
from muster.slurm.client.srun_options import UnknownOption, described, read_srun

HELPER, LAUNCHER, RANKS = Kind.HELPER, Kind.LAUNCHER, Kind.RANKS
TEXTS = {
    "run.sh": "#!/bin/bash\n# not: torchrun\nexec torchrun --nnodes 2 train.py\n",
    "./run.sh": "#!/bin/bash -l\nmodule load cuda\npython -m torch.distributed.run train.py\n",
    "contained.sh": "#!/bin/bash\napptainer exec --nv x.sif \\\n  torchrun x\n",
    "stage.sh": "#!/bin/bash\n# before torchrun\ncp data /tmp\n",
    "./train.py": "#!/usr/bin/env python3\nimport torch  # torchrun starts me\n",
}
BASH_C = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NPROCS python -u train.py"
ACCELERATE = "python -u -m accelerate.commands.launch --num_machines 2 --tee 3 train.py"
NUMACTL = "numactl --membind=0 torchrun --node-rank $SLURM_PROCID --nnodes=2 train.py"


def text_of(name: str) -> str:
    return TEXTS.get(name, "")


def found(
    *words: str, nodes: int = 2, tasks: int = 0, each: int = 0, lines: tuple[int, ...] = (), launch: str = ""
) -> Decision:
    named = LaunchLine(9, tuple(launch.split()), "the last srun") if launch else None
    return decide(read_srun(words), Script(nodes, tasks, each, named), lines, text_of)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        # scripts as people run them
        (("torchrun", "--nnodes", "2", "-m", "titan.train"), LAUNCHER),
        (("-l", "torchrun", "--rdzv_endpoint=n0", "./train.py"), LAUNCHER),
        (("--wait=60", "--oom-kill-step", "bash", "-c", ACCELERATE), LAUNCHER),
        (("--wait=60", "--kill-on-bad-exit=1", "--jobid", "7", "bash", "-c", ACCELERATE), LAUNCHER),
        (("-lu", "--cpus-per-task", "2", "--wait", "60", "bash", "-c", NUMACTL), LAUNCHER),
        (("--nodes=1", "--ntasks=1", "-w", "n0", "hostname", "--ip-address"), HELPER),
        # other forms of a launch
        (("-N2", "-n2", "accelerate", "launch", "train.py"), LAUNCHER),
        (("accelerate-launch", "train.py"), LAUNCHER),
        (("-N", "2", "--ntasks-per-node=1", "python", "-m", "torch.distributed.run", "train.py"), LAUNCHER),
        (("--nodelist=n[0-1]", "/opt/venv/bin/torchrun", "train.py"), LAUNCHER),
        (("bash", "run.sh", "a"), LAUNCHER),
        (("./run.sh",), LAUNCHER),
        (("env", "A=1", "numactl", "-N0", "./run.sh"), LAUNCHER),
        (("--export=ALL,A=1", "sh", "-ec", "cd x && exec torchrun y"), LAUNCHER),
        # no launch
        (("bash", "stage.sh"), HELPER),
        (("cp", "-r", "torchrun_data", "/tmp"), HELPER),
        (("pip", "show", "torch"), HELPER),
        (("--pty", "bash"), HELPER),
        (("--test-only", "torchrun", "x"), HELPER),
        (("python", "prepare.py"), HELPER),
        (("-N1", "torchrun", "--standalone", "x"), HELPER),
        (("-n3", "torchrun", "x"), HELPER),
        (("--ntasks-per-node=2", "torchrun", "x"), HELPER),
        (("-w", "n0", "torchrun", "x"), HELPER),
        (("--container-image=x.sqsh", "torchrun", "x"), HELPER),
        (("apptainer", "exec", "x.sif", "torchrun", "x"), HELPER),
        (("bash", "-c", "singularity exec x.sif torchrun x"), HELPER),
        (("bash", "contained.sh"), HELPER),
        (("torchrun", "x", ":", "-n1", "torchrun", "y"), HELPER),
    ],
)  # fmt: skip
def test_a_launcher_on_every_node_is_the_launch(words: tuple[str, ...], kind: Kind) -> None:
    plugins = {"container-image": True}
    read = read_srun(words, plugins)
    assert decide(read, Script(2), (), text_of).kind is kind


@pytest.mark.parametrize(
    ("words", "each"),
    [
        (("python", "train.py"), 2),
        (("--cpu-bind=none", "bash", "-c", BASH_C), 2),
        (("--label", "python", "-u", "train.py"), 2),
        (("-N2", "-n8", "python", "train.py"), 4),
        (("--ntasks-per-node", "3", "python", "train.py"), 3),
        (("-n2", "./train.py"), 1),
    ],
)
def test_the_line_that_submit_has_found_starts_ranks(words: tuple[str, ...], each: int) -> None:
    decision = found(*words, tasks=4, each=2, launch="srun " + ("bash" if "-c" in words else words[-1]))
    assert (decision.kind, decision.tasks_per_node) == (RANKS, each)


def test_another_line_starts_no_ranks() -> None:
    launch = "srun --label python -u train.py --seed $SLURM_ARRAY_TASK_ID"
    assert found("--label", "python", "-u", "train.py", "--seed", "7", launch=launch).kind is RANKS
    assert found("python", "prepare.py", launch=launch) == Decision(HELPER, 1, everywhere=True)
    assert found("python", "eval.py", launch="srun python train.py", lines=(8,)).kind is HELPER
    assert found("python", "train.py", launch="$CMD", lines=(31, 9)).kind is RANKS
    assert found("python", "train.py").kind is HELPER


def test_a_line_that_starts_the_same_program_starts_the_ranks() -> None:
    """As in the branches of an `if`."""
    launch = 'srun bash -c "RANK=$SLURM_PROCID python $HERE/train.py"'
    assert found("python", "x/train.py", "--resume", launch=launch, lines=(8,)).kind is RANKS
    assert found("python", "-m", "x.train", launch="srun python -m x.train", lines=(8,)).kind is RANKS
    assert found("python", "-m", "x.eval", launch="srun python -m x.train", lines=(8,)).kind is HELPER
    assert found("cp", "train.py", "/tmp", launch="srun python train.py", lines=(8,)).kind is HELPER
    for size in ("-n1", "--ntasks-per-node=1"):
        stage = found(size, "python", "train.py", "--stage", tasks=4, launch="srun python train.py", lines=(8,))
        assert (stage.kind, stage.warning) == (HELPER, "")


def test_what_srun_starts_without_the_launcher_is_a_helper_of_the_same_program() -> None:
    script = Script(2, launch=LaunchLine(9, ("srun", "torchrun", "train.py"), BY_LAUNCHER))
    assert decide(read_srun(["python", "train.py", "--download"]), script, (8,), text_of).kind is HELPER
    assert decide(read_srun(["torchrun", "train.py"]), script, (9,), text_of).kind is LAUNCHER


def test_a_line_of_which_nothing_is_known_even_when_it_runs_says_so() -> None:
    script = Script(2, launch=LaunchLine(9, ("srun", "bash", "$RUN"), KNOWN_WHEN_IT_RUNS))
    assert decide(read_srun(["bash", "stage.sh"]), script, (9,), text_of).warning.startswith("no launcher")
    assert not decide(read_srun(["bash", "stage.sh"]), script, (8,), text_of).warning


def test_a_variable_that_only_the_shell_of_the_task_replaces_is_seen_through() -> None:
    words = read_srun(["--jobid", "7", "bash", "-c", "$LAUNCHER --node_rank $SLURM_PROCID ${CMD}"])
    line = LaunchLine(9, ("srun", "bash", "-c", "'$LAUNCHER $CMD'"), "it starts a launcher")
    environ = {"SLURM_NTASKS": "2", "CMD": "train.py"}

    def kind(launcher: str) -> Kind:
        return decide(words, script_of(environ | {"LAUNCHER": launcher}, 2, line), (9,), text_of).kind

    assert kind("python3 -u -m torch.distributed.launch --nnodes 2") is LAUNCHER
    assert kind("python3 -u") is RANKS
    assert kind("echo") is HELPER
    assert decide(words, script_of(environ, 2, line), (9,), text_of).kind is HELPER, "no such variable"


def test_a_line_that_the_user_names_is_the_only_launch() -> None:
    named = Script(2, launch=LaunchLine(9, ("start_training",), NAMED_BY_USER))

    def kind(*words: str, lines: tuple[int, ...]) -> Kind:
        return decide(read_srun(words), named, lines, text_of).kind

    assert kind("./program", lines=(4, 9)) is RANKS
    assert kind("torchrun", "x", lines=(9,)) is LAUNCHER
    assert kind("torchrun", "x", lines=(8,)) is HELPER
    assert kind("python", "x", lines=()) is RANKS, "another script, which line 9 has started, calls"


def test_a_helper_with_a_task_on_every_node_is_known() -> None:
    assert found("cp", "a", "/tmp", tasks=4) == Decision(HELPER, 2, everywhere=True)
    assert found("--ntasks-per-node=1", "-n2", "cp", "a", "/tmp", tasks=4) == Decision(HELPER, 1, everywhere=True)
    for words in (("-n1",), ("-N1",), ("-w", "n[0-1]"), ("-x", "n1"), ("-r1",)):
        assert not found(*words, "cp", "a", "/tmp", tasks=4).everywhere, words
    one = Script(1)
    assert decide(read_srun(["cp", "a", "/tmp"]), one, (), text_of).everywhere
    assert not decide(read_srun(["-N1", "cp", "a", "/tmp"]), one, (), text_of).everywhere, "it asks for one node"


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("-N1", "torchrun", "x"), "it has not as many tasks on each of the 2 nodes"),
        (("-n", "none", "torchrun", "x"), "it has not as many tasks"),
        (("--ntasks-per-node=-1", "torchrun", "x"), "it has not as many tasks"),
        (("--ntasks-per-node=2", "torchrun", "x"), "it starts a launcher 2 times on a node"),
        (("singularity", "exec", "x.sif", "torchrun", "x"), "it runs in a container"),
    ],
)
def test_what_looks_like_a_launch_and_is_none_says_why(words: tuple[str, ...], warning: str) -> None:
    assert found(*words).warning.startswith(warning)


def test_options_are_read_as_srun_reads_them() -> None:
    read = read_srun(("-lN2", "-n", "4", "--cpu-b=none", "--exclusive", "-K", "--tasks-per-node=2", "--", "-x", "y"))
    assert [(option.name, option.value) for option in read.options] == [
        *(("label", None), ("nodes", "2"), ("ntasks", "4"), ("cpu-bind", "none"), ("exclusive", None)),
        *(("kill-on-bad-exit", None), ("ntasks-per-node", "2")),
    ]
    assert read.command == ("-x", "y")


def test_an_option_of_the_site_is_known_from_srun_itself() -> None:
    with pytest.raises(UnknownOption, match="--auto-resume=1"):
        read_srun(("--auto-resume=1", "true"))
    plugins = described("  -N, --nodes=N   number\n      --auto-resume=N   restart\n      --site-mode[=x]  mode\n")
    assert plugins == {"nodes": True, "auto-resume": True, "site-mode": False}
    assert read_srun(("--auto-resume", "1", "--site-mode", "true"), plugins).command == ("true",)
