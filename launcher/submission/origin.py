"""What a job starts from: step 0, or the durable checkpoint of an earlier run, or the one that --resume names.

The coordinator knows how earlier runs of a job ended. It forgets a run some days after its end. Then the manifests in
the durable folder still say which checkpoints are of this job, but not how their run ended: the user says what to do.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from muster.checkpoint.format.folder_names import JOB_IS_DONE, parse_path
from muster.daemon.transport.gang_ids import job_identity
from muster.launcher.command import print_note
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.errors import Unavailable, WrongInput

if TYPE_CHECKING:
    from muster.v1.api_pb2 import GangRef, GangView
    from muster.v1.common_pb2 import JobSpec

_CRASH_LOOP = 93
"""The exit code of a gang whose software failed again and again (docs/OPERATIONS.md)."""
_NOTHING = "Nothing was queued"


class KnowsGangs(Protocol):
    """A coordinator that has answered."""

    async def newest_run(self, identity: str) -> GangView | None:
        """As in CoordinatorClient."""

    async def describe(self, ref: GangRef) -> GangView:
        """As in CoordinatorClient."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user has said: `resume` is a job or a checkpoint; empty: neither."""

    resume: str = ""
    fresh: bool = False


def add_origin_options(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh and --resume to a command line."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--fresh", action="store_true", help="start at step 0, whatever earlier runs of this job have left"
    )
    group.add_argument(
        "--resume",
        default="",
        metavar="JOB|PATH",
        help="go on from the newest durable checkpoint of this job of Muster, or from this checkpoint",
    )


async def choose_origin(spec: JobSpec, asked: Asked, coordinator: KnowsGangs | None) -> str:
    """The durable checkpoint that the job starts from; empty: step 0. Says in one line which and why, if there is a
    choice.

    Args:
        spec: the job.
        asked: what the user has said.
        coordinator: None: it does not answer, and the user wants the job queued nevertheless.

    Raises:
        LauncherError: a run of this job is queued or runs, or what was asked for can't be had. Nothing was queued.
    """
    last = await coordinator.newest_run(job_identity(spec)) if coordinator is not None else None
    if last is not None and not last.final:
        raise WrongInput(
            f"{_job(last)} is the same job (name, command and durable_dir), and is {last.phase}",
            f"wait for its end, or cancel it: muster cancel {_number(last)}. A run beside it needs another name or "
            f"durable_dir. {_NOTHING}",
        )
    try:
        if asked.resume:
            return await _named(spec, asked.resume, coordinator)
        if asked.fresh or not spec.memory_checkpoint:  # otherwise the script loads what it wants
            return ""
        return _after(last) if last is not None else _beside_unknown_runs(spec)
    except OSError as error:
        raise WrongInput(
            f"{error.filename or spec.durable_dir}, where a checkpoint is looked for, can't be read: {error.strerror}",
            f"ask its owner, or start at step 0 with --fresh. {_NOTHING}",
        ) from None


def _after(last: GangView) -> str:
    """The origin of a run whose last run before it has ended."""
    before, resume = f"{_job(last)}, the last run of this job,", f"--resume {_number(last)}"
    path = _still_there(last.checkpoint.durable_path)
    if not path:
        return _start_afresh(f"{before} has left no checkpoint")
    if last.phase == "DONE":
        return _start_afresh(f"{before} is done. {resume} goes on{_at(path)} from its checkpoint")
    if why := _why_not_by_itself(last):
        return _start_afresh(f"{before} {why}. {resume} goes on{_at(path)}")
    print_note(f"muster: goes on{_at(path)} from {path}: {before} has not finished ({last.reason}). Else: --fresh")
    return path


def _why_not_by_itself(last: GangView) -> str:
    """Why only a user can want to go on from what this run has left; empty: there is no such reason."""
    if last.phase == "CANCELLED":
        return "was cancelled"
    if last.not_finite:
        return f"ended after a value that is not finite ({last.not_finite})"
    return "failed again and again" if last.exit_code == _CRASH_LOOP else ""


