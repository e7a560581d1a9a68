"""Durable checkpoints on disk: how their folders are named and found.

A folder `step_00000123_g4_GANG` is a standard torch.distributed.checkpoint of step 123, written by generation 4 of a
gang, with a manifest beside it. It gets that name in one rename, once everything is on disk; before, it is
`.step_00000123_g4_GANG.7.tmp`, where 7 is the flush's serial.

Jobs may share the folder that these stand in. Generations and flushes are counted within a gang, so they are compared
only within one: between gangs, what was completed last is the newest. Folders of before, whose names have no gang, are
read as well: their manifests name it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.format.versions import Version

METADATA = ".metadata"
MANIFEST = "manifest.json"

_FOLDER = re.compile(r"step_(\d+)_g(\d+)(?:_(.+))?")
_ASIDE = re.compile(r"\.(step_.+)\.(\d+)\.tmp")


class ParsedFolderName(NamedTuple):
    """What a folder's name says. `gang` is empty in names of before."""

    version: Version
    gang: str


def folder_name(version: Version, gang: str) -> str:
    """The final name of a version's folder."""
    return f"step_{version.step:08}_g{version.generation}_{gang}"


def temporary_folder_name(version: Version, gang: str, serial: int) -> str:
    """The name while flush `serial` of the gang writes it."""
    return f".{folder_name(version, gang)}.{serial}.tmp"


def rank_file_name(rank: int) -> str:
    """The file of a rank's published items, as torch names it."""
    return f"__{rank}_0.distcp"


def parse_folder_name(name: str) -> ParsedFolderName | None:
    """What the name of a final folder says; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return ParsedFolderName(Version(int(found[2]), int(found[1])), found[3] or "") if found else None


def parse_temporary_folder_name(name: str) -> tuple[ParsedFolderName, int] | None:
    """The same of a folder that is being written, or was given up, and its flush's serial; None for any other name."""
    found = _ASIDE.fullmatch(name)
    label = parse_folder_name(found[1]) if found else None
    return (label, int(found[2])) if found and label else None


@dataclass(frozen=True)
class Manifest:
    """What a folder holds. `ranks`: for each rank its shard's digest, and its file's name, bytes and XXH3-128."""

    step: int
    generation: int
    world_size: int
    gang: str
    reason: str
    ranks: dict[str, dict[str, Any]]

    def dump(self) -> bytes:
        """As JSON for people and programs."""
        return json.dumps({"format": "torch.distributed.checkpoint", **asdict(self)}, indent=1).encode() + b"\n"

    def matches(self, folder: Path) -> bool:
        """Whether `folder` holds these very bytes, by its own manifest. Why they were written is no matter."""
        there, mine = _manifest_in(folder), asdict(self)
        return all(there.get(key) == value for key, value in mine.items() if key != "reason")


def _manifest_in(folder: Path) -> dict[str, Any]:
    """What the manifest in a folder says; empty where it has none that can be read."""
    try:
        said = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


@dataclass(frozen=True)
class _Whole:
    """A whole checkpoint in a folder of them. `completed`: when its metadata was written, in ns since 1970."""

    path: Path
    gang: str
    version: Version
    completed: int


def _whole_in(folder: Path) -> Iterator[_Whole]:
    for path in folder.iterdir():
        label = parse_folder_name(path.name)
        if label is None or not (path / METADATA).is_file():
            continue
        gang = label.gang or str(_manifest_in(path).get("gang", ""))
        yield _Whole(path, gang, label.version, (path / METADATA).stat().st_mtime_ns)


def newest_checkpoint(folder: Path, gang: str = "") -> Path | None:
    """The newest whole checkpoint: `folder` itself where it is one, else the newest in it.

    Of one gang that is the newest version, by (generation, step); of several gangs' newest ones, the one that was
    completed last.

    Args:
        folder: a checkpoint, or a folder of them.
        gang: where given, only its checkpoints are looked at.
    """
    if (folder / METADATA).is_file():
        return folder
    if not folder.is_dir():
        return None
    of_gang: dict[str, _Whole] = {}
    for one in sorted(_whole_in(folder), key=lambda w: w.version):
        of_gang[one.gang] = one
    found = [one for one in of_gang.values() if gang in ("", one.gang)]
    return max(found, key=lambda w: (w.completed, w.version, w.path.name)).path if found else None


def finished_steps_of(folder: Path) -> int:
    """The number of finished steps that a checkpoint holds.

    Raises:
        CheckpointError: neither its manifest nor its name says so.
    """
    try:
        return int(_manifest_in(folder)["step"])
    except (KeyError, TypeError, ValueError):
        pass
    label = parse_folder_name(folder.name)
    if label is None:
        raise CheckpointError(f"{folder} has no {MANIFEST}, and its name doesn't say which step it holds")
    return label.version.step
