"""The record of one run: what `muster submit` knows of it, as one JSON file of the user's own.

A run is a job as it was submitted. A job that is requeued, or that grows, is one run.
"""

from __future__ import annotations

import json
import os
import secrets as random_names
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from muster.daemon.host.held_folder import HeldFolder
from muster.launcher.runs import secrets

if TYPE_CHECKING:
    from muster.launcher.submission.script import Submission

VARIABLE = "MUSTER_RUNS"
NEW, SUFFIX = "new", ".json"
"""The folder of records that `muster runs` has not taken into the store yet."""
FORMAT = 1


def store_folder(named: str, environ: Mapping[str, str]) -> Path:
    """The folder of all records. `named`: what job.toml or an option says; empty: nothing."""
    if named or environ.get(VARIABLE):
        return Path(named or environ[VARIABLE]).expanduser()
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "muster" / "runs"


def make_record(
    submission: Submission, job: int, at_s: float, origins: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """What is known of the run when it is queued. `at_s`: seconds since the epoch."""
    spec, table = submission.spec, submission.job.record
    shown = MessageToDict(spec, preserving_proto_field_name=True)
    shown["command"] = secrets.command(spec.command)
    if "live" in shown:
        shown["live"]["to"] = secrets.text(spec.live.to)
    for hook in shown.get("hooks", []):
        hook["command"] = secrets.command(hook["command"])
    shown["env"] = secrets.environment(spec.env, table.secrets)
    return {
        "format": FORMAT,
        "gang_id": submission.gang,
        "slurm_job_id": job,
        "name": spec.name,
        "submitted_s": at_s,
        "host": os.uname().nodename,
        "run_dir": spec.run_dir,
        "resumed_from": spec.resume_from,
        "data": table.data,
        "seed": table.seed,
        "note": table.note,
        "spec": shown,
        "sbatch_options": secrets.command([option.directive for option in submission.options]),
        "environment": secrets.environment(environ, table.secrets),
        **origins,
    }


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Leave the record in `folder`, for `muster runs`. Only this user may read it.

    Raises:
        OSError: it can't be written, or another user has taken a name on its way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with HeldFolder.open_to_pass(folder) as store, store.make_own_folder(NEW, 0o700) as new:
        unfinished = f".{random_names.token_hex(8)}"
        with os.fdopen(new.create(unfinished, 0o600), "w", encoding="utf-8") as file:
            json.dump(record, file)
        new.rename(unfinished, f"{record['gang_id']}{SUFFIX}")
