"""What a job starts from: step 0, or the durable checkpoint of an earlier run, or the one that --resume names.

The coordinator knows how earlier runs of a job ended. It forgets a run some days after its end. Then the manifests in
the durable folder still say which checkpoints are of this job, but not how their run ended: the user says what to do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from muster.checkpoint.format.folder_names import parse_path
from muster.launcher.command import print_note
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.errors import Unavailable, WrongInput
from muster.launcher.output.checkpoint_lines import why_not_by_itself
from muster.launcher.submission import left_checkpoints
from muster.launcher.submission.storage_look import Look
from muster.launcher.submission.storage_look import look as look_at

if TYPE_CHECKING:
    from muster.v1.api_pb2 import GangRef, GangView
    from muster.v1.common_pb2 import JobSpec

_NOTHING = "Nothing was queued"
_MOST_NAMED = 6
"""Differences that one line names."""


class KnowsGangs(Protocol):
    """A coordinator that has answered."""

    async def newest_run(self, spec: JobSpec) -> GangView | None:
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


def names_checkpoint(resume: str) -> bool:
    """Whether --resume names a checkpoint, by its path or by the name that it has in durable_dir. Else it is a job."""
    return "/" in resume or parse_path(resume) is not None


async def choose_origin(spec: JobSpec, asked: Asked, coordinator: KnowsGangs | None, look: Look = look_at) -> str:
    """The durable checkpoint that the job starts from; empty: step 0. Says in one line which and why, if there is a
    choice.

    Args:
        spec: the job.
        asked: what the user has said.
        coordinator: None: it does not answer, and the user wants the job queued nevertheless.
        look: looks at storage.

    Raises:
        LauncherError: a run of this job is queued or runs, or what was asked for can't be had. Nothing was queued.
    """
    last = await coordinator.newest_run(spec) if coordinator is not None else None
    if last is not None and not last.differs and not last.final:
        raise WrongInput(
            f"{_job(last)} is the same job (name, command, env, work_dir and durable_dir), and is {last.phase}",
            f"wait for its end, or cancel it: muster cancel {_number(last)}. A run beside it needs another name or "
            f"durable_dir. {_NOTHING}",
        )
    try:
        if asked.resume:
            return await _named(spec, asked.resume, coordinator, look)
        if asked.fresh or not spec.memory_checkpoint:  # otherwise the script loads what it wants
            return ""
        if last is not None and not last.differs:
            return _after(last, await _newest_left(last, look))
        return await _without_run(spec, last, look)
    except OSError as error:
        raise WrongInput(
            f"{error.filename or spec.durable_dir}, where a checkpoint is looked for, can't be read: {error.strerror}",
            f"ask its owner, or start at step 0 with --fresh. {_NOTHING}",
        ) from None


async def _newest_left(view: GangView, look: Look) -> str:
    """The newest durable checkpoint of a gang; empty: it has none, or this host sees that all are gone."""
    path = view.checkpoint.durable_path
    return await look(path, partial(left_checkpoints.newest_left, path)) if path else ""


def _after(last: GangView, path: str) -> str:
    """The origin of a run whose last run before it has ended. `path`: the newest checkpoint of that one."""
    before, resume = f"{_job(last)}, the last run of this job,", f"--resume {_number(last)}"
    if not path:
        return _start_afresh(f"{before} has left no checkpoint")
    if last.phase == "DONE":
        return _start_afresh(f"{before} is done. {resume} goes on{_at(path)} from its checkpoint")
    if why := why_not_by_itself(last):
        return _start_afresh(f"{before} {why}. {resume} goes on{_at(path)}")
    print_note(f"muster: goes on{_at(path)} from {path}: {before} has not finished ({last.reason}). Else: --fresh")
    return path


def _start_afresh(because: str) -> str:
    print_note(f"muster: starts at step 0: {because}")
    return ""


async def _named(spec: JobSpec, resume: str, coordinator: KnowsGangs | None, look: Look) -> str:
    """The checkpoint that --resume names."""
    if not spec.memory_checkpoint:
        raise WrongInput(
            f"--resume {resume}: with checkpoint.memory = false, Muster loads no checkpoint",
            f"let the script load it. {_NOTHING}",
        )
    if names_checkpoint(resume):
        path, of = resume if "/" in resume else f"{spec.durable_dir}/{resume}", ""
    else:
        path, of = await _newest_of(resume, coordinator, look)
    path = await _checked(spec, path, look)
    print_note(f"muster: goes on{_at(path)} from {path}{of or _whose(path)}")
    return path


async def _newest_of(job: str, coordinator: KnowsGangs | None, look: Look) -> tuple[str, str]:
    """The newest checkpoint that is left of a job, and whose it is, in words."""
    if coordinator is None:
        raise Unavailable(
            f"--resume {job}: only the coordinator knows the checkpoints of a job",
            f"name the checkpoint by its path. {_NOTHING}",
        )
    view = await coordinator.describe(gang_ref(job))
    known = view.checkpoint.durable_path
    path = await _newest_left(view, look)
    if not path:
        gone = f", which had {known}, has none left" if known else " has no durable checkpoint"
        raise WrongInput(f"--resume {job}: {_job(view)}{gone}", _NOTHING)
    if path == known:
        return path, f", of {_job(view)}"
    return path, f", the newest that is left of {_job(view)}, which had {os.path.basename(known)}"


async def _checked(spec: JobSpec, path: str, look: Look) -> str:
    """The absolute path or URL of a checkpoint, if this host can see that it is one, or can't see the place at all."""
    if "://" in path:
        if not spec.trust_durable_store:
            raise WrongInput(
                f"--resume {path} is in a store of objects, which does not say who has written a checkpoint",
                f"if you trust all who may write there: checkpoint.trust_durable_store = true. {_NOTHING}",
            )
        return path.rstrip("/")
    path = os.path.abspath(path)
    if await look(path, partial(left_checkpoints.is_no_checkpoint, path)):
        raise WrongInput(
            f"--resume {path} is no complete checkpoint",
            f"name one of the folders step_..., as muster status shows it. {_NOTHING}",
        )
    if not await look(path, partial(os.path.isdir, place := os.path.dirname(path))):
        print_note(f"muster: --resume {path}: this host has no {place}: the nodes must have it")
    return path


