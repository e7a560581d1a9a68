"""A user's batch script in its own bash, with a program in the place of Slurm's srun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.daemon.agent.user_script import script_job
from muster.slurm.client.launch_settings import LaunchSettings, settings_file
from muster.v1.common_pb2 import JobSpec

AGENT = Path(sys.prefix) / "bin" / "muster-agent"
SRUN = """#!/bin/bash
echo "srun $* on $SLURM_NNODES of $SLURM_JOB_NODELIST"
case "$*" in *serve*)
    trap 'echo "srun got USR1"; echo again > "$READY"' USR1
    trap 'echo "srun got TERM"; exit 143' TERM
    echo ready > "$READY"
    while :; do read -t 0.05 <> "$WAITS"; done;;
esac
exit 5
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_NTASKS": "6"}


class Shell:
    """Runs scripts in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        self.srun = folder / "bin" / "srun"
        self.srun.write_text(SRUN)
        self.srun.chmod(0o755)
        for name in ("ready", "waits"):
            os.mkfifo(folder / name)
        settings = LaunchSettings("g", "", "/opt/muster-agent", 1, JobSpec(name="g", run_dir=str(folder)))
        path = settings_file(str(folder), "g")
        Path(path).write_text(settings.to_json())
        (folder / "bash_env.sh").write_text(f'unset BASH_ENV\\neval "$({AGENT} shell {path})"\\n'.replace("\\n", "\n"))

    def run(self, text: str, options: Sequence[str] = ()) -> list[str]:
        """The lines that the script prints, on both outputs."""
        script = self.folder / "script.sh"
        script.write_text(text)
        environ = {
            **os.environ,
            **JOB,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "BASH_ENV": f"{self.folder}/bash_env.sh",
            "READY": f"{self.folder}/ready",
            "WAITS": f"{self.folder}/waits",
        }
        with (self.folder / "output").open("w+") as output:
            subprocess.run(
                ["bash", *options, script], env=environ, stdout=output, stderr=output, timeout=60, cwd=self.folder
            )
            output.seek(0)
            return output.read().splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_helper_has_its_exit_code_and_runs_on_spares_only_if_nobody_reads_what_it_prints(shell: Shell) -> None:
    script = """
    echo "$SLURM_NNODES $SLURM_JOB_NODELIST $SLURM_NTASKS"
    srun -l stage || echo "code $?"
    echo "read: $(srun hostname)"
    srun hostname > hosts; cat hosts
    srun hostname | cat
    srun -N1 hostname > /dev/null
    srun stage > /dev/null; echo "code $?"
    """
    own = "srun --exclude=n2 hostname on 2 of n[0-1]"
    assert shell.run(script, ["-u"]) == [
        "2 n[0-1] 4",
        "srun -l --nodes=3 --ntasks=6 stage on 3 of n[0-2]",
        "code 5",
        f"read: {own}",
        own,
        own,
        "code 5",
    ]


@pytest.mark.parametrize("call", ["srun -N1 a", "srun -N1 a | cat"])
def test_a_helper_that_is_killed_runs_once(shell: Shell, call: str) -> None:
    shell.srun.write_text("#!/bin/bash\necho once\nkill -KILL $$\n")
    said = shell.run(f"{call}\necho code ${{PIPESTATUS[0]}}")
    assert [line for line in said if "Killed" not in line] == ["once", "code 137"]


def test_functions_that_the_script_exports_reach_the_tasks_of_srun(shell: Shell) -> None:
    shell.srun.write_text("#!/bin/bash\nexec ${@:$#-2}\n")
    assert shell.run("prepare() { echo prepared; }; export -f prepare\nsrun -N1 bash -c prepare") == ["prepared"]


def test_in_a_job_that_the_script_queues_srun_is_slurms_own(shell: Shell) -> None:
    script = """
    export SLURM_JOB_ID=8 SLURM_NNODES=1 SLURM_JOB_NODELIST=n9
    srun -N1 torchrun train.py
    env srun hostname; echo "code $?"
    rm -r g.bin; bash -c 'srun -l a'
    """
    assert shell.run(script) == [
        "srun -N1 torchrun train.py on 1 of n9",
        "srun hostname on 1 of n9",
        "code 5",
        "srun -l a on 1 of n9",
    ]


def test_where_only_path_is_left_of_the_environment_srun_is_slurms_own(shell: Shell) -> None:
    assert shell.run("env -i PATH=$PATH srun -N1 a; echo $?") == ["srun -N1 a on  of ", "5"]


@pytest.mark.parametrize("between", [",", "", "\n"])
def test_the_scripts_own_separator_of_words_does_not_matter(shell: Shell, between: str) -> None:
    script = f"train() {{ srun -N1 a; }}\nIFS='{between}'\ntrain\n"
    assert shell.run(script) == ["srun -N1 --exclude=n2 a on 2 of n[0-1]"]


def test_a_signal_for_a_call_in_the_background_reaches_srun(shell: Shell) -> None:
    script = """
    trap 'kill -USR1 $call' USR1
    srun -N1 serve &
    call=$!
    until read -r _ < "$READY"; do :; done  # nothing, while srun still closes it
    kill -USR1 $$
    until read -r _ < "$READY"; do :; done
    kill -TERM $call
    wait $call; echo "code $?"
    """
    assert shell.run(script)[1:] == ["srun got USR1", "srun got TERM", "code 143"]


def test_libraries_that_the_script_has_chosen_reach_srun_alone(shell: Shell) -> None:
    (shell.folder / "libz.so.1").write_text("no library")
    shell.srun.write_text("#!/bin/bash\necho srun with $LD_LIBRARY_PATH $MUSTER_KEPT_LD_LIBRARY_PATH\n")
    script = f"export LD_LIBRARY_PATH={shell.folder}; srun -N1 a"
    assert shell.run(script) == [f"srun with {shell.folder}"]


def test_a_step_that_comes_past_muster_is_said_if_it_starts_ranks(shell: Shell) -> None:
    """Slurm's srun starts what SLURM_PROLOG names before its step, with the words of the step."""
    for name, text in {
        "past/srun": '"$SLURM_PROLOG" "$@"\n' + f"{shell.srun} with $SLURM_PROLOG",
        "bin/scontrol": f"echo 'SrunPortRange = 0-0'\necho 'SrunProlog              = {shell.folder}/site'",
        "site": 'echo "the site sees $*"',
    }.items():
        (shell.folder / name).parent.mkdir(exist_ok=True)
        (shell.folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (shell.folder / name).chmod(0o755)
    script = f"""
    PAST={shell.folder}/past/srun
    $PAST python3 train.py
    $PAST hostname
    LAUNCH=torchrun $PAST bash -c '$LAUNCH train.py'
    SLURM_NTASKS=1 $PAST python3 one
    srun -N1 hostname
    SLURM_JOB_ID=8 $PAST torchrun a
    """
    why = "its srun was called by a path, or without the PATH and function of Muster: write srun"
    goes_on = f"srun with {shell.folder}/g.bin/prolog on 2 of n[0-1]"
    assert shell.run(script) == [
        f"muster: not supervised: srun python3 train.py: {why}. It runs as it is written",
        *("the site sees python3 train.py", goes_on),
        *("the site sees hostname", goes_on),
        f"muster: not supervised: srun bash -c $LAUNCH train.py: {why}. It runs as it is written",
        *("the site sees bash -c $LAUNCH train.py", goes_on),
        *("the site sees python3 one", goes_on),
        "srun -N1 --exclude=n2 hostname on 2 of n[0-1]",
        *("the site sees torchrun a", goes_on),
    ]


def test_no_srun_of_a_helper_starts_what_looks_for_steps_past_muster(shell: Shell) -> None:
    shell.srun.write_text('#!/bin/bash\necho "prolog: $SLURM_PROLOG"\n')
    assert shell.run("srun -N1 a") == ["prolog: "]
    assert shell.run("export SLURM_PROLOG=mine\nsrun -N1 a") == ["prolog: mine"]


def test_srun_is_found_after_another_folder_was_put_first(shell: Shell) -> None:
    script = f"""
    export PATH={shell.srun.parent}:$PATH
    srun -N1 a
    bash -c 'srun -N1 b'
    set -x; srun -N1 c
    """
    one, other, *traced = shell.run(script)
    assert (one, other) == ("srun -N1 --exclude=n2 a on 2 of n[0-1]", "srun -N1 --exclude=n2 b on 2 of n[0-1]")
    assert traced == ["+ srun -N1 c", "srun -N1 --exclude=n2 c on 2 of n[0-1]"]


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("gone; rmdir ../gone", "the working folder of the script has been removed"),
        ("$'caf\\xe9'", r"'{folder}/caf\udce9/' is no UTF-8"),
    ],
)
def test_what_no_gang_can_have_is_said(shell: Shell, folder: str, says: str) -> None:
    made = folder.partition(";")[0]
    said = shell.run(f"mkdir {made}; cd {folder}\nsrun --ntasks-per-node=1 -n2 torchrun\necho code $?")
    assert said[-2:] == [f"muster: the launch can't become a gang: {says.format(folder=shell.folder)}", "code 64"]