def _start_afresh(because: str) -> str:
    print_note(f"muster: starts at step 0: {because}")
    return ""


async def _named(spec: JobSpec, resume: str, coordinator: KnowsGangs | None) -> str:
    """The checkpoint that --resume names."""
    if not spec.memory_checkpoint:
        raise WrongInput(
            f"--resume {resume}: with checkpoint.memory = false, Muster loads no checkpoint",
            f"let the script load it. {_NOTHING}",
        )
    if "/" in resume:
        path, of = _checked(spec, resume), ""
    elif coordinator is None:
        raise Unavailable(
            f"--resume {resume}: only the coordinator knows the checkpoints of a job",
            f"name the checkpoint by its path. {_NOTHING}",
        )
    else:
        view = await coordinator.describe(gang_ref(resume))
        if not view.checkpoint.durable_path:
            raise WrongInput(f"--resume {resume}: {_job(view)} has no durable checkpoint", _NOTHING)
        path, of = _checked(spec, view.checkpoint.durable_path), f", of {_job(view)}"
    print_note(f"muster: goes on{_at(path)} from {path}{of or _whose(path)}")
    return path


def _checked(spec: JobSpec, path: str) -> str:
    """The absolute path or URL of a checkpoint, if this host can see that it is one, or can't see the place at all."""
    from muster.checkpoint.durable import newest  # few jobs need it

    if "://" in path:
        if not spec.trust_durable_store:
            raise WrongInput(
                f"--resume {path} is in a store of objects, which does not say who has written a checkpoint",
                f"if you trust all who may write there: checkpoint.trust_durable_store = true. {_NOTHING}",
            )
        return path.rstrip("/")
    path = os.path.abspath(path)
    if os.path.isdir(os.path.dirname(path)) and not newest.is_complete(path):
        raise WrongInput(
            f"--resume {path} is no complete checkpoint",
            f"name one of the folders step_..., as muster status shows it. {_NOTHING}",
        )
    return path


def _still_there(path: str) -> str:
    """The checkpoint, or a newer one of the same gang; empty: this host can see that it is gone."""
    place, label = os.path.dirname(path), parse_path(path)
    if "://" in path or not os.path.isdir(place) or label is None or not label.gang:
        return path
    from muster.checkpoint.durable import newest  # few jobs need it

    return newest.newest_checkpoint(place, label.gang) or ""


def _beside_unknown_runs(spec: JobSpec) -> str:
    """The origin of a job of which the coordinator knows no run: step 0, if the durable folder holds nothing of it."""
    from muster.checkpoint.durable import newest  # few jobs need it

    folder, identity = spec.durable_dir, job_identity(spec)
    if not identity or "://" in folder or not os.path.isdir(folder):
        return ""
    found = newest.newest_of_job(folder, identity)
    if found is None:
        return ""
    path, manifest = found
    if str(manifest.get("reason")).startswith(JOB_IS_DONE):
        return _start_afresh(f"an earlier run of this job is done. --resume {path} goes on from its checkpoint")
    raise WrongInput(
        f"durable_dir holds a checkpoint of an earlier run of this job, {path}, and nobody knows how that run ended",
        f"say --resume {path}, or --fresh to start at step 0. {_NOTHING}",
    )


def _whose(path: str) -> str:
    label = parse_path(path)
    return f", of gang {label.gang}" if label is not None and label.gang else ""


def _at(path: str) -> str:
    """ " at step 176", if the name of the checkpoint says it."""
    label = parse_path(path)
    return f" at step {label.step}" if label is not None else ""


def _job(view: GangView) -> str:
    return f"job {_number(view)}" + (f" ({view.name})" if view.name else "")


def _number(view: GangView) -> int:
    return view.slurm_job_ids[0]
