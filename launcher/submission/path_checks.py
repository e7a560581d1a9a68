"""What this host can see of a job's paths before the job is queued: its folders, its program, its script.

A path is judged only where all hosts see the same: on a network file system, or on the mount of run_dir, which must be
shared. Elsewhere compute nodes may have what this host lacks: then it is said and not refused.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.host.held_folder import others_can_lay_links
from muster.launcher.errors import WrongInput
from muster.v1.common_pb2 import JobSpec

MOUNTS = Path("/proc/self/mounts")
_NETWORK = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs", "cifs", "smb3",
        "panfs", "wekafs", "pvfs2", "afs",
    }
)  # fmt: skip
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_INTERPRETER = re.compile(r"(python(3(\.\d+)?)?|bash|sh)")


@dataclass(frozen=True, slots=True)
class _Mount:
    folder: str
    kind: str


def check_paths(spec: JobSpec, mounts: str) -> list[str]:
    """Checks the paths of a job. Returns what is doubtful, one line each.

    Args:
        mounts: the text of /proc/self/mounts.

    Raises:
        WrongInput: a path is wrong on every node. The message names all of them.
    """
    shared = _mount_of(Path(spec.run_dir), mounts)
    wrong, doubtful = list(_problems_of_run_dir(Path(spec.run_dir), shared)), []
    for what, path, problem in missing(spec):
        mount = _mount_of(path, mounts)
        if mount.kind in _NETWORK or (mount == shared and mount.folder != "/"):
            wrong.append(f"{what} {problem}")
        else:
            doubtful.append(f"{what} {problem} on this host: the nodes must have it")
    if wrong:
        raise WrongInput("; ".join(wrong), "Nothing was queued")
    return doubtful


def doubt_of_output(run_dir: Path) -> str:
    """Whether others can lead Slurm's output to other files of the user, in words; empty: they can't."""
    status = run_dir.stat()
    if not others_can_lay_links(status) or (status.st_uid == os.geteuid() and _only_own_group_writes(status)):
        return ""
    return (
        f"run_dir = {str(run_dir)!r} (mode {stat.S_IMODE(status.st_mode):04o}) lets others lay links there, and Slurm "
        "follows them when it writes slurm-JOB.out as you: name a folder that only you can write to"
    )


def _only_own_group_writes(status: os.stat_result) -> bool:
    """Whether those who may write are a group with the name of this user, which distributions make for one user."""
    try:
        name = grp.getgrgid(status.st_gid).gr_name
        return not status.st_mode & stat.S_IWOTH and name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # the name service does not have one of them
        return False


def _problems_of_run_dir(folder: Path, mount: _Mount) -> Iterator[str]:
    temporary = any(folder.is_relative_to(place) for place in _TEMPORARY) and mount.kind not in _NETWORK
    if temporary:
        yield f"run_dir = {str(folder)!r} is local to each host ({mount.kind}): name a folder that all nodes share"
    elif not os.path.exists(top := Path(*folder.parts[:2])):
        yield f"run_dir = {str(folder)!r}: {top} does not exist: is it misspelt?"


def missing(spec: JobSpec) -> Iterator[tuple[str, Path, str]]:
    """What is named, its path, and what is wrong with it on this host."""
    folder = Path(spec.work_dir)
    if not os.path.isdir(folder):
        yield f"work_dir = {spec.work_dir!r}", folder, _why_absent(folder) or "is not a folder"
    for what, word, right, verb in _files(spec.command):
        path = folder / word
        if absent := _why_absent(path):
            yield f"command: the {what} {path}", path, absent
        elif path.is_dir() or not os.access(path, right):
            yield f"command: the {what} {path}", path, "is a folder" if path.is_dir() else f"can't be {verb} by you"


def _why_absent(path: Path) -> str:
    """Why a path leads to nothing; empty: it leads to something. A folder above may be closed to this user."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return "does not exist"
    except OSError as error:
        return f"can't be reached: {error.strerror}"
    return ""


def _files(command: Sequence[str]) -> Iterator[tuple[str, str, int, str]]:
    """The program if it is a path, and the script that a known interpreter is given."""
    program, *words = command
    if "/" in program:
        yield "program", program, os.X_OK, "run"
    if not _INTERPRETER.fullmatch(program.rpartition("/")[2]):
        return
    for word in words:
        if word.startswith("-"):
            if word not in ("-u", "-O", "-B", "-E", "-I", "-P", "-s"):
                return  # -m, -c, or an option with a value: the next word may be no script
        else:
            yield "script", word, os.R_OK, "read"
            return


def _mount_of(path: Path, mounts: str) -> _Mount:
    """The mount that holds the path, or that would hold it."""
    place = Path(os.path.realpath(path))
    found = _Mount("/", "")
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        folder = fields[1].replace("\\040", " ")
        if place.is_relative_to(folder) and len(folder) >= len(found.folder):
            found = _Mount(folder, fields[2])
    return found
