"""Durable checkpoints on disk: how their folders are named and found.

A folder `step_00000123_g4_GANG` is a standard torch.distributed.checkpoint of step 123, written by generation 4 of a
gang, with a manifest beside it. The folder gets this name in one rename when all its bytes are on disk. Before, its
name is `.step_00000123_g4_GANG.7.tmp`, where 7 is the serial number of the flush.

Several jobs may share a durable folder. Generations and flushes are counted within a gang, so versions are compared
only within one gang. Between gangs, the checkpoint that was completed last is the newest. Earlier versions of Muster
wrote folder names without a gang; such folders are read too, because their manifests name the gang.

Several users may share it as well, if it has the sticky bit. Each of them can make any name that is free. So what is
written goes into folders of this user only, and a checkpoint of another user is never preferred to an own one.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.format.versions import Version

FOLDER_MODE = 0o755
"""Only the owner may write, whatever the umask: else the checkpoint is not read again (trusted_folder.py)."""
_FILE_MODE = 0o644

METADATA = ".metadata"
MANIFEST = "manifest.json"

_MOST_MANIFEST_BYTES = 64 << 20
"""Far more than the manifest of 100,000 ranks has."""

_FOLDER = re.compile(r"step_(\d+)_g(\d+)(?:_(.+))?")
_ASIDE = re.compile(r"\.(step_.+)\.(\d+)\.tmp")


class ParsedFolderName(NamedTuple):
    """What a folder's name says. `gang` is empty in a name without a gang."""

    version: Version
    gang: str


def open_for_owner(path: str, flags: int) -> int:
    """The opener of the files of a checkpoint: only the owner may write, whatever the umask."""
    return os.open(path, flags, _FILE_MODE)


def folder_name(version: Version, gang: str) -> str:
    """The final name of a version's folder."""
    return f"step_{version.step:08}_g{version.generation}_{gang}"


def temporary_folder_name(version: Version, gang: str, serial: int) -> str:
    """The folder's name while flush `serial` of the gang writes it."""
    return f".{folder_name(version, gang)}.{serial}.tmp"


def rank_file_name(rank: int) -> str:
    """The file of a rank's published items, as torch names it."""
    return f"__{rank}_0.distcp"


def rank_of_file(name: str) -> int:
    """The rank whose published items are in a file of that name: the reverse of `rank_file_name`."""
    return int(name.removeprefix("__").removesuffix("_0.distcp"))


def parse_folder_name(name: str) -> ParsedFolderName | None:
    """What the name of a final folder says; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return ParsedFolderName(Version(int(found[2]), int(found[1])), found[3] or "") if found else None


def parse_temporary_folder_name(name: str) -> tuple[ParsedFolderName, int] | None:
    """What the name of a temporary folder says, and the serial number of its flush; None for any other name."""
    found = _ASIDE.fullmatch(name)
    label = parse_folder_name(found[1]) if found else None
    return (label, int(found[2])) if found and label else None


@dataclass(frozen=True)
class Manifest:
    """What a folder holds.

    `ranks`: for each rank the digest of its shard, and its file's name, size in bytes and XXH3-128 digest.
    """

    step: int
    generation: int
    world_size: int
    gang: str
    reason: str
    ranks: dict[str, dict[str, Any]]

    def dump(self) -> bytes:
        """The manifest as JSON."""
        return json.dumps({"format": "torch.distributed.checkpoint", **asdict(self)}, indent=1).encode() + b"\n"

    def matches(self, folder: Path) -> bool:
        """Whether the manifest in `folder` names the same bytes. The reason of the flush may differ."""
        existing = _manifest_in(folder)
        return all(existing.get(key) == value for key, value in asdict(self).items() if key != "reason")


def _manifest_in(folder: Path) -> dict[str, Any]:
    """The manifest in a folder; empty if there is none, or if it can't be read."""
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a named pipe
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_MANIFEST_BYTES:
                return {}
            manifest = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def gang_of_manifest(folder: Path) -> str:
    """The gang that the manifest in a folder names; empty if there is none, or if it can't be read."""
    return str(_manifest_in(folder).get("gang", ""))


@dataclass(frozen=True)
class _CompleteCheckpoint:
    """A complete checkpoint. `completed_ns`: when its metadata was written, in ns since 1970. `is_foreign`: it belongs
    to neither this user nor root."""

    path: Path
    gang: str
    version: Version
    completed_ns: int
    is_foreign: bool


def _complete_checkpoints(folder: Path) -> Iterator[_CompleteCheckpoint]:
    for path in folder.iterdir():
        label = parse_folder_name(path.name)
        if label is None or not (path / METADATA).is_file():
            continue
        is_foreign = path.stat().st_uid not in (0, os.geteuid())
        gang = label.gang or ("" if is_foreign else gang_of_manifest(path))
        yield _CompleteCheckpoint(path, gang, label.version, (path / METADATA).stat().st_mtime_ns, is_foreign)


def newest_checkpoint(folder: Path, gang: str = "") -> Path | None:
    """The newest complete checkpoint: `folder` itself if it is one, otherwise the newest one in it.

    Within a gang this is the newest version by (generation, step). Of the newest checkpoints of several gangs it is the
    one that was completed last. A checkpoint of another user counts only where there is no other: whoever loads it is
    told why that is refused.

    Args:
        folder: a checkpoint, or a folder of them.
        gang: if not empty, only checkpoints of this gang count.
    """
    if (folder / METADATA).is_file():
        return folder
    if not folder.is_dir():
        return None
    newest_of_gang: dict[str, _CompleteCheckpoint] = {}
    complete = [one for one in _complete_checkpoints(folder) if gang in ("", one.gang)]
    believable = [one for one in complete if not one.is_foreign]
    for checkpoint in sorted(believable or complete, key=lambda one: one.version):
        newest_of_gang[checkpoint.gang] = checkpoint
    found = newest_of_gang.values()
    return max(found, key=lambda one: (one.completed_ns, one.version, one.path.name)).path if found else None


def finished_steps_of(folder: Path) -> int:
    """The number of finished steps that a checkpoint holds.

    Raises:
        CheckpointError: neither the manifest nor the folder's name says it.
    """
    try:
        return int(_manifest_in(folder)["step"])
    except (KeyError, TypeError, ValueError):
        pass
    label = parse_folder_name(folder.name)
    if label is None:
        raise CheckpointError(f"{folder} has no {MANIFEST}, and its name doesn't say which step it holds")
    return label.version.step
