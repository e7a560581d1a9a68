"""What a call of srun in a user's batch script knows of its job: the variables that `muster-agent shell` has set."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.agent.user_script import own_nodes
from muster.daemon.agent.user_script.own_nodes import Nodes
from muster.daemon.host.plain_text import plain
from muster.slurm.client.launch_settings import (
    ALLOCATION,
    JOB,
    PROLOG,
    SETTINGS,
    LaunchSettings,
    WrongSettings,
    program_folder,
    prolog_program,
    read,
)
from muster.slurm.client.srun_options import SrunWords

SHELL = "MUSTER_SHELL"
"""The process of the script, and its standard output at its start, as "PID DEVICE INODE"."""
LINES = "MUSTER_LINES"
"""The line of the script that calls srun, and those that call the functions around it; empty: not known."""
ENDED = "MUSTER_ENDED"
"""The exit code of this call, if its process was killed and this one takes its place; else empty."""
_OWN = (SETTINGS, ALLOCATION, SHELL, JOB, LINES, ENDED, "BASH_FUNC_srun%%")
_SHOWN_CHARS = 60
KEPT = "MUSTER_KEPT_"
"""In front of a variable that the program srun has taken away from this process, and gives back to what it starts."""
_NO_COMMAND = re.compile(r"\s*(#.*|wait\b.*|exit( \$\?)?|fi|done|esac|\}|;;)?\s*")
"""A line behind the launch that does nothing."""


class NoScriptJob(Exception):
    """This is no call in a job that `muster submit` has queued. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """The job of a script. `restarts`: how often Slurm has restarted it."""

    settings: LaunchSettings
    gang: str
    nodes: Nodes
    job_id: int
    restarts: int
    lines: tuple[int, ...]
    """The line that calls srun, and those that call the functions around it. Empty: not known."""
    shell: int
    """The process of the script; 0: not known."""

    @property
    def line(self) -> int:
        """The line in the text of the script, outside of functions; 0: not known."""
        return self.lines[-1] if self.lines else 0


def gang_of(settings: LaunchSettings, environ: Mapping[str, str]) -> str:
    """The gang id of the job; each task of an array is a gang of its own."""
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{settings.gang}_{task}" if task else settings.gang


def array_task(environ: Mapping[str, str]) -> str:
    """The name that Slurm shows of a task of an array job: "42_1"; empty: the job is none."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else ""


def load(path: str) -> LaunchSettings:
    """Reads the launch settings.

    Raises:
        NoScriptJob: they can't be read.
    """
    try:
        return read(Path(path).read_text())
    except OSError as error:
        raise NoScriptJob(f"the launch settings {path} can't be read: {error.strerror}") from None
    except (WrongSettings, UnicodeDecodeError) as error:
        raise NoScriptJob(f"{path}: {error}") from None


def script_job(environ: Mapping[str, str]) -> ScriptJob:
    """Reads what the variables name.

    Raises:
        NoScriptJob: a variable is missing or wrong, or a file can't be read.
    """
    if not (path := environ.get(SETTINGS, "")):
        raise NoScriptJob(f"{SETTINGS} is not set: this command is for a script that `muster submit` has queued")
    if not environ.get("SLURM_JOB_ID"):
        raise NoScriptJob("SLURM_JOB_ID is not set: this command runs in a job of Slurm")
    settings = load(path)
    allocation = [name for name in environ.get(ALLOCATION, "").split(",") if name]
    return ScriptJob(
        settings=settings,
        gang=gang_of(settings, environ),
        nodes=own_nodes.divide(allocation, settings.spares),
        job_id=_number("SLURM_JOB_ID", environ),
        restarts=_number("SLURM_RESTART_COUNT", environ),
        lines=tuple(int(line) for line in environ.get(LINES, "").split() if int(line)),
        shell=int(environ.get(SHELL, "").partition(" ")[0] or 0),
    )


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name) or "0"
    if not text.isdecimal():
        raise NoScriptJob(f"{name}={text!r} is no number: the script must leave it as Slurm has set it")
    return int(text)


def as_sbatch_gives(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as the script would have it without Muster."""
    kept = {name.removeprefix(KEPT): value for name, value in environ.items() if name not in _OWN}
    if SETTINGS in environ and "PATH" in kept:
        if kept.get(PROLOG) == prolog_program(environ[SETTINGS]):
            del kept[PROLOG]
        own = program_folder(environ[SETTINGS])
        kept["PATH"] = os.pathsep.join(folder for folder in kept["PATH"].split(os.pathsep) if folder != own)
    return kept


def is_of_another(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in another job than the script, or knows nothing of the script but PATH."""
    known = JOB in environ and environ[JOB] == environ.get("SLURM_JOB_ID")
    return SETTINGS in environ and not known


def describe_shell(pid: int) -> str:
    """The value of SHELL for the process `pid`."""
    try:
        output = os.stat(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
    return f"{pid} {output.st_dev} {output.st_ino}"


def output_is_read(environ: Mapping[str, str]) -> bool:
    """Whether the script uses what this call prints: a pipe or a file of its own, in place of the script's output."""
    try:
        own = os.fstat(1)
    except OSError:
        return False
    if not (stat.S_ISFIFO(own.st_mode) or stat.S_ISREG(own.st_mode)):
        return False
    pid, _, at_start = environ.get(SHELL, "").partition(" ")
    now = describe_shell(int(pid or 0)).partition(" ")[2]
    # A function with `> file` changes the output of the shell itself for a moment, so that `now` says nothing of files.
    return f"{own.st_dev} {own.st_ino}" != (at_start if stat.S_ISREG(own.st_mode) else now)


def output_file(shell: int) -> str:
    """The file to which this process writes, or the script itself if this process writes to a pipe; empty: none."""
    for process in ("self", str(shell)):
        try:
            path = os.readlink(f"/proc/{process}/fd/1")
            if stat.S_ISREG(os.stat(path).st_mode):
                return path
        except OSError:
            pass
    return ""


def script_text(shell: int) -> str:
    """The text of the script that the process `shell` runs; "" if that can't be seen."""
    try:
        words = Path(f"/proc/{shell}/cmdline").read_bytes().split(b"\0")
        found = next((word for word in words[1:] if word and not word.startswith(b"-")), b"")
        return Path(os.fsdecode(found)).read_text(errors="replace") if found else ""
    except OSError:
        return ""


def goes_on(text: str, line: int) -> bool:
    """Whether a script has commands behind the one that begins at `line`, or nobody knows."""
    rest = text.splitlines()[line - 1 :] if line else []
    while rest and rest[0].endswith("\\"):
        rest.pop(0)
    return not rest or any(not _NO_COMMAND.fullmatch(one) for one in rest[1:])


def mark(job: ScriptJob) -> Path:
    """The file that names the newest run of the job that has launched its gang."""
    return Path(job.settings.spec.run_dir) / f"{job.gang}.launched"


def run_of(job: ScriptJob) -> str:
    """The text of the mark for this run of the job."""
    return f"{job.job_id} {job.restarts}"


def was_launched(job: ScriptJob) -> bool:
    """Whether this run of the script has launched the gang."""
    try:
        return mark(job).read_text() == run_of(job)
    except OSError:
        return False


def describe(job: ScriptJob, words: SrunWords) -> str:
    """The call, for a message."""
    at = f"line {job.line}, " if job.line else ""
    text = plain(" ".join(words.command))
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"{at}srun {shown}"