def test_a_count_of_restarts_that_is_no_number_is_said(shell: Shell) -> None:
    said = shell.run("export SLURM_RESTART_COUNT=abc; srun a; echo code $?")
    assert said[0].startswith("muster-agent: SLURM_RESTART_COUNT='abc' is no number")
    assert said[1:] == ["code 64"]


def test_a_script_that_comes_through_a_pipe_is_left_for_srun(shell: Shell) -> None:
    shell.srun.write_text("#!/bin/bash\necho srun $*; cat\n")
    assert shell.run("echo text | srun -N1 bash /dev/stdin") == ["srun -N1 --exclude=n2 bash /dev/stdin", "text"]


def test_a_helper_has_the_variables_of_the_script(shell: Shell) -> None:
    shell.srun.write_text("#!/bin/bash\necho ${GRPC_VERBOSITY-unset} ${GRPC_SSL_CIPHER_SUITES-unset}\n")
    script = "unset GRPC_VERBOSITY GRPC_SSL_CIPHER_SUITES; srun -N1 a; GRPC_VERBOSITY=INFO srun -N1 a"
    assert shell.run(script) == ["unset unset", "INFO unset"]


def test_an_option_that_srun_does_not_know_reaches_srun(shell: Shell) -> None:
    assert shell.run("srun --no-such=1 torchrun x") == ["srun --no-such=1 torchrun x on 2 of n[0-1]"]


