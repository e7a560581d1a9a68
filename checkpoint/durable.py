"""Durable checkpoints on disk: how their folders are named and found.

A folder `step_00000123_g4` is a standard torch.distributed.checkpoint of step 123, written by generation 4, with a
manifest beside it. It gets that name in one rename, once everything is on disk; before, it is
`.step_00000123_g4.tmp`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.checkpoint.errors import CheckpointError
from muster.checkpoint.shards import Stamp

METADATA = ".metadata"
MANIFEST = "manifest.json"

_FOLDER = re.compile(r"step_(\d+)_g(\d+)")
_ASIDE = re.compile(r"\.step_(\d+)_g(\d+)\.tmp")


def folder_name(stamp: Stamp) -> str:
    """The final name of a version's folder."""
    return f"step_{stamp.step:08}_g{stamp.generation}"


def aside_name(stamp: Stamp) -> str:
    """The name while it is being written."""
    return f".{folder_name(stamp)}.tmp"


def file_name(rank: int) -> str:
    """The file of a rank's published items, as torch names it."""
    return f"__{rank}_0.distcp"


def stamp_of_folder(name: str) -> Stamp | None:
    """The version of a final folder; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return Stamp(int(found[2]), int(found[1])) if found else None


def stamp_of_aside(name: str) -> Stamp | None:
    """The version of a folder that is being written, or was given up; None for any other name."""
    found = _ASIDE.fullmatch(name)
    return Stamp(int(found[2]), int(found[1])) if found else None


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
        return json.dumps({"format": "torch.distributed.checkpoint", **self.__dict__}, indent=1).encode() + b"\n"


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint: `folder` itself where it is one, else the newest in it by (generation, step)."""
    if (folder / METADATA).is_file():
        return folder
    if not folder.is_dir():
        return None
    found = [(stamp, p) for p in folder.iterdir() if (stamp := stamp_of_folder(p.name)) and (p / METADATA).is_file()]
    return max(found)[1] if found else None


def step_of(folder: Path) -> int:
    """The number of finished steps that a checkpoint holds.

    Raises:
        CheckpointError: neither its manifest nor its name says so.
    """
    try:
        return int(json.loads((folder / MANIFEST).read_bytes())["step"])
    except (OSError, ValueError, KeyError):
        pass
    stamp = stamp_of_folder(folder.name)
    if stamp is None:
        raise CheckpointError(f"{folder} has no {MANIFEST}, and its name doesn't say which step it holds")
    return stamp.step
