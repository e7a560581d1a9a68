"""Durable checkpoints: how their folders are named, and what their manifest says.

A folder `step_00000123_g4_GANG` is a standard torch.distributed.checkpoint of step 123, written by generation 4 of a
gang, with a manifest beside it. The folder gets this name in one rename when all its bytes are on disk. Before, its
name is `.step_00000123_g4_GANG.7.tmp`, where 7 is the serial number of the flush.

Several jobs may share a durable folder. Generations and flushes are counted within a gang, so versions are compared
only within one gang. Between gangs, the checkpoint that was completed last is the newest. Earlier versions of Muster
wrote folder names without a gang; such folders are read too, because their manifests name the gang.

Several users may share it as well, and a group may write to it. Each of them can make any name that is free, and
without the sticky bit rename what others have made. So what is written goes into folders of this user only, and a
checkpoint of another user is never preferred to an own one. Where others can rename, a folder counts only if its
manifest says what its name says.

In a store of objects nothing is renamed. There the final name ends with the number of the flush, as in
`step_00000123_g4_GANG.flush7`, and the metadata is written last (checkpoint/durable/object_store.py).
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from muster.checkpoint.format import folder_names
from muster.checkpoint.format.versions import Version

FOLDER_MODE = 0o755
"""Only the owner may write, whatever the umask: else the checkpoint is not read again (trusted_folder.py)."""

METADATA = ".metadata"
MANIFEST = "manifest.json"

MOST_MANIFEST_BYTES = 64 << 20
"""Far more than the manifest of 100,000 ranks has."""

_WRITTEN = re.compile(
    r"(?:\.metadata|manifest\.json|__\d+_0\.distcp|__\d+\.part|\.failed)(?:\.new)?"
    r"|\.nfs.+"  # what a file server leaves of a removed file that a process has open
)
_DECLARED = re.compile(r"\d+-\d+-.+")
"""A declaration (flush_version.py) is empty. Files with dates in their names have such names, too."""
_ASIDE = re.compile(r"\.(step_.+)\.(\d+)\.tmp")


class ParsedFolderName(NamedTuple):
    """What a folder's name says. `gang` is empty in a name without a gang. `serial`: the number of the flush within the
    gang, which only names in a store of objects have; 0: the name has none."""

    version: Version
    gang: str
    serial: int = 0


def folder_name(version: Version, gang: str, serial: int = 0) -> str:
    """The final name of a version's folder; in a store of objects with the number of the flush."""
    return f"step_{version.step:08}_g{version.generation}_{gang}" + (f".flush{serial}" if serial else "")


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
    found = folder_names.parse_name(name)
    return ParsedFolderName(Version(found.generation, found.step), found.gang, found.serial) if found else None


def is_written_by_a_flush(name: str, size: int) -> bool:
    """Whether a flush writes files of such a name and size."""
    return _WRITTEN.fullmatch(name) is not None or (size == 0 and _DECLARED.fullmatch(name) is not None)


def parse_manifest(text: bytes) -> dict[str, Any]:
    """The manifest; empty: the text is none."""
    try:
        manifest = json.loads(text)
    except ValueError:
        return {}
    return manifest if isinstance(manifest, dict) else {}


def says_its_name(manifest: dict[str, Any], label: ParsedFolderName) -> bool:
    """Whether a manifest names the version, and the gang, that the folder's name does. If not, somebody has renamed the
    folder. Names of earlier versions have no gang."""
    version = (manifest.get("generation"), manifest.get("step"))
    return version == label.version and label.gang in ("", manifest.get("gang"))


def parse_temporary_folder_name(name: str) -> tuple[ParsedFolderName, int] | None:
    """What the name of a temporary folder says, and the serial number of its flush; None for any other name."""
    found = _ASIDE.fullmatch(name)
    label = parse_folder_name(found[1]) if found else None
    return (label, int(found[2])) if found and label else None


@dataclass(frozen=True)
class Manifest:
    """What a folder holds.

    `job`: equal for all runs of a job (gang_ids.job_identity); empty: not known.
    `ranks`: for each rank the digest of its shard, and its file's name, size in bytes and XXH3-128 digest; the size of
    the items in it, and the digest of the digests that follow (block_digests.py). `metadata_bytes` and
    `metadata_xxh3_128`: size and digest of the metadata.
    """

    step: int
    generation: int
    world_size: int
    gang: str
    reason: str
    ranks: dict[str, dict[str, Any]]
    metadata_bytes: int
    metadata_xxh3_128: str
    job: str = ""

    def dump(self) -> bytes:
        """The manifest as JSON."""
        return json.dumps({"format": "torch.distributed.checkpoint", **asdict(self)}, indent=1).encode() + b"\n"

    def matches(self, existing: dict[str, Any]) -> bool:
        """Whether the manifest `existing` names the same bytes. The reason of the flush may differ."""
        return all(existing.get(key) == value for key, value in asdict(self).items() if key not in ("reason", "job"))


@dataclass(frozen=True)
class FileDigests:
    """What the manifest says of a file: `data_bytes`, and the digest of the digests of its blocks."""

    data_bytes: int
    blocks_xxh3_128: str


def digests_of_file(manifest: dict[str, Any], name: str) -> FileDigests | None:
    """What a manifest says of a file; None: nothing, as in a checkpoint of an earlier version of Muster."""
    ranks = manifest.get("ranks")
    for entry in ranks.values() if isinstance(ranks, dict) else ():
        if isinstance(entry, dict) and entry.get("file") == name and "blocks_xxh3_128" in entry:
            return FileDigests(int(entry["data_bytes"]), str(entry["blocks_xxh3_128"]))
    return None