def test_set_e_ends_the_script_at_a_helper_that_fails(shell: Shell) -> None:
    assert shell.run("set -e; srun -N1 a; echo goes on") == ["srun -N1 --exclude=n2 a on 2 of n[0-1]"]


def test_a_launcher_on_one_of_two_nodes_runs_as_written_and_is_said(shell: Shell) -> None:
    said, done = shell.run("srun -N1 torchrun --standalone x")
    assert said == (
        "muster: not supervised: line 1, srun torchrun --standalone x: it has not as many tasks on each of the 2 "
        "nodes. It runs as it is written"
    )
    assert done == "srun -N1 --exclude=n2 torchrun --standalone x on 2 of n[0-1]"


@pytest.mark.parametrize("command", ["a", "torchrun x", "-N2 --ntasks-per-node=1 torchrun x"])
def test_a_call_in_another_job_is_not_this_ones(shell: Shell, command: str) -> None:
    words = f"--jobid=8 {command}"
    assert shell.run(f"srun {words}") == [f"srun {words} on 2 of n[0-1]"]


def test_a_task_of_an_array_may_name_itself(shell: Shell) -> None:
    said = shell.run("export SLURM_ARRAY_JOB_ID=6 SLURM_ARRAY_TASK_ID=1; srun -N1 --jobid=6_1 hostname")
    assert said == ["srun -N1 --jobid=6_1 --exclude=n2 hostname on 2 of n[0-1]"]


def test_a_call_in_a_function_is_named_by_the_line_that_calls_the_function(shell: Shell) -> None:
    script = "train() {\n  srun -N1 torchrun a\n}\n\ntrain\n"
    assert shell.run(script)[0].startswith("muster: not supervised: line 5, srun torchrun a")


@pytest.mark.parametrize(
    ("rest", "goes_on"),
    [
        ("", False),
        ("# done\n\nwait $!\nexit $?\n", False),
        ("fi\n  done\n", False),
        ("echo done\n", True),
        ("srun eval\n", True),
    ],
)
def test_a_script_goes_on_if_commands_are_behind_the_launch(rest: str, goes_on: bool) -> None:
    text = f"#!/bin/bash\nsrun torchrun \\\n  --nnodes 2 \\\n  x\n{rest}"
    assert script_job.goes_on(text, 2) is goes_on
    assert script_job.goes_on(text, 0), "nobody knows"