async def _without_run(spec: JobSpec, beside: GangView | None, look: Look) -> str:
    """The origin of a job of which the coordinator knows no run: step 0, if the durable folder holds nothing of it.

    Args:
        beside: the newest gang that is another job of the same name in the same folder, and has a checkpoint; else one
            that goes on.
    """
    left = await look(spec.durable_dir, partial(left_checkpoints.left_in_folder, spec))
    if left is not None and left.is_same:
        if left.is_done:
            return _start_afresh(
                f"an earlier run of this job is done. --resume {left.path} goes on from its checkpoint"
            )
        raise WrongInput(
            f"durable_dir holds a checkpoint of an earlier run of this job, {left.path}, and nobody knows how that run "
            "ended",
            f"say --resume {left.path}, or --fresh to start at step 0. {_NOTHING}",
        )
    if beside is not None and (path := await _newest_left(beside, look)):
        return _start_afresh(
            f"{_of_another(beside)}. --resume {_number(beside)} goes on{_at(path)} from its checkpoint"
        )
    if left is not None:
        return _start_afresh(
            f"durable_dir holds a checkpoint of a job {spec.name} with another command, env or work_dir. "
            f"--resume {left.path} goes on from it"
        )
    if beside is not None and not beside.final and list(beside.differs) == ["work_dir"]:  # submitted from two folders
        return _start_afresh(f"{_of_another(beside)}. Both will run")
    return ""


def _of_another(beside: GangView) -> str:
    runs = "" if beside.final else f" is {beside.phase},"
    return f"{_job(beside)}{runs} has the same durable_dir, and is another job: {_that_differ(beside.differs)}"


def _that_differ(names: Sequence[str]) -> str:
    """ "its command, env.LR and env.SEED differ"."""
    shown = [*names[:_MOST_NAMED], *([f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else [])]
    listed = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    return f"its {listed} {'differs' if len(shown) == 1 else 'differ'}"


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
