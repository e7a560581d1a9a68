"""What the name of a checkpoint's folder says: `step_00000123_g4_GANG`, in a store of objects with `.flush7`. Pure: the
coordinator's core reads such names, too.
"""

import re
from typing import NamedTuple

JOB_IS_DONE = "the job is done"
"""The reason of the last flush of a job that has finished, as the manifest has it."""

_FOLDER = re.compile(r"step_(\d{1,18})_g(\d{1,9})(?:_(.+?)(?:\.flush(\d{1,18}))?)?")
"""A user may name any path. No number may be larger than what a message holds."""


class FolderName(NamedTuple):
    """`gang`: empty in a name without a gang. `serial`: the number of the flush; 0: the name has none."""

    step: int
    generation: int
    gang: str
    serial: int


def parse_name(name: str) -> FolderName | None:
    """What the name of a final folder says; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return FolderName(int(found[1]), int(found[2]), found[3] or "", int(found[4] or 0)) if found else None


def parse_path(path: str) -> FolderName | None:
    """What the last name of a path or URL says."""
    return parse_name(path.rstrip("/").rpartition("/")[2])
