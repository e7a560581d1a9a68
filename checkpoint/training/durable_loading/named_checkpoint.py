"""Which durable checkpoint a path leads to. Needs no torch."""

import logging

from muster.checkpoint.durable import locations, newest
from muster.checkpoint.durable.durable_store import FoundFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError

log = logging.getLogger(__name__)

_MOST_NAMED = 4
"""Checkpoints that an error names."""


def find(path: str) -> str | None:
    """The checkpoint that a path leads to; None if the path is empty.

    A folder of checkpoints is none: the newest one in it may be another job's. If the path names a version that is not
    there, a newer version of the same gang beside it is found: a flush of a running gang may write a newer version than
    its order names. A name without a gang leads to no other folder.

    Raises:
        CheckpointError: the path names one checkpoint, and neither that checkpoint nor a newer one is complete.
    """
    if not path:
        return None
    place, name = locations.split(path)
    named = durable_folders.parse_folder_name(name)
    if newest.is_complete(path):
        return path
    newer = newest.newest_checkpoint(place, named.gang) if named is not None and named.gang else None
    label = durable_folders.parse_folder_name(locations.split(newer)[1]) if newer is not None else None
    if label is None or named is None or label.version <= named.version:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {durable_folders.METADATA}")
    return newer


def find_for_script(path: str, gang: str) -> str | None:
    """The checkpoint that a script means by a path: the one that it names, or the newest one of its own in a folder.

    A script that names a folder never gets the state of another job: experiments may share the folder. Whether a job
    goes on from an earlier run of it is decided when it is submitted.

    Args:
        path: a checkpoint, or a place with checkpoints; a path or a URL.
        gang: the gang that the script runs in; empty: none, as under torchrun.

    Raises:
        CheckpointError: the checkpoint that is named is not complete, or a folder holds those of several jobs, and the
            script runs in no gang.
    """
    if durable_folders.parse_folder_name(locations.split(path)[1]) is not None or newest.is_complete(path):
        found = find(path)
        label = durable_folders.parse_folder_name(locations.split(found)[1]) if found is not None else None
        if label is not None and label.gang not in ("", gang):
            log.info("%s, which the script names, is a checkpoint of gang %s", found, label.gang)
        return found
    of_gangs = newest.newest_of_gangs(path)
    if not gang:
        return _of_one_job(path, of_gangs)
    own = [found for name, found in of_gangs.items() if name in ("", gang)]
    if own:
        return locations.join(path, newest.last_completed(own).name)
    if of_gangs:
        log.warning(
            "%s holds checkpoints of other jobs alone, such as %s: none is loaded. To load one, name it",
            path,
            newest.last_completed(of_gangs.values()).name,
        )
    return None


def _of_one_job(path: str, of_gangs: dict[str, FoundFolder]) -> str | None:
    """The checkpoint that was completed last, if all are of one job."""
    if len(of_gangs) > 1:
        store = locations.open_store(path)
        jobs = {newest.manifest_in(store, found.name).get("job") or gang for gang, found in of_gangs.items()}
        if len(jobs) > 1:
            names = sorted(found.name for found in of_gangs.values())
            more = ", ..." if len(names) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{path} holds checkpoints of {len(jobs)} jobs: name the one to load: "
                f"{', '.join(names[:_MOST_NAMED])}{more}"
            )
    return locations.join(path, newest.last_completed(of_gangs.values()).name) if of_gangs else None
