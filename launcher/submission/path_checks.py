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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from muster.daemon.agent.start_checks.job_paths import Missing, find_missing, find_program
from muster.daemon.host.held_folder import others_can_lay_links
from muster.launcher.errors import WrongInput
from muster.v1.common_pb2 import JobSpec

_PYTHON = re.compile(r"python([23])\.(\d+)")
MOUNTS = Path("/proc/self/mounts")
_NETWORK = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs", "cifs", "smb3",
        "panfs", "wekafs", "pvfs2", "afs",
    }
)  # fmt: skip
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


@dataclass(frozen=True, slots=True)
class _Mount:
    folder: str
    kind: str


def check_paths(spec: JobSpec, mounts: str, search_path: str, beside: Path) -> list[str]:
    """Checks the paths of a job. Returns what is doubtful, one line each.

    Args:
        mounts: the text of /proc/self/mounts.
        search_path: PATH of this shell, which the job inherits.
        beside: the folder of job.toml.

    Raises:
        WrongInput: a path is wrong on every node. The message names all of them.
    """
    shared = _mount_of(Path(spec.run_dir), mounts)
    wrong = list(_problems_of_run_dir(Path(spec.run_dir), shared))
    doubtful: list[str] = []
    problem, everywhere = _problem_of_durable_dir(spec, mounts)
    if problem:
        (wrong if everywhere else doubtful).append(problem)
    search_path = spec.env.get("PATH", search_path)
    # The command of a user's own batch script is known when it runs.
    for missing in find_missing(spec.work_dir, spec.command, search_path) if spec.command else ():
        missing = _with_place_beside(missing, spec, beside)
        mount = _mount_of(missing.path, mounts)
        if missing.path.is_absolute() and (mount.kind in _NETWORK or (mount == shared and mount.folder != "/")):
            wrong.append(missing.full)
        else:
            doubtful.append(f"{missing.words} on this host: the nodes must have it")
    if wrong:
        raise WrongInput("; ".join(wrong), "Nothing was queued")
    return [*doubtful, *_doubt_of_python(spec, search_path)]


def _doubt_of_python(spec: JobSpec, search_path: str) -> Iterator[str]:
    """Says that an interpreter is too old for a zygote, as far as its file's name shows."""
    program = spec.command[0] if spec.command else ""
    found = find_program(program, search_path, spec.work_dir) if program else None
    version = _PYTHON.fullmatch(os.path.basename(os.path.realpath(found))) if found else None
    if version and (int(version[1]), int(version[2])) < (3, 9):
        yield (
            f"command: {program} is Python {version[1]}.{version[2]}: each restart of a rank takes the time of its "
            "imports. From Python 3.9 on, a process that has imported the same waits for it"
        )


def _with_place_beside(missing: Missing, spec: JobSpec, beside: Path) -> Missing:
    """A relative name counts from work_dir, which is the folder of `muster submit`: job.toml may be in another one."""
    for word in spec.command:
        other = beside / word
        if not os.path.isabs(word) and Path(spec.work_dir, word) == missing.path and other.is_file():
            return replace(missing, right=f"{other} does: submit from {beside}, or set work_dir")
    return missing


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
    if _is_temporary(folder, mount):
        yield f"run_dir = {str(folder)!r} is local to each host ({mount.kind}): name a folder that all share: --run-dir"
    elif not os.path.exists(top := Path(*folder.parts[:2])):
        yield f"run_dir = {str(folder)!r}: {top} does not exist: is it misspelt?"


def _problem_of_durable_dir(spec: JobSpec, mounts: str) -> tuple[str, bool]:
    """What is the matter with durable_dir, and whether it is so on all nodes.

    Nodes may have a store that this host lacks. A job of one node can use a folder of that node: the next job finds its
    checkpoints if it gets the same one.
    """
    if not spec.durable_dir or "://" in spec.durable_dir:
        return "", False
    folder = Path(spec.durable_dir)
    mount = _mount_of(folder, mounts)
    if _is_temporary(folder, mount):
        said = f"durable_dir = {str(folder)!r} is local to each host ({mount.kind}): name a folder that all nodes share"
        return said, spec.nodes + spec.spares > 1
    top = Path(*folder.parts[:2])
    return ("" if top.exists() else f"durable_dir = {str(folder)!r}: this host has no {top}: is it misspelt?"), False


def _is_temporary(folder: Path, mount: _Mount) -> bool:
    return any(folder.is_relative_to(place) for place in _TEMPORARY) and mount.kind not in _NETWORK


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
