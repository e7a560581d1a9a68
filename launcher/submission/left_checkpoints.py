"""What earlier runs have left in a durable folder, as far as this host sees it. All functions block, as storage does.

They raise OSError if a place can't be read, and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from muster.checkpoint.format.folder_names import JOB_IS_DONE, parse_path
from muster.daemon.transport.gang_ids import job_identity, name_of
from muster.v1.common_pb2 import JobSpec


@dataclass(frozen=True, slots=True)
class Left:
    """The newest checkpoint of a job: of an earlier run of it if `is_same`, else of one that only has its name.

    `is_done`: the run had finished when it wrote that.
    """

    path: str
    is_same: bool
    is_done: bool


def newest_left(path: str) -> str:
    """The newest checkpoint of the gang that has written the checkpoint `path`. Empty: this host sees that none is
    left. `path` itself if this host does not see the place."""
    from muster.checkpoint.durable import newest  # few jobs need it

    place, label = os.path.dirname(path), parse_path(path)
    if "://" in path or not os.path.isdir(place):
        return path
    if label is None or not label.gang:
        return path if newest.is_complete(path) else ""
    return newest.newest_checkpoint(place, label.gang) or ""


def is_no_checkpoint(path: str) -> bool:
    """Whether this host sees the place of `path`, and no complete checkpoint there."""
    from muster.checkpoint.durable import newest  # few jobs need it

    return os.path.isdir(os.path.dirname(path)) and not newest.is_complete(path)


def left_in_folder(spec: JobSpec) -> Left | None:
    """The newest checkpoint of an earlier run of the job in its durable folder, else of another job of its name; None:
    there is neither, or this host does not see the folder."""
    folder, identity, other = spec.durable_dir, job_identity(spec), None
    if not folder or "://" in folder or not os.path.isdir(folder):
        return None
    from muster.checkpoint.durable import newest  # few jobs need it

    for path, manifest in newest.last_completed_first(folder, lambda gang: name_of(gang) == spec.name):
        is_done = str(manifest.get("reason")).startswith(JOB_IS_DONE)
        if manifest.get("job") == identity:
            return Left(path, is_same=True, is_done=is_done)
        other = other or Left(path, is_same=False, is_done=is_done)
    return other
